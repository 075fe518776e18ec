from __future__ import annotations

import pytest

from disagg.engine.commands import Ended, PrefillComputed, TokenSampled
from disagg.engine.core.policy import PASS_S, before_tail, chunk_length, finish_reason
from disagg.engine.core.scheduler_audit import check_plan, scheduler_findings
from disagg.engine.plan import ScheduledSequence, StepPlan
from disagg.engine.request import SequenceState
from tests.support.engine import (
    GATEWAY,
    add_to,
    key_of,
    make_prompt,
    make_scheduler,
    make_sequence,
    make_spec,
    shape_of,
    states_of,
    step_scheduler,
)


@pytest.mark.parametrize(
    ("start", "num_uncomputed", "budget", "first", "expected"),
    [
        (0, 40, 64, True, 40),
        (0, 40, 40, False, 40),
        (0, 100, 64, True, 64),
        (0, 100, 70, True, 64),
        (0, 100, 31, False, 16),
        (0, 100, 15, True, 15),
        (0, 100, 15, False, 0),
        (15, 85, 1, False, 1),
        (15, 85, 20, False, 17),
        (15, 85, 1, True, 1),
        (16, 10, 9, False, 0),
        (16, 9, 9, False, 9),
    ],
)
def test_chunk_length(start: int, num_uncomputed: int, budget: int, first: bool, expected: int) -> None:
    assert chunk_length(start, num_uncomputed, budget, 16, first=first) == expected


@pytest.mark.parametrize(
    ("output", "min_tokens", "max_tokens", "expected"),
    [
        ([], 0, 3, None),
        ([1], 0, 3, None),
        ([9], 0, 3, "stop"),
        ([9], 2, 3, None),
        ([1, 9], 2, 3, "stop"),
        ([1, 2, 3], 0, 3, "length"),
        ([1, 2, 9], 0, 3, "stop"),
        ([1, 2, 3, 4, 5], 0, 30, "length"),
        ([], 0, 0, "length"),
    ],
)
def test_finish_reason(output: list[int], min_tokens: int, max_tokens: int, expected: str | None) -> None:
    spec = make_spec("a", (9, 9, 9), emitted=output, min_tokens=min_tokens, max_tokens=max_tokens, stop=[9])
    assert finish_reason(make_sequence(spec), max_model_len=8) == expected


