"""Recorded traffic of others, read into one form: times, lengths, and which parts of the prompts are the same.

Two formats are known:

- `mooncake`: JSON lines of `timestamp` (ms), `input_length`, `output_length` (tokens) and `hash_ids`, one id for each
  512-token block of the prompt, the last block possibly shorter. Equal ids are equal blocks with equal blocks before
  them. From the Mooncake paper (R. Qin et al., FAST 2025), whose repository publishes such traces.
- `azure`: CSV with the columns TIMESTAMP, ContextTokens and GeneratedTokens, from the Azure Public Dataset (P. Patel et
  al., Splitwise, ISCA 2024). Nothing is known about shared prefixes.

Lengths stay as recorded here; workload.py scales them.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

import msgspec

TraceFormat = Literal["mooncake", "azure"]

BLOCK_TOKENS = 512
"""Prompt tokens of one `hash_ids` block of the `mooncake` format."""

Count = Annotated[int, msgspec.Meta(ge=1)]


@dataclass(frozen=True, kw_only=True)
class TraceRequest:
    """Request of a trace, as recorded."""

    time_s: float
    """Seconds since the first request of the trace."""
    num_input_tokens: int
    num_output_tokens: int
    block_ids: tuple[int, ...] = ()
    """Ids of the blocks of `BLOCK_TOKENS` prompt tokens; empty if the format has none."""


def read_trace(path: Path, kind: TraceFormat, first_n: int | None = None) -> list[TraceRequest]:
    """Read the requests of a trace file in the order of their times, the first of them at 0.

    Args:
        path: the file.
        kind: its format.
        first_n: number of requests after which reading stops.

    Raises:
        ValueError: for a file that cannot be read or has no request, and for a bad line, naming file, line and field.
    """
    read = _read_mooncake if kind == "mooncake" else _read_azure
    found: list[TraceRequest] = []
    try:
        for request in read(path):
            found.append(request)
            if len(found) == first_n:
                break
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from None
    if not found:
        raise ValueError(f"{path}: the trace has no request")
    found.sort(key=lambda request: request.time_s)
    start = found[0].time_s
    return [
        TraceRequest(
            time_s=round(request.time_s - start, 6),
            num_input_tokens=request.num_input_tokens,
            num_output_tokens=request.num_output_tokens,
            block_ids=request.block_ids,
        )
        for request in found
    ]


class _MooncakeLine(msgspec.Struct, frozen=True, kw_only=True):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Count
    output_length: Count
    hash_ids: tuple[int, ...]


_mooncake_decoder = msgspec.json.Decoder(_MooncakeLine)


def _read_mooncake(path: Path) -> Iterator[TraceRequest]:
    with path.open("rb") as lines:
        for number, text in enumerate(lines, start=1):
            if not text.strip():
                continue
            try:
                line = _mooncake_decoder.decode(text)
            except msgspec.MsgspecError as error:
                raise ValueError(f"{path}:{number}: {error}") from None
            num_blocks = math.ceil(line.input_length / BLOCK_TOKENS)
            if len(line.hash_ids) != num_blocks:
                raise ValueError(
                    f"{path}:{number}: hash_ids: {line.input_length} input tokens are {num_blocks} blocks of "
                    f"{BLOCK_TOKENS}; got {len(line.hash_ids)} ids"
                )
            yield TraceRequest(
                time_s=line.timestamp / 1000,
                num_input_tokens=line.input_length,
                num_output_tokens=line.output_length,
                block_ids=line.hash_ids,
            )


def _read_azure(path: Path) -> Iterator[TraceRequest]:
    with path.open(encoding="utf-8-sig", newline="") as lines:
        rows = csv.DictReader(lines)
        columns = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
        missing = [column for column in columns if column not in (rows.fieldnames or ())]
        if missing:
            raise ValueError(f"{path}:1: {missing[0]}: no such column; got {', '.join(rows.fieldnames or ())}")
        for row in rows:
            place = f"{path}:{rows.line_num}"
            yield TraceRequest(
                time_s=_timestamp(row["TIMESTAMP"], f"{place}: TIMESTAMP"),
                num_input_tokens=_tokens(row["ContextTokens"], f"{place}: ContextTokens"),
                num_output_tokens=_tokens(row["GeneratedTokens"], f"{place}: GeneratedTokens"),
            )


def _timestamp(text: str | None, field: str) -> float:
    """Seconds of a date and time; UTC if it has no zone. Digits below a microsecond are dropped."""
    try:
        time = datetime.fromisoformat((text or "").strip())
    except ValueError:
        raise ValueError(f"{field}: expected a date and time such as 2023-11-16 18:17:03.97; got {text!r}") from None
    return (time if time.tzinfo is not None else time.replace(tzinfo=UTC)).timestamp()


def _tokens(text: str | None, field: str) -> int:
    """Parse a count of at least 1."""
    stripped = (text or "").strip()
    if not (stripped.isascii() and stripped.isdigit() and int(stripped) > 0):
        raise ValueError(f"{field}: expected a whole number of tokens above 0; got {text!r}")
    return int(stripped)
