"""The draws are the documented ones, on every machine."""

from __future__ import annotations

import pytest

from disagg.engine.randomness import uniform
from disagg.proto.splitmix import splitmix64


def test_splitmix64_gives_the_published_sequence() -> None:
    found = [splitmix64(1234567, index) for index in range(5)]
    assert found == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_draws_are_frozen() -> None:
    assert [uniform(0, 0), uniform(0, 1), uniform(7, 100)] == [
        0.6524484863740322,
        0.7012121095215252,
        0.917532811404855,
    ]


def test_a_draw_is_the_top_53_bits_of_the_hash() -> None:
    bits = splitmix64(splitmix64(99, 0), 4)
    assert uniform(99, 4) == (bits >> 11) / 2**53


def test_draws_are_in_range_and_spread_evenly() -> None:
    draws = [uniform(seed, index) for seed in range(100) for index in range(100)]
    assert all(0.0 <= draw < 1.0 for draw in draws)
    assert len(set(draws)) == len(draws)
    counts = [0] * 10
    for draw in draws:
        counts[int(draw * 10)] += 1
    assert all(900 <= count <= 1100 for count in counts)  # 1000 expected, standard deviation 30


def test_neighbouring_seeds_do_not_share_a_stream() -> None:
    shifted = 0x9E3779B97F4A7C15  # raw SplitMix64 streams of seeds this far apart are one stream, shifted by one
    first, second = ({uniform(seed, index) for index in range(1000)} for seed in (5, 5 + shifted))
    assert not first & second


def test_seeds_are_taken_modulo_2_to_the_64() -> None:
    assert uniform(-1, 3) == uniform(2**64 - 1, 3)
    assert uniform(2**64 + 5, 3) == uniform(5, 3)


def test_a_negative_index_is_refused() -> None:
    with pytest.raises(ValueError, match="index -1 is negative"):
        uniform(1, -1)