class TestPlan:
    def test_nothing_to_do(self) -> None:
        assert make_scheduler().schedule() == StepPlan()

    def test_a_prompt_within_the_budget_is_one_chunk_and_then_decodes(self) -> None:
        scheduler = make_scheduler()
        add_to(scheduler, "a", 20, max_tokens=3)
        shapes = [shape_of(step_scheduler(scheduler)[0]) for _ in range(4)]
        assert shapes == [([], [("a", 0, 20)]), ([("a", 20, 1)], []), ([("a", 21, 1)], []), ([], [])]

    def test_a_long_prompt_is_cut_at_block_boundaries(self) -> None:
        scheduler = make_scheduler(token_budget=40)
        add_to(scheduler, "a", 110, max_tokens=1)
        shapes = [shape_of(step_scheduler(scheduler)[0])[1] for _ in range(4)]
        assert shapes == [[("a", 0, 32)], [("a", 32, 32)], [("a", 64, 32)], [("a", 96, 14)]]

    def test_only_the_last_chunk_samples(self) -> None:
        scheduler = make_scheduler(token_budget=32)
        add_to(scheduler, "a", 40)
        assert [entry.samples for entry in step_scheduler(scheduler)[0].entries] == [False]
        assert [entry.samples for entry in step_scheduler(scheduler)[0].entries] == [True]

    def test_chunks_of_several_prompts_share_a_step_within_the_budget(self) -> None:
        scheduler = make_scheduler(20, token_budget=64)
        for name, num_tokens in [("a", 20), ("b", 30), ("c", 40)]:
            add_to(scheduler, name, num_tokens)
        first, second = (step_scheduler(scheduler)[0] for _ in range(2))
        assert shape_of(first) == ([], [("a", 0, 20), ("b", 0, 30)])
        assert shape_of(second) == ([("a", 20, 1), ("b", 30, 1)], [("c", 0, 40)])

    def test_decodes_come_first_and_their_tokens_count(self) -> None:
        scheduler = make_scheduler(20, token_budget=34)
        add_to(scheduler, "a", 10)
        add_to(scheduler, "b", 10)
        step_scheduler(scheduler)
        add_to(scheduler, "c", 50)
        plan, _ = step_scheduler(scheduler)
        assert shape_of(plan) == ([("a", 10, 1), ("b", 10, 1)], [("c", 0, 32)])
        assert plan.num_tokens == 34
        assert [e.sequence.key.request_id for e in plan.entries] == ["a", "b", "c"]

    def test_prefill_advances_however_little_the_decodes_leave(self) -> None:
        scheduler = make_scheduler(20, token_budget=3, max_num_seqs=8)
        assert scheduler.max_num_seqs == 3
        for name in "abc":
            add_to(scheduler, name, 2 if name < "c" else 20, max_tokens=30)
        shapes = [shape_of(step_scheduler(scheduler)[0]) for _ in range(4)]
        assert shapes == [
            ([], [("a", 0, 2)]),
            ([("a", 2, 1)], [("b", 0, 2)]),
            ([("a", 3, 1), ("b", 2, 1)], [("c", 0, 1)]),
            ([("a", 4, 1), ("b", 3, 1)], [("c", 1, 1)]),
        ]

    def test_priority_goes_before_arrival_also_between_started_and_waiting_prompts(self) -> None:
        scheduler = make_scheduler(30, token_budget=32)
        add_to(scheduler, "late", 64, arrival=2.0)
        add_to(scheduler, "early", 64, arrival=1.0)
        assert shape_of(step_scheduler(scheduler)[0])[1] == [("early", 0, 32)]
        add_to(scheduler, "urgent", 48, priority=1, arrival=3.0)
        shapes = [shape_of(step_scheduler(scheduler)[0])[1] for _ in range(3)]
        assert shapes == [[("urgent", 0, 32)], [("urgent", 32, 16), ("early", 32, 16)], [("early", 48, 16)]]

    def test_on_a_prefill_worker_a_short_prompt_passes_a_long_one_that_has_begun(self) -> None:
        scheduler = make_scheduler(20, token_budget=64)
        add_to(scheduler, "long", 150, hold=True)
        assert shape_of(step_scheduler(scheduler)[0]) == ([], [("long", 0, 64)])
        add_to(scheduler, "short", 40, seed=1, hold=True, arrival=PASS_S / 2)
        shapes = [shape_of(step_scheduler(scheduler)[0]) for _ in range(3)]
        assert shapes == [
            ([], [("short", 0, 40), ("long", 64, 16)]),
            ([], [("long", 80, 64)]),
            ([], [("long", 144, 6)]),
        ]

    def test_short_prompts_pass_a_long_one_for_a_while_only(self) -> None:
        scheduler = make_scheduler(20, token_budget=64)
        add_to(scheduler, "long", 150, hold=True)
        add_to(scheduler, "late", 40, seed=1, hold=True, arrival=PASS_S * 1.01)
        shapes = [shape_of(step_scheduler(scheduler)[0]) for _ in range(3)]
        assert shapes == [([], [("long", 0, 64)]), ([], [("long", 64, 64)]), ([], [("long", 128, 22), ("late", 0, 40)])]

    def test_prompts_that_stay_on_the_worker_do_not_pass_each_other(self) -> None:
        scheduler = make_scheduler(20, token_budget=64)
        add_to(scheduler, "long", 150)
        add_to(scheduler, "short", 40, seed=1)
        assert shape_of(step_scheduler(scheduler)[0]) == ([], [("long", 0, 64)])

    def test_max_num_seqs_bounds_the_batch_with_its_promised_places(self) -> None:
        scheduler = make_scheduler(max_num_seqs=2)
        reserved = make_sequence(make_spec("r", make_prompt(16)), state=SequenceState.RESERVED)
        assert scheduler.reserve(reserved) is None
        add_to(scheduler, "a", 16, max_tokens=2)
        add_to(scheduler, "b", 16)
        assert shape_of(step_scheduler(scheduler)[0])[1] == [("a", 0, 16)]
        other = make_sequence(make_spec("s", make_prompt(16)), state=SequenceState.RESERVED)
        assert scheduler.reserve(other) == "the batch is full"
        step_scheduler(scheduler)
        assert shape_of(step_scheduler(scheduler)[0])[1] == [("b", 0, 16)]

    def test_a_plan_that_would_write_a_shared_block_fails_its_check(self) -> None:
        scheduler = make_scheduler()
        add_to(scheduler, "a", 20)
        step_scheduler(scheduler)
        (sequence,) = scheduler.running.values()
        scheduler.blocks._refs[sequence.block_table[1]] += 1
        with pytest.raises(AssertionError, match="a/1 would write a shared block"):
            check_plan(scheduler, scheduler.schedule())

    def test_a_plan_is_checked_against_the_sequences(self) -> None:
        scheduler = make_scheduler()
        add_to(scheduler, "a", 20)
        step_scheduler(scheduler)
        (sequence,) = scheduler.running.values()
        good = ScheduledSequence(sequence, 20, 1, samples=True)
        for plan, message in [
            (StepPlan(decodes=(good, good)), "planned twice"),
            (StepPlan(decodes=(ScheduledSequence(sequence, 19, 1, samples=False),)), "leave a gap"),
            (StepPlan(decodes=(ScheduledSequence(sequence, 20, 1, samples=False),)), "wrong token"),
            (StepPlan(prefills=(ScheduledSequence(sequence, 20, 13, samples=False),)), "does not cover"),
            (StepPlan(prefills=(ScheduledSequence(sequence, 20, 65, samples=False),)), "over its token budget"),
        ]:
            with pytest.raises(AssertionError, match=message):
                check_plan(scheduler, plan)


