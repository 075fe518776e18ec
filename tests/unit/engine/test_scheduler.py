from __future__ import annotations

import pytest

from disagg.engine.commands import ChunkComputed, Ended, PrefillComputed, TokenSampled
from disagg.engine.plan import ScheduledSequence, StepPlan
from disagg.engine.request import SequenceState
from disagg.engine.scheduler import Scheduler, chunk_length, finish_reason
from disagg.proto.block_hash import chain_hashes
from disagg.proto.messages import BlocksRemoved, BlocksStored
from tests.support.engine import (
    GATEWAY,
    ROOT,
    key_of,
    make_prompt,
    make_scheduler,
    make_sequence,
    make_spec,
    shape_of,
    step_scheduler,
)


def add(
    scheduler: Scheduler,
    request_id: str,
    num_tokens: int,
    *,
    seed: int | None = None,
    max_tokens: int = 4,
    priority: int = 0,
    arrival: float = 0.0,
    hold: bool = False,
) -> None:
    """Queue a sequence whose prompt is its own, unless `seed` is shared."""
    prompt = make_prompt(num_tokens, seed=sum(request_id.encode()) if seed is None else seed)
    spec = make_spec(request_id, prompt, max_tokens=max_tokens, priority=priority)
    scheduler.add(make_sequence(spec, arrival=arrival, hold=hold))


def states(scheduler: Scheduler) -> dict[str, str]:
    return {str(key.request_id): sequence.state.value for key, sequence in scheduler.sequences.items()}


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
        add(scheduler, "a", 20, max_tokens=3)
        shapes = [shape_of(step_scheduler(scheduler)[0]) for _ in range(4)]
        assert shapes == [([], [("a", 0, 20)]), ([("a", 20, 1)], []), ([("a", 21, 1)], []), ([], [])]

    def test_a_long_prompt_is_cut_at_block_boundaries(self) -> None:
        scheduler = make_scheduler(token_budget=40)
        add(scheduler, "a", 110, max_tokens=1)
        shapes = [shape_of(step_scheduler(scheduler)[0])[1] for _ in range(4)]
        assert shapes == [[("a", 0, 32)], [("a", 32, 32)], [("a", 64, 32)], [("a", 96, 14)]]

    def test_only_the_last_chunk_samples(self) -> None:
        scheduler = make_scheduler(token_budget=32)
        add(scheduler, "a", 40)
        assert [entry.samples for entry in step_scheduler(scheduler)[0].entries] == [False]
        assert [entry.samples for entry in step_scheduler(scheduler)[0].entries] == [True]

    def test_chunks_of_several_prompts_share_a_step_within_the_budget(self) -> None:
        scheduler = make_scheduler(20, token_budget=64)
        for name, num_tokens in [("a", 20), ("b", 30), ("c", 40)]:
            add(scheduler, name, num_tokens)
        first, second = (step_scheduler(scheduler)[0] for _ in range(2))
        assert shape_of(first) == ([], [("a", 0, 20), ("b", 0, 30)])
        assert shape_of(second) == ([("a", 20, 1), ("b", 30, 1)], [("c", 0, 40)])

    def test_decodes_come_first_and_their_tokens_count(self) -> None:
        scheduler = make_scheduler(20, token_budget=34)
        add(scheduler, "a", 10)
        add(scheduler, "b", 10)
        step_scheduler(scheduler)
        add(scheduler, "c", 50)
        plan, _ = step_scheduler(scheduler)
        assert shape_of(plan) == ([("a", 10, 1), ("b", 10, 1)], [("c", 0, 32)])
        assert plan.num_tokens == 34
        assert [e.sequence.key.request_id for e in plan.entries] == ["a", "b", "c"]

    def test_prefill_advances_however_little_the_decodes_leave(self) -> None:
        scheduler = make_scheduler(20, token_budget=3, max_num_seqs=8)
        assert scheduler.max_num_seqs == 3
        for name in "abc":
            add(scheduler, name, 2 if name < "c" else 20, max_tokens=30)
        shapes = [shape_of(step_scheduler(scheduler)[0]) for _ in range(4)]
        assert shapes == [
            ([], [("a", 0, 2)]),
            ([("a", 2, 1)], [("b", 0, 2)]),
            ([("a", 3, 1), ("b", 2, 1)], [("c", 0, 1)]),
            ([("a", 4, 1), ("b", 3, 1)], [("c", 1, 1)]),
        ]

    def test_priority_goes_before_arrival_also_between_started_and_waiting_prompts(self) -> None:
        scheduler = make_scheduler(30, token_budget=32)
        add(scheduler, "late", 64, arrival=2.0)
        add(scheduler, "early", 64, arrival=1.0)
        assert shape_of(step_scheduler(scheduler)[0])[1] == [("early", 0, 32)]
        add(scheduler, "urgent", 48, priority=1, arrival=3.0)
        shapes = [shape_of(step_scheduler(scheduler)[0])[1] for _ in range(3)]
        assert shapes == [[("urgent", 0, 32)], [("urgent", 32, 16), ("early", 32, 16)], [("early", 48, 16)]]

    def test_max_num_seqs_bounds_the_batch_with_its_promised_places(self) -> None:
        scheduler = make_scheduler(max_num_seqs=2)
        reserved = make_sequence(make_spec("r", make_prompt(16)), state=SequenceState.RESERVED)
        assert scheduler.reserve(reserved) is None
        add(scheduler, "a", 16, max_tokens=2)
        add(scheduler, "b", 16)
        assert shape_of(step_scheduler(scheduler)[0])[1] == [("a", 0, 16)]
        other = make_sequence(make_spec("s", make_prompt(16)), state=SequenceState.RESERVED)
        assert scheduler.reserve(other) == "the batch is full"
        step_scheduler(scheduler)
        assert shape_of(step_scheduler(scheduler)[0])[1] == [("b", 0, 16)]

    def test_a_plan_that_would_write_a_shared_block_is_not_returned(self) -> None:
        scheduler = make_scheduler()
        add(scheduler, "a", 20)
        step_scheduler(scheduler)
        (sequence,) = scheduler.running.values()
        scheduler.blocks._refs[sequence.block_table[1]] += 1
        with pytest.raises(AssertionError, match="a/1 would write a shared block"):
            scheduler.schedule()

    def test_a_plan_is_checked_against_the_sequences(self) -> None:
        scheduler = make_scheduler()
        add(scheduler, "a", 20)
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
                scheduler._check_plan(plan)


