"""Which workers, and which pairs of them, are left out because a leg of requests fails there again and again.

    failed, passed ──> one breaker per worker and leg, one per pair ──> excluded(): what placement does not look at
    placed ──> an attempt on what is half-open is its trial             over: a trial without a result is withdrawn

A transfer has two ends. Its failure counts against the pair, and against both workers; a worker is left out only once
its transfers with different peers fail. A decode worker that is left out for its transfers may still compute prompts
itself.

Only the first failure of a request counts. Else a request that fails wherever it runs would have all workers left out.

There is a breaker from the first failure on, until all that it knows is good. So a cluster without failures pays for
none of this. Where every worker of a role is blocked, those with the shortest pause are used all the same.

Owner: the router's fleet.
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
from disagg.router.workers.worker import Worker, decodes_only, longest_sequence, prefills_only

logger = logging.getLogger(__name__)

Leg = Literal["prefill", "transfer", "decode"]
"""A part of the way of a request. `decode` is all of it where one worker does all of it."""
Pair = tuple[WorkerId, WorkerId]
"""A prefill and a decode worker."""

_NEVER = float("inf")


class Subject(NamedTuple):
    """What a breaker is for."""

    leg: Leg
    worker_id: WorkerId
    peer: WorkerId | None = None
    """The decode worker, where it is for a pair."""

    def __str__(self) -> str:
        return self.worker_id if self.peer is None else f"{self.worker_id} -> {self.peer}"


class Exclusions(NamedTuple):
    """What a placement must not use."""

    prefills: frozenset[WorkerId]
    """As the P of a pair."""
    decodes: frozenset[WorkerId]
    """As the D of a pair."""
    colocated: frozenset[WorkerId]
    """As the one that does all of it."""
    pairs: frozenset[Pair]
    """Each with two workers that may be used otherwise."""


NO_EXCLUSIONS = Exclusions(frozenset(), frozenset(), frozenset(), frozenset())


class CircuitBreakers:
    """See the module docstring."""

    def __init__(self, config: RouterConfig) -> None:
        self.changes: Counter[str] = Counter()
        """breaker_opened, breaker_closed."""
        self.version = 0
        """Counts what may have changed `excluded`."""
        self._limits = BreakerLimits(
            failures=config.breaker_failures,
            share=config.breaker_share,
            pause_s=config.breaker_pause_s,
            max_pause_s=config.breaker_max_pause_s,
        )
        self._breakers: dict[Subject, CircuitBreaker] = {}
        self._due = _NEVER
        """End of the first pause."""
        self._unformed: dict[Pair, tuple[float, float]] = {}
        """Pairs that attempts waited for in vain: since when the first one did, and until when the last one did."""

    def __len__(self) -> int:
        """Breakers that are kept."""
        return len(self._breakers)

    @property
    def is_clear(self) -> bool:
        """Whether there is no breaker at all, and no pair that is waited for."""
        return not self._breakers and not self._unformed

    def next_of(self, other: float | None) -> float | None:
        """When to look again: at the end of the first pause, or at that other time if it comes earlier."""
        if self._due == _NEVER:
            return other
        return self._due if other is None else min(self._due, other)

    # ---------------------------------------------------------------- attempts

    def placed(self, key: AttemptKey, prefill: WorkerId | None, decode: WorkerId) -> bool:
        """An attempt was placed there. Returns whether it is a trial."""
        is_trial = False
        for subject in _subjects_of(prefill, decode):
            breaker = self._breakers.get(subject)
            if breaker is not None and breaker.state is BreakerState.HALF_OPEN:
                breaker.begin_trial(key)
                self.version += 1
                is_trial = True
                logger.info("%s: %s tries its %s again", subject, key, subject.leg)
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
        """A leg of an attempt failed.

        Args:
            leg: which one.
            prefill, decode: the workers of the attempt.
            placed_at: when it was placed.
            now: the time.
            detail: why, for the log.
            is_first: whether no attempt of this request failed before.
            at_once: leave the pair out without waiting for more failures.

        Returns:
            Whether one of those to blame is left out now.
        """
        blocked = False
        for subject in _blamed(leg, prefill, decode):
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
        self, prefill: WorkerId, decode: WorkerId, placed_at: float, now: float, patience_s: float
    ) -> bool:
        """An attempt gave up to wait for its pair, because its request is in a hurry. Returns whether that counts as a
        failure: the pair has not been formed for `patience_s`, over all attempts that waited, or it is left out."""
        breaker = self._breakers.get(Subject("transfer", prefill, decode))
        if breaker is not None and breaker.state is not BreakerState.CLOSED:
            return True
        first, last = self._unformed.get((prefill, decode), (placed_at, now))
        if placed_at - last > patience_s:  # It may have been formed since.
            first = placed_at
        self._unformed[prefill, decode] = first, now
        return now - first >= patience_s

    def passed(self, leg: Leg, prefill: WorkerId | None, decode: WorkerId, placed_at: float, now: float) -> bool:
        """A leg of an attempt went well. Returns whether a worker or a pair is used again because of it."""
        closed = False
        if leg == "transfer" and prefill is not None:
            self._unformed.pop((prefill, decode), None)
        for subject in _blamed(leg, prefill, decode):
            breaker = self._breakers.get(subject)
            if breaker is None:
                continue
            if breaker.passed(placed_at, now):
                closed = True
                self._changed("breaker_closed")
                away_s = now - breaker.opened_at
                logger.warning("%s: %s works again after %.1f s; it is used as before", subject, leg, away_s)
            if breaker.is_forgotten(now):
                del self._breakers[subject]
        return closed

    def over(self, key: AttemptKey) -> bool:
        """A trial is over. Returns whether another may follow, because it ended without a result."""
        withdrawn = [breaker.withdraw(key) for breaker in self._breakers.values()]
        if any(withdrawn):
            self.version += 1
        return any(withdrawn)

    def tick(self, now: float) -> bool:
        """Time passed. Returns whether a pause is over, so that something takes a trial."""
        if now < self._due:
            return False
        ended = [breaker.tick(now) for breaker in self._breakers.values()]
        self._set_due()
        self.version += any(ended)
        return any(ended)

    def forget(self, worker_id: WorkerId) -> None:
        """A worker is gone, and what is known of it with it."""
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
        """What not to use of these workers: P, D, and those with both roles."""
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
        """What is not closed."""
        return {
            subject: breaker
            for subject, breaker in sorted(self._breakers.items(), key=lambda each: str(each[0]))
            if breaker.state is not BreakerState.CLOSED
        }

    def describe(self, now: float) -> dict[WorkerId, tuple[str, ...]]:
        """For operators: what is not closed, by the worker that it is for (a pair is for its prefill worker)."""
        lines: dict[WorkerId, list[str]] = {}
        for subject, breaker in self.states().items():
            with_peer = "" if subject.peer is None else f" to {subject.peer}"
            wait_s = breaker.trial_at - now
            then = f"next trial in {wait_s:.1f} s" if breaker.state is BreakerState.OPEN else "being tried again"
            lines.setdefault(subject.worker_id, []).append(
                f"{subject.leg}{with_peer} fails since {now - breaker.opened_at:.0f} s ({breaker.detail}), {then}"
            )
        return {worker_id: tuple(each) for worker_id, each in lines.items()}

    def check_integrity(self) -> list[str]:
        """What does not fit together; empty when all is well."""
        found = []
        for subject, breaker in self._breakers.items():
            if (breaker.trial is not None) != (breaker.state is BreakerState.TRIAL):
                found.append(f"{subject.leg} of {subject}: {breaker.state.value} with trial {breaker.trial}")
            if breaker.state is BreakerState.OPEN and breaker.trial_at < self._due:
                found.append(f"{subject.leg} of {subject}: nobody looks at the end of its pause")
        return found

    def trials(self) -> Mapping[Subject, AttemptKey]:
        """The trials under way."""
        return MappingProxyType(
            {subject: breaker.trial for subject, breaker in self._breakers.items() if breaker.trial is not None}
        )

    # ---------------------------------------------------------------- inside

    def _opened(self, subject: Subject, breaker: CircuitBreaker, now: float, *, was_closed: bool) -> None:
        self._set_due()
        if was_closed:
            self._changed("breaker_opened")
            logger.warning(
                "%s: left out of %s, which failed (%s); others are used instead, one request tries it again in %.1f s",
                *(subject, subject.leg, breaker.detail, breaker.pause_s),
            )
        else:
            self.version += 1
            logger.warning(
                "%s: %s still fails after %.1f s (%s); the next request tries it in %.1f s",
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
    """A worker's transfers must fail with different peers before it is the worker that is left out."""
    peers = 2 if subject.leg == "transfer" and subject.peer is None else 1
    return BreakerLimits(limits.failures, limits.share, limits.pause_s, limits.max_pause_s, peers)


