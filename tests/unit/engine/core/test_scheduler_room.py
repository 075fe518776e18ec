"""Admission, prefix hits and preemption: who gets blocks, and whose are taken."""

from __future__ import annotations

import pytest

from disagg.engine.commands import Ended
from disagg.engine.core.scheduler import Scheduler
from disagg.engine.core.scheduler_audit import scheduler_findings
from disagg.engine.plan import StepPlan
from disagg.engine.request import SequenceState
from disagg.proto.block_hash import chain_hashes
from disagg.proto.messages import BlocksRemoved, BlocksStored
from disagg.proto.token_ids import pack_token_ids
from tests.support.engine import (
    ROOT,
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


class TestAdmission:
    def test_the_prompt_and_the_output_to_come_are_reserved(self) -> None:
        scheduler = make_scheduler(10, decode_reserve_tokens=32)
        add_to(scheduler, "a", 20, max_tokens=100)
        step_scheduler(scheduler)
        (sequence,) = scheduler.running.values()
        assert (len(sequence.block_table), sequence.reserved_blocks) == (2, 2)
        assert (scheduler.blocks.num_reserved, scheduler.blocks.num_available) == (2, 6)

    @pytest.mark.parametrize(("max_tokens", "num_blocks"), [(1, 1), (2, 2), (17, 2), (18, 3)])
    def test_the_kv_of_the_last_token_needs_no_room(self, max_tokens: int, num_blocks: int) -> None:
        scheduler = make_scheduler(10)
        add_to(scheduler, "a", 16, max_tokens=max_tokens)
        scheduler.schedule()
        assert scheduler.blocks.num_active + scheduler.blocks.num_reserved == num_blocks

    def test_held_sequences_reserve_no_output(self) -> None:
        scheduler = make_scheduler(10)
        add_to(scheduler, "a", 32, max_tokens=100, hold=True)
        scheduler.schedule()
        assert (scheduler.blocks.num_active, scheduler.blocks.num_reserved) == (2, 0)

    def test_one_that_does_not_fit_waits_and_nobody_overtakes_it(self) -> None:
        scheduler = make_scheduler(10)
        add_to(scheduler, "a", 64, max_tokens=2)
        add_to(scheduler, "b", 100, max_tokens=2)
        add_to(scheduler, "c", 10, max_tokens=2)
        assert shape_of(step_scheduler(scheduler)[0])[1] == [("a", 0, 64)]
        assert shape_of(step_scheduler(scheduler)[0]) == ([("a", 64, 1)], [])
        assert shape_of(step_scheduler(scheduler)[0]) == ([], [("b", 0, 64)])

    @pytest.mark.parametrize(("num_watermark_blocks", "admitted"), [(0, True), (3, True), (4, False)])
    def test_the_watermark_stays_free(self, num_watermark_blocks: int, admitted: bool) -> None:
        scheduler = make_scheduler(10, num_watermark_blocks=num_watermark_blocks, token_budget=200)
        add_to(scheduler, "a", 64, max_tokens=1)
        add_to(scheduler, "b", 48, max_tokens=1)
        scheduler.schedule()
        assert states_of(scheduler) == {"a": "running", "b": "running" if admitted else "waiting"}

    def test_one_alone_gets_in_with_the_reserve_that_is_left(self) -> None:
        scheduler = make_scheduler(10, num_watermark_blocks=3, token_budget=200)
        add_to(scheduler, "a", 140, max_tokens=500)
        scheduler.schedule()
        (sequence,) = scheduler.running.values()
        assert (len(sequence.block_table), sequence.reserved_blocks) == (9, 1)

    def test_one_beside_a_held_one_is_not_alone(self) -> None:
        scheduler = make_scheduler(10, num_watermark_blocks=3, token_budget=200)
        add_to(scheduler, "h", 16, hold=True)
        step_scheduler(scheduler)
        assert states_of(scheduler) == {"h": "held"}
        add_to(scheduler, "a", 120, max_tokens=1)
        assert step_scheduler(scheduler)[0] == StepPlan()
        scheduler.drop(scheduler.sequences[key_of("h")])
        assert shape_of(step_scheduler(scheduler)[0])[1] == [("a", 0, 120)]

    def test_locking_a_cached_prefix_counts_as_taking_it(self) -> None:
        """Ten blocks, four of them cached: the hit of four plus six new ones is all there is."""
        scheduler = make_scheduler(10, token_budget=200)
        add_to(scheduler, "warm", 64, seed=1, max_tokens=1)
        step_scheduler(scheduler)
        add_to(scheduler, "other", 16, hold=True)
        step_scheduler(scheduler)
        add_to(scheduler, "a", 160, seed=1, max_tokens=1)
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
        add_to(scheduler, "warm", 64, seed=1, max_tokens=1)
        step_scheduler(scheduler)
        add_to(scheduler, "a", num_tokens, seed=seed)
        plan, _ = step_scheduler(scheduler)
        assert shape_of(plan)[1] == [("a", cached, num_tokens - cached)]
        assert scheduler.sequences[key_of("a")].cached_tokens == cached

    def test_running_sequences_share_blocks(self) -> None:
        scheduler = make_scheduler(10)
        add_to(scheduler, "a", 40, seed=1)
        step_scheduler(scheduler)
        add_to(scheduler, "b", 40, seed=1)
        step_scheduler(scheduler)
        a, b = scheduler.running.values()
        assert a.block_table[:2] == b.block_table[:2]
        assert a.block_table[2] != b.block_table[2]
        assert scheduler.blocks.num_active == 4

    def test_blocks_that_decode_filled_are_hit(self) -> None:
        scheduler = make_scheduler(10)
        add_to(scheduler, "a", 30, seed=1, max_tokens=20)
        while scheduler.sequences:
            step_scheduler(scheduler, token_id=7)
        known = [*make_prompt(30, seed=1), *[7] * 20]
        hashes = tuple(chain_hashes(ROOT, pack_token_ids(known)))
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
            add_to(scheduler, f"warm{seed}", 48, seed=seed, max_tokens=1)
            step_scheduler(scheduler)
        stored = scheduler.blocks.prefix.drain_events()
        add_to(scheduler, "a", 32, seed=3, max_tokens=1)
        step_scheduler(scheduler)
        hashes = chain_hashes(ROOT, pack_token_ids(make_prompt(48, seed=1)))
        assert len(stored) == 1
        assert scheduler.blocks.prefix.drain_events()[0] == BlocksRemoved(hashes=(hashes[2], hashes[1]))

    def test_the_head_of_a_chain_stays_while_a_twin_of_the_one_that_published_it_goes_on(self) -> None:
        scheduler = make_scheduler(7, token_budget=200)
        add_to(scheduler, "a", 33, seed=1, max_tokens=1)
        add_to(scheduler, "b", 33, seed=1, max_tokens=18)
        for _ in range(16):
            step_scheduler(scheduler, token_id=7)
        add_to(scheduler, "c", 48, seed=3, max_tokens=1)
        step_scheduler(scheduler)
        assert states_of(scheduler) == {"b": "running"}
        chains = ([*make_prompt(33, seed=1), *[7] * 15], make_prompt(48, seed=3))
        announced = {block_hash for chain in chains for block_hash in chain_hashes(ROOT, pack_token_ids(chain))}
        assert set(scheduler.blocks.prefix.snapshot().hashes) == announced

    def test_blocks_of_64_tokens(self) -> None:
        scheduler = make_scheduler(10, block_size=64, token_budget=200)
        add_to(scheduler, "warm", 130, seed=1, max_tokens=1)
        step_scheduler(scheduler)
        add_to(scheduler, "a", 128, seed=1)
        add_to(scheduler, "b", 129, seed=1)
        assert shape_of(step_scheduler(scheduler)[0])[1] == [("a", 64, 64), ("b", 128, 1)]


class TestPreemption:
    def fill(self, *, priority_a: int = 0) -> Scheduler:
        """Two sequences whose known tokens just fill all four blocks."""
        scheduler = make_scheduler(4, decode_reserve_tokens=0, token_budget=64)
        add_to(scheduler, "a", 31, max_tokens=40, priority=priority_a, arrival=1.0)
        step_scheduler(scheduler)
        add_to(scheduler, "b", 31, max_tokens=40, arrival=2.0)
        step_scheduler(scheduler)
        return scheduler

    def test_the_one_with_fewest_output_tokens_goes(self) -> None:
        scheduler = self.fill()
        plan, _ = step_scheduler(scheduler)
        assert shape_of(plan) == ([("a", 32, 1)], [])
        assert states_of(scheduler) == {"a": "running", "b": "waiting"}
        b = scheduler.sequences[key_of("b")]
        assert (b.num_preemptions, b.num_tokens, b.block_table, b.num_computed_tokens) == (1, 32, [], 0)
        assert scheduler.num_preempted == 1

    def test_lower_priority_goes_before_fewer_tokens(self) -> None:
        scheduler = self.fill(priority_a=-1)
        plan, _ = step_scheduler(scheduler)
        assert shape_of(plan) == ([("b", 31, 1)], [])
        assert states_of(scheduler) == {"a": "waiting", "b": "running"}

    def test_a_victim_that_was_planned_already_leaves_the_plan(self) -> None:
        scheduler = make_scheduler(4, decode_reserve_tokens=0, token_budget=64)
        add_to(scheduler, "a", 20, max_tokens=40, priority=-1)
        step_scheduler(scheduler)
        add_to(scheduler, "b", 31, max_tokens=40)
        shapes = [shape_of(step_scheduler(scheduler)[0]) for _ in range(3)]
        assert shapes[1:] == [([("a", 21, 1), ("b", 31, 1)], []), ([("b", 32, 1)], [])]
        assert states_of(scheduler) == {"a": "waiting", "b": "running"}

    def test_a_preempted_one_can_be_dropped(self) -> None:
        scheduler = self.fill()
        step_scheduler(scheduler)
        scheduler.drop(scheduler.sequences[key_of("b")])
        assert scheduler.num_preempted == 0
        assert scheduler_findings(scheduler) == []

    def test_the_newest_goes_among_equals(self) -> None:
        scheduler = make_scheduler(5, decode_reserve_tokens=0, token_budget=200)
        for name, arrival in [("a", 2.0), ("b", 3.0), ("c", 1.0)]:
            add_to(scheduler, name, 16, max_tokens=40, arrival=arrival)
        step_scheduler(scheduler)
        plan, _ = step_scheduler(scheduler)
        assert [name for name, *_ in shape_of(plan)[0]] == ["c", "a"]
        assert states_of(scheduler) == {"a": "running", "b": "waiting", "c": "running"}

    def test_nobody_is_admitted_in_a_step_that_preempts(self) -> None:
        scheduler = self.fill()
        add_to(scheduler, "c", 1, arrival=3.0, priority=1)
        assert shape_of(step_scheduler(scheduler)[0]) == ([("a", 32, 1)], [])

    def test_the_preempted_one_resumes_before_new_ones_and_reservations(self) -> None:
        scheduler = self.fill()
        add_to(scheduler, "c", 16, arrival=0.0, max_tokens=1)
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
        add_to(scheduler, "a", 32, max_tokens=40)
        step_scheduler(scheduler)
        reserve = make_sequence(make_spec("r", make_prompt(32, seed=5), max_tokens=1), state=SequenceState.RESERVED)
        assert scheduler.reserve(reserve) is None
        assert step_scheduler(scheduler)[0] == StepPlan()
        assert states_of(scheduler) == {"a": "waiting", "r": "reserved"}
        assert reserve.reserved_blocks == 2

    def test_sequences_of_the_prefill_role_are_spared(self) -> None:
        scheduler = make_scheduler(6, decode_reserve_tokens=0, token_budget=32)
        add_to(scheduler, "a", 16, max_tokens=40, arrival=1.0)
        add_to(scheduler, "h", 80, hold=True, arrival=2.0)
        shapes = [shape_of(step_scheduler(scheduler)[0]) for _ in range(4)]
        assert shapes == [([], [("a", 0, 16), ("h", 0, 16)]), ([], [("h", 16, 32)]), ([], [("h", 48, 32)]), ([], [])]
        assert states_of(scheduler) == {"a": "waiting", "h": "held"}
        scheduler.drop(scheduler.sequences[key_of("h")])
        assert shape_of(step_scheduler(scheduler)[0]) == ([], [("a", 16, 1)])

    def test_everybody_finishes_with_the_same_output_under_pressure(self) -> None:
        scheduler = make_scheduler(8, decode_reserve_tokens=0, token_budget=64)
        for index, name in enumerate("abcd"):
            add_to(scheduler, name, 20 + index, max_tokens=60, arrival=float(index))
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
