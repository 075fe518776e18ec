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
"""Stands for tenants beyond the bound of names; no tenant has this name."""
MAX_PENDING_KEYS: Final = 20_000
MAX_PENDING_PARTS: Final = 10_000
MAX_PENDING_PART_BYTES: Final = 32 << 20
"""Of the token ids of parts."""
NO_USAGE: Final = "no_usage"
"""Code of the error where a gateway records none."""
DEFAULT_DAYS: Final = 7
MAX_DAYS: Final = 3660
MAX_ROWS: Final = 10_000
"""Of one question."""
_DAY_S: Final = 86_400
_EPOCH: Final = datetime.date(1970, 1, 1).toordinal()


def day_of(now: float) -> int:
    """Days from 1970-01-01 to the day, in UTC, of seconds since then."""
    return int(now // _DAY_S)


def date_of(day: int) -> str:
    """As `2026-11-26`."""
    return datetime.date.fromordinal(_EPOCH + day).isoformat()


class Counts(NamedTuple):
    """Sums over calls."""

    requests: int = 0
    failed: int = 0
    """Of `requests`."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of `prompt_tokens`: those that no worker had to compute."""
    completion_tokens: int = 0

    def plus(self, other: Counts) -> Counts:
        """The sum, field by field."""
        return Counts(*(a + b for a, b in zip(self, other, strict=True)))


class Key(NamedTuple):
    """What sums are kept for."""

    tenant: str
    day: int
    model: str


class Part(NamedTuple):
    """A call of an answer that more than one call may bring."""

    key: Key
    stream: bytes
    continues: bool
    is_open: bool
    """It broke off: another call may continue it."""
    counts: Counts
    """Of the whole answer so far, what an earlier call brought included."""
    token_ids: bytes = b""
    """Of the answer, from its first token on: four bytes each."""
    num_had: int = 0
    """Tokens that this call did not deliver."""


@dataclass(slots=True)
class Batch:
    """What is written in one transaction."""

    sums: dict[Key, Counts] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.sums or self.parts)

    @property
    def num_requests(self) -> int:
        """Calls in it."""
        return sum(counts.requests for counts in self.sums.values()) + len(self.parts)


class Pending:
    """What is not written yet, however many calls it comes from: one entry for each key, and a bounded list of
    parts."""

    def __init__(self) -> None:
        self._batch = Batch()
        self._part_bytes = 0
        """Of token ids in it."""

    @property
    def num_requests(self) -> int:
        """Calls that are not written."""
        return self._batch.num_requests

    def add(self, tenant: str, day: int, use: CallUse, *, failed: bool, is_open: bool) -> None:
        """A call has ended.

        Args:
            tenant: whose it is.
            day: of its end.
            use: what it used; has a model.
            failed: by an error that is not its client's leaving.
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
        """All of it; it is the caller's from now on."""
        batch, self._batch, self._part_bytes = self._batch, Batch(), 0
        return batch

    def put_back(self, batch: Batch) -> None:
        """What could not be written."""
        for key, counts in batch.sums.items():
            self._add(key, counts)
        parts, self._batch.parts, self._part_bytes = [*batch.parts, *self._batch.parts], [], 0
        for part in parts:
            self._add_part(part)

    def _add_part(self, part: Part) -> None:
        """Beyond the bounds it is a call of its own, which no other continues."""
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
    """A list of rows, as far as it was asked for."""

    rows: list[Row]
    """The latest day first, then by tenant and model."""
    first_day: int
    last_day: int
    has_more: bool
    """There are more rows than were asked for."""


class UsageView(Protocol):
    """What was used, for those who show it."""

    async def read(self, days: int, tenant: str | None, limit: int) -> Page:
        """The last `days` days of a tenant, or of all. Raises `UnavailableError` where nothing is recorded."""
        ...