class TestAdmission:
    def test_the_prompt_and_the_output_to_come_are_reserved(self) -> None:
        scheduler = make_scheduler(10, decode_reserve_tokens=32)
        add(scheduler, "a", 20, max_tokens=100)
        step_scheduler(scheduler)
        (sequence,) = scheduler.running.values()
        assert (len(sequence.block_table), sequence.reserved_blocks) == (2, 2)
        assert (scheduler.blocks.num_reserved, scheduler.blocks.num_available) == (2, 6)

    @pytest.mark.parametrize(("max_tokens", "num_blocks"), [(1, 1), (2, 2), (17, 2), (18, 3)])
    def test_the_kv_of_the_last_token_needs_no_room(self, max_tokens: int, num_blocks: int) -> None:
        scheduler = make_scheduler(10)
        add(scheduler, "a", 16, max_tokens=max_tokens)
        scheduler.schedule()
        assert scheduler.blocks.num_active + scheduler.blocks.num_reserved == num_blocks

    def test_held_sequences_reserve_no_output(self) -> None:
        scheduler = make_scheduler(10)
        add(scheduler, "a", 32, max_tokens=100, hold=True)
        scheduler.schedule()
        assert (scheduler.blocks.num_active, scheduler.blocks.num_reserved) == (2, 0)

    def test_one_that_does_not_fit_waits_and_nobody_overtakes_it(self) -> None:
        scheduler = make_scheduler(10)
        add(scheduler, "a", 64, max_tokens=2)
        add(scheduler, "b", 100, max_tokens=2)
        add(scheduler, "c", 10, max_tokens=2)
        assert shape_of(step_scheduler(scheduler)[0])[1] == [("a", 0, 64)]
        assert shape_of(step_scheduler(scheduler)[0]) == ([("a", 64, 1)], [])
        assert shape_of(step_scheduler(scheduler)[0]) == ([], [("b", 0, 64)])

    @pytest.mark.parametrize(("num_watermark_blocks", "admitted"), [(0, True), (3, True), (4, False)])
    def test_the_watermark_stays_free(self, num_watermark_blocks: int, admitted: bool) -> None:
        scheduler = make_scheduler(10, num_watermark_blocks=num_watermark_blocks, token_budget=200)
        add(scheduler, "a", 64, max_tokens=1)
        add(scheduler, "b", 48, max_tokens=1)
        scheduler.schedule()
        assert states(scheduler) == {"a": "running", "b": "running" if admitted else "waiting"}

    def test_one_alone_gets_in_with_the_reserve_that_is_left(self) -> None:
        scheduler = make_scheduler(10, num_watermark_blocks=3, token_budget=200)
        add(scheduler, "a", 140, max_tokens=500)
        scheduler.schedule()
        (sequence,) = scheduler.running.values()
        assert (len(sequence.block_table), sequence.reserved_blocks) == (9, 1)

    def test_one_beside_a_held_one_is_not_alone(self) -> None:
        scheduler = make_scheduler(10, num_watermark_blocks=3, token_budget=200)
        add(scheduler, "h", 16, hold=True)
        step_scheduler(scheduler)
        assert states(scheduler) == {"h": "held"}
        add(scheduler, "a", 120, max_tokens=1)
        assert step_scheduler(scheduler)[0] == StepPlan()
        scheduler.drop(scheduler.sequences[key_of("h")])
        assert shape_of(step_scheduler(scheduler)[0])[1] == [("a", 0, 120)]

    def test_locking_a_cached_prefix_counts_as_taking_it(self) -> None:
        """Ten blocks, four of them cached: the hit of four plus six new ones is all there is."""
        scheduler = make_scheduler(10, token_budget=200)
        add(scheduler, "warm", 64, seed=1, max_tokens=1)
        step_scheduler(scheduler)
        add(scheduler, "other", 16, hold=True)
        step_scheduler(scheduler)
        add(scheduler, "a", 160, seed=1, max_tokens=1)
        assert step_scheduler(scheduler)[0] == StepPlan()
        scheduler.drop(scheduler.sequences[key_of("other")])
        assert shape_of(step_scheduler(scheduler)[0])[1] == [("a", 64, 96)]


