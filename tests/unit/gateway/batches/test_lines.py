"""What is known of lines before they run."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from disagg.gateway.batches.lines import NO_MODEL, Index, InputError, demand_of, index


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
    assert demand_of(msgspec.Raw(msgspec.json.encode(body)))[:2] == (model, num_answers)


def test_white_space_and_bytes_that_are_no_text() -> None:
    assert demand_of(msgspec.Raw(b'{ "prompt" : [ \n "a" , "b" ] , "n" : 2 }'))[:2] == ("", 4)
    assert demand_of(msgspec.Raw(b'{"model":"\xff","n":2}'))[:2] == ("", 1)


@pytest.mark.parametrize(
    ("body", "num_tokens"),
    [
        ({}, 256),
        ({"max_tokens": 1000, "n": 3}, 3000),
        ({"max_tokens": 5, "max_completion_tokens": 10}, 10),
        ({"max_output_tokens": 99_999}, 99_999),
        ({"max_tokens": 10**30}, 256),
        ({"max_tokens": -5}, 256),
        ({"max_tokens": 20, "n": 1000}, 20),
    ],
)
def test_how_large_answers_are_expected_to_be(body: Any, num_tokens: int) -> None:
    assert demand_of(msgspec.Raw(msgspec.json.encode(body))).expected_bytes == 640 + 6 * num_tokens


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
    assert list(found.num_bytes) == [len(line) for line in lines]


def _lines(folder: Path, names: Iterable[str]) -> Path:
    with (folder / "in").open("wb") as target:
        for name in names:
            row = {"custom_id": name, "method": "POST", "url": "/v1/x", "body": {}}
            target.write(msgspec.json.encode(row) + b"\n")
    return folder / "in"


@pytest.mark.parametrize("name", ["x" * 513, "\u00fc" * 257, "x" * 1_000_000])
def test_a_long_name_is_refused_with_its_line(tmp_path: Path, name: str) -> None:
    assert len(index(_lines(tmp_path, ["x" * 512, "\u00fc" * 256]), "/v1/x", ()).offsets) == 2
    with pytest.raises(InputError, match=r"^line 2: custom_id: must have at most 512 bytes, not \d+$"):
        index(_lines(tmp_path, ["a", name]), "/v1/x", ())


def test_of_a_line_little_is_kept(tmp_path: Path) -> None:
    """Names alone are 10 MB here; all of a file of the most lines is in memory while its batch is open."""
    path = _lines(tmp_path, (f"{number:0512d}" for number in range(20_000)))
    tracemalloc.start()
    try:
        index(path, "/v1/x", ())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 5_000_000


def test_an_index_that_nobody_waits_for_is_not_finished(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b'{"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": {}}\n{\n')
    looks = iter([False, True])
    with pytest.raises(InputError, match="nobody waits"):
        index(tmp_path / "in", "/v1/completions", (), lambda: next(looks))
