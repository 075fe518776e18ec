"""What the benchmark of batches makes of its measurements."""

from __future__ import annotations

import pytest

from benchmarks.batches.beside import PROMPT_TOKENS, RATE_PER_S, Seen, plan, ratios


def test_a_request_meets_its_targets_or_not() -> None:
    met = [Seen(900.0, 50.0), Seen(1000.0, 100.0), Seen(1001.0, 1.0), Seen(1.0, 101.0), Seen(error="overloaded")]
    assert [one.met for one in met] == [True, True, False, False, False]


def test_the_same_requests_come_in_each_stretch() -> None:
    planned = plan(1000.0)
    assert planned == plan(1000.0) != plan(1000.0, seed=2)
    assert len(planned) == pytest.approx(1000 * RATE_PER_S, rel=0.1)
    assert [one.due_s for one in planned] == sorted(one.due_s for one in planned)
    lengths = [len(one.prompt) for one in planned]
    assert (min(lengths), max(lengths)) == PROMPT_TOKENS


def test_stretches_of_a_kind_are_taken_together() -> None:
    rows = [
        {"batch": has_batch, "requests": 10, "met": met, "batch_tokens_per_s": rate}
        for has_batch, met, rate in ((False, 10, 0.0), (True, 8, 100.0), (True, 9, 200.0), (False, 10, 0.0))
    ]
    assert ratios(rows) == {
        "interactive_ratio": 0.85,
        "attainment_with_batch": 0.85,
        "attainment_without": 1.0,
        "batch_tokens_per_s": 150.0,
    }
