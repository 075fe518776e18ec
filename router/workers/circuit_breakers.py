"""Circuit breakers of all workers and pairs: which of them placement excludes, because a leg (prefill, transfer or
decode) fails there repeatedly.

    failed, passed ──> one breaker per worker and leg, one per pair ──> excluded(): what placement does not use
    placed ──> an attempt on what is half-open is its trial             attempt_ended: without a result, the trial is
                                                                        withdrawn

A transfer has two ends. Its failure counts against the pair, and against both workers; a worker is excluded only once
its transfers with different peers fail. A decode worker that is excluded from transfers may still compute prompts
itself.

Only the first failure of a request counts. Else a request that fails wherever it runs would exclude all workers.

A breaker exists from the first failure on, until all its results are good. So a cluster without failures pays for none
of this. Where every worker of a role is blocked, those with the shortest pause are used all the same.

Owner: the fleet.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

from disagg.proto.ids import AttemptKey, WorkerId
from disagg.router.config import RouterConfig
from disagg.router.workers.circuit_breaker import BreakerLimits, BreakerState, CircuitBreaker
from disagg.router.workers.worker import Worker, can_decode_for_others, can_prefill_for_others, longest_sequence

logger = logging.getLogger(__name__)

Leg = Literal["prefill", "transfer", "decode"]
"""A phase of a request that can fail on its own. `decode` is the whole request if one worker computes prompt and
answer."""
Pair = tuple[WorkerId, WorkerId]
"""A prefill and a decode worker."""

_NEVER = float("inf")


class Subject(NamedTuple):
    """The leg, and the worker or pair, of a breaker."""

    leg: Leg
    worker_id: WorkerId
    peer: WorkerId | None = None
    """The decode worker of a pair; None for a single worker."""

    def __str__(self) -> str:
        return self.worker_id if self.peer is None else f"{self.worker_id} -> {self.peer}"


class Exclusions(NamedTuple):
    """The workers and pairs that a placement must not use."""

    prefills: frozenset[WorkerId]
    """Workers that must not be the P of a pair."""
    decodes: frozenset[WorkerId]
    """Workers that must not be the D of a pair."""
    colocated: frozenset[WorkerId]
    """Workers that must not compute prompt and answer."""
    pairs: frozenset[Pair]
    """Pairs that must not be used, though their workers may be used with others."""


NO_EXCLUSIONS = Exclusions(frozenset(), frozenset(), frozenset(), frozenset())


class CircuitBreakers:
    """The breakers that exist, by worker or pair and leg."""

    def __init__(self, config: RouterConfig) -> None:
        self.changes: Counter[str] = Counter()
        """Counts of the changes, by name: breaker_opened, breaker_closed."""
        self.version = 0
        """Counts the events that may have changed `excluded`."""
        self._limits = BreakerLimits(
            failures=config.breaker_failures,
            share=config.breaker_share,
            pause_s=config.breaker_pause_s,
            max_pause_s=config.breaker_max_pause_s,
        )
        self._breakers: dict[Subject, CircuitBreaker] = {}
        self._due = _NEVER
        """When the first pause ends."""
        self._unformed: dict[Pair, tuple[float, float]] = {}
        """For each pair that was not formed in time: when the first attempt began to wait, and when the last one gave
        up."""

    def __len__(self) -> int:
        """Number of existing breakers."""
        return len(self._breakers)

    @property
    def is_clear(self) -> bool:
        """Whether there is no breaker and no pair in `_unformed`."""
        return not self._breakers and not self._unformed

    def next_of(self, other: float | None) -> float | None:
        """The earlier one of `other` and the end of the first pause; None for never."""
        if self._due == _NEVER:
            return other
        return self._due if other is None else min(self._due, other)

    # ---------------------------------------------------------------- attempts

    def placed(self, key: AttemptKey, prefill: WorkerId | None, decode: WorkerId) -> bool:
        """Note that an attempt was placed on these workers. Returns whether it is a trial."""
        is_trial = False
        for subject in _subjects_of(prefill, decode):
            breaker = self._breakers.get(subject)
            if breaker is not None and breaker.state is BreakerState.HALF_OPEN:
                breaker.begin_trial(key)
                self.version += 1
                is_trial = True
                logger.info("%s: circuit breaker of %s half-open, attempt %s is its trial", subject, subject.leg, key)
        return is_trial

    def failed(
        self,
        leg: Leg,
        prefill: WorkerId | None,
        decode: WorkerId,
        placed_at: float,
        now: float,
        detail: str = "",
        *,
        is_first: bool = True,
        at_once: bool = False,
    ) -> bool:
        """Note that a leg of an attempt failed.

        Args:
            leg: the failed leg.
            prefill, decode: the workers of the attempt.
            placed_at: when it was placed.
            now: the time.
            detail: the reason, for the log.
            is_first: whether no attempt of this request failed before.
            at_once: open the breaker of the pair without waiting for more failures.

        Returns:
            Whether one of the breakers that the failure counts for blocks now.
        """
        blocked = False
        for subject in _subjects_of_leg(leg, prefill, decode):
            breaker = self._breakers.get(subject)
            if breaker is None:
                if not is_first:
                    continue
                breaker = self._breakers[subject] = CircuitBreaker(_limits_of(subject, self._limits))
            if is_first or breaker.state is not BreakerState.CLOSED:
                peer = _peer_in(subject, prefill, decode)
                is_pair = subject.peer is not None
                was_closed = breaker.state is BreakerState.CLOSED
                if breaker.failed(placed_at, now, peer, detail, at_once=at_once and is_pair):
                    self._opened(subject, breaker, now, was_closed=was_closed)
            blocked = blocked or breaker.is_blocked
        return blocked

    def pair_timed_out(
        self, prefill: WorkerId, decode: WorkerId, placed_at: float, now: float, pair_timeout_s: float
    ) -> bool:
        """Note that an attempt gave up waiting for its pair earlier than `pair_timeout_s`, because of its request's
        target or deadline. Returns whether that counts as a failure: the pair has not been formed for `pair_timeout_s`,
        over all attempts that waited, or its breaker is not closed."""
        breaker = self._breakers.get(Subject("transfer", prefill, decode))
        if breaker is not None and breaker.state is not BreakerState.CLOSED:
            return True
        first, last = self._unformed.get((prefill, decode), (placed_at, now))
        if placed_at - last > pair_timeout_s:  # It may have been formed since.
            first = placed_at
        self._unformed[prefill, decode] = first, now
        return now - first >= pair_timeout_s

    def passed(self, leg: Leg, prefill: WorkerId | None, decode: WorkerId, placed_at: float, now: float) -> bool:
        """Note that a leg of an attempt succeeded. Returns whether a breaker closed because of it."""
        closed = False
        if leg == "transfer" and prefill is not None:
            self._unformed.pop((prefill, decode), None)
        for subject in _subjects_of_leg(leg, prefill, decode):
            breaker = self._breakers.get(subject)
            if breaker is None:
                continue
            if breaker.passed(placed_at, now):
                closed = True
                self._changed("breaker_closed")
                logger.warning(
                    "%s: circuit breaker closed, %s works again after %.1f s; it gets requests as before",
                    *(subject, leg, now - breaker.opened_at),
                )
            if breaker.is_forgotten(now):
                del self._breakers[subject]
        return closed

    def attempt_ended(self, key: AttemptKey) -> bool:
        """Note that the attempt of a trial ended. Returns whether another trial may follow, because it had no
        result."""
        withdrawn = [breaker.withdraw(key) for breaker in self._breakers.values()]
        if any(withdrawn):
            self.version += 1
        return any(withdrawn)

    def tick(self, now: float) -> bool:
        """Update the breakers by the time. Returns whether the pause of a breaker ended, so that it is half-open
        now."""
        if now < self._due:
            return False
        ended = [breaker.tick(now) for breaker in self._breakers.values()]
        self._set_due()
        self.version += any(ended)
        return any(ended)

    def forget(self, worker_id: WorkerId) -> None:
        """Drop all breakers of a worker that is lost."""
        self._unformed = {pair: times for pair, times in self._unformed.items() if worker_id not in pair}
        gone = [subject for subject in self._breakers if worker_id in (subject.worker_id, subject.peer)]
        for subject in gone:
            del self._breakers[subject]
        if gone:
            self.version += 1
            self._set_due()

    # ---------------------------------------------------------------- questions

    def excluded(
        self, prefills: frozenset[WorkerId], decodes: frozenset[WorkerId], colocated: frozenset[WorkerId]
    ) -> Exclusions:
        """The exclusions among these workers: P, D, and those with both roles."""
        blocked: dict[Leg, dict[WorkerId, float]] = {"prefill": {}, "transfer": {}, "decode": {}}
        pairs: dict[Pair, float] = {}
        for subject, breaker in self._breakers.items():
            if not breaker.is_blocked:
                continue
            if subject.peer is None:
                blocked[subject.leg][subject.worker_id] = breaker.pause_s
            else:
                pairs[subject.worker_id, subject.peer] = breaker.pause_s
        no_prefill = _worst(prefills, blocked["prefill"], blocked["transfer"])
        no_decode = _worst(decodes, blocked["decode"], blocked["transfer"])
        no_colocated = _worst(decodes, blocked["decode"]) | _worst(colocated, blocked["decode"])
        reachable = _reachable(decodes - no_decode, prefills - no_prefill, pairs)
        if reachable:
            no_decode = decodes - reachable
            no_prefill = prefills - _reachable(
                prefills - no_prefill, reachable, {(decode, prefill) for prefill, decode in pairs}
            )
        return Exclusions(no_prefill, no_decode, no_colocated, frozenset(pairs))

    def states(self) -> dict[Subject, CircuitBreaker]:
        """The state of each breaker that is not closed."""
        return {
            subject: breaker
            for subject, breaker in sorted(self._breakers.items(), key=lambda each: str(each[0]))
            if breaker.state is not BreakerState.CLOSED
        }

    def describe(self, now: float) -> dict[WorkerId, tuple[str, ...]]:
        """One line for operators for each breaker that is not closed, by worker (of a pair, by its prefill worker)."""
        lines: dict[WorkerId, list[str]] = {}
        for subject, breaker in self.states().items():
            with_peer = "" if subject.peer is None else f" to {subject.peer}"
            wait_s = breaker.trial_at - now
            then = f"next trial in {wait_s:.1f} s" if breaker.state is BreakerState.OPEN else "being tried again"
            for_s = now - breaker.opened_at
            lines.setdefault(subject.worker_id, []).append(
                f"{subject.leg}{with_peer} has been failing for {for_s:.0f} s ({breaker.detail}), {then}"
            )
        return {worker_id: tuple(each) for worker_id, each in lines.items()}

    def check_integrity(self) -> list[str]:
        """Inconsistencies; empty when there are none."""
        found = []
        for subject, breaker in self._breakers.items():
            if (breaker.trial is not None) != (breaker.state is BreakerState.TRIAL):
                found.append(f"{subject.leg} of {subject}: {breaker.state.value} with trial {breaker.trial}")
            if breaker.state is BreakerState.OPEN and breaker.trial_at < self._due:
                found.append(f"{subject.leg} of {subject}: no tick is due at the end of its pause")
        return found

    def trials(self) -> Mapping[Subject, AttemptKey]:
        """The attempts of the present trials."""
        return MappingProxyType(
            {subject: breaker.trial for subject, breaker in self._breakers.items() if breaker.trial is not None}
        )

    # ---------------------------------------------------------------- inside

    def _opened(self, subject: Subject, breaker: CircuitBreaker, now: float, *, was_closed: bool) -> None:
        self._set_due()
        if was_closed:
            self._changed("breaker_opened")
            logger.warning(
                "%s: circuit breaker open, %s failed (%s); using other workers, next trial in %.1f s",
                *(subject, subject.leg, breaker.detail, breaker.pause_s),
            )
        else:
            self.version += 1
            logger.warning(
                "%s: circuit breaker stays open, %s has been failing for %.1f s (%s); next trial in %.1f s",
                *(subject, subject.leg, now - breaker.opened_at, breaker.detail, breaker.pause_s),
            )

    def _changed(self, what: str) -> None:
        self.changes[what] += 1
        self.version += 1
        self._set_due()

    def _set_due(self) -> None:
        open_until = (b.trial_at for b in self._breakers.values() if b.state is BreakerState.OPEN)
        self._due = min(open_until, default=_NEVER)


def _limits_of(subject: Subject, limits: BreakerLimits) -> BreakerLimits:
    """The limits of a subject. A worker's transfers must fail with different peers before the worker itself is
    excluded."""
    peers = 2 if subject.leg == "transfer" and subject.peer is None else 1
    return BreakerLimits(limits.failures, limits.share, limits.pause_s, limits.max_pause_s, peers)


def _subjects_of_leg(leg: Leg, prefill: WorkerId | None, decode: WorkerId) -> tuple[Subject, ...]:
    """The subjects that a result of a leg counts for."""
    if leg == "decode" or prefill is None:
        return (Subject("decode", decode),)
    if leg == "prefill":
        return (Subject("prefill", prefill),)
    return (Subject("transfer", prefill, decode), Subject("transfer", prefill), Subject("transfer", decode))


def _subjects_of(prefill: WorkerId | None, decode: WorkerId) -> tuple[Subject, ...]:
    """All subjects that an attempt could be a trial of."""
    if prefill is None:
        return _subjects_of_leg("decode", None, decode)
    legs: tuple[Leg, ...] = ("prefill", "transfer", "decode")
    return tuple(subject for leg in legs for subject in _subjects_of_leg(leg, prefill, decode))


def _peer_in(subject: Subject, prefill: WorkerId | None, decode: WorkerId) -> str:
    """The other end of a transfer; empty for other legs."""
    if subject.leg != "transfer":
        return ""
    return decode if subject.worker_id == prefill else prefill or ""


def _worst(workers: frozenset[WorkerId], *blocked: Mapping[WorkerId, float]) -> frozenset[WorkerId]:
    """The blocked workers, by the pauses of their breakers. If all are blocked, those with the shortest pause are left
    out."""
    pauses = {worker_id: max(each.get(worker_id, 0.0) for each in blocked) for worker_id in workers}
    least = min(pauses.values(), default=0.0)
    return frozenset(worker_id for worker_id, pause_s in pauses.items() if pause_s > least)


def _reachable(
    workers: frozenset[WorkerId], peers: frozenset[WorkerId], blocked: Iterable[Pair]
) -> frozenset[WorkerId]:
    """The workers (second in a pair) that have an unblocked pair with one of the peers (first); all workers if none
    has."""
    blocked_peers = Counter(worker for peer, worker in blocked if peer in peers)
    found = frozenset(worker_id for worker_id in workers if blocked_peers[worker_id] < len(peers))
    return found or workers


class UsableWorkers(NamedTuple):
    """The workers that take new requests, by role, and the exclusions among them."""

    prefills: frozenset[WorkerId]
    decodes: frozenset[WorkerId]
    colocated: frozenset[WorkerId]
    excluded: Exclusions
    longest_prefill: int
    """Tokens of the longest sequence that fits on a P that is not excluded. The next two fields are those of a D and of
    a colocated worker."""
    longest_decode: int
    longest_colocated: int

    def excluded_for(self, num_tokens: int) -> Exclusions:
        """The exclusions for a request of `num_tokens` tokens. A role has none if only excluded workers could take the
        request."""
        excluded = self.excluded
        if num_tokens < min(self.longest_prefill, self.longest_decode, self.longest_colocated):
            return excluded
        return Exclusions(
            excluded.prefills if num_tokens < self.longest_prefill else frozenset(),
            excluded.decodes if num_tokens < self.longest_decode else frozenset(),
            excluded.colocated if num_tokens < self.longest_colocated else frozenset(),
            excluded.pairs,
        )


def find_usable(workers: Collection[Worker], breakers: CircuitBreakers) -> UsableWorkers:
    """The usable workers among these, with the exclusions of the breakers."""
    prefills = frozenset(w.worker_id for w in workers if can_prefill_for_others(w.info))
    decodes = frozenset(w.worker_id for w in workers if can_decode_for_others(w.info))
    colocated = frozenset(w.worker_id for w in workers) - prefills - decodes
    excluded = breakers.excluded(prefills, decodes, colocated)

    def longest(those: frozenset[WorkerId]) -> int:
        return max((longest_sequence(w.info) for w in workers if w.worker_id in those), default=0)

    return UsableWorkers(
        prefills,
        decodes,
        colocated,
        excluded,
        longest(prefills - excluded.prefills),
        longest(decodes - excluded.decodes),
        longest((decodes | colocated) - excluded.colocated),
    )
