"""A follower alone; the test plays rank 0."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from disagg.engine.batch_arrays import BatchArrays
from disagg.engine.fake_runner import FakeModelRunner
from disagg.engine.plan import ScheduledSequence, StepPlan
from disagg.engine.rank_messages import (
    Answer,
    Begin,
    ClearBuffer,
    ClosePair,
    Done,
    Failed,
    FreeBuffer,
    GatherPart,
    Join,
    Posted,
    ReceivePart,
    ScatterPart,
    Step,
    Stop,
    encode_step,
)
from disagg.engine.sharding.shards import Shard
from disagg.proto.errors import ConfigError
from disagg.proto.messages import ONE_RANK, decoder
from tests.support.engine import VOCAB_SIZE, make_prompt, make_sequence, make_spec
from tests.support.rank_connections import WAIT_S, memory_connections, start_rank

TABLE = np.array([3, 1], dtype="<i4").tobytes()
PROMPT = make_prompt(32)


def make_runner() -> FakeModelRunner:
    return FakeModelRunner(8, 16, 4096, VOCAB_SIZE, num_kv_heads=2, shard=Shard(1, 2))


def step() -> Step:
    """The KV of `PROMPT` into the blocks of `TABLE`."""
    sequence = make_sequence(make_spec("a", PROMPT))
    sequence.block_table = [3, 1]
    return encode_step(make_runner().arrays(StepPlan(prefills=(ScheduledSequence(sequence, 0, 32, True),))))


def gather(call: int, buffer_bytes: int = 2 * 32 * 8) -> GatherPart:
    return GatherPart(call=call, buffer=1, buffer_bytes=buffer_bytes, block_table=TABLE, start=0, end=32, peer=ONE_RANK)


def scatter(call: int) -> ScatterPart:
    return ScatterPart(call=call, buffer=1, buffer_bytes=2 * 32 * 8, block_table=TABLE, start=0, end=32, peer=ONE_RANK)


class Leader:
    """Rank 0's end of the connection to one follower, which has joined and begun."""

    def __init__(self, runner: FakeModelRunner | None = None, **changes: Any) -> None:
        self.connection, other = memory_connections()
        self.rank = start_rank(runner or make_runner(), other, **changes)

    def hear(self) -> Answer:
        frame = self.connection.receive()
        assert frame is not None
        answer: Answer = decoder(Answer).decode(frame)
        return answer

    def begin(self) -> None:
        join = self.hear()
        assert isinstance(join, Join)
        assert (join.rank, join.fingerprint, join.num_blocks) == (1, "fake", 8)
        self.connection.send(Begin(num_blocks=5, collective_address=""))

    def stop(self) -> None:
        self.connection.send(Stop())
        assert self.rank.join() == 0
        self.connection.close()


def test_orders_of_the_engine_are_carried_out_in_order() -> None:
    leader = Leader()
    leader.begin()
    commands = (step(), gather(1), ClearBuffer(buffer=1, buffer_bytes=512), scatter(2), gather(3), step(), gather(4))
    for command in commands:
        leader.connection.send(command)
    whole, scattered, zeros, again = (leader.hear() for _ in range(4))
    assert isinstance(whole, Done)
    assert whole.ok
    assert whole.call == 1
    assert len(whole.checksums) == 1
    assert scattered == Done(call=2, ok=True)
    assert isinstance(zeros, Done)
    assert zeros.ok
    assert zeros.checksums != whole.checksums
    assert again == Done(call=4, ok=True, checksums=whole.checksums)
    assert leader.rank.runner.num_blocks == 5
    leader.stop()
    assert leader.rank.transports.is_closed
    assert leader.rank.ends == []


def test_a_copy_that_cannot_be_done_is_answered_so() -> None:
    leader = Leader()
    leader.begin()
    for command in (step(), gather(1, buffer_bytes=18)):
        leader.connection.send(command)
    refused = leader.hear()
    assert refused == Done(call=1, ok=False, error="ValueError: 32 tokens of KV are 256 bytes, the buffer has 9")
    leader.connection.send(FreeBuffer(buffer=1))
    leader.connection.send(gather(2))
    done = leader.hear()
    assert isinstance(done, Done)
    assert done.ok
    leader.stop()


