"""The source of a fetch: which calls it refuses, what it holds for the others, and that nothing is left of either."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from disagg.engine.commands import Ended, Gather, Gathered, Pin, Pinned, Release
from disagg.engine.io.blocking import call_on_thread
from disagg.engine.kv_transfer.transports.local import LocalRendezvous
from disagg.prefill_worker.role import PrefillRole
from disagg.proto.block_hash import chain_hashes, root_hash
from disagg.proto.handover import (
    Abort,
    AbortAck,
    ChunkDone,
    ChunkHeader,
    ClearToSend,
    Commit,
    CommitAck,
    Failure,
    Fetch,
    FetchAnswer,
    FetchGranted,
    FetchRefused,
    Offer,
    PairWelcome,
    Refused,
    Reserved,
)
from disagg.proto.ids import BlockHash, GatewayId, Incarnation, RequestId
from disagg.proto.messages import Sampling, SequenceSpec
from disagg.proto.token_ids import pack_token_ids
from tests.support.roles import (
    LAYOUT,
    PlayedContext,
    PlayedStream,
    info_of,
    peer_of,
    settle,
    until,
)
from tests.support.secret import SECRET

NEEDY = info_of("d", "decode")
ROOT = root_hash("fake", b"a tenant's")
TOKENS = pack_token_ids(range(48))


def prefix_of(name: str = "fetch-a", **changes: Any) -> SequenceSpec:
    spec = SequenceSpec(
        request_id=RequestId(name),
        attempt=1,
        gateway_id=GatewayId(""),
        prompt_token_ids=TOKENS,
        block_hashes=tuple(chain_hashes(ROOT, TOKENS)),
        root_hash=ROOT,
        sampling=Sampling(temperature=0.0, max_tokens=1),
        timeout_s=1.0,
    )
    return msgspec.structs.replace(spec, **changes)


def fetch_of(spec: SequenceSpec | None = None, **changes: Any) -> Fetch:
    fields: dict[str, Any] = {
        "spec": spec or prefix_of(),
        "from_token": 0,
        "needy": peer_of(NEEDY),
        "source_incarnation": Incarnation("p.1"),
        "fingerprint": "fake",
        "kv_layout": LAYOUT,
    }
    return Fetch(**{**fields, **changes})


class Bench:
    def __init__(self) -> None:
        self.context = PlayedContext("p", "prefill")
        self.context.config = msgspec.structs.replace(self.context.config, fetch=True)
        self.role = PrefillRole(self.context)
        self.rendezvous = LocalRendezvous(SECRET)
        assert self.role._served is not None
        self.served = self.role._served

    async def ask(self, fetch: Fetch) -> asyncio.Task[FetchAnswer]:
        call = asyncio.create_task(self.served.serve(fetch))
        await settle()
        return call

    async def reason(self, fetch: Fetch) -> str:
        """Why a call is refused, without a word to the engine."""
        call = await self.ask(fetch)
        assert self.context.commands() == []
        answer = await call
        assert isinstance(answer, FetchRefused)
        return answer.reason

    async def granted(self, num_tokens: int = 48) -> None:
        """A call that was answered."""
        call = await self.ask(fetch_of())
        assert self.context.command(Pin).spec == prefix_of()
        self.role.on_event(Pinned(prefix_of().key, num_tokens))
        assert await call == FetchGranted(end_token=num_tokens)

    async def form(self, stream: PlayedStream) -> None:
        welcome = PairWelcome(
            incarnation=NEEDY.incarnation,
            pair_name="pair",
            transport="local",
            store_address=self.rendezvous.address,
            credits=2,
            max_chunk_bytes=80,
        )
        stream.welcome.set_result(welcome)
        self.transport = await call_on_thread("accept", lambda: self.rendezvous.accept("pair"))
        await until(lambda: stream._sent)

    def held(self) -> dict[str, int]:
        return {name: count for name, count in self.role.holdings().items() if count}


@asynccontextmanager
async def bench() -> AsyncIterator[Bench]:
    it = Bench()
    await it.role.start()
    try:
        yield it
    finally:
        await it.role.stop()
        it.rendezvous.close()
        assert it.context.faults == []


KEY: dict[str, Any] = {"request_id": RequestId("fetch-a"), "attempt": 1, "generation": 1}


async def test_a_prefix_is_pinned_sent_and_released(streams: list[PlayedStream]) -> None:
    async with bench() as it:
        await it.granted(num_tokens=32)
        await it.form(streams[0])
        (stream,) = streams
        cut = prefix_of(prompt_token_ids=pack_token_ids(range(32)), block_hashes=prefix_of().block_hashes[:2])
        assert stream.message(Offer) == Offer(spec=cut, is_prefix=True)
        stream.say(Reserved(**KEY, cached_tokens=26))
        await settle()
        gather = it.context.command(Gather)
        assert (gather.start, gather.end) == (26, 32)
        header, commit = stream.sent()
        assert isinstance(header, ChunkHeader)
        assert commit == Commit(**KEY, token_id=None, num_chunks=1)
        it.role.on_event(Gathered(prefix_of().key, 0, ok=True))
        it.transport.recv(np.zeros(48, dtype=np.uint8), 48, lambda *_: None, lambda: None)
        stream.say(ClearToSend(**KEY, seq=0, turn=0))
        stream.say(ChunkDone(**KEY, seq=0))
        stream.say(CommitAck(**KEY))
        await settle()
        assert it.context.command(Release) == Release(prefix_of().key)
        await until(lambda: not it.held())
        assert it.role.num_served_fetches == 1
        assert [(count.decode_worker, count.num_transfers) for count in it.role.transfers()] == [("d", 1)]
        assert it.context.ends == []


@pytest.mark.parametrize(
    ("fetch", "reason"),
    [
        (fetch_of(source_incarnation=Incarnation("p.0")), "p is incarnation p.1, not p.0"),
        (fetch_of(needy=peer_of(info_of("p", "prefill"))), "a worker that fetches from itself"),
        (fetch_of(fingerprint="other"), "model fingerprints differ: other and fake"),
        (fetch_of(prefix_of("a")), "a/1 names no new fetch"),
        (fetch_of(prefix_of(emitted_token_ids=(1,))), "a prefix of 49 tokens is none of whole blocks of 16 tokens"),
        (
            fetch_of(prefix_of(prompt_token_ids=pack_token_ids(range(40)))),
            "a prefix of 40 tokens is none of whole blocks of 16 tokens",
        ),
        (
            fetch_of(prefix_of(prompt_token_ids=pack_token_ids([]))),
            "a prefix of 0 tokens is none of whole blocks of 16 tokens",
        ),
        (
            fetch_of(prefix_of(prompt_token_ids=pack_token_ids(range(1040)))),
            "a prefix of 1040 tokens is none of whole blocks of 16 tokens",
        ),
        (fetch_of(from_token=48), "tokens from 48 on of 48"),
        (fetch_of(from_token=-1), "tokens from -1 on of 48"),
        (
            fetch_of(prefix_of(root_hash=root_hash("fake"))),
            "the block hashes are not those of the tokens behind the root hash",
        ),
        (
            fetch_of(prefix_of(block_hashes=(*prefix_of().block_hashes[:2], BlockHash(b"another")))),
            "the block hashes are not those of the tokens behind the root hash",
        ),
        (
            fetch_of(prefix_of(block_hashes=prefix_of().block_hashes[:2])),
            "the block hashes are not those of the tokens behind the root hash",
        ),
    ],
)
async def test_what_is_not_for_this_worker_is_refused_and_nothing_held(fetch: Fetch, reason: str) -> None:
    async with bench() as it:
        assert await it.reason(fetch) == reason
        assert it.held() == {}


async def test_a_third_fetch_and_a_second_of_the_same_are_refused() -> None:
    async with bench() as it:
        calls = [await it.ask(fetch_of(prefix_of(name))) for name in ("fetch-a", "fetch-b")]
        assert [command.spec.request_id for command in it.context.commands()] == ["fetch-a", "fetch-b"]  # type: ignore[union-attr]
        assert await it.reason(fetch_of(prefix_of("fetch-c"))) == "2 fetches are served already"
        assert await it.reason(fetch_of()) == "fetch-a/1 names no new fetch"
        for name in ("fetch-a", "fetch-b"):
            it.role.on_event(Pinned(prefix_of(name).key, 0, "nothing of it is cached any more"))
        refused = FetchRefused(reason="nothing of it is cached any more")
        assert [await call for call in calls] == [refused, refused]
        assert it.held() == {}


async def test_what_the_caller_has_is_not_sent() -> None:
    async with bench() as it:
        call = await it.ask(fetch_of(from_token=32))
        it.context.command(Pin)
        it.role.on_event(Pinned(prefix_of().key, 32))
        assert await call == FetchRefused(reason="of 32 tokens the caller has 32")
        assert it.context.command(Release) == Release(prefix_of().key)
        assert it.held() == {}


async def test_a_caller_that_went_gets_nothing() -> None:
    async with bench() as it:
        call = await it.ask(fetch_of())
        it.context.command(Pin)
        call.cancel()
        await settle()
        it.role.on_event(Pinned(prefix_of().key, 48))
        assert it.context.command(Release) == Release(prefix_of().key)
        assert it.held() == {}


async def test_a_prefix_is_released_when_the_other_worker_refuses_it(streams: list[PlayedStream]) -> None:
    async with bench() as it:
        await it.granted()
        await it.form(streams[0])
        streams[0].message(Offer)
        streams[0].say(Refused(request_id=RequestId("fetch-a"), attempt=1, reason="late"))
        await settle()
        assert it.context.command(Release) == Release(prefix_of().key)
        assert it.held() == {}
        assert it.role.num_served_fetches == 0


async def test_a_prefix_is_released_when_the_other_worker_aborts_it(streams: list[PlayedStream]) -> None:
    async with bench() as it:
        await it.granted()
        await it.form(streams[0])
        streams[0].message(Offer)
        streams[0].say(Abort(request_id=RequestId("fetch-a"), attempt=1, failure=Failure.CANCELLED))
        await settle()
        assert it.context.command(Release) == Release(prefix_of().key)
        assert it.held() == {}


async def test_a_prefix_whose_pair_is_never_formed_is_released_at_its_deadline() -> None:
    async with bench() as it:
        await it.granted()
        it.context.time += 1.0
        it.role.tick(it.context.time)
        assert it.context.command(Release) == Release(prefix_of().key)
        assert it.held() == {}


async def test_a_prefix_that_the_engine_ended_is_no_end_for_a_gateway() -> None:
    async with bench() as it:
        await it.granted()
        it.role.on_event(Ended(prefix_of().key, GatewayId(""), "deadline"))
        assert it.held() == {}
        assert it.context.ends == []


async def test_the_other_worker_hears_that_it_took_too_long(streams: list[PlayedStream]) -> None:
    async with bench() as it:
        await it.granted()
        await it.form(streams[0])
        streams[0].message(Offer)
        it.role.on_event(Ended(prefix_of().key, GatewayId(""), "deadline"))
        assert streams[0].message(Abort).failure is Failure.DEADLINE
        streams[0].say(AbortAck(request_id=RequestId("fetch-a"), attempt=1))
        await settle()
        assert it.held() == {}


async def test_a_worker_that_stops_answers() -> None:
    async with bench() as it:
        call = await it.ask(fetch_of())
    assert await call == FetchRefused(reason="the worker stops")


async def test_without_fetches_there_is_no_service() -> None:
    role = PrefillRole(PlayedContext("p", "prefill"))
    assert role.handlers() == []
    async with bench() as it:
        assert len(it.role.handlers()) == 1
