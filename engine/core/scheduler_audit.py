"""Consistency checks of the scheduler's counts, its sequences and its blocks. Pure; reads only."""

from __future__ import annotations

from disagg.engine.blocks.window_group import WindowGroup
from disagg.engine.core.scheduler import Scheduler
from disagg.engine.plan import StepPlan
from disagg.engine.request import Sequence, SequenceState


def check_plan(scheduler: Scheduler, plan: StepPlan) -> None:
    """Our own invariants: no sequence computes into a block that another one can read.

    Raises:
        AssertionError: one does not hold.
    """
    entries, is_writable, size = plan.entries, scheduler.blocks.is_writable, scheduler.blocks.block_size
    assert sum([entry.num_tokens for entry in entries]) <= scheduler.token_budget, "the plan is over its token budget"
    running, ends = SequenceState.RUNNING, dict[Sequence, int]()
    windows = scheduler.kv_cache.windows
    before: Sequence | None = None
    for entry in entries:
        sequence, start = entry.sequence, entry.start
        end = start + entry.num_tokens
        key, table = sequence.key, sequence.block_table
        assert sequence.state is running, f"{key} is planned and not running"
        if sequence in ends:
            follows = sequence is before and start == ends[sequence]
            assert follows, f"{key} is planned twice"
        else:
            assert start == sequence.next_token, f"{key} would leave a gap"
        ends[sequence], before = end, sequence
        num_known = len(sequence.token_ids)
        if sequence.num_launched_tokens:  # of a decode, whose token of the step under way counts as known
            num_known = max(num_known, sequence.next_token + 1)
        if entry.drafts:
            assert end == num_known + len(entry.drafts), f"{key} has a draft at the wrong place"
            assert entry.samples, f"{key} does not sample behind a draft"
        else:
            assert entry.samples == (end == num_known), f"{key} samples at the wrong token"
        assert len(table) * size >= end, f"the block table of {key} does not cover its chunk"
        for block in table[start // size : -(-end // size)]:
            assert is_writable(block), f"{key} would write a shared block"
        if windows:
            _check_window_writes(windows, sequence, start, end)


def _check_window_writes(windows: tuple[WindowGroup, ...], sequence: Sequence, start: int, end: int) -> None:
    key = sequence.key
    for window, held in zip(windows, sequence.windows, strict=True):
        size = window.size
        assert len(held.block_table) * size >= end, f"a window of {key} does not cover its chunk"
        first_seen = max(0, start + 1 - window.group.window)
        assert held.first_token <= first_seen, f"{key} would read a block that has left its window"
        for block in held.block_table[start // size : -(-end // size)]:
            assert window.blocks.is_writable(block), f"{key} would write a shared block of a window"


def scheduler_findings(scheduler: Scheduler) -> list[str]:
    """What is wrong between two steps; empty when sound. Costs O(blocks + sequences): for idle moments and tests."""
    sequences = scheduler.sequences.values()
    problems = scheduler.blocks.check_integrity(
        [s.block_table for s in sequences], sum(s.reserved_blocks for s in sequences)
    )
    problems += _check_windows(scheduler)
    problems += _check_counts(scheduler)
    problems += scheduler.swap.check_integrity(
        {s.key: s.swapped_tokens for s in sequences if s.state is SequenceState.SUSPENDED}
    )
    for sequence in sequences:
        problems += _check_sequence(sequence, scheduler)
    return problems


def _check_windows(scheduler: Scheduler) -> list[str]:
    kv_cache = scheduler.kv_cache
    holders = [sequence for sequence in scheduler.sequences.values() if sequence.windows]
    problems = []
    for place, window in enumerate(kv_cache.windows):
        problems += window.check_integrity([sequence.windows[place] for sequence in holders])
        for sequence in holders:
            held = sequence.windows[place]
            first_seen = max(0, sequence.num_computed_tokens + 1 - window.group.window)
            if held.first_token > first_seen and sequence.state is not SequenceState.RESERVED:
                problems.append(f"{sequence.key} has lost a block of its window of {window.group.window} tokens")
            num_launched = -(-sequence.num_launched_tokens // window.size)
            if held.num_held - num_launched > held.num_promised and sequence.state is not SequenceState.RESERVED:
                promised = f"{held.num_promised} are promised"
                problems.append(f"{sequence.key} holds {held.num_held} blocks of a window, {promised}")
            covered = (len(sequence.block_table) + sequence.reserved_blocks) * window.size
            if held.num_promised < window.most_for(covered):
                problems.append(f"{sequence.key} has blocks for {covered} tokens, and a window is promised fewer")
    problems += kv_cache.points.check_integrity()
    for sequence in scheduler.sequences.values():
        if sequence.block_table and len(sequence.windows) != len(kv_cache.windows):
            problems.append(f"{sequence.key} has blocks in {1 + len(sequence.windows)} cache groups")
    return problems


def _check_counts(scheduler: Scheduler) -> list[str]:
    sequences = scheduler.sequences.values()
    by_state = {state: [s for s in sequences if s.state is state] for state in SequenceState}
    in_queue = by_state[SequenceState.WAITING] + by_state[SequenceState.SUSPENDED]
    counted = {
        "waiting or suspended": (len(in_queue), len(scheduler.waiting)),
        "running": (len(by_state[SequenceState.RUNNING]), len(scheduler.running)),
        "reserved": (len(by_state[SequenceState.RESERVED]), scheduler.num_reserved),
        "loading and in the queue": (sum(s in scheduler.waiting for s in by_state[SequenceState.LOADING]), 0),
        "held and leaving": (sum(s.is_leaving for s in by_state[SequenceState.HELD]), scheduler.num_leaving),
        "pooled": (sum(s.spec.pooling is not None for s in sequences), scheduler.num_pooled),
        "ended": (len(by_state[SequenceState.ENDED]), 0),
    }
    problems = [
        f"{found} sequences are {states}, {number} are counted"
        for states, (found, number) in counted.items()
        if found != number
    ]
    if sum(s.num_preemptions > 0 for s in in_queue) != scheduler.num_preempted:
        problems.append(f"{scheduler.num_preempted} preempted sequences are counted and other ones wait")
    if scheduler.resuming:
        problems.append(f"{len(scheduler.resuming)} sequences have blocks again and no copy into them is due")
    if scheduler.num_places() < 0:
        problems.append(f"{-scheduler.num_places()} sequences more than the batch has places")
    return problems


def _check_sequence(sequence: Sequence, scheduler: Scheduler) -> list[str]:
    key, table, state, blocks = sequence.key, sequence.block_table, sequence.state, scheduler.blocks
    problems = []
    if len(set(table)) != len(table):
        problems.append(f"{key} lists a block twice")
    if len(table) * blocks.block_size < sequence.num_computed_tokens:
        problems.append(f"the block table of {key} does not cover its computed tokens")
    if state in (SequenceState.WAITING, SequenceState.SUSPENDED) and (table or sequence.reserved_blocks):
        problems.append(f"{key} is {state.value} and holds blocks")
    if (state is SequenceState.SUSPENDED) != (sequence.swapped_tokens > 0):
        problems.append(f"{key} is {state.value} with the KV of {sequence.swapped_tokens} tokens in host memory")
    if sequence.spec.root_hash and state in (SequenceState.RUNNING, SequenceState.HELD):
        full = table[: sequence.num_computed_tokens // blocks.block_size]
        if not all(map(blocks.prefix.is_published, full)):
            problems.append(f"{key} has computed a full block that is not published")
    if sequence.num_launched_tokens:
        if len(table) * blocks.block_size < sequence.next_token:
            problems.append(f"the block table of {key} does not cover what steps under way compute")
        if state is not SequenceState.RUNNING:
            problems.append(f"{key} is {state.value} while a step computes it")
    if state is SequenceState.HELD and sequence.reserved_blocks and not sequence.is_leaving:
        problems.append(f"{key} is computed and still has blocks reserved")
    return problems
