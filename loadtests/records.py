"""What a load test plans and what it records: the two structs that everything else in this folder reads or writes.

    workload.py ──PlannedRequest──> open_loop.py ──RequestRecord──> one JSON line each ──> goodput.py, report.py

All times are seconds on the monotonic clock of the generating process, counted from the start of the run. Latencies are
taken from the *due* time, not from the time of sending: a generator that falls behind must not hide it (coordinated
omission).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Literal

import msgspec

Status = Literal["ok", "refused", "failed", "deadline", "dropped"]
"""`ok`: the whole answer came. `refused`: RESOURCE_EXHAUSTED. `deadline`: DEADLINE_EXCEEDED. `dropped`: not sent,
because too many were in flight. Everything but `ok` counts as missed."""


class PlannedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a workload, complete before the run begins."""

    index: int
    """0, 1, 2, ... in the order of `due_s`."""
    due_s: float
    """When it is to be sent. A later turn of a conversation is sent at this time or, if that is later, when the answer
    to the turn before it has ended."""
    prompt_token_ids: tuple[int, ...]
    """The prompt; of a later turn only the new tokens, which follow the earlier prompt and the answer to it."""
    max_tokens: int
    """Output tokens, forced: the end of sequence is ignored."""
    after: int | None = None
    """Index of the turn before this one in the same conversation."""
    group: str = ""
    """A label for reports, such as the shared prefix or the conversation."""


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request as it went. A request that was due has exactly one record."""

    index: int
    due_s: float
    """When it was due: as planned or, for a later turn of a conversation, when the answer to the turn before it ended,
    if that was later."""
    sent_s: float
    """When it was really sent, or dropped. Its lateness is `sent_s - due_s`."""
    status: Status
    num_prompt_tokens: int
    max_tokens: int
    token_times_s: tuple[float, ...] = ()
    """When each output token came in, in order; several may share one message and so one time."""
    end_s: float | None = None
    """When the stream ended."""
    cached_tokens: int = 0
    output_digest: str = ""
    """Hash of the output token ids: equal work is asserted by equal digests."""
    request_id: str = ""
    error: str = ""
    group: str = ""

    @property
    def lateness_s(self) -> float:
        """By how much the generator was late."""
        return self.sent_s - self.due_s

    @property
    def ttft_s(self) -> float | None:
        """From the due time to the first token."""
        return self.token_times_s[0] - self.due_s if self.token_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None for answers of one token."""
        times = self.token_times_s
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None

    @property
    def max_itl_s(self) -> float | None:
        """The longest gap between two tokens; None for answers of one token."""
        times = self.token_times_s
        return max(after - before for before, after in pairwise(times)) if len(times) > 1 else None


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(RequestRecord)


def to_line(record: RequestRecord) -> bytes:
    """One record as a line of JSON, newline included."""
    return _encoder.encode(record) + b"\n"


def read_records(lines: Iterable[bytes]) -> Iterator[RequestRecord]:
    """Records from lines of JSON; raises `ValueError` naming the line that is none."""
    for number, line in enumerate(lines, start=1):
        try:
            yield _decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise ValueError(f"line {number}: {error}") from None


def read_file(path: Path) -> list[RequestRecord]:
    """All records of a file; raises `ValueError` naming file and line."""
    try:
        with path.open("rb") as lines:
            return list(read_records(lines))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
