"""Host memory of a worker of several ranks: each keeps its own heads and layers, and has them back."""

from __future__ import annotations

from typing import Any

import pytest

from disagg.engine.plan import ScheduledSequence, StepPlan
from disagg.engine.tiers.sizes import extent_bytes
from tests.support.engine import make_prompt, make_sequence, make_spec
from tests.support.rank_connections import fake_group
from tests.support.tiers import TierWorker


@pytest.mark.parametrize(("size", "num_kv_heads", "pp"), [(2, 2, 1), (4, 2, 1), (1, 1, 3), (2, 2, 2)])
def test_every_rank_gets_back_what_it_had(size: int, num_kv_heads: int, pp: int) -> None:
    """Rank 0 reads back only its own heads and layers: the others compute the next token from theirs, too."""
    prompts = {name: make_prompt(150, seed=number) for number, name in enumerate("abc")}
    with fake_group(size, num_kv_heads, 17, pp=pp, num_layers=pp) as group:
        runner: Any = group.runner
        num_bytes = extent_bytes(runner.layout, size)
        worker = TierWorker(host_extents=4, num_blocks=17, runner=runner, extent_bytes=num_bytes)
        for name, prompt in prompts.items():
            worker.run(make_spec(f"{name}0", prompt, max_tokens=4))
        for name, prompt in prompts.items():
            worker.run(make_spec(f"{name}1", prompt, max_tokens=4))
            blocks = worker.core._blocks.match_prefix(make_spec("x", prompt).block_hashes, 128)
            assert len(blocks) == 8
            sequence = make_sequence(make_spec("again", prompt[:128], max_tokens=2))
            sequence.block_table = blocks
            plan = StepPlan((ScheduledSequence(sequence, 127, 1, samples=True),))
            runners = [runner._local, *(rank.runner for rank in group.ranks)]
            assert len({tuple(each.run(plan).token_ids) for each in runners}) == 1
        assert worker.core.totals().loaded_tokens == 3 * 128
    assert group.faults == group.lost == []
