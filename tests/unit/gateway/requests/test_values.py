"""Checks of single values of a client."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from disagg.gateway.requests.values import is_deeper


@pytest.mark.parametrize(
    ("value", "depth"), [(1, 0), ("a", 0), ([], 1), ({}, 1), ([1, {"a": [2]}], 3), ({"a": [[]]}, 3)]
)
def test_how_deep_a_value_is(value: Any, depth: int) -> None:
    assert [is_deeper(value, most) for most in range(5)] == [most < depth for most in range(5)]


def test_to_see_how_deep_a_value_is_takes_steps_for_its_levels_and_not_for_its_values() -> None:
    calls: list[str] = []

    def steps(value: Any) -> int:
        calls.clear()
        sys.setprofile(lambda frame, event, _: calls.append(event) if event == "call" else None)
        try:
            assert not is_deeper(value, 4)
        finally:
            sys.setprofile(None)
        return len(calls)

    assert steps([[1] * 5] * 5) == steps([[1] * 500] * 500)
