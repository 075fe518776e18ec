"""Prefixes whose KV comes from another worker, and those that another worker fetches from here. Pure.

    order ──> FetchOrdered ──> reserve, landed* ──> over: the sequences that wait for it begin
                   └── all of them are out of time, or gone ──> FetchGivenUp ──> over

What comes is the KV of a *prefix*: a sequence of its own in state LOADING, which holds the blocks, takes no place in
the batch and is never computed. Its blocks are published as they are filled in order. When the fetch is over, whatever
the reason, they are in the device cache, where they are last to be evicted, and what waited for them is queued like any
other sequence (or loaded from a tier, if that has more). So the scheduler knows nothing of fetches, and one that fails
costs only its time.

Sequences that want the same prefix share a fetch. How many blocks it takes at most: `load_room.py`.

The other way round, `pin` holds the cached blocks of a prefix, in state HELD, while they are gathered for another
worker. What a tier of this worker has beyond them is loaded first, where that is quicker than computing it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from disagg.engine.commands import Event, FetchEnded, FetchGivenUp, FetchOrdered, FetchOver, Pinned
from disagg.engine.core.load_room import load_room
from disagg.engine.core.scheduler import Scheduler
from disagg.engine.request import Sequence, SequenceState
from disagg.proto.block_hash import HASH_BLOCK_TOKENS
from disagg.proto.ids import AttemptKey, BlockHash, GatewayId, RequestId, WorkerId
from disagg.proto.messages import Fetched, FetchFrom, FetchOutcome, Sampling, SequenceSpec
from disagg.proto.token_ids import pack_token_ids

_FETCH: Final = "fetch-"


def fetch_key(key: AttemptKey) -> AttemptKey:
    """The key of the prefix that is fetched for an attempt, on both workers. An attempt is on one worker only, so no
    other one fetches under this key."""
    return AttemptKey(RequestId(_FETCH + key.request_id), key.attempt)


def is_fetch_key(key: AttemptKey) -> bool:
    """Whether a key is that of a prefix that is fetched, and of no request."""
    return key.request_id.startswith(_FETCH)


class FetchTotals(NamedTuple):
    """Fetches since the start."""

    fetched_tokens: int
    fetches: dict[FetchOutcome, int]


@dataclass(slots=True, eq=False)
class _Waiting:
    """A sequence for which a prefix is fetched."""

    key: AttemptKey
    gateway_id: GatewayId
    until: float
    sequence: Sequence | None = None
    """None before its `Add`."""


@dataclass(slots=True, eq=False)
class _Fetch:
    order: FetchOrdered
    began: float
    waiting: dict[AttemptKey, _Waiting] = field(default_factory=dict)
    is_given_up: bool = False
    prefix: Sequence | None = None
    """The prefix while it has blocks here."""
    num_arrived: int = 0
    """Tokens whose KV came."""

    @property
    def hashes(self) -> tuple[BlockHash, ...]:
        return self.order.spec.block_hashes

    def covers(self, hashes: Seq[BlockHash]) -> bool:
        """Whether it brings the prefix with these hashes."""
        return not self.is_given_up and self.hashes[len(hashes) - 1 : len(hashes)] == tuple(hashes[-1:])


class Fetching:
    """Owner: the engine core.

    Args:
        scheduler: the sequences and their blocks.
        begin: queues a sequence in state LOADING that waits no more.
        num_in_tiers: how many of the first tokens of a chain the tiers of this worker have.
        bytes_per_token: of KV.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        begin: Callable[[Sequence, float], None],
        num_in_tiers: Callable[[Seq[BlockHash], int], int],
        bytes_per_token: int,
    ) -> None:
        self._scheduler = scheduler
        self._begin = begin
        self._num_in_tiers = num_in_tiers
        self._bytes_per_token = bytes_per_token
        self._fetches: dict[AttemptKey, _Fetch] = {}
        self._fetch_of: dict[AttemptKey, _Fetch] = {}
        """The fetch that each sequence waits for, or will once it is added."""
        self._events: list[Event] = []
        self._num_fetched_tokens = 0
        self._outcomes: Counter[FetchOutcome] = Counter()

    # ------------------------------------------------------------ sequences that wait

    def order(self, sequence: Sequence, fetch: FetchFrom, now: float) -> None:
        """A sequence is to be added for which a prefix can be fetched."""
        key = sequence.key
        if key in self._fetch_of or fetch_key(key) in self._fetches or self._scheduler.kv_cache.windows:
            return
        spec, from_token = self._missing(sequence, fetch)
        if spec is None:
            return
        found = next((each for each in self._fetches.values() if each.covers(spec.block_hashes)), None)
        if found is None:
            found = _Fetch(FetchOrdered(spec.key, spec, fetch.peer, from_token), now)
            self._fetches[spec.key] = found
            self._events.append(found.order)
        self._fetch_of[key] = found
        found.waiting[key] = _Waiting(key, sequence.spec.gateway_id, now + fetch.timeout_ms / 1e3)

    def waits(self, sequence: Sequence) -> bool:
        """Whether a sequence that is added waits for a fetch; then it is in state LOADING."""
        fetch = self._fetch_of.get(sequence.key)
        if fetch is None:
            return False
        fetch.waiting[sequence.key].sequence = sequence
        self._scheduler.load(sequence)
        sequence.loading_tokens = len(fetch.hashes) * HASH_BLOCK_TOKENS
        return True

    def advance(self, now: float) -> bool:
        """Let those begin that are out of time; whether there were any."""
        late = [
            (fetch, waiting)
            for fetch in self._fetches.values()
            for waiting in fetch.waiting.values()
            if now >= waiting.until
        ]
        for fetch, waiting in late:
            self._end(fetch, waiting, "late", "", now)
            if not fetch.waiting:
                self._outcomes["late"] += 1
                self._give_up(fetch)
        return bool(late)

    def over(self, command: FetchOver, now: float) -> None:
        """A fetch is over: what waited for it begins."""
        fetch = self._fetches.pop(command.key, None)
        if fetch is None:
            return
        if not fetch.is_given_up:
            self._outcomes[command.outcome] += 1
        for waiting in list(fetch.waiting.values()):
            self._end(fetch, waiting, command.outcome, command.detail, now)

    def forget(self, key: AttemptKey) -> None:
        """A sequence is over: one that waited, or a prefix."""
        if (own := self._fetches.get(key)) is not None:
            own.prefix = None
        if (fetch := self._fetch_of.pop(key, None)) is not None:
            del fetch.waiting[key]
            if not fetch.waiting:
                self._give_up(fetch)

    def take_events(self) -> list[Event]:
        """What happened since the last call."""
        events, self._events = self._events, []
        return events

    # ------------------------------------------------------------ prefixes

    def reserve(self, prefix: Sequence) -> str | None:
        """Give blocks to a prefix in state LOADING that its source offers, and lock what is cached of it. Returns why
        not, or None."""
        fetch = self._fetches.get(prefix.key)
        if fetch is None or fetch.is_given_up or fetch.prefix is not None:
            return "nobody waits for this prefix"
        size, num_tokens, spec = self._scheduler.blocks.block_size, prefix.num_tokens, fetch.order.spec
        num_hashes = num_tokens // HASH_BLOCK_TOKENS
        if num_tokens % size or tuple(prefix.block_hashes) != fetch.hashes[:num_hashes] or not num_hashes:
            return "this is not the prefix that was asked for"
        if prefix.spec.root_hash != spec.root_hash or prefix.spec.tenant_tag != spec.tenant_tag:
            return "this is not the prefix that was asked for"
        if not self._scheduler.kv_cache.admit_loading(prefix, num_tokens, num_tokens):
            return "not enough free KV blocks"
        self._scheduler.load(prefix)
        prefix.loading_tokens = num_tokens
        prefix.cached_tokens = prefix.num_computed_tokens
        fetch.prefix = prefix
        return None

    def receives(self, sequence: Sequence) -> bool:
        """Whether a sequence is a prefix that comes from another worker."""
        fetch = self._fetches.get(sequence.key)
        return fetch is not None and fetch.prefix is sequence

    def landed(self, prefix: Sequence, num_tokens: int) -> None:
        """The KV of the first `num_tokens` tokens of a prefix is in its blocks: publish those that are full."""
        fetch, start = self._fetches[prefix.key], prefix.num_computed_tokens
        if num_tokens <= start:
            return
        prefix.num_computed_tokens = num_tokens
        self._scheduler.kv_cache.publish(prefix, start)
        fetch.num_arrived += num_tokens - start
        self._num_fetched_tokens += num_tokens - start

    @property
    def why_no_pin(self) -> str:
        """Why nothing can be fetched from here now; empty where it can."""
        scheduler = self._scheduler
        if scheduler.kv_cache.windows:
            return "a model with windows"
        if scheduler.num_preempted:
            return "preempted sequences go first"
        return "" if scheduler.has_time() else "its sequences have no slack"

    def pin(self, prefix: Sequence) -> bool:
        """Hold what is cached of a prefix that another worker fetches, in state HELD, cut to that; whether there is
        any. `Pinned` is among the events."""
        scheduler, blocks = self._scheduler, self._scheduler.blocks
        matched = blocks.match_prefix(prefix.block_hashes, prefix.num_tokens)
        num_tokens = len(matched) * blocks.block_size
        reason = self.why_no_pin or ("" if matched else "nothing of it is cached any more")
        if reason:
            self._events.append(Pinned(prefix.key, 0, reason))
            return False
        blocks.lock(matched)
        prefix.state, prefix.block_table, prefix.num_computed_tokens = SequenceState.HELD, matched, num_tokens
        del prefix.token_ids[num_tokens:], prefix.block_hashes[num_tokens // HASH_BLOCK_TOKENS :]
        scheduler.sequences[prefix.key] = prefix
        self._events.append(Pinned(prefix.key, num_tokens))
        return True

    # ------------------------------------------------------------ reports

    @property
    def due_at(self) -> float:
        """When `advance` must be called at the latest."""
        untils = [waiting.until for fetch in self._fetches.values() for waiting in fetch.waiting.values()]
        return min(untils, default=math.inf)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a fetch."""
        return sum(
            waiting.sequence is not None for fetch in self._fetches.values() for waiting in fetch.waiting.values()
        )

    @property
    def num_open(self) -> int:
        """Fetches that are not over."""
        return len(self._fetches)

    def totals(self) -> FetchTotals:
        """What was fetched since the start."""
        return FetchTotals(self._num_fetched_tokens, dict(self._outcomes))

    @property
    def loading(self) -> set[AttemptKey]:
        """Sequences in state LOADING that wait for a fetch, and the prefixes themselves."""
        waiting = {key for key, fetch in self._fetch_of.items() if fetch.waiting[key].sequence is not None}
        return waiting | {key for key, fetch in self._fetches.items() if fetch.prefix is not None}

    def check_integrity(self) -> list[str]:
        """Findings; empty when sound."""
        sequences = self._scheduler.sequences
        problems = []
        if any(key not in sequences or sequences[key].state is not SequenceState.LOADING for key in self.loading):
            problems.append("fetches are kept for sequences that are not loading")
        if any(not fetch.waiting and not fetch.is_given_up for fetch in self._fetches.values()):
            problems.append("a fetch goes on for which nobody waits")
        return problems

    # ------------------------------------------------------------ inside

    def _missing(self, sequence: Sequence, fetch: FetchFrom) -> tuple[SequenceSpec | None, int]:
        """The prefix to fetch, or None, and how many tokens of it are here."""
        scheduler, spec = self._scheduler, sequence.spec
        blocks, size = scheduler.blocks, scheduler.blocks.block_size
        end = min(fetch.end_token, scheduler.kv_cache.most_cached(sequence)) // size * size
        end = min(end, len(sequence.block_hashes) * HASH_BLOCK_TOKENS // size * size)
        matched = blocks.match_prefix(sequence.block_hashes, end)
        from_token = len(matched) * size
        end = min(end, from_token + load_room(scheduler, sequence, matched) * size)
        if end <= max(from_token, self._num_in_tiers(sequence.block_hashes, end)) or scheduler.num_preempted:
            return None, from_token
        request_id, attempt = fetch_key(sequence.key)
        prefix = SequenceSpec(
            request_id=request_id,
            attempt=attempt,
            gateway_id=GatewayId(""),
            prompt_token_ids=pack_token_ids(sequence.token_ids[:end]),
            block_hashes=tuple(sequence.block_hashes[: end // HASH_BLOCK_TOKENS]),
            root_hash=spec.root_hash,
            tenant_tag=spec.tenant_tag,
            sampling=Sampling(temperature=0.0, max_tokens=1),
            priority=spec.priority,
            timeout_s=fetch.timeout_ms / 1e3,
        )
        return prefix, from_token

    def _end(self, fetch: _Fetch, waiting: _Waiting, outcome: FetchOutcome, detail: str, now: float) -> None:
        """A sequence waits no more. What came is counted for the one for which it was ordered."""
        key = waiting.key
        del fetch.waiting[key], self._fetch_of[key]
        is_first = fetch_key(key) == fetch.order.key
        source: WorkerId = fetch.order.peer.worker_id
        message = Fetched(
            request_id=key.request_id,
            attempt=key.attempt,
            source=source,
            outcome=outcome,
            tokens=fetch.num_arrived,
            kv_bytes=fetch.num_arrived * self._bytes_per_token if is_first else 0,
            transfer_s=now - fetch.began if is_first else 0.0,
            detail=detail,
        )
        self._events.append(FetchEnded(key, waiting.gateway_id, message))
        if waiting.sequence is not None:
            self._begin(waiting.sequence, now)

    def _give_up(self, fetch: _Fetch) -> None:
        fetch.is_given_up = True
        self._events.append(FetchGivenUp(fetch.order.key))
