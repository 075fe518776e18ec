"""The prefill role with decode workers of several ranks."""

from __future__ import annotations

from typing import Any

import pytest

from disagg.engine.commands import Add, ChunkPlanned, Gather, Gathered
from disagg.engine.io.blocking import call_on_thread
from disagg.engine.kv_transfer.transports.factory import make_connector
from disagg.proto.handover import Abort, ChunkDone, ChunkHeader, ClearToSend, Failure, Offer
from disagg.proto.ids import RequestId
from disagg.proto.messages import ParallelShape
from tests.support.reshard import Answer
from tests.support.roles import PlayedStream, key_of, settle, spec_of, until
from tests.support.secret import SECRET
from tests.unit.prefill_worker.test_role import Bench, bench


async def form(it: Bench, stream: PlayedStream) -> list[Any]:
    """A pair with a D of two ranks, both of which hold the one KV head; their channels."""
    welcome = it.welcome(shape=ParallelShape(tp=2))
    stream.welcome.set_result(welcome)
    accept = make_connector("local", "127.0.0.1", SECRET, "receiver")
    return [
        await call_on_thread("accept", lambda: accept(f"{welcome.pair_name}/0-{rank}", it.rendezvous.address))  # noqa: B023
        for rank in range(2)
    ]


async def test_a_wider_decode_worker_gets_each_rank_its_slices(streams: list[PlayedStream]) -> None:
    async with bench() as it:
        it.dispatch(spec_of("a"))
        channels = await form(it, streams[0])
        await until(lambda: streams[0]._sent)
        streams[0].message(Offer)
        await it.reserve(streams[0])
        it.context.command(Add)
        it.role.on_event(ChunkPlanned(key_of("a"), 14))
        first, second = (each for each in it.context.commands() if isinstance(each, Gather))
        # 80 bytes of staging hold 5 tokens, since each token goes out twice.
        assert [(each.start, each.end, each.peer.tp) for each in (first, second)] == [(0, 5, 2), (5, 10, 2)]
        first.out[:40], first.out[40:] = 3, 4
        it.role.on_event(Gathered(key_of("a"), 0, ok=True))
        assert streams[0].message(ChunkHeader).nbytes == 80
        answers, parts = [Answer(), Answer()], [it.context.new_staging(40), it.context.new_staging(40)]
        for channel, part, answer in zip(channels, parts, answers, strict=True):
            channel.recv(part, 40, answer)
        streams[0].say(ClearToSend(request_id=RequestId("a"), attempt=1, generation=1, seq=0, turn=0))
        await until(lambda: all(answer.results for answer in answers))
        assert [set(part.tolist()) for part in parts] == [{3}, {4}]
        await until(lambda: it.context._commands)
        rest = it.context.command(Gather)
        assert (rest.start, rest.end, rest.out.nbytes) == (10, 14, 64)
        for seq in (1, 2):
            it.role.on_event(Gathered(key_of("a"), seq, ok=True))
        streams[0].say(ChunkDone(request_id=RequestId("a"), attempt=1, generation=1, seq=0))
        streams[0].say(Abort(request_id=RequestId("a"), attempt=1, failure=Failure.OTHER))
        await until(it.idle)


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        (ParallelShape(tp=65), "the decode worker has tp 65; it must be from 1 to 64"),
        (ParallelShape(stage_ends=(1, 2)), "the decode worker has stages up to layers [1, 2]; they must ascend"),
    ],
)
async def test_a_decode_worker_of_a_shape_that_cannot_be_ends_the_pair(
    streams: list[PlayedStream], shape: ParallelShape, text: str
) -> None:
    async with bench() as it:
        it.dispatch(spec_of("a"))
        streams[0].welcome.set_result(it.welcome(shape=shape))
        await until(lambda: it.context.ends)
        await settle()
        assert it.context.ends[0].reason == "refused"
        assert text in it.context.ends[0].detail
        assert it.idle()
