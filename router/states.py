"""The two state tables: where a request is, and where its current attempt is.

    request   QUEUED ──placed──> RUNNING ──answered──> FINISHED
                 ^                  │
                 └────put back──────┘                    failed, cancelled: from QUEUED or RUNNING, for good

    attempt   PREFILLING ──prefilled──> TRANSFERRING ──handed over──> DECODING
                  └── prefilled here (local prefill), or handed over (D's message came first) ──> DECODING
              every state but ENDED ──ended──> ENDED

Transitions are data. A pair that is not listed raises, and nothing changes.

Members hash by identity: `Enum` hashes by name, in Python, which every table lookup would pay for twice.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType


class IllegalTransitionError(RuntimeError):
    """A bug: this event cannot happen in this state."""


class RequestState(enum.Enum):
    """Where a request is."""

    __hash__ = object.__hash__

    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class RequestEvent(enum.Enum):
    """What happens to a request."""

    __hash__ = object.__hash__

    PLACED = "placed"
    PUT_BACK = "put back"
    ANSWERED = "answered"
    FAILED = "failed"
    CANCELLED = "cancelled"


class AttemptState(enum.Enum):
    """Where an attempt is."""

    __hash__ = object.__hash__

    PREFILLING = "prefilling"
    TRANSFERRING = "transferring"
    DECODING = "decoding"
    ENDED = "ended"


class AttemptEvent(enum.Enum):
    """What happens to an attempt."""

    __hash__ = object.__hash__

    PREFILLED = "prefilled"
    """P computed the prompt."""
    PREFILLED_HERE = "prefilled here"
    """The worker that also decodes computed the prompt."""
    HANDED_OVER = "handed over"
    ENDED = "ended"


REQUEST_TABLE: Mapping[tuple[RequestState, RequestEvent], RequestState] = MappingProxyType(
    {
        (RequestState.QUEUED, RequestEvent.PLACED): RequestState.RUNNING,
        (RequestState.QUEUED, RequestEvent.FAILED): RequestState.FAILED,
        (RequestState.QUEUED, RequestEvent.CANCELLED): RequestState.CANCELLED,
        (RequestState.RUNNING, RequestEvent.PUT_BACK): RequestState.QUEUED,
        (RequestState.RUNNING, RequestEvent.ANSWERED): RequestState.FINISHED,
        (RequestState.RUNNING, RequestEvent.FAILED): RequestState.FAILED,
        (RequestState.RUNNING, RequestEvent.CANCELLED): RequestState.CANCELLED,
    }
)

ATTEMPT_TABLE: Mapping[tuple[AttemptState, AttemptEvent], AttemptState] = MappingProxyType(
    {
        (AttemptState.PREFILLING, AttemptEvent.PREFILLED): AttemptState.TRANSFERRING,
        (AttemptState.PREFILLING, AttemptEvent.PREFILLED_HERE): AttemptState.DECODING,
        (AttemptState.PREFILLING, AttemptEvent.HANDED_OVER): AttemptState.DECODING,
        (AttemptState.PREFILLING, AttemptEvent.ENDED): AttemptState.ENDED,
        (AttemptState.TRANSFERRING, AttemptEvent.HANDED_OVER): AttemptState.DECODING,
        (AttemptState.TRANSFERRING, AttemptEvent.ENDED): AttemptState.ENDED,
        (AttemptState.DECODING, AttemptEvent.ENDED): AttemptState.ENDED,
    }
)


def next_request_state(state: RequestState, event: RequestEvent) -> RequestState:
    """The state of a request after `event`. Raises `IllegalTransitionError` for an unlisted pair."""
    try:
        return REQUEST_TABLE[state, event]
    except KeyError:
        raise IllegalTransitionError(f"request: {event.value!r} while {state.value}") from None


def next_attempt_state(state: AttemptState, event: AttemptEvent) -> AttemptState:
    """The state of an attempt after `event`. Raises `IllegalTransitionError` for an unlisted pair."""
    try:
        return ATTEMPT_TABLE[state, event]
    except KeyError:
        raise IllegalTransitionError(f"attempt: {event.value!r} while {state.value}") from None
