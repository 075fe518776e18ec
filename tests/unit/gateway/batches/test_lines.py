"""What is known of lines before they run."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from disagg.gateway.batches.batch_handlers import shown
from disagg.gateway.batches.lines import MAX_BLANK_LINES, NO_MODEL, Index, InputError, demand_of, index, line_of, read
from disagg.gateway.batches.store import Batch


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


GOOD = b'{"custom_id": "%d", "method": "POST", "url": "/v1/x", "body": {}}'


def test_what_editors_leave_in_a_file_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"\xef\xbb\xbf" + GOOD % 1 + b"\r\n\r\n \t\n" + GOOD % 2 + b"\n\n")
    found = index(tmp_path / "in", "/v1/x", ())
    assert list(found.offsets) == [3, 3 + len(GOOD) - 1 + 7]
    assert [read(tmp_path / "in", offset).custom_id for offset in found.offsets] == ["1", "2"]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([GOOD % 1, b"{"], "line 2: Input data was truncated"),
        ([GOOD % 1, b"", b"[]"], "line 3: Expected `object`, got `array`"),
        ([GOOD % 1, b"\xff"], "line 2: "),
        ([b"", GOOD % 1, GOOD % 1], "line 3: custom_id: an earlier line has the same"),
        ([("a" + (GOOD % 1).decode()).encode("utf-16")], "line 1: is UTF-16; save the file as UTF-8"),
        ([b"", b""], "the file has no line"),
        ([b""] * (MAX_BLANK_LINES + 1) + [GOOD % 1], "line 50001: a batch has at most 50000 blank lines"),
    ],
)
def test_a_wrong_line_is_named_by_its_number_in_the_file(tmp_path: Path, lines: list[bytes], expected: str) -> None:
    (tmp_path / "in").write_bytes(b"".join(line + b"\n" for line in lines))
    with pytest.raises(InputError) as refused:
        index(tmp_path / "in", "/v1/x", ())
    assert str(refused.value).startswith(expected)
    assert line_of(str(refused.value)) == (int(expected.split()[1][:-1]) if expected.startswith("line") else None)


@pytest.mark.parametrize(
    ("error", "line"), [("line 2: is nested too deeply", 2), ("its input file cannot be read", None)]
)
def test_a_failed_batch_names_the_line(error: str, line: int | None) -> None:
    batch = Batch("b", "t", "/v1/x", "f", "failed", 0.0, 0.0, 0.0, 0, None, None, error, 0, 0, None)
    assert shown(batch)["errors"]["data"] == [
        {"code": "invalid_input", "message": error, "param": "input_file_id", "line": line}
    ]