def _blamed(leg: Leg, prefill: WorkerId | None, decode: WorkerId) -> tuple[Subject, ...]:
    """What a result of a leg counts for."""
    if leg == "decode" or prefill is None:
        return (Subject("decode", decode),)
    if leg == "prefill":
        return (Subject("prefill", prefill),)
    return (Subject("transfer", prefill, decode), Subject("transfer", prefill), Subject("transfer", decode))


def _subjects_of(prefill: WorkerId | None, decode: WorkerId) -> tuple[Subject, ...]:
    """All that an attempt could be a trial of."""
    if prefill is None:
        return _blamed("decode", None, decode)
    return _blamed("prefill", prefill, decode) + _blamed("transfer", prefill, decode) + _blamed("decode", None, decode)


def _peer_in(subject: Subject, prefill: WorkerId | None, decode: WorkerId) -> str:
    """The other end of a transfer."""
    if subject.leg != "transfer":
        return ""
    return decode if subject.worker_id == prefill else prefill or ""


def _worst(workers: frozenset[WorkerId], *blocked: Mapping[WorkerId, float]) -> frozenset[WorkerId]:
    """Those that are blocked, by the pauses of their breakers. Where all are, those with the shortest pause stay."""
    pauses = {worker_id: max(each.get(worker_id, 0.0) for each in blocked) for worker_id in workers}
    least = min(pauses.values(), default=0.0)
    return frozenset(worker_id for worker_id, pause_s in pauses.items() if pause_s > least)


def _reachable(
    workers: frozenset[WorkerId], peers: frozenset[WorkerId], blocked: Iterable[Pair]
) -> frozenset[WorkerId]:
    """Of the workers (second in a pair) those that have a pair with one of the peers (first) that is not blocked; all
    where none has."""
    blocked_peers = Counter(worker for peer, worker in blocked if peer in peers)
    found = frozenset(worker_id for worker_id in workers if blocked_peers[worker_id] < len(peers))
    return found or workers


class UsableWorkers(NamedTuple):
    """The workers that get new work, by role, and what of them is left out."""

    prefills: frozenset[WorkerId]
    decodes: frozenset[WorkerId]
    colocated: frozenset[WorkerId]
    excluded: Exclusions
    longest_prefill: int
    """Of the sequences that fit on a P that is not left out."""
    longest_decode: int
    longest_colocated: int

    def excluded_for(self, num_tokens: int) -> Exclusions:
        """What a request of so many tokens must not use: nothing of a role where only those left out could take it."""
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
    """Of these workers."""
    prefills = frozenset(w.worker_id for w in workers if prefills_only(w.info))
    decodes = frozenset(w.worker_id for w in workers if decodes_only(w.info))
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
