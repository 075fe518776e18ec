"""Bounds that stand in types, and what a constructor says about a value beyond them."""

from __future__ import annotations

import msgspec
import pytest

from disagg.proto.config import (
    Count,
    Fraction,
    KvReserve,
    Name,
    NonNegative,
    NonNegativeInt,
    Port,
    Positive,
    Seconds,
    Share,
    Watermark,
    check_bounds,
)
from disagg.proto.errors import ConfigError


class Sample(msgspec.Struct, kw_only=True):
    count: Count = 1
    length: Count | None = None
    zero: NonNegativeInt = 0
    pause_ms: NonNegative = 0.0
    time_s: Positive | None = 1.0
    day_s: Seconds = 1.0
    share: Share = 1.0
    fraction: Fraction = 0.0
    watermark: Watermark = 0.0
    port: Port = 0
    name: Name = "n"
    names: tuple[Name, ...] = ()
    number: int = -7
    """Without bounds."""


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("count", 0, "must be at least 1, not 0"),
        ("length", 0, "must be at least 1, not 0"),
        ("zero", -1, "must not be negative, not -1"),
        ("pause_ms", -0.5, "must not be negative, not -0.5"),
        ("time_s", 0.0, "must be positive, not 0.0"),
        ("time_s", float("nan"), "must be positive, not nan"),
        ("day_s", 0.0, "must be in (0, 86400], not 0.0"),
        ("day_s", float("inf"), "must be in (0, 86400], not inf"),
        ("share", 0.0, "must be in (0, 1], not 0.0"),
        ("share", 1.5, "must be in (0, 1], not 1.5"),
        ("fraction", 1.5, "must be in [0, 1], not 1.5"),
        ("watermark", 1.0, "must be in [0, 1), not 1.0"),
        ("port", 65_536, "must be in [0, 65535], not 65536"),
        ("name", "", "must not be empty"),
        ("name", "n" * 257, "must have at most 256 characters"),
    ],
)
def test_a_value_out_of_bounds_is_named(field: str, value: object, rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_bounds(Sample(**{field: value}), "place")  # type: ignore[arg-type]
    assert str(caught.value) == f"place.{field}: {rule}"


def test_the_bounds_themselves_are_inside() -> None:
    check_bounds(Sample(), "place")
    check_bounds(Sample(time_s=None, day_s=86_400, port=65_535, name="n" * 256, names=("",)), "place")


def test_inherited_fields_have_their_bounds() -> None:
    class More(KvReserve, frozen=True, kw_only=True):
        other: Count = 1

    check_bounds(More(decode_reserve_tokens=0), "place")
    with pytest.raises(ConfigError, match=r"^place\.watermark: must be in \[0, 1\), not -0\.1$"):
        check_bounds(More(watermark=-0.1), "place")
