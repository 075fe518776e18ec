"""How many lines may start: what interactive requests leave, and as far as steps stay short; whose: the tenants in
turn."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from disagg.gateway.batches.batch_quota import (
    BatchQuota,
    StepBounds,
    bounds_for,
    lines_to_start,
    num_admissible,
    quota_of,
)
from disagg.proto.messages import Load, StepCoefficients
from disagg.router.api import BackgroundView, ClusterView, WorkerView
from tests.support.router import worker_info

TIMES = StepCoefficients(base_ms=5.0, prefill_token_ms=0.4, attended_ms=0.0, decode_ms=0.5, context_ms=0.001)


def _view(num_running: int = 0, blocks: int = 0, **changes: Any) -> ClusterView:
    info = msgspec.structs.replace(worker_info("d0"), roles=("decode",), max_num_seqs=100, block_size=16)
    worker = WorkerView(info, Load(num_running=num_running, blocks_active=blocks), steps=TIMES)
    return dataclasses.replace(ClusterView((worker,), 0, num_running), **changes)


def test_lines_start_only_in_room_that_nobody_waits_for() -> None:
    assert num_admissible(10, 0, 4, 0, 100) == 6
    assert num_admissible(10, 0, 4, 98, 100) == 2
    assert num_admissible(10, 1, 4, 0, 100) == 0
    assert num_admissible(3, 0, 4, 0, 100) == 0


def test_lines_that_wait_hold_up_their_tenant_only() -> None:
    tenants = {"a": (3, 1), "b": (0, 4)}
    assert quota_of(_view(num_queued=3, background=BackgroundView(3), tenants=tenants), 4, 0.1, 1000) == BatchQuota(
        90, 90, tenants
    )
    assert quota_of(_view(num_queued=3, background=BackgroundView(2), tenants=tenants), 4, 0.1, 1000) == BatchQuota(
        0, 0, tenants
    )


def test_lines_that_wait_for_a_limit_of_their_tenant_hold_no_place() -> None:
    """Of eight places, seven answers wait; others have these places, and one prompt at a time where those are few."""
    view = _view(num_running=1, num_queued=7, background=BackgroundView(7), tenants={"a": (7, 1)})
    assert quota_of(view, 8, 0.1, 8).num_answers == 7
    bounds = StepBounds(prefill_ms=100.0)
    assert quota_of(view, 8, 0.1, 8, bounds=bounds).num_prompts == 1


@pytest.mark.parametrize(
    ("tenants", "most_running", "num_lines", "expected"),
    [
        ({}, None, 5, 9),
        ({"a": (0, 5)}, None, 5, 9),
        ({"a": (1, 5)}, None, 5, 0),
        ({"b": (1, 5)}, None, 5, 9),
        ({}, 4, 1, 3),
        ({"a": (0, 3)}, 4, 1, 1),
        ({"a": (0, 3)}, 20, 1, 9),
        ({"a": (0, 9)}, 4, 1, -5),
    ],
)
def test_how_many_answers_of_a_tenant_may_start(
    tenants: dict[str, tuple[int, int]], most_running: int | None, num_lines: int, expected: int
) -> None:
    assert BatchQuota(9, 9, tenants).num_for("a", most_running, num_lines) == expected


@pytest.mark.parametrize(
    ("num_running", "blocks", "max_step_ms", "expected"),
    [
        (0, 0, None, 90),
        (0, 0, 20.0, 19),  # 15 ms for sequences of 0.5 + 0.256 ms
        (10, 625, 20.0, 0),  # of 1,000 tokens each: 1.5 ms, so ten are enough
        (8, 500, 20.0, 2),
        (0, 0, 1.0, 1),  # even an empty step takes longer: one line, else the batch would never run
        (1, 10, 1.0, 0),
    ],
)
def test_lines_start_as_far_as_steps_stay_short(
    num_running: int, blocks: int, max_step_ms: float | None, expected: int
) -> None:
    bounds = StepBounds(decode_ms=max_step_ms)
    assert quota_of(_view(num_running, blocks), 0, 0.1, 1000, bounds=bounds).num_answers == expected


def test_lines_of_a_model_with_experts_start_as_far_as_their_reads_leave_time() -> None:
    """Steps of up to 16 ms: 5, for each sequence 0.5 + 0.256, and 8 times the share of experts that they read, by which
    five take 14.9 ms and six 16.1."""
    steps = TIMES._replace(experts_ms=8.0, expert_share=0.25)
    (worker,) = _view().workers
    view = dataclasses.replace(_view(), workers=(dataclasses.replace(worker, steps=steps),))
    assert quota_of(view, 0, 0.1, 1000, bounds=StepBounds(decode_ms=16.0)).num_answers == 5


@pytest.mark.parametrize(
    ("background", "prefill_ms", "expected"),
    [
        (BackgroundView(), None, BatchQuota(90, 90)),
        (BackgroundView(), 500.0, BatchQuota(90, 4, is_paced=True)),  # prompts of 256 tokens take 102.4 ms
        (BackgroundView(0, 2, 200), 100.0, BatchQuota(90, 0, is_paced=True)),  # 40 ms each
        (BackgroundView(1, 2, 30), 20.0, BatchQuota(90, 2, is_paced=True)),  # 4 ms each
        (BackgroundView(0, 1, 9999), 50.0, BatchQuota(90, 0, is_paced=True)),
        (BackgroundView(), 1.0, BatchQuota(90, 1, is_paced=True)),
    ],
)
def test_prompts_of_lines_take_little_time_of_those_that_compute_prompts(
    background: BackgroundView, prefill_ms: float | None, expected: BatchQuota
) -> None:
    view = _view(background=background, num_queued=background.num_queued)
    prefill = WorkerView(worker_info("p0"), Load(), steps=TIMES)
    view = dataclasses.replace(view, workers=(*view.workers, prefill))
    assert quota_of(view, 0, 0.1, 1000, bounds=StepBounds(prefill_ms=prefill_ms)) == expected


def test_bounds_follow_from_the_targets() -> None:
    assert bounds_for(1.0, 0.05, None) == pytest.approx((30.0, 100.0))
    assert bounds_for(None, 0.05, 12.0) == (12.0, None)
    assert bounds_for(None, None, None) == (None, None)


def test_without_a_worker_one_line_may_make_one_start() -> None:
    none = ClusterView((), 0, 0)
    assert [
        quota_of(none, lines, 0.1, 9, wakes_workers=wakes).num_answers for lines, wakes in ((0, False), (0, True))
    ] == [
        0,
        1,
    ]
    assert quota_of(none, 1, 0.1, 9, wakes_workers=True).num_answers == 0


@pytest.mark.parametrize(
    ("num_answers", "running", "waiting", "expected"),
    [
        (6, [4, 0, 1], [[1] * 9, [1] * 9, [1] * 9], [0, 4, 2]),
        (5, [0, 0], [[1], [1] * 9], [1, 4]),
        (5, [7], [[1, 1]], [2]),
        (0, [1], [[1]], [0]),
        (3, [], [], []),
        (8, [0, 0], [[3, 3, 3], [1] * 9], [1, 3]),  # then it is the first one's turn, which needs 3
        (4, [2], [[5, 1]], [0]),  # waits for its room, and no smaller line passes
        (4, [2, 3], [[5], [1]], [0, 0]),
        (4, [3, 2], [[5], [1, 1, 1]], [0, 1]),  # until it is the turn of the first
        (4, [0], [[5, 1]], [1]),  # alone, since there may never be more room
        (4, [0, 0], [[5], [1]], [1, 0]),
    ],
)
def test_the_next_line_is_of_the_batch_with_the_fewest_answers(
    num_answers: int, running: list[int], waiting: list[list[int]], expected: list[int]
) -> None:
    assert lines_to_start(BatchQuota(num_answers, 99), running, waiting) == expected


def test_answers_to_a_line_are_one_prompt() -> None:
    assert lines_to_start(BatchQuota(90, 2), [0], [[16] * 9]) == [2]
    assert lines_to_start(BatchQuota(90, 0), [0], [[16] * 9]) == [0]
