"""Overload of the decode side in virtual time: what would miss its target is refused at once, the rest meets it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from disagg.proto.ids import AttemptKey, RequestId
from disagg.proto.messages import Load
from disagg.router.api import RoutedRequest
from disagg.router.config import RouterConfig
from disagg.router.placement.forecast import openings, wait_ms
from disagg.router.workers.assignments import AssignedLoad, Assignment
from disagg.router.workers.worker import Worker
from tests.support.engine_world import EngineWorld
from tests.support.placing import samples
from tests.support.router import routed_request, worker_info, worker_report

CONFIG = RouterConfig(local_prefill="never", watermark=0.0)
TTFT_S, SECONDS = 0.5, 30.0


class Offered:
    """Requests of one size at a steady rate, to one decode worker."""

    def __init__(
        self,
        rate: float,
        *,
        num_tokens: int,
        max_tokens: int,
        num_blocks: int,
        max_num_seqs: int,
        has_target: bool = True,
        seconds: float = SECONDS,
    ) -> None:
        self.world = world = EngineWorld(CONFIG, num_blocks=num_blocks, max_num_seqs=max_num_seqs)

        def request(number: int) -> RoutedRequest:
            start = 1000 + 97 * number
            routed = routed_request(f"r{number}", range(start, start + num_tokens), max_tokens=max_tokens)
            return msgspec.structs.replace(routed, ttft_slo_s=TTFT_S if has_target else None)

        world.run([(number / rate, request(number)) for number in range(int(rate * seconds))])
        world.assert_nothing_held()
        ends = world.ended
        waits_s = {name: when - world.arrived_at[name] for name, when in world.first_token_at.items()}
        self.good = sum(wait_s <= TTFT_S for wait_s in waits_s.values())
        self.finished = sum(how == "finished" for how in ends.values())
        self.refused = [name for name, how in ends.items() if how == "slow_down"]
        self.num_others = len(ends) - self.finished - len(self.refused)

    @property
    def longest_refusal_s(self) -> float:
        return max((self.world.ended_at[name] - self.world.arrived_at[name] for name in self.refused), default=0.0)


PLACES: dict[str, Any] = {"num_tokens": 64, "max_tokens": 200, "num_blocks": 4096, "max_num_seqs": 8}
"""Eight places, each for 200 steps of 14 ms: 2.86 a second."""
BLOCKS: dict[str, Any] = {"num_tokens": 600, "max_tokens": 100, "num_blocks": 150, "max_num_seqs": 64}
"""Three sequences of 44 blocks at a time."""


@pytest.mark.parametrize(("kind", "capacity"), [(PLACES, 2.8), (BLOCKS, 2.5)])
def test_ten_times_what_decode_workers_can_do(kind: dict[str, Any], capacity: float) -> None:
    """What can be done is taken in as a whole and in time. Of ten times as much, as many are answered in time, but for
    those that were taken in before the router had seen how long answers are."""
    most = Offered(capacity, **kind)
    assert (most.good, most.refused) == (int(capacity * SECONDS), [])
    overloaded = Offered(10 * capacity, **kind)
    assert overloaded.good >= 0.9 * most.good
    assert overloaded.finished - overloaded.good <= 24
    assert overloaded.finished + len(overloaded.refused) == int(10 * capacity * SECONDS)
    assert (overloaded.num_others, overloaded.longest_refusal_s) == (0, 0.0)
    assert not overloaded.world.num_refused_by


def test_without_a_target_requests_queue() -> None:
    offered = Offered(8.0, has_target=False, seconds=5.0, **PLACES)
    assert (offered.finished, offered.refused) == (40, [])


# ---------------------------------------------------------------- openings


def busy(*assignments: Assignment, load: Load | None = None) -> Worker:
    """A worker of four places, 64 blocks and steps of 10 ms."""
    info = worker_info("d0", max_num_seqs=4, calibration=samples(base_ms=10, prefill_token_ms=1, decode_ms=0))
    assigned = AssignedLoad()
    worker = Worker(info, assigned, 0, 1)
    for number, assignment in enumerate(assignments):
        assigned.assignments[AttemptKey(RequestId(f"r{number}"), 0)] = assignment
        assigned.blocks += assignment.blocks
    worker.take_report(worker_report("d0", 0, load=load))
    worker.refresh()
    return worker


def running(num_made: int, *, most: int = 1000, blocks: int = 8) -> Assignment:
    return Assignment(blocks=blocks, context=100 + num_made, known_tokens=100, most_output_tokens=most)


def opens(worker: Worker, num_blocks: int = 8, room: int = 64) -> list[int]:
    """Answers are expected to have 50 tokens."""
    return [round(when) for when in openings(worker, num_blocks, room, 50.0)]


def test_free_places_are_open_now_and_others_when_answers_end() -> None:
    assert opens(busy()) == [0, 0, 0, 0]
    assert opens(busy(running(20), running(40))) == [0, 0, 100, 300]
    assert opens(busy(*[running(made) for made in (10, 20, 30, 40)])) == [100, 200, 300, 400]


def test_an_answer_is_no_longer_than_it_may_be_and_goes_on_where_it_outgrew_the_mean() -> None:
    full = [running(0, most=5), running(10, most=12), running(100), running(100, most=110)]
    assert opens(busy(*full)) == [20, 50, 100, 250]


def test_places_without_blocks_are_not_open() -> None:
    half = [running(20, blocks=30), running(40, blocks=30)]
    assert opens(busy(*half), num_blocks=20) == [100, 300, 300]
    assert opens(busy(*half), num_blocks=62) == [300]
    assert opens(busy(), num_blocks=100) == [0]


def test_the_ends_of_other_routers_sequences_are_spread_over_an_answer() -> None:
    load = Load(num_running=4, blocks_active=64)
    assert opens(busy(load=load), num_blocks=16) == [100, 200, 300, 400]


@pytest.mark.parametrize(("position", "expected"), [(0, 10.0), (2, 30.0), (3, 110.0), (7, 220.0)])
def test_behind_the_last_opening_the_next_generation_is_waited_for(position: int, expected: float) -> None:
    assert wait_ms([10.0, 20.0, 30.0], position, 100.0) == expected
    assert wait_ms([], position, 100.0) == 0.0
