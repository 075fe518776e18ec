"""The sampling fuzz of `benchmarks/`, short: settings of one request change no token of another, and fail no step."""

from __future__ import annotations

import msgspec
import pytest

from tests.acceptance.isolation.sampling_fuzz import WAYS, fuzz


@pytest.mark.parametrize("way", WAYS)
def test_accepted_settings_change_no_other_request(way: str) -> None:
    verdict = fuzz(way, 100)
    assert (verdict.steps_failed, verdict.innocents_changed, verdict.without_token) == (0, 0, 0)
    assert verdict.generated == 100
    assert verdict.accepted > 60
    assert len(verdict.refused) > 5
    assert (verdict.preemptions > 3) == (way == "preempted")
    assert (verdict.steps_ahead > 3) == (way == "queued")


@pytest.mark.parametrize("way", WAYS)
def test_settings_that_leave_no_token_end_their_own_request_only(way: str) -> None:
    """As a gateway with other limits would let them through."""
    verdict = fuzz(way, 40, seed=1, change=lambda it: msgspec.structs.replace(it, repetition_penalty=1e-38))
    assert (verdict.steps_failed, verdict.innocents_changed) == (0, 0)
    assert verdict.without_token > 15
