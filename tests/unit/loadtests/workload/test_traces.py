"""Both trace formats, and what is wrong with a line, by file, line and field."""

from __future__ import annotations

from pathlib import Path

import pytest

from disagg.loadtests.workload.traces import TraceFormat, TraceRequest, read_trace

MOONCAKE = """\
{"timestamp": 1000, "input_length": 1024, "output_length": 7, "hash_ids": [0, 1]}

{"timestamp": 3500, "input_length": 513, "output_length": 2, "hash_ids": [0, 2], "extra": true}
{"timestamp": 3000, "input_length": 1, "output_length": 1, "hash_ids": [3]}
"""
AZURE = """\
\ufeffTIMESTAMP,ContextTokens,GeneratedTokens\r
2023-11-16 18:17:03.9799600,4808,10\r
2023-11-16 18:17:04.0319600,3180,8\r
"""


def trace_file(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text, encoding="utf-8", newline="")
    return path


def test_mooncake_requests_are_read_and_ordered_by_time(tmp_path: Path) -> None:
    assert read_trace(trace_file(tmp_path, MOONCAKE), "mooncake") == [
        TraceRequest(time_s=0.0, num_input_tokens=1024, num_output_tokens=7, block_ids=(0, 1)),
        TraceRequest(time_s=2.0, num_input_tokens=1, num_output_tokens=1, block_ids=(3,)),
        TraceRequest(time_s=2.5, num_input_tokens=513, num_output_tokens=2, block_ids=(0, 2)),
    ]


def test_azure_requests_are_read_with_byte_order_mark_and_seven_digits(tmp_path: Path) -> None:
    assert read_trace(trace_file(tmp_path, AZURE), "azure") == [
        TraceRequest(time_s=0.0, num_input_tokens=4808, num_output_tokens=10),
        TraceRequest(time_s=0.052, num_input_tokens=3180, num_output_tokens=8),
    ]


def test_azure_times_with_and_without_a_zone_agree(tmp_path: Path) -> None:
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00+00:00,1,1\n2024-05-10 00:00:02,1,1\n"
    assert [request.time_s for request in read_trace(trace_file(tmp_path, text), "azure")] == [0.0, 2.0]


def test_only_the_first_requests_are_read(tmp_path: Path) -> None:
    path = trace_file(tmp_path, MOONCAKE + "not even JSON\n")
    assert [request.block_ids for request in read_trace(path, "mooncake", first_n=3)] == [(0, 1), (3,), (0, 2)]


HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
GOOD = '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [0]}\n'
BAD: list[tuple[TraceFormat, str, str]] = [
    ("mooncake", GOOD + "{\n", ":2: Input data was truncated"),
    ("mooncake", GOOD + "{}\n", ":2: Object missing required field `timestamp`"),
    ("mooncake", GOOD + GOOD.replace("5", '"5"'), ":2: Expected `int`, got `str` - at `$.input_length`"),
    ("mooncake", GOOD.replace("1", "0"), ":1: Expected `int` >= 1 - at `$.output_length`"),
    ("mooncake", GOOD.replace("5", "513"), ":1: hash_ids: 513 input tokens are 2 blocks of 512; got 1 ids"),
    ("mooncake", "\n", ": the trace has no request"),
    ("azure", "", ":1: TIMESTAMP: no such column; got "),
    ("azure", "TIMESTAMP,GeneratedTokens\n", ":1: ContextTokens: no such column; got TIMESTAMP, GeneratedTokens"),
    ("azure", HEAD, ": the trace has no request"),
    (
        "azure",
        HEAD + "yesterday,1,1\n",
        ":2: TIMESTAMP: expected a date and time such as 2023-11-16 18:17:03.97; got 'y",
    ),
    (
        "azure",
        HEAD + "2023-11-16 18:17:03,1.5,1\n",
        ":2: ContextTokens: expected a whole number of tokens above 0; got",
    ),
    ("azure", HEAD + "2023-11-16 18:17:03,1,0\n", ":2: GeneratedTokens: expected a whole number of tokens above 0"),
    (
        "azure",
        HEAD + "2023-11-16 18:17:03,1\n",
        ":2: GeneratedTokens: expected a whole number of tokens above 0; got No",
    ),
]


@pytest.mark.parametrize(("kind", "text", "message"), BAD)
def test_what_is_wrong_is_named_by_file_line_and_field(
    kind: TraceFormat, text: str, message: str, tmp_path: Path
) -> None:
    path = trace_file(tmp_path, text)
    with pytest.raises(ValueError) as caught:  # noqa: PT011  the text is compared below
        read_trace(path, kind)
    assert str(caught.value).startswith(f"{path}{message}")


@pytest.mark.parametrize("kind", ["mooncake", "azure"])
def test_a_file_that_cannot_be_read_is_named(kind: TraceFormat, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere: cannot be read"):
        read_trace(tmp_path / "nowhere", kind)
