"""A circuit breaker: whether a worker, or a pair, is used for one leg of requests (prefill, transfer or decode).

    CLOSED ──tripped──> OPEN ──pause over──> HALF_OPEN ──trial begun──> TRIAL ──passed──> CLOSED
                         ^                       ^                        │ │
                         │                       └───────withdrawn────────┘ │
                         └────────────────────────failed────────────────────┘

It trips after `failures` failures in a row, or when `share` of its latest results are failures. OPEN gets no requests.
HALF_OPEN gets one request, the trial. The pause before a trial doubles with each trial that fails, and with each
opening soon after the last, up to a limit. A trial that ends without a result (cancelled, refused) is withdrawn.

Results of attempts that were placed before it opened are outdated: while it is not closed they are ignored.
Where the breakers of all workers of a role are open, some of the workers are used nevertheless; a success closes too.

Transitions are data. A pair that is not listed raises, and nothing changes. Pure.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from disagg.proto.ids import AttemptKey
from disagg.router.states import IllegalTransitionError

WINDOW = 20
"""Number of latest results that the share of failures is taken of."""
MIN_RESULTS = 10
"""Number of results below which the share does not count."""
RELAPSE_S = 60.0
"""Seconds after its closing in which another opening continues to double the pause."""


class BreakerState(enum.Enum):
    """The states; see the module docstring."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"
    TRIAL = "trial"


class BreakerEvent(enum.Enum):
    """The events; see the module docstring."""

    TRIPPED = "tripped"
    PAUSE_OVER = "pause over"
    TRIAL_BEGUN = "trial begun"
    PASSED = "passed"
    FAILED = "failed"
    WITHDRAWN = "withdrawn"


BREAKER_TABLE: Mapping[tuple[BreakerState, BreakerEvent], BreakerState] = MappingProxyType(
    {
        (BreakerState.CLOSED, BreakerEvent.TRIPPED): BreakerState.OPEN,
        (BreakerState.OPEN, BreakerEvent.PAUSE_OVER): BreakerState.HALF_OPEN,
        (BreakerState.OPEN, BreakerEvent.PASSED): BreakerState.CLOSED,
        (BreakerState.HALF_OPEN, BreakerEvent.TRIAL_BEGUN): BreakerState.TRIAL,
        (BreakerState.HALF_OPEN, BreakerEvent.PASSED): BreakerState.CLOSED,
        (BreakerState.HALF_OPEN, BreakerEvent.FAILED): BreakerState.OPEN,
        (BreakerState.TRIAL, BreakerEvent.PASSED): BreakerState.CLOSED,
        (BreakerState.TRIAL, BreakerEvent.FAILED): BreakerState.OPEN,
        (BreakerState.TRIAL, BreakerEvent.WITHDRAWN): BreakerState.HALF_OPEN,
    }
)


def next_breaker_state(state: BreakerState, event: BreakerEvent) -> BreakerState:
    """The state after `event`. Raises `IllegalTransitionError` for an unlisted pair."""
    try:
        return BREAKER_TABLE[state, event]
    except KeyError:
        raise IllegalTransitionError(f"breaker: {event.value!r} while {state.value}") from None


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """When a breaker opens, and for how long."""

    failures: int
    """Number of failures in a row that opens a breaker."""
    share: float
    """Share of failures in the latest `WINDOW` results that opens a breaker, once there are `MIN_RESULTS`."""
    pause_s: float
    """Seconds before the first trial."""
    max_pause_s: float
    peers: int = 1
    """Number of different peers that the failures must be with."""


@dataclass(slots=True)
class CircuitBreaker:
    """One breaker. Owner: `CircuitBreakers`."""

    limits: BreakerLimits
    state: BreakerState = BreakerState.CLOSED
    opened_at: float = 0.0
    """When it left the state CLOSED."""
    trial_at: float = 0.0
    """End of the pause, while OPEN."""
    trial: AttemptKey | None = None
    """The attempt that is the trial, in state TRIAL."""
    pause_s: float = 0.0
    """Seconds of the latest pause."""
    detail: str = ""
    """The worker's message of the latest failure."""
    _closed_at: float = float("-inf")
    _failed_peers: deque[str | None] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """The latest results: the peer of a failure, None for a success."""

    @property
    def is_blocked(self) -> bool:
        """Whether the worker or pair takes no new request, not even a trial."""
        return self.state is BreakerState.OPEN or self.state is BreakerState.TRIAL

    def failed(self, placed_at: float, now: float, peer: str = "", detail: str = "", *, at_once: bool = False) -> bool:
        """Note that the leg failed for an attempt placed at `placed_at`; `at_once` opens without waiting for more
        failures. Returns whether the breaker opened, or opened again."""
        if self.state is not BreakerState.CLOSED and placed_at < self.opened_at:
            return False
        self.detail = detail
        if self.state is BreakerState.CLOSED:
            self._failed_peers.append(peer)
            if not (at_once or self._has_tripped()):
                return False
            relapsed = now - self._closed_at < RELAPSE_S
            self._enter(BreakerEvent.TRIPPED)
            self.opened_at = now
            self._pause(now, doubled=relapsed)
            return True
        if self.state is BreakerState.OPEN:
            return False
        self._enter(BreakerEvent.FAILED)
        self._pause(now, doubled=True)
        return True

    def passed(self, placed_at: float, now: float) -> bool:
        """Note that the leg succeeded for an attempt placed at `placed_at`. Returns whether that closed the breaker."""
        if self.state is BreakerState.CLOSED:
            self._failed_peers.append(None)
            return False
        if placed_at < self.opened_at:
            return False
        self._enter(BreakerEvent.PASSED)
        self._failed_peers.clear()
        self._closed_at = now
        return True

    def tick(self, now: float) -> bool:
        """Update the state by the time. Returns whether the pause ended just now."""
        if self.state is not BreakerState.OPEN or now < self.trial_at:
            return False
        self._enter(BreakerEvent.PAUSE_OVER)
        return True

    def begin_trial(self, key: AttemptKey) -> None:
        """Begin the trial of a half-open breaker with this attempt."""
        self._enter(BreakerEvent.TRIAL_BEGUN)
        self.trial = key

    def withdraw(self, key: AttemptKey) -> bool:
        """Withdraw an attempt that ended without a result; if it was the trial, another may follow. Returns whether it
        was."""
        if self.trial != key:
            return False
        self._enter(BreakerEvent.WITHDRAWN)
        return True

    def is_forgotten(self, now: float) -> bool:
        """Whether it has no failure to remember, so that it can be dropped."""
        return (
            self.state is BreakerState.CLOSED
            and not any(peer is not None for peer in self._failed_peers)
            and now - self._closed_at >= RELAPSE_S
        )

    def _enter(self, event: BreakerEvent) -> None:
        self.state = next_breaker_state(self.state, event)
        if self.state is not BreakerState.TRIAL:
            self.trial = None

    def _pause(self, now: float, *, doubled: bool) -> None:
        limits = self.limits
        self.pause_s = min(2 * self.pause_s, limits.max_pause_s) if doubled and self.pause_s else limits.pause_s
        self.trial_at = now + self.pause_s

    def _has_tripped(self) -> bool:
        limits, results = self.limits, self._failed_peers
        failed = [peer for peer in results if peer is not None]
        latest = list(results)[-limits.failures :]
        in_a_row = len(latest) == limits.failures and None not in latest
        if in_a_row and len(set(latest)) >= limits.peers:
            return True
        is_share = len(results) >= MIN_RESULTS and len(failed) >= limits.share * len(results)
        return is_share and len(set(failed)) >= limits.peers