def test_orders_of_the_transport_go_to_the_transports_also_during_a_step() -> None:
    entered, leave = threading.Event(), threading.Event()

    class Slow(FakeModelRunner):
        def compute(self, arrays: BatchArrays) -> None:
            entered.set()
            assert leave.wait(WAIT_S)

    leader = Leader(Slow(8, 16, 4096, VOCAB_SIZE, shard=Shard(1, 2)))
    leader.begin()
    receive = ReceivePart(call=6, pair_name="p", buffer=1, buffer_bytes=8, group=0, element_bytes=8)
    leader.connection.send(step())
    assert entered.wait(WAIT_S)
    for command in (gather(5), receive, ClosePair(call=7, pair_name="p")):
        leader.connection.send(command)
    said = [leader.hear() for _ in range(3)]
    assert said == [Posted(call=6), Done(call=6, ok=True, checksums=(6,)), Done(call=7, ok=True, checksums=(7,))]
    leave.set()
    done = leader.hear()
    assert isinstance(done, Done)
    assert done.call == 5
    leader.stop()


# ---------------------------------------------------------------- ends


@pytest.mark.parametrize("begun", [False, True])
def test_a_follower_ends_with_its_line(begun: bool) -> None:
    leader = Leader()
    if begun:
        leader.begin()
    else:
        leader.hear()
    leader.connection.close()
    assert leader.rank.join() == 3
    assert leader.rank.ends == []
    assert leader.rank.transports.is_closed


@pytest.mark.parametrize(("told", "expected"), [(False, 3), (True, 0)])
def test_a_follower_whose_engine_does_not_come_back_ends_its_process(told: bool, expected: int) -> None:
    entered, leave, ended = threading.Event(), threading.Event(), threading.Event()

    class Stuck(FakeModelRunner):
        def compute(self, arrays: BatchArrays) -> None:
            entered.set()
            assert leave.wait(WAIT_S)

    statuses: list[int] = []

    def end_process(status: int) -> None:
        statuses.append(status)
        ended.set()

    stuck = Stuck(8, 16, 4096, VOCAB_SIZE, shard=Shard(1, 2))
    leader = Leader(stuck, grace_s=0.0, stop_grace_s=0.0, end_process=end_process)
    leader.begin()
    leader.connection.send(step())
    assert entered.wait(WAIT_S)
    if told:
        leader.connection.send(Stop())
    leader.connection.close()
    assert ended.wait(WAIT_S)
    assert statuses == [expected]
    leave.set()
    assert leader.rank.join() == expected


def test_a_follower_that_cannot_load_says_why() -> None:
    def fail(*_: object) -> FakeModelRunner:
        raise ConfigError("tp: 3 heads cannot be divided")

    leader = Leader(make_runner=fail)
    assert leader.hear() == Failed(error="ConfigError: tp: 3 heads cannot be divided")
    assert leader.rank.join() == 3
    assert leader.connection.receive() is None


def test_a_follower_that_cannot_compute_says_so_and_ends() -> None:
    leader = Leader()
    leader.begin()
    bad = make_sequence(make_spec("a", PROMPT))
    bad.block_table = [3, 100]
    plan = StepPlan(prefills=(ScheduledSequence(bad, 0, 32, True),))
    leader.connection.send(encode_step(make_runner().arrays(plan)))
    failed = leader.hear()
    assert isinstance(failed, Failed)
    assert failed.error.startswith("IndexError: ")
    assert leader.rank.join() == 3
    assert leader.rank.transports.is_closed


def test_a_copy_that_fails_for_ever_ends_a_follower() -> None:
    class Lost(FakeModelRunner):
        def gather_part(self, *_: object) -> list[int]:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    leader = Leader(Lost(8, 16, 4096, VOCAB_SIZE, num_kv_heads=2, shard=Shard(1, 2)))
    leader.begin()
    leader.connection.send(gather(1))
    failed = leader.hear()
    assert failed == Failed(error="AcceleratorError: CUDA error: an illegal memory access was encountered")
    assert leader.rank.join() == 3


@pytest.mark.parametrize("frame", [b"\xc1", b"\x81\xa4type\xa4Boom"])
def test_a_frame_that_is_no_order_ends_a_follower(frame: bytes) -> None:
    leader = Leader()
    leader.begin()
    leader.connection.send_frame(frame)
    assert leader.rank.join() == 3


def test_an_order_for_the_transport_before_it_has_joined_ends_a_follower() -> None:
    loads, load = threading.Event(), threading.Event()

    def make_late(*_: object) -> FakeModelRunner:
        loads.set()
        assert load.wait(WAIT_S)
        return make_runner()

    ended = threading.Event()
    leader = Leader(make_runner=make_late, grace_s=0.0, end_process=lambda _: ended.set())
    assert loads.wait(WAIT_S)
    leader.connection.send(ClosePair(call=1, pair_name="p"))
    assert ended.wait(WAIT_S)
    load.set()
    assert leader.rank.join() == 3
