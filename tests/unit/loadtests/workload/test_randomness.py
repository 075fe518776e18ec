"""The streams of draws: equal everywhere, apart from each other, and of the distributions that they claim."""

from __future__ import annotations

import statistics

import pytest

from disagg.loadtests.workload.randomness import Stream, token_ids


def test_draws_are_these_numbers_on_every_machine() -> None:
    stream = Stream("golden", 7)
    assert [stream.integer(0, 999_999) for _ in range(3)] == [401418, 79606, 159045]
    assert token_ids(4, 49_152, "golden", 7) == (12428, 48573, 18951, 20111)


def test_a_key_has_one_stream_and_another_key_another() -> None:
    def draws(*key: int | str) -> list[float]:
        stream = Stream(*key)
        return [stream.uniform() for _ in range(200)]

    assert draws("a", 1) == draws("a", 1)
    keys: list[tuple[int | str, ...]] = [("a", 1), ("a", 2), ("a", "1"), ("a1",), ("a", 1, 0)]
    assert len({tuple(draws(*key)) for key in keys}) == 5


def test_token_ids_of_a_key_begin_alike_and_stay_inside_the_vocabulary() -> None:
    long = token_ids(1000, 7, "key")
    assert token_ids(30, 7, "key") == long[:30]
    assert set(long) == set(range(7))
    assert token_ids(0, 7, "key") == ()


def test_integers_reach_both_ends_evenly() -> None:
    stream = Stream("integers")
    drawn = [stream.integer(-1, 2) for _ in range(8000)]
    counts = [drawn.count(value) for value in (-1, 0, 1, 2)]
    assert sum(counts) == 8000
    assert all(abs(number - 2000) < 5 * 39 for number in counts)  # five standard deviations


def test_exponential_has_mean_and_deviation_one() -> None:
    stream = Stream("exponential")
    drawn = [stream.exponential() for _ in range(20_000)]
    assert statistics.fmean(drawn) == pytest.approx(1, abs=5 / 141)
    assert statistics.pstdev(drawn) == pytest.approx(1, abs=0.08)


@pytest.mark.parametrize("shape", [0.25, 1.0, 4.0])
def test_gamma_has_its_shape_as_mean_and_variance(shape: float) -> None:
    stream = Stream("gamma", str(shape))
    drawn = [stream.gamma(shape) for _ in range(20_000)]
    assert min(drawn) >= 0
    assert statistics.fmean(drawn) == pytest.approx(shape, rel=0.07)
    assert statistics.pvariance(drawn) == pytest.approx(shape, rel=0.15)


def test_a_stream_goes_on_beyond_one_hash() -> None:
    stream = Stream("long")
    assert len({stream.uniform() for _ in range(500)}) == 500
