"""What is known of lines before they run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from disagg.router.gateway.batches.lines import NO_MODEL, Index, index, shape_of


@pytest.mark.parametrize(
    ("body", "model", "num_answers"),
    [
        ({}, "", 1),
        ({"model": "m", "messages": [], "n": 16}, "m", 16),
        ({"model": "m", "n": 2, "best_of": 5}, "m", 5),
        ({"model": "m", "n": None, "best_of": None}, "m", 1),
        ({"prompt": "a, [b"}, "", 1),
        ({"prompt": [1, 2, 3], "n": 3}, "", 3),
        ({"prompt": ["a", 'b", "', ""], "n": 3}, "", 9),
        ({"prompt": [[1, 2], [], [3]]}, "", 3),
        ({"prompt": []}, "", 1),
        ({"prompt": ["a"] * 64, "n": 2}, "", 128),
        ({"prompt": ["a"] * 64, "n": 3}, "", 1),  # is refused
        ({"n": 10**30}, "", 1),
        ({"n": 0}, "", 1),
        ({"n": -4}, "", 1),
        ({"n": "8"}, "", 1),
        ({"model": 5, "n": 8}, "", 8),
        ({"model": "x" * 5000}, "", 1),
        ({"prompt": ["a", 1]}, "", 1),
        ([1], "", 1),
        (None, "", 1),
    ],
)
def test_where_a_line_runs_and_how_many_answers_it_has(body: Any, model: str, num_answers: int) -> None:
    assert shape_of(msgspec.Raw(msgspec.json.encode(body))) == (model, num_answers)


def test_white_space_and_bytes_that_are_no_text() -> None:
    assert shape_of(msgspec.Raw(b'{ "prompt" : [ \n "a" , "b" ] , "n" : 2 }')) == ("", 4)
    assert shape_of(msgspec.Raw(b'{"model":"\xff","n":2}')) == ("", 1)


def test_lines_of_a_file(tmp_path: Path) -> None:
    rows = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/x", "body": {"model": model, "n": i + 1}}
        for i, model in enumerate(("b", "a", "c"))
    ]
    lines = [msgspec.json.encode(row) + b"\n" for row in rows]
    (tmp_path / "in").write_bytes(b"".join(lines))
    found: Index = index(tmp_path / "in", "/v1/x", ("a", "b"))
    assert list(found.offsets) == [0, len(lines[0]), len(lines[0] + lines[1])]
    assert (list(found.models), list(found.num_answers)) == ([1, 0, NO_MODEL], [1, 2, 3])