class TestApply:
    def test_events_of_a_held_prefill(self) -> None:
        scheduler = make_scheduler(token_budget=32)
        add_to(scheduler, "a", 40, hold=True)
        key = key_of("a")
        assert step_scheduler(scheduler)[1] == []
        assert step_scheduler(scheduler)[1] == [
            TokenSampled(key, GATEWAY, 0, 7),
            PrefillComputed(key, GATEWAY, 7, 0),
        ]
        assert states_of(scheduler) == {"a": "held"}
        assert step_scheduler(scheduler) == (StepPlan(), [])

    def test_a_held_prefill_that_ends_at_its_first_token_holds_nothing(self) -> None:
        scheduler = make_scheduler()
        add_to(scheduler, "a", 40, hold=True, max_tokens=1)
        key = key_of("a")
        assert step_scheduler(scheduler)[1] == [TokenSampled(key, GATEWAY, 0, 7), Ended(key, GATEWAY, "length")]
        assert scheduler.sequences == {}
        assert scheduler.blocks.num_active == 0

    def test_output_indices_go_on_after_an_earlier_attempt(self) -> None:
        scheduler = make_scheduler()
        scheduler.add(make_sequence(make_spec("a", make_prompt(10), emitted=[3, 4, 5], max_tokens=5, attempt=2)))
        key = key_of("a", 2)
        assert step_scheduler(scheduler)[1] == [TokenSampled(key, GATEWAY, 3, 7)]
        assert step_scheduler(scheduler)[1] == [TokenSampled(key, GATEWAY, 4, 7), Ended(key, GATEWAY, "length")]

    def test_sequences_that_computed_the_same_blocks_side_by_side_share_them_afterwards(self) -> None:
        scheduler = make_scheduler(10)
        add_to(scheduler, "a", 32, seed=1)
        add_to(scheduler, "b", 32, seed=1)
        step_scheduler(scheduler)
        assert [s.block_table for s in scheduler.running.values()] == [[0, 1], [0, 1]]
        assert scheduler.blocks.num_active == 2
        assert scheduler_findings(scheduler) == []

    def test_all_blocks_together_bound_the_length(self) -> None:
        scheduler = make_scheduler(2)
        assert scheduler.max_model_len == 32
        add_to(scheduler, "a", 30, max_tokens=50)
        events = [event for _ in range(3) for event in step_scheduler(scheduler)[1]]
        assert events[-1] == Ended(key_of("a"), GATEWAY, "length")
        assert len(events) == 3


