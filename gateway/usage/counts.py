"""What calls used, and the sums that are not written yet. (pure)

    CallUse, of one call ──its end──> Entry ──> Pending: sums by (tenant, day, model), and parts of streams
                                                   └─ take ──> written, or put back

Which calls count, and for what: ADR 62.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from disagg.gateway.requests.call_use import CallUse

OTHERS: Final = "*"
"""Stands for all tenants above the maximum number of names; no tenant has this name."""
MAX_PENDING_KEYS: Final = 20_000
MAX_PENDING_PARTS: Final = 10_000
MAX_PENDING_PART_BYTES: Final = 32 << 20
"""Maximum bytes of the token ids of all pending parts."""
NO_USAGE: Final = "no_usage"
"""Error code of a gateway that does not record usage."""
DEFAULT_DAYS: Final = 7
MAX_DAYS: Final = 3660
MAX_ROWS: Final = 10_000
"""Maximum number of rows that one query can ask for."""
_DAY_S: Final = 86_400
_EPOCH: Final = datetime.date(1970, 1, 1).toordinal()


def day_of(now: float) -> int:
    """The day in UTC as the number of days since 1970-01-01; `now` is in seconds since then."""
    return int(now // _DAY_S)


def date_of(day: int) -> str:
    """The date of a day in ISO format, such as `2026-11-26`."""
    return datetime.date.fromordinal(_EPOCH + day).isoformat()


class Counts(NamedTuple):
    """Calls and their tokens, summed."""

    requests: int = 0
    failed: int = 0
    """Number of the `requests` that failed."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Number of the `prompt_tokens` that no worker had to compute."""
    completion_tokens: int = 0

    def plus(self, other: Counts) -> Counts:
        """The sum, field by field."""
        return Counts(*(a + b for a, b in zip(self, other, strict=True)))


class Key(NamedTuple):
    """The tenant, day and model of a sum."""

    tenant: str
    day: int
    model: str


class Part(NamedTuple):
    """A call that delivers a part of an answer, which other calls may begin or continue."""

    key: Key
    stream: bytes
    continues: bool
    is_open: bool
    """Whether the call broke off, so that another one may continue the answer."""
    counts: Counts
    """Counts of the whole answer so far, with the part that an earlier call delivered."""
    token_ids: bytes = b""
    """Token ids of the answer from its first token on, four bytes each."""
    num_had: int = 0
    """Tokens of the answer that this call did not deliver."""


@dataclass(slots=True)
class Batch:
    """The sums and parts that are written in one transaction."""

    sums: dict[Key, Counts] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.sums or self.parts)

    @property
    def num_requests(self) -> int:
        """Number of calls in the batch."""
        return sum(counts.requests for counts in self.sums.values()) + len(self.parts)


class Pending:
    """Usage that is not written yet: one sum for each key, and a bounded list of parts."""

    def __init__(self) -> None:
        self._batch = Batch()
        self._part_bytes = 0
        """Bytes of the token ids of the pending parts."""

    @property
    def num_requests(self) -> int:
        """Number of calls that are not written yet."""
        return self._batch.num_requests

    def add(self, tenant: str, day: int, use: CallUse, *, failed: bool, is_open: bool) -> None:
        """Add a call that has ended.

        Args:
            tenant: the tenant that made it.
            day: the day on which it ended.
            use: its tokens; `use.model` is set.
            failed: whether it ended by an error other than the client's disconnect.
            is_open: whether it broke off, so that another call may continue it.
        """
        key = Key(tenant, day, use.model)
        counts = Counts(1, int(failed), use.prompt_tokens, use.cached_tokens, use.completion_tokens)
        is_open = is_open and bool(use.stream) and (use.continues or use.completion_tokens > 0)
        is_part = use.continues or is_open
        if is_part and use.stream:
            token_ids = use.token_ids.tobytes()
            self._add_part(Part(key, use.stream, use.continues, is_open, counts, token_ids, use.num_had))
        else:
            self._add(key, counts)

    def take(self) -> Batch:
        """Remove and return everything that is pending."""
        batch, self._batch, self._part_bytes = self._batch, Batch(), 0
        return batch

    def put_back(self, batch: Batch) -> None:
        """Add a batch again that could not be written."""
        for key, counts in batch.sums.items():
            self._add(key, counts)
        parts, self._batch.parts, self._part_bytes = [*batch.parts, *self._batch.parts], [], 0
        for part in parts:
            self._add_part(part)

    def _add_part(self, part: Part) -> None:
        """Add a part. Beyond the limits it is counted as a complete call, which no other continues."""
        num_bytes = self._part_bytes + len(part.token_ids)
        if len(self._batch.parts) < MAX_PENDING_PARTS and num_bytes <= MAX_PENDING_PART_BYTES:
            self._batch.parts.append(part)
            self._part_bytes = num_bytes
        else:
            self._add(part.key, part.counts)

    def _add(self, key: Key, counts: Counts) -> None:
        sums = self._batch.sums
        if key not in sums and len(sums) >= MAX_PENDING_KEYS:
            key = key._replace(tenant=OTHERS)
        sums[key] = sums.get(key, Counts()).plus(counts)


class Row(NamedTuple):
    """What one tenant used of one model on one day."""

    key: Key
    counts: Counts


class Page(NamedTuple):
    """The rows that a query asked for."""

    rows: list[Row]
    """Rows ordered by day, the latest first, then by tenant and model."""
    first_day: int
    last_day: int
    has_more: bool
    """Whether there are more rows than the query asked for."""


class UsageView(Protocol):
    """The recorded usage, for handlers that show it."""

    async def read(self, days: int, tenant: str | None, limit: int) -> Page:
        """The usage of the last `days` days, of a tenant or of all. Raises `UnavailableError` if none is recorded."""
        ...
