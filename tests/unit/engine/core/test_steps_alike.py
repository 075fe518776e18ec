"""Decode steps in which nothing changes: how many there are, and that taking them in together is taking in each."""

from __future__ import annotations

from typing import Any

import pytest

from disagg.engine.commands import Add
from disagg.engine.core.scheduler import Scheduler
from disagg.engine.core.scheduler_audit import check_plan, scheduler_findings
from disagg.engine.core.steps import num_alike
from disagg.engine.plan import StepPlan, StepResult
from tests.support.engine import (
    add_to,
    handle_all,
    make_core,
    make_prompt,
    make_scheduler,
    make_sequence,
    make_spec,
    run_until_idle,
    shape_of,
    step_scheduler,
    token_ids_of,
)


def decoding(num_blocks: int = 12, **options: Any) -> Scheduler:
    """`a` and `b` decode, of 20 and 33 known tokens before their first, and 9 cached blocks of others are there."""
    scheduler = make_scheduler(num_blocks, **options)
    add_to(scheduler, "gone", 150, max_tokens=1)
    while scheduler.sequences:
        step_scheduler(scheduler)
    add_to(scheduler, "a", 20, max_tokens=60)
    add_to(scheduler, "b", 33, max_tokens=50)
    step_scheduler(scheduler)
    return scheduler


def planned(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    check_plan(scheduler, plan)
    return plan


def alike(scheduler: Scheduler) -> int:
    return num_alike(scheduler, planned(scheduler))


def state_of(scheduler: Scheduler) -> object:
    blocks = scheduler.blocks
    return (
        [
            (s.key, s.token_ids, s.num_computed_tokens, s.block_table, s.reserved_blocks, s.block_hashes)
            for s in scheduler.sequences.values()
        ],
        (blocks.num_free, blocks.num_cached, blocks.num_reserved, blocks.prefix.drain_events()),
        scheduler_findings(scheduler),
        shape_of(planned(scheduler)),
    )


@pytest.mark.parametrize("num_steps", [1, 16, 48])
def test_steps_together_are_steps_one_by_one(num_steps: int) -> None:
    together, one_by_one = decoding(), decoding()
    plan = planned(together)
    assert num_alike(together, plan) == 48, "one token of 50 is there, and the last one ends `b`"
    rows = [[number, 100 + number] for number in range(num_steps)]
    events = together.apply_alike(plan, rows)
    expected = []
    for row in rows:
        expected += one_by_one.apply(planned(one_by_one), StepResult(row))
    assert events == expected
    assert state_of(together) == state_of(one_by_one)


def test_blocks_that_are_not_promised_bound_them() -> None:
    # Tables of 2 and 3 blocks, whose last ones have room for 11 and 14 tokens more.
    assert alike(decoding(decode_reserve_tokens=0)) == 12


def test_the_longest_sequence_bounds_them() -> None:
    assert alike(decoding(max_model_len=40)) == 40 - 34 - 1


def test_what_is_not_alike() -> None:
    scheduler = decoding()
    add_to(scheduler, "c", 20)
    assert alike(scheduler) == 0, "a prompt is computed"
    scheduler = decoding(max_num_seqs=2)
    add_to(scheduler, "c", 20)
    assert alike(scheduler) == 0, "a prompt waits"
    scheduler = make_scheduler(token_budget=32)
    add_to(scheduler, "held", 33, hold=True)
    step_scheduler(scheduler)
    assert alike(scheduler) == 0, "a prompt's last token is computed for another worker"
    scheduler = make_scheduler()
    scheduler.add(make_sequence(make_spec("a", make_prompt(20), max_tokens=30, logprobs=2)))
    step_scheduler(scheduler)
    assert alike(scheduler) == 0, "log-probabilities are to be sampled"
    assert num_alike(scheduler, StepPlan()) == 0


def test_the_core_counts_them_as_steps() -> None:
    prompt = make_prompt(40)
    core = make_core()
    events = handle_all(core, Add(make_spec("a", prompt, max_tokens=20))) + core.step(0.0)
    core.plan_step(0.0)
    assert core.num_alike == 18
    tokens = list(range(100, 118))
    events += core.run_alike([[token_id] for token_id in tokens])
    assert core.load().steps == 19
    events += run_until_idle(core)
    ids = token_ids_of(events, "a")
    assert (len(ids), ids[1:19]) == (20, tokens)
    assert core.totals().output_tokens == 20