class TestPrefixHits:
    @pytest.mark.parametrize(
        ("num_tokens", "seed", "cached"),
        [(50, 2, 0), (50, 1, 48), (48, 1, 32), (49, 1, 48), (32, 1, 16), (16, 1, 0), (17, 1, 16), (100, 1, 64)],
    )
    def test_none_partial_full(self, num_tokens: int, seed: int, cached: int) -> None:
        scheduler = make_scheduler(20, token_budget=200)
        add(scheduler, "warm", 64, seed=1, max_tokens=1)
        step_scheduler(scheduler)
        add(scheduler, "a", num_tokens, seed=seed)
        plan, _ = step_scheduler(scheduler)
        assert shape_of(plan)[1] == [("a", cached, num_tokens - cached)]
        assert scheduler.sequences[key_of("a")].cached_tokens == cached

    def test_running_sequences_share_blocks(self) -> None:
        scheduler = make_scheduler(10)
        add(scheduler, "a", 40, seed=1)
        step_scheduler(scheduler)
        add(scheduler, "b", 40, seed=1)
        step_scheduler(scheduler)
        a, b = scheduler.running.values()
        assert a.block_table[:2] == b.block_table[:2]
        assert a.block_table[2] != b.block_table[2]
        assert scheduler.blocks.num_active == 4

    def test_blocks_that_decode_filled_are_hit(self) -> None:
        scheduler = make_scheduler(10)
        add(scheduler, "a", 30, seed=1, max_tokens=20)
        while scheduler.sequences:
            step_scheduler(scheduler, token_id=7)
        known = [*make_prompt(30, seed=1), *[7] * 20]
        hashes = tuple(chain_hashes(ROOT, known))
        assert scheduler.blocks.prefix.drain_events() == (BlocksStored(hashes=hashes),)
        scheduler.add(make_sequence(make_spec("b", known)))
        assert shape_of(step_scheduler(scheduler)[0])[1] == [("b", 48, 2)]

    def test_without_hashes_nothing_is_published_or_hit(self) -> None:
        scheduler = make_scheduler(10)
        for name in "ab":
            scheduler.add(make_sequence(make_spec(name, make_prompt(40), max_tokens=1, cached=False)))
            assert shape_of(step_scheduler(scheduler)[0])[1] == [(name, 0, 40)]
        assert scheduler.blocks.prefix.drain_events() == ()
        assert scheduler.blocks.num_free == 10

    def test_eviction_takes_the_oldest_tail(self) -> None:
        scheduler = make_scheduler(6, token_budget=200)
        for seed in (1, 2):
            add(scheduler, f"warm{seed}", 48, seed=seed, max_tokens=1)
            step_scheduler(scheduler)
        stored = scheduler.blocks.prefix.drain_events()
        add(scheduler, "a", 32, seed=3, max_tokens=1)
        step_scheduler(scheduler)
        hashes = chain_hashes(ROOT, make_prompt(48, seed=1))
        assert len(stored) == 1
        assert scheduler.blocks.prefix.drain_events()[0] == BlocksRemoved(hashes=(hashes[2], hashes[1]))

    def test_blocks_of_64_tokens(self) -> None:
        scheduler = make_scheduler(10, block_size=64, token_budget=200)
        add(scheduler, "warm", 130, seed=1, max_tokens=1)
        step_scheduler(scheduler)
        add(scheduler, "a", 128, seed=1)
        add(scheduler, "b", 129, seed=1)
        assert shape_of(step_scheduler(scheduler)[0])[1] == [("a", 64, 64), ("b", 128, 1)]


