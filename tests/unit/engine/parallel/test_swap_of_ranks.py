"""Sequences of a worker of several ranks whose KV goes to host memory and comes back, on every rank."""

from __future__ import annotations

from typing import Any

import pytest

from disagg.engine.commands import Add
from disagg.engine.core.engine_core import EngineCore
from disagg.engine.fake_runner import FakeModelRunner
from disagg.engine.plan import ScheduledSequence, StepPlan
from disagg.engine.request import Sequence, SequenceState
from tests.support.engine import (
    VOCAB_SIZE,
    assert_idle,
    expected_output,
    handle_all,
    make_core,
    make_prompt,
    make_sequence,
    make_spec,
    token_ids_of,
)
from tests.support.rank_connections import FakeGroup, fake_group

NUM_BLOCKS = 8


@pytest.mark.parametrize(
    ("size", "num_kv_heads", "pp"), [(2, 2, 1), (2, 4, 1), (4, 2, 1), (2, 1, 1), (1, 1, 2), (2, 2, 2)]
)
def test_all_ranks_have_the_kv_of_what_was_suspended(size: int, num_kv_heads: int, pp: int) -> None:
    """Rank 0 reads back only its own heads and layers, so the pages of the others are looked at."""
    prompts = {f"r{number}": make_prompt(20 + number, seed=number) for number in range(4)}
    with fake_group(size, num_kv_heads, NUM_BLOCKS, pp=pp, num_layers=pp) as group:
        runner: Any = group.runner
        core = make_core(decode_reserve_tokens=0, swap_bytes=1 << 20, roles=("decode",), runner=runner)
        events = handle_all(core, *(Add(make_spec(name, p, max_tokens=70)) for name, p in prompts.items()))
        swapped_in = 0
        while core.has_work:
            events += core.step(0.0)
            if core.totals().swapped_in_blocks > swapped_in:
                swapped_in = core.totals().swapped_in_blocks
                for sequence in core._scheduler.running.values():
                    assert_kv(group, core, sequence)
        assert swapped_in > 0
        for name, prompt in prompts.items():
            assert token_ids_of(events, name) == expected_output(prompt, 70)
        assert_idle(core)
    assert group.faults == group.lost == []


def assert_kv(group: FakeGroup, core: EngineCore, sequence: Sequence) -> None:
    """Every rank has what a rank that computed the tokens itself has."""
    local: Any = group.runner._local
    num_tokens = sequence.num_computed_tokens
    buffer = group.runner.new_staging(1024)
    group.runner.gather(
        sequence.block_table, 0, 1, buffer, group.runner.shape
    )  # All ranks have done what they were told.
    for runner in (local, *(rank.runner for rank in group.ranks)):
        fresh = FakeModelRunner(
            NUM_BLOCKS,
            16,
            4096,
            VOCAB_SIZE,
            num_kv_heads=runner.layout.groups[0].num_heads,
            num_layers=runner.shard.stages,
            shard=runner.shard,
        )
        alone = make_sequence(sequence.spec, state=SequenceState.RUNNING)
        alone.token_ids, alone.block_table = sequence.token_ids, sequence.block_table
        fresh.run(StepPlan(prefills=(ScheduledSequence(alone, 0, num_tokens, samples=False),)))
        blocks, offsets = fresh._slots(sequence.block_table, 0, num_tokens)
        expected = fresh._pages_2HNB[:, :, blocks, offsets]
        assert (runner._pages_2HNB[:, :, blocks, offsets] == expected).all(), (runner.shard, sequence.key)
