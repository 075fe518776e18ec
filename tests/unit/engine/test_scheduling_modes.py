"""The baselines of the scheduler: prompts before decodes, and static batches."""

from __future__ import annotations

import pytest

from disagg.engine.config import Scheduling, WorkerConfig
from disagg.engine.plan import StepPlan
from tests.support.engine import add_to, make_scheduler, shape_of, states_of, step_scheduler


class TestPrefillFirst:
    def test_prompts_are_computed_alone_and_decodes_wait(self) -> None:
        scheduler = make_scheduler(20, token_budget=32, scheduling="prefill_first")
        add_to(scheduler, "a", 10)
        shapes = [shape_of(step_scheduler(scheduler)[0]) for _ in range(2)]
        add_to(scheduler, "b", 50, max_tokens=2)
        shapes += [shape_of(step_scheduler(scheduler)[0]) for _ in range(4)]
        assert shapes == [
            ([], [("a", 0, 10)]),
            ([("a", 10, 1)], []),
            ([], [("b", 0, 32)]),
            ([], [("b", 32, 18)]),
            ([("a", 11, 1), ("b", 50, 1)], []),
            ([("a", 12, 1)], []),
        ]

    def test_a_prompt_without_room_does_not_stop_the_decodes(self) -> None:
        scheduler = make_scheduler(4, scheduling="prefill_first")
        add_to(scheduler, "a", 40, max_tokens=3)
        step_scheduler(scheduler)
        add_to(scheduler, "b", 40)
        assert shape_of(step_scheduler(scheduler)[0]) == ([("a", 40, 1)], [])
        assert shape_of(step_scheduler(scheduler)[0]) == ([("a", 41, 1)], [])
        assert shape_of(step_scheduler(scheduler)[0]) == ([], [("b", 0, 40)])

    def test_two_prompts_share_a_step(self) -> None:
        scheduler = make_scheduler(20, token_budget=64, scheduling="prefill_first")
        add_to(scheduler, "a", 20)
        add_to(scheduler, "b", 44)
        assert shape_of(step_scheduler(scheduler)[0]) == ([], [("a", 0, 20), ("b", 0, 44)])


class TestStatic:
    def test_a_batch_is_computed_then_decodes_and_nobody_joins_before_its_end(self) -> None:
        scheduler = make_scheduler(30, token_budget=32, scheduling="static")
        add_to(scheduler, "a", 20, max_tokens=2)
        add_to(scheduler, "b", 40, max_tokens=4)
        shapes = [shape_of(step_scheduler(scheduler)[0]) for _ in range(3)]
        add_to(scheduler, "late", 8, max_tokens=1)
        shapes += [shape_of(step_scheduler(scheduler)[0]) for _ in range(4)]
        assert shapes == [
            ([], [("a", 0, 20)]),
            ([], [("b", 0, 32)]),
            ([], [("b", 32, 8)]),
            ([("a", 20, 1), ("b", 40, 1)], []),
            ([("b", 41, 1)], []),
            ([("b", 42, 1)], []),
            ([], [("late", 0, 8)]),
        ]
        assert scheduler.schedule() == StepPlan()

    def test_a_batch_has_at_most_as_many_places_as_the_worker(self) -> None:
        scheduler = make_scheduler(20, max_num_seqs=2, scheduling="static")
        for name in "abc":
            add_to(scheduler, name, 5, max_tokens=1)
        assert shape_of(step_scheduler(scheduler)[0]) == ([], [("a", 0, 5), ("b", 0, 5)])
        assert states_of(scheduler) == {"c": "waiting"}
        assert shape_of(step_scheduler(scheduler)[0]) == ([], [("c", 0, 5)])

    def test_a_preempted_sequence_waits_for_the_next_batch(self) -> None:
        scheduler = make_scheduler(4, decode_reserve_tokens=0, scheduling="static")
        add_to(scheduler, "a", 31, max_tokens=4)
        add_to(scheduler, "b", 31, max_tokens=4)
        shapes = [shape_of(step_scheduler(scheduler)[0]) for _ in range(3)]
        assert shapes[:2] == [([], [("a", 0, 31), ("b", 0, 31)]), ([("a", 31, 1), ("b", 31, 1)], [])]
        assert shapes[2] == ([("a", 32, 1)], [])
        assert states_of(scheduler) == {"a": "running", "b": "waiting"}
        assert shape_of(step_scheduler(scheduler)[0]) == ([("a", 33, 1)], [])
        assert shape_of(step_scheduler(scheduler)[0])[1][0][0] == "b"


@pytest.mark.parametrize("scheduling", ["decode_first", "prefill_first", "static"])
def test_everybody_ends_in_every_mode(scheduling: Scheduling) -> None:
    scheduler = make_scheduler(12, token_budget=24, max_num_seqs=3, decode_reserve_tokens=2, scheduling=scheduling)
    lengths = {f"r{index}": (3 + 17 * index % 60, 1 + 5 * index % 9) for index in range(12)}
    sampled: dict[str, int] = dict.fromkeys(lengths, 0)
    for arrival, (name, (num_tokens, max_tokens)) in enumerate(lengths.items()):
        add_to(scheduler, name, num_tokens, max_tokens=max_tokens, arrival=float(arrival))
        for entry in step_scheduler(scheduler)[0].entries:
            sampled[str(entry.sequence.key.request_id)] += entry.samples
    while scheduler.sequences:
        for entry in step_scheduler(scheduler)[0].entries:
            sampled[str(entry.sequence.key.request_id)] += entry.samples
    assert sampled == {name: max_tokens for name, (_, max_tokens) in lengths.items()}


def test_decode_first_is_what_is_served() -> None:
    assert WorkerConfig(worker_id="w", roles=("prefill",), model_path="fake").scheduling == "decode_first"
