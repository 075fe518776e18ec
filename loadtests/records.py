"""The plan and the record of a request in a load test: the two structs that everything else in this folder reads or
writes.

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
"""Result of a request. `ok`: the whole answer came. `refused`: RESOURCE_EXHAUSTED. `deadline`: DEADLINE_EXCEEDED.
`dropped`: not sent, because too many were in flight. Everything but `ok` counts as missed."""


class PlannedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a workload, complete before the run begins."""

    index: int
    """Number of the request, from 0, in the order of `due_s`."""
    due_s: float
    """Time at which it is to be sent. A later turn of a conversation is sent at this time or, if that is later, when
    the answer to the turn before it has ended."""
    prompt_token_ids: tuple[int, ...]
    """Token ids of the prompt; in a later turn only the new ones, which follow the earlier prompt and the answer to
    it."""
    max_tokens: int
    """Number of output tokens, which is forced: the end of sequence is ignored."""
    after: int | None = None
    """Index of the turn before this one in the same conversation."""
    group: str = ""
    """Label for reports, such as the shared prefix or the conversation."""


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Record of one request. A request that was due has exactly one record."""

    index: int
    due_s: float
    """Time at which it was due: as planned or, for a later turn of a conversation, when the answer to the turn before
    it ended, if that was later."""
    sent_s: float
    """Time at which it was sent, or dropped. Its lateness is `sent_s - due_s`."""
    status: Status
    num_prompt_tokens: int
    max_tokens: int
    token_times_s: tuple[float, ...] = ()
    """Arrival time of each output token, in order; several may share one message and so one time."""
    end_s: float | None = None
    """Time at which the stream ended; None if it is unknown."""
    cached_tokens: int = 0
    output_digest: str = ""
    """Hash of the output token ids: equal answers have equal digests."""
    request_id: str = ""
    error: str = ""
    group: str = ""

    @property
    def lateness_s(self) -> float:
        """Lateness of the generator, in seconds."""
        return self.sent_s - self.due_s

    @property
    def ttft_s(self) -> float | None:
        """Time from the due time to the first token, in seconds; None without a token."""
        return self.token_times_s[0] - self.due_s if self.token_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first, in seconds; None for answers of one token."""
        times = self.token_times_s
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None

    @property
    def max_itl_s(self) -> float | None:
        """The longest gap between two tokens, in seconds; None for answers of one token."""
        times = self.token_times_s
        return max(after - before for before, after in pairwise(times)) if len(times) > 1 else None


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(RequestRecord)


def to_line(record: RequestRecord) -> bytes:
    """One record as a line of JSON, newline included."""
    return _encoder.encode(record) + b"\n"


def read_records(lines: Iterable[bytes]) -> Iterator[RequestRecord]:
    """Read records from lines of JSON; raises `ValueError` naming the first invalid line."""
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
