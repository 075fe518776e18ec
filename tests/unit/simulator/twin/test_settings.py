"""Which settings a twin compares."""

from __future__ import annotations

import pytest

from disagg.proto.messages import StepCoefficients
from disagg.router.config import is_decodes, num_split
from disagg.simulator.twin.settings import decode_share, mean_steps, most_settings, settings_of
from tests.support.twins import arrival, evenly

STEPS = StepCoefficients(base_ms=5.0, prefill_token_ms=0.4, attended_ms=0.0, decode_ms=0.5, context_ms=0.0)


def test_settings_have_a_form() -> None:
    assert all(map(is_decodes, ("spread", "gather", "split:1", "split:9999")))
    assert not any(map(is_decodes, ("", "auto", "split", "split:", "split:0", "split:01", "split:10000", "split:-1")))
    assert not any(map(is_decodes, ("split:1 ", "spread:1", "split:\u0661", "split:1\n")))
    assert [num_split(each) for each in ("split:12", "spread", "gather", None)] == [12, 0, 0, 0]


def test_of_few_workers_every_split_is_compared() -> None:
    arrivals = evenly(3)
    assert settings_of(arrivals, [STEPS] * 2, "spread") == ["spread", "gather", "split:1"]
    assert settings_of(arrivals, [STEPS] * 4, "gather") == ["spread", "gather", "split:1", "split:2", "split:3"]


def test_the_share_of_decoding_counts_full_batches_and_prompts_without_what_was_cached() -> None:
    # 512 tokens take 204.8 ms; at 20 ms a step has 30 sequences, so 64 tokens take 64 * 20 / 30 ms.
    assert decode_share([arrival(0.0)], STEPS) == pytest.approx((64 * 2 / 3) / (204.8 + 64 * 2 / 3))
    # The mark stands for the first block of 16 tokens, which the second request finds cached.
    first, second = arrival(0.0, marks=(7,)), arrival(1.0, marks=(7, 8))
    prompts_ms = (512 + 512 - 16) * 0.4
    assert decode_share([first, second], STEPS) == pytest.approx(128 * 2 / 3 / (prompts_ms + 128 * 2 / 3))
    # Without a target, or with one that no step meets, a sequence decodes alone.
    for tpot_s in (None, 0.001):
        assert decode_share([arrival(0.0, tpot_s=tpot_s)], STEPS) == pytest.approx(64 * 5.5 / (204.8 + 64 * 5.5))


def test_of_many_workers_the_splits_next_to_that_share_and_to_the_present_one_are_compared() -> None:
    arrivals = evenly(3)
    assert decode_share(arrivals, STEPS) == pytest.approx(0.172, abs=0.001)
    assert settings_of(arrivals, [STEPS] * 12, "spread") == ["spread", "gather", "split:1", "split:2", "split:3"]
    assert settings_of(arrivals, [STEPS] * 12, "split:9")[2:] == [f"split:{n}" for n in (1, 2, 3, 8, 9, 10)]
    # A setting of more workers than there are now.
    assert settings_of(arrivals, [STEPS] * 5, "split:9") == ["spread", "gather", "split:1", "split:2", "split:9"]


def test_no_more_settings_than_said_are_compared() -> None:
    assert [most_settings(number) for number in (2, 4, 5, 100)] == [3, 5, 8, 8]


def test_unequal_workers_count_by_their_mean() -> None:
    other = StepCoefficients(base_ms=7.0, prefill_token_ms=0.2, attended_ms=0.0, decode_ms=1.5, context_ms=2.0)
    assert mean_steps([STEPS, other]) == pytest.approx((6.0, 0.3, 0.0, 1.0, 1.0, 0.0, 0.0))
