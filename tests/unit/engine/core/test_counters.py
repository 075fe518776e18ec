"""What a worker counts for its reports."""

from __future__ import annotations

import pytest

from disagg.engine.core.reports import EngineTotals, WorkerCounters
from disagg.proto.ids import WorkerId
from disagg.proto.messages import STEP_SECONDS_BOUNDS, StepSample, TransferCount, WorkerMetrics


def test_steps_fall_into_their_intervals() -> None:
    it = WorkerCounters()
    assert it.metrics(()) == WorkerMetrics(step_seconds=(0,) * (len(STEP_SECONDS_BOUNDS) + 1))
    for ms in (0.5, 1.0, 1.5, 4000.0, 9000.0):
        it.note((StepSample(ms=ms, prefill_tokens=3),), EngineTotals(output_tokens=7, cached_tokens=8, preemptions=9))
    it.note((), EngineTotals(8, 9, 10, swapped_out_blocks=12, swapped_in_blocks=11))
    found = it.metrics(())
    assert found.step_seconds == (2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1)
    assert found.step_seconds_sum == pytest.approx(13.003)
    assert (found.prompt_tokens, found.output_tokens, found.cached_tokens, found.preemptions) == (15, 8, 9, 10)
    assert (found.swapped_out_blocks, found.swapped_in_blocks) == (12, 11)


def test_drafts_are_those_of_the_engine() -> None:
    it = WorkerCounters()
    it.note((), EngineTotals(draft_steps=3, drafted_tokens=9, accepted_tokens=4, draft_runs=(1, 0, 2)))
    found = it.metrics(())
    assert (found.draft_steps, found.drafted_tokens, found.accepted_tokens) == (3, 9, 4)
    assert found.draft_runs == (1, 0, 2)


def test_the_imbalance_of_experts_is_the_engines() -> None:
    it = WorkerCounters()
    it.note((), EngineTotals(expert_imbalance=(1.0, 2.5)))
    assert it.metrics(()).expert_imbalance == (1.0, 2.5)


def test_what_the_roles_count_goes_along() -> None:
    moved = TransferCount(decode_worker=WorkerId("d0"), transport="fake", num_bytes=3)
    assert WorkerCounters().metrics((moved,)).transfers == (moved,)


def test_what_a_probe_computed_is_left_out() -> None:
    it = WorkerCounters()
    it.leave_out(prompt_tokens=8, output_tokens=1)  # of the batch that comes
    it.note([StepSample(ms=3.0, prefill_tokens=72)], EngineTotals(output_tokens=5))
    found = it.metrics(())
    assert (found.prompt_tokens, found.output_tokens, sum(found.step_seconds)) == (64, 4, 1)