class TestPreemption:
    def fill(self, *, priority_a: int = 0) -> Scheduler:
        """Two sequences whose known tokens just fill all four blocks."""
        scheduler = make_scheduler(4, decode_reserve_tokens=0, token_budget=64)
        add(scheduler, "a", 31, max_tokens=40, priority=priority_a, arrival=1.0)
        step_scheduler(scheduler)
        add(scheduler, "b", 31, max_tokens=40, arrival=2.0)
        step_scheduler(scheduler)
        return scheduler

    def test_the_one_with_fewest_output_tokens_goes(self) -> None:
        scheduler = self.fill()
        plan, _ = step_scheduler(scheduler)
        assert shape_of(plan) == ([("a", 32, 1)], [])
        assert states(scheduler) == {"a": "running", "b": "waiting"}
        b = scheduler.sequences[key_of("b")]
        assert (b.num_preemptions, b.num_tokens, b.block_table, b.num_computed_tokens) == (1, 32, [], 0)
        assert scheduler.num_preempted == 1

    def test_lower_priority_goes_before_fewer_tokens(self) -> None:
        scheduler = self.fill(priority_a=-1)
        plan, _ = step_scheduler(scheduler)
        assert shape_of(plan) == ([("b", 31, 1)], [])
        assert states(scheduler) == {"a": "waiting", "b": "running"}

    def test_a_victim_that_was_planned_already_leaves_the_plan(self) -> None:
        scheduler = make_scheduler(4, decode_reserve_tokens=0, token_budget=64)
        add(scheduler, "a", 20, max_tokens=40, priority=-1)
        step_scheduler(scheduler)
        add(scheduler, "b", 31, max_tokens=40)
        shapes = [shape_of(step_scheduler(scheduler)[0]) for _ in range(3)]
        assert shapes[1:] == [([("a", 21, 1), ("b", 31, 1)], []), ([("b", 32, 1)], [])]
        assert states(scheduler) == {"a": "waiting", "b": "running"}

    def test_a_preempted_one_can_be_dropped(self) -> None:
        scheduler = self.fill()
        step_scheduler(scheduler)
        scheduler.drop(scheduler.sequences[key_of("b")])
        assert scheduler.num_preempted == 0
        assert scheduler.check_integrity() == []

    def test_the_newest_goes_among_equals(self) -> None:
        scheduler = make_scheduler(5, decode_reserve_tokens=0, token_budget=200)
        for name, arrival in [("a", 2.0), ("b", 3.0), ("c", 1.0)]:
            add(scheduler, name, 16, max_tokens=40, arrival=arrival)
        step_scheduler(scheduler)
        plan, _ = step_scheduler(scheduler)
        assert [name for name, *_ in shape_of(plan)[0]] == ["c", "a"]
        assert states(scheduler) == {"a": "running", "b": "waiting", "c": "running"}

    def test_nobody_is_admitted_in_a_step_that_preempts(self) -> None:
        scheduler = self.fill()
        add(scheduler, "c", 1, arrival=3.0, priority=1)
        assert shape_of(step_scheduler(scheduler)[0]) == ([("a", 32, 1)], [])

    def test_the_preempted_one_resumes_before_new_ones_and_reservations(self) -> None:
        scheduler = self.fill()
        add(scheduler, "c", 16, arrival=0.0, max_tokens=1)
        step_scheduler(scheduler)
        reserve = make_sequence(make_spec("r", make_prompt(16)), state=SequenceState.RESERVED)
        assert scheduler.reserve(reserve) == "preempted sequences go first"
        scheduler.drop(scheduler.sequences[key_of("a")])
        plan, _ = step_scheduler(scheduler)
        assert [name for name, *_ in shape_of(plan)[1]] == ["b", "c"]
        assert scheduler.num_preempted == 0
        assert scheduler.reserve(reserve) is None

    def test_a_reservation_is_never_broken_by_a_decode(self) -> None:
        scheduler = make_scheduler(4, decode_reserve_tokens=0, token_budget=64)
        add(scheduler, "a", 32, max_tokens=40)
        step_scheduler(scheduler)
        reserve = make_sequence(make_spec("r", make_prompt(32, seed=5), max_tokens=1), state=SequenceState.RESERVED)
        assert scheduler.reserve(reserve) is None
        assert step_scheduler(scheduler)[0] == StepPlan()
        assert states(scheduler) == {"a": "waiting", "r": "reserved"}
        assert reserve.reserved_blocks == 2

    def test_sequences_of_the_prefill_role_are_spared(self) -> None:
        scheduler = make_scheduler(6, decode_reserve_tokens=0, token_budget=32)
        add(scheduler, "a", 16, max_tokens=40, arrival=1.0)
        add(scheduler, "h", 80, hold=True, arrival=2.0)
        shapes = [shape_of(step_scheduler(scheduler)[0]) for _ in range(4)]
        assert shapes == [([], [("a", 0, 16), ("h", 0, 16)]), ([], [("h", 16, 32)]), ([], [("h", 48, 32)]), ([], [])]
        assert states(scheduler) == {"a": "waiting", "h": "held"}
        scheduler.drop(scheduler.sequences[key_of("h")])
        assert shape_of(step_scheduler(scheduler)[0]) == ([], [("a", 16, 1)])

    def test_everybody_finishes_with_the_same_output_under_pressure(self) -> None:
        scheduler = make_scheduler(8, decode_reserve_tokens=0, token_budget=64)
        for index, name in enumerate("abcd"):
            add(scheduler, name, 20 + index, max_tokens=60, arrival=float(index))
        ended = []
        preempted = 0
        for _ in range(500):
            if not scheduler.sequences:
                break
            _, events = step_scheduler(scheduler)
            ended += [e.key.request_id for e in events if isinstance(e, Ended)]
            preempted = max(preempted, scheduler.num_preempted)
        assert sorted(ended) == ["a", "b", "c", "d"]
        assert preempted >= 2
        assert scheduler.blocks.num_active == scheduler.blocks.num_reserved == 0


