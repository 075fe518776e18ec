"""The prefill role and its links: the test plays the engine, the decode worker and the gateway."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from disagg.engine.commands import Add, ChunkPlanned, Ended, Gather, Gathered, PrefillComputed, Release
from disagg.engine.io.blocking import call_on_thread
from disagg.engine.kv_transfer.transports.local import LocalRendezvous, LocalTransport
from disagg.prefill_worker.role import PrefillRole
from disagg.prefill_worker.service import PairError
from disagg.proto.handover import (
    Abort,
    AbortAck,
    ChunkDone,
    ChunkHeader,
    ChunkSum,
    ClearToSend,
    CloseWhenIdle,
    Commit,
    CommitAck,
    Failure,
    Offer,
    PairWelcome,
    Refused,
    Reserved,
)
from disagg.proto.ids import Incarnation, RequestId
from disagg.proto.messages import Dispatch, SequenceSpec, Targets, TokenLogprobs
from tests.support.roles import (
    GATEWAY,
    PlayedContext,
    PlayedStream,
    info_of,
    key_of,
    peer_of,
    settle,
    spec_of,
    until,
)
from tests.support.secret import SECRET

PEER = peer_of(info_of("d", "decode"))
A = RequestId("a")
LOGPROBS = TokenLogprobs(-0.5, (99,), (-0.5,))


class Bench:
    """A prefill role, and the far end of its transports."""

    def __init__(self) -> None:
        self.context = PlayedContext("p", "prefill")
        self.role = PrefillRole(self.context)
        self.rendezvous = LocalRendezvous(SECRET)
        self.transports: list[LocalTransport] = []

    def dispatch(self, spec: SequenceSpec) -> None:
        self.role.dispatch(Dispatch(spec=spec, decode_peer=PEER))
        self.context.flush()

    def welcome(self, **changes: Any) -> PairWelcome:
        fields: dict[str, Any] = {
            "incarnation": Incarnation("d.1"),
            "pair_name": f"pair-{len(self.transports)}",
            "transport": "local",
            "store_address": self.rendezvous.address,
            "credits": 2,
            "max_chunk_bytes": 80,
        }
        return PairWelcome(**{**fields, **changes})

    async def form(self, stream: PlayedStream, **changes: Any) -> None:
        """Let the pair be formed."""
        welcome = self.welcome(**changes)
        stream.welcome.set_result(welcome)
        self.transports.append(await call_on_thread("accept", lambda: self.rendezvous.accept(welcome.pair_name)))

    def idle(self) -> bool:
        return not any(self.role.holdings().values())

    async def reserve(self, stream: PlayedStream, request: str = "a", cached_tokens: int = 0) -> None:
        stream.say(Reserved(request_id=RequestId(request), attempt=1, generation=1, cached_tokens=cached_tokens))
        await settle()


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


@asynccontextmanager
async def offered(spec: SequenceSpec, streams: list[PlayedStream]) -> AsyncIterator[tuple[Bench, PlayedStream]]:
    """An attempt whose offer is out."""
    async with bench() as it:
        it.dispatch(spec)
        await it.form(streams[0])
        await until(lambda: streams[0]._sent)
        assert streams[0].message(Offer).spec == spec
        yield it, streams[0]


# ---------------------------------------------------------------- the whole way


async def test_a_prompt_is_computed_moved_and_released(streams: list[PlayedStream]) -> None:
    async with offered(spec_of("a"), streams) as (it, stream):
        context, role = it.context, it.role
        await it.reserve(stream, cached_tokens=4)
        assert context.command(Add) == Add(spec_of("a"), hold_after_prefill=True)
        role.on_event(ChunkPlanned(key_of("a"), 14))
        gather = context.command(Gather)
        assert (gather.start, gather.end) == (4, 14)
        gather.out[:] = 7
        role.on_event(Gathered(key_of("a"), 0, ok=True))
        header = stream.message(ChunkHeader)
        assert (header.start_token, header.end_token, header.nbytes) == (4, 14, 80)

        role.on_event(PrefillComputed(key_of("a"), GATEWAY, 99, 3, LOGPROBS))
        assert [(done.request_id, done.cached_tokens) for done in context.prefilled] == [("a", 3)]
        context.command(Gather)
        role.on_event(Gathered(key_of("a"), 1, ok=True, checksum=5))
        last, commit, checksum = stream.sent()
        assert isinstance(last, ChunkHeader)
        assert isinstance(commit, Commit)
        assert isinstance(checksum, ChunkSum)
        assert (last.checksum, checksum.seq, checksum.checksum) == (None, 1, 5)
        assert (commit.token_id, commit.logprobs, commit.num_chunks) == (99, LOGPROBS, 2)

        for each in (header, last):
            received: asyncio.Queue[bool] = asyncio.Queue()
            buffer = context.new_staging(each.nbytes)
            it.transports[0].recv(buffer, each.nbytes, lambda ok, *_: received.put_nowait(ok))  # noqa: B023
            stream.say(ClearToSend(request_id=A, attempt=1, generation=1, seq=each.seq, turn=each.seq))
            assert await received.get()
            stream.say(ChunkDone(request_id=A, attempt=1, generation=1, seq=each.seq))
        assert not it.idle()
        stream.say(CommitAck(request_id=A, attempt=1, generation=1))
        await until(it.idle)
        assert context.command(Release) == Release(key_of("a"))
        assert not role.owns(key_of("a"))
        assert context.ends == []


@pytest.mark.parametrize(("offers", "takes"), [(False, False), (True, False), (True, True)])
async def test_digests_are_the_pairs_where_d_takes_them(streams: list[PlayedStream], offers: bool, takes: bool) -> None:
    async with bench() as it:
        it.context.digests = offers
        it.dispatch(spec_of("a"))
        await it.form(streams[0], digests=takes)
        await until(lambda: streams[0]._sent)
        streams[0].sent()
        assert streams[0].digests is offers
        await it.reserve(streams[0])
        it.context.command(Add)
        it.role.on_event(ChunkPlanned(key_of("a"), 10))
        assert it.context.command(Gather).digests is takes
        it.role.on_event(Gathered(key_of("a"), 0, ok=False))


async def test_what_is_dispatched_meanwhile_waits_for_the_one_pair(streams: list[PlayedStream]) -> None:
    async with bench() as it:
        it.role.connect(PEER)
        it.role.connect(PEER)
        for name in ("a", "b"):
            it.dispatch(spec_of(name))
        assert it.role.holdings()["waiting_for_pair"] == 2
        it.role.cancel(key_of("a"))
        await it.form(streams[0])
        await until(lambda: streams[0]._sent)
        assert streams[0].message(Offer).spec == spec_of("b")
        assert len(streams) == 1
        assert it.context.ends == []  # who cancelled knows


# ---------------------------------------------------------------- time


async def test_the_wait_for_the_pair_counts(streams: list[PlayedStream]) -> None:
    async with bench() as it:
        it.dispatch(spec_of("late", timeout_s=1.0))
        targeted = msgspec.structs.replace(spec_of("a", timeout_s=5.0), targets=Targets(ttft_s=4.0, age_s=0.5))
        it.dispatch(targeted)
        it.context.time += 2.0
        it.role.tick(it.context.time)
        it.dispatch(spec_of("also late", timeout_s=0.5))
        assert it.context.reasons() == [("late", "deadline")]
        it.context.time += 1.0
        await it.form(streams[0])
        await until(lambda: streams[0]._sent)
        assert it.context.reasons() == [("late", "deadline"), ("also late", "deadline")]
        later = Targets(ttft_s=4.0, age_s=3.5)
        assert streams[0].message(Offer).spec == msgspec.structs.replace(targeted, timeout_s=2.0, targets=later)


async def test_an_attempt_does_not_wait_for_ever_for_a_pair_that_goes_on_being_formed(
    streams: list[PlayedStream],
) -> None:
    async with bench() as it:
        for name, timeout_s in (("a", 2.0), ("b", None)):
            it.role.dispatch(Dispatch(spec=spec_of(name), decode_peer=PEER, pair_timeout_s=timeout_s))
        it.context.time += 1.9
        it.role.tick(it.context.time)
        assert it.context.ends == []
        it.context.time += 0.2
        it.role.tick(it.context.time)
        (end,) = it.context.ends
        assert (end.request_id, end.reason, end.in_transfer) == ("a", "refused", True)
        assert end.detail == "pair with d: not formed after 2.1 s"
        [count] = it.role.transfers()
        assert count.failures == {"pair_lost": 1}
        assert it.role.holdings()["waiting_for_pair"] == 1
        await it.form(streams[0])
        await until(lambda: streams[0]._sent)
        assert streams[0].message(Offer).spec == spec_of("b")


async def test_d_has_a_pair_closed_that_nothing_uses(streams: list[PlayedStream]) -> None:
    async with offered(spec_of("a"), streams) as (it, stream):
        stream.say(CloseWhenIdle())
        stream.say(Refused(request_id=A, attempt=1, reason="no blocks"))  # so the first one was read
        await until(it.idle)
        assert not stream.closed
        stream.say(CloseWhenIdle())
        await until(lambda: stream.closed)
        await until(lambda: not it.role._all_links)
        it.dispatch(spec_of("b"))
        await it.form(streams[1])
        await until(lambda: streams[1]._sent)
        assert streams[1].message(Offer).spec == spec_of("b")
        assert [each.reason for each in it.context.ends] == ["refused"]


async def test_a_refusal_of_d_is_no_fault_of_the_pair(streams: list[PlayedStream]) -> None:
    async with offered(spec_of("a"), streams) as (it, stream):
        stream.say(Refused(request_id=A, attempt=1, reason="no blocks"))
        await until(it.idle)
        (end,) = it.context.ends
        assert (end.reason, end.in_transfer) == ("refused", False)


async def test_a_deadline_after_the_offer_is_told_to_the_gateway_and_to_d(streams: list[PlayedStream]) -> None:
    async with offered(spec_of("a", timeout_s=1.0), streams) as (it, stream):
        it.context.time += 1.0
        it.role.tick(it.context.time)
        assert it.context.reasons() == [("a", "deadline")]
        stream.sent()
        stream.say(AbortAck(request_id=A, attempt=1))
        await until(it.idle)


async def test_a_deadline_that_d_saw_first_is_a_deadline(streams: list[PlayedStream]) -> None:
    async with offered(spec_of("a"), streams) as (it, stream):
        stream.say(Abort(request_id=A, attempt=1, failure=Failure.DEADLINE))
        await until(it.idle)
        assert it.context.reasons() == [("a", "deadline")]


# ---------------------------------------------------------------- pairs that cannot be formed, or break


async def test_a_pair_that_is_refused_refuses_who_waits_and_the_next_dispatch_tries_again(
    streams: list[PlayedStream],
) -> None:
    async with bench() as it:
        it.dispatch(spec_of("a"))
        await settle()
        streams[0].welcome.set_exception(PairError("another fingerprint"))
        await until(lambda: streams[0].closed)
        (end,) = it.context.ends
        assert (end.reason, end.detail) == ("refused", "pair with d: another fingerprint")
        it.dispatch(spec_of("b"))
        assert len(streams) == 2
        await it.form(streams[1])
        await until(lambda: streams[1]._sent)


@pytest.mark.parametrize(
    "nonsense",
    [{"transport": "pigeon"}, {"store_address": "nowhere"}, {"credits": 0}, {"max_chunk_bytes": 7}],
)
async def test_a_welcome_that_cannot_be_used_refuses_who_waits(
    streams: list[PlayedStream], nonsense: dict[str, Any]
) -> None:
    async with bench() as it:
        it.dispatch(spec_of("a"))
        welcome = it.welcome(**nonsense)
        streams[0].welcome.set_result(welcome)
        accepts = "store_address" not in nonsense and "transport" not in nonsense
        if accepts:
            it.transports.append(await call_on_thread("accept", lambda: it.rendezvous.accept(welcome.pair_name)))
        await until(lambda: streams[0].closed)
        assert it.context.reasons() == [("a", "refused")]
        await until(lambda: not it.role._all_links)
        if accepts:  # and the channel that was made is closed
            answers: list[bool] = []
            it.transports[0].recv(it.context.new_staging(8), 8, lambda ok, *_: answers.append(ok))
            assert answers == [False]


async def test_a_broken_stream_fails_attempts_and_waits_for_the_engine(streams: list[PlayedStream]) -> None:
    async with offered(spec_of("a"), streams) as (it, stream):
        await it.reserve(stream)
        it.context.commands()
        it.role.on_event(ChunkPlanned(key_of("a"), 10))
        it.context.command(Gather)
        stream.end()
        await until(lambda: it.context.reasons() == [("a", "failed")])
        assert it.role.owns(key_of("a"))  # the engine still writes into a slot
        assert it.context.commands() == []
        it.role.on_event(Gathered(key_of("a"), 0, ok=True))
        assert it.context.command(Release) == Release(key_of("a"))
        assert not it.role.owns(key_of("a"))
        await until(lambda: not it.role._all_links)
        assert it.idle()


async def test_after_a_violation_the_next_dispatch_goes_to_a_new_pair_at_once(streams: list[PlayedStream]) -> None:
    async with offered(spec_of("a"), streams) as (it, stream):
        stream.say(ClearToSend(request_id=A, attempt=1, generation=1, seq=0, turn=0))
        await until(lambda: it.context.ends)
        it.dispatch(spec_of("b"))
        assert it.context.reasons() == [("a", "failed")]
        assert len(streams) == 2


async def test_a_stop_while_the_other_side_does_not_come_leaves_nothing(streams: list[PlayedStream]) -> None:
    async with bench() as it:
        it.dispatch(spec_of("a"))
        welcome = it.welcome()
        streams[0].welcome.set_result(welcome)
        await until(lambda: it.rendezvous._meetings)
        await it.role.stop()
        assert streams[0].closed
        assert it.idle()
        late = await call_on_thread("accept", lambda: it.rendezvous.accept(welcome.pair_name))
        answers: list[bool] = []
        await until(lambda: late._channel.closed)  # P's end was opened after the stop, and is closed
        late.recv(it.context.new_staging(8), 8, lambda ok, *_: answers.append(ok))
        assert answers == [False]


# ---------------------------------------------------------------- gateways


async def test_cancels_in_every_phase(streams: list[PlayedStream]) -> None:
    async with offered(spec_of("a"), streams) as (it, stream):
        it.role.cancel(key_of("unknown"))
        it.role.cancel(key_of("a"))
        it.role.cancel(key_of("a"))
        stream.message(Abort)
        await it.reserve(stream)  # it crossed the abort
        stream.say(AbortAck(request_id=A, attempt=1))
        await until(it.idle)
        assert it.context.commands() == []
        assert it.context.ends == []


async def test_a_sweep_finds_what_is_live(streams: list[PlayedStream]) -> None:
    async with offered(spec_of("a"), streams) as (it, _):
        assert it.role.keys_of_gateway(GATEWAY) == [key_of("a")]
        assert it.role.keys_of_gateway("another") == []
        it.role.cancel(key_of("a"))
        assert it.role.keys_of_gateway(GATEWAY) == []


async def test_a_key_that_is_used_again_ends_and_hurts_nobody(streams: list[PlayedStream]) -> None:
    async with offered(spec_of("a"), streams) as (it, stream):
        it.dispatch(spec_of("a"))  # while it runs: dropped
        assert stream.sent() == []
        assert it.context.ends == []
        it.role.cancel(key_of("a"))
        it.dispatch(spec_of("a"))  # while its abort is not acknowledged
        (end,) = it.context.ends
        assert (end.reason, end.detail) == ("failed", "a/1 was offered before")
        assert it.role.keys_of_gateway(GATEWAY) == []
        stream.say(AbortAck(request_id=A, attempt=1))
        await until(it.idle)


async def test_waits_are_measured_and_hand_overs_counted(streams: list[PlayedStream]) -> None:
    async with offered(spec_of("a"), streams) as (it, stream):
        it.context.time += 1.5
        await it.reserve(stream, cached_tokens=20)
        it.context.time += 1.0
        it.role.on_event(PrefillComputed(key_of("a"), GATEWAY, 99, 3, queue_s=0.25))
        assert [(done.alloc_wait_s, done.queue_s) for done in it.context.prefilled] == [(1.5, 0.25)]
        assert it.role.transfers() == []
        stream.say(CommitAck(request_id=A, attempt=1, generation=1))
        await until(it.idle)
        assert [msgspec.to_builtins(count) for count in it.role.transfers()] == [
            {"decode_worker": "d", "transport": "local", "num_transfers": 1, "num_bytes": 0, "failures": {}}
        ]
        it.dispatch(spec_of("b"))
        await until(lambda: stream._sent)
        stream.end()
        await until(it.idle)
        (count,) = it.role.transfers()
        assert (count.num_transfers, count.failures) == (1, {"pair_lost": 1})


@pytest.mark.parametrize(
    ("failure", "ends", "counted"),
    [
        (Failure.LEASE_LOST, [("a", "failed")], {"lease_lost": 1}),
        (Failure.ENDED, [("a", "failed")], {"ended": 1}),
        (Failure.OTHER, [("a", "failed")], {"other": 1}),
        (Failure.DEADLINE, [("a", "deadline")], {}),
        (Failure.CANCELLED, [], {}),
    ],
)
async def test_an_abort_of_d_is_counted_by_its_failure(
    streams: list[PlayedStream], failure: Failure, ends: list[tuple[str, str]], counted: dict[str, int]
) -> None:
    async with offered(spec_of("a"), streams) as (it, stream):
        stream.say(Abort(request_id=A, attempt=1, failure=failure, detail="whatever a peer says"))
        await until(it.idle)
        assert it.context.reasons() == ends
        [count] = it.role.transfers()
        assert count.failures == counted


async def test_an_empty_prompt_is_not_offered(streams: list[PlayedStream]) -> None:
    async with bench() as it:
        it.dispatch(spec_of("a", num_tokens=0))
        assert it.context.reasons() == [("a", "failed")]
        assert it.idle()
        assert streams == []


async def test_a_refusal_is_passed_on(streams: list[PlayedStream]) -> None:
    async with offered(spec_of("a"), streams) as (it, stream):
        stream.say(Refused(request_id=A, attempt=1, reason="no room"))
        await until(it.idle)
        (end,) = it.context.ends
        assert (end.reason, end.detail) == ("refused", "no room")


async def test_an_answer_of_one_token_ends_here_and_cancels_the_reservation(streams: list[PlayedStream]) -> None:
    async with offered(spec_of("a"), streams) as (it, stream):
        await it.reserve(stream)
        it.context.commands()
        it.role.on_event(Ended(key_of("a"), GATEWAY, "stop", cached_tokens=2))
        assert [(end.reason, end.cached_tokens) for end in it.context.ends] == [("stop", 2)]
        assert stream.message(Abort).detail == "ended on the prefill worker: stop"
        stream.say(AbortAck(request_id=A, attempt=1))
        await until(it.idle)


async def test_a_prompt_without_a_token_to_sample_has_one_end_that_names_the_cause(streams: list[PlayedStream]) -> None:
    """Also where a chunk of it was to be gathered behind its step."""
    async with offered(spec_of("a"), streams) as (it, stream):
        await it.reserve(stream)
        it.context.commands()
        it.role.on_event(ChunkPlanned(key_of("a"), 10))
        it.context.command(Gather)
        it.role.on_event(Ended(key_of("a"), GATEWAY, "invalid", "nothing to sample"))
        it.role.on_event(Gathered(key_of("a"), 0, ok=False))
        assert [(end.reason, end.detail) for end in it.context.ends] == [("invalid", "nothing to sample")]
        assert stream.message(Abort).detail == "ended on the prefill worker: invalid"
        stream.say(AbortAck(request_id=A, attempt=1))
        await until(it.idle)


async def test_a_gather_that_fails_ends_its_attempt_and_nothing_else(streams: list[PlayedStream]) -> None:
    async with offered(spec_of("a"), streams) as (it, stream):
        await it.reserve(stream)
        it.context.commands()
        it.role.on_event(ChunkPlanned(key_of("a"), 10))
        it.context.command(Gather)
        it.role.on_event(Gathered(key_of("a"), 0, ok=False))  # before the engine says that it ended the sequence
        assert it.context.reasons() == [("a", "failed")]
        assert stream.message(Abort).failure is Failure.KV_GONE
        assert it.context.command(Release) == Release(key_of("a"))
        assert not it.role.owns(key_of("a"))
        stream.say(AbortAck(request_id=A, attempt=1))
        await until(it.idle)


async def test_the_staging_memory_of_a_pair_goes_with_it(streams: list[PlayedStream]) -> None:
    """And not when the garbage collector comes, which knows nothing of its size."""
    async with offered(spec_of("a"), streams) as (it, stream):
        await it.reserve(stream)
        it.context.commands()
        it.role.on_event(ChunkPlanned(key_of("a"), 10))
        staging = weakref.ref(it.context.command(Gather).out.base)
        gc.disable()
        try:
            stream.end()
            await until(lambda: not it.role._all_links)
            it.role.on_event(Gathered(key_of("a"), 0, ok=True))
            it.context.commands()
            await settle()
            assert staging() is None
        finally:
            gc.enable()