def test_integrity_findings() -> None:
    scheduler = make_scheduler()
    add_to(scheduler, "a", 20)
    add_to(scheduler, "w", 20)
    step_scheduler(scheduler)
    sequence = scheduler.sequences[key_of("a")]
    scheduler.num_reserved += 9
    scheduler.num_preempted += 1
    sequence.block_table.append(sequence.block_table[0])
    sequence.num_computed_tokens = 100
    assert scheduler_findings(scheduler) == [
        "block 0: 1 references counted, 2 tables list it",
        "0 sequences are reserved, 9 are counted",
        "1 preempted sequences are counted and other ones wait",
        "3 sequences more than the batch has places",
        "a/1 lists a block twice",
        "the block table of a/1 does not cover its computed tokens",
        "a/1 has computed a full block that is not published",
    ]


class TestTails:
    """A prompt that is handed over ends in a short step of its own."""

    @pytest.mark.parametrize(
        ("start", "num_tokens", "expected"),
        [(0, 63, 63), (0, 64, 48), (0, 65, 48), (0, 512, 496), (0, 521, 512), (16, 80, 64), (5, 100, 91)],
    )
    def test_before_tail(self, start: int, num_tokens: int, expected: int) -> None:
        assert before_tail(start, num_tokens, 8, 16) == expected
        assert before_tail(start, num_tokens, 0, 16) == num_tokens

    @pytest.mark.parametrize("block_size", [240, 256, 512])
    @pytest.mark.parametrize("num_tokens", [256, 270, 287, 288, 511, 543, 544])
    def test_large_blocks_leave_no_empty_chunk_before_the_tail(self, block_size: int, num_tokens: int) -> None:
        first = before_tail(0, num_tokens, 32, block_size)
        assert first == ((num_tokens - 32) // block_size * block_size or num_tokens)

    def test_a_last_chunk_that_is_not_worth_it_is_computed_whole(self) -> None:
        scheduler = make_scheduler(40, token_budget=96, tail_tokens=8)
        add_to(scheduler, "a", 150, hold=True)
        add_to(scheduler, "b", 20, hold=True, arrival=PASS_S)
        plans = [step_scheduler(scheduler)[0] for _ in range(4)]
        assert [[(e.sequence.key.request_id, e.num_tokens) for e in plan.prefills] for plan in plans] == [
            [("a", 96)],
            [("a", 54), ("b", 20)],
            [],
            [],
        ]

    def test_a_long_last_chunk_is_cut_and_both_parts_go_alone(self) -> None:
        scheduler = make_scheduler(40, token_budget=96, tail_tokens=8)
        add_to(scheduler, "a", 90, hold=True)
        add_to(scheduler, "b", 20, hold=True)
        plans = [step_scheduler(scheduler)[0] for _ in range(3)]
        assert [[(e.sequence.key.request_id, e.num_tokens) for e in plan.prefills] for plan in plans] == [
            [("a", 80)],
            [("a", 10)],
            [("b", 20)],
        ]

    def test_a_prompt_that_stays_here_has_none(self) -> None:
        scheduler = make_scheduler(40, token_budget=96, tail_tokens=8)
        add_to(scheduler, "a", 90)
        assert [e.num_tokens for e in step_scheduler(scheduler)[0].prefills] == [90]

    def test_a_cached_prefix_with_a_short_suffix_shares_its_step(self) -> None:
        scheduler = make_scheduler(40, token_budget=96, tail_tokens=8)
        add_to(scheduler, "warm", 65, seed=1, max_tokens=1)
        step_scheduler(scheduler)
        for name in "ab":
            add_to(scheduler, name, 72, seed=1, hold=True)
        plan = step_scheduler(scheduler)[0]
        assert [(e.sequence.key.request_id, e.start, e.num_tokens) for e in plan.prefills] == [
            ("a", 64, 8),
            ("b", 64, 8),
        ]