class TestApply:
    def test_events_of_a_held_prefill(self) -> None:
        scheduler = make_scheduler(token_budget=32)
        add(scheduler, "a", 40, hold=True)
        key = key_of("a")
        assert step_scheduler(scheduler)[1] == [ChunkComputed(key, 32)]
        assert step_scheduler(scheduler)[1] == [
            TokenSampled(key, GATEWAY, 0, 7),
            ChunkComputed(key, 40),
            PrefillComputed(key, GATEWAY, 7, 0),
        ]
        assert states(scheduler) == {"a": "held"}
        assert step_scheduler(scheduler) == (StepPlan(), [])

    def test_a_held_prefill_that_ends_at_its_first_token_holds_nothing(self) -> None:
        scheduler = make_scheduler()
        add(scheduler, "a", 40, hold=True, max_tokens=1)
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

    def test_all_blocks_together_bound_the_length(self) -> None:
        scheduler = make_scheduler(2)
        assert scheduler.max_model_len == 32
        add(scheduler, "a", 30, max_tokens=50)
        events = [event for _ in range(3) for event in step_scheduler(scheduler)[1]]
        assert events[-1] == Ended(key_of("a"), GATEWAY, "length")
        assert len(events) == 3


def test_integrity_findings() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 20)
    add(scheduler, "w", 20)
    step_scheduler(scheduler)
    sequence = scheduler.sequences[key_of("a")]
    scheduler.num_reserved += 9
    scheduler.num_preempted += 1
    sequence.block_table.append(sequence.block_table[0])
    sequence.num_computed_tokens = 100
    assert scheduler.check_integrity() == [
        "block 0: 1 references counted, 2 tables list it",
        "0 sequences are reserved, 9 are counted",
        "1 preempted sequences are counted and other ones wait",
        "3 sequences more than the batch has places",
        "a/1 lists a block twice",
        "the block table of a/1 does not cover its computed tokens",
    ]
