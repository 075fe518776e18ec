"""Words for texts that people read."""

from __future__ import annotations

from disagg.proto.wording import counted


def test_one_thing_is_singular_and_any_other_number_is_not() -> None:
    assert [counted(number, "rank") for number in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
