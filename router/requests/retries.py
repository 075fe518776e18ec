"""Whether a request whose attempt failed gets another one. The only place in the cluster that decides so. Pure.

    fault      at most `max_attempts` of a request, and of these `max_losses` by the loss of a worker, which the request
               itself may have caused; and no more retries than `retry_share` of all requests, so that a fault of every
               attempt does not multiply the load that may have caused it. An attempt that brought `PROGRESS_TOKENS`
               resets the count, but there are never more than twice `max_losses` losses
    suspect    a request that was computed twice on workers that ended then, the second time as the only suspect, is not
               tried again (`suspects.py`)
    moved      its worker left on purpose (drain, scale-down): no fault, and without a limit
    free       a fault of a worker while others are healthy: it counts for none of these, but there are at most
               `max_attempts` of them
    refusal    not a fault; without a limit if the worker has other sequences, whose blocks become free; by workers
               without other sequences at most `max_refusals` in a row
    preempted  not a fault either, and without a limit: such an attempt brought the request further, and the one that is
               furthest on a worker is not preempted, so that all of them come to an end

The loss of a worker requeues all its requests at once, which may be half of what runs. So the first attempt after it
does not count for `retry_share`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from disagg.proto.errors import DisaggError, UnavailableError
from disagg.proto.ids import WorkerId
from disagg.proto.messages import End
from disagg.router.config import RouterConfig
from disagg.router.requests.record import RequestRecord
from disagg.router.requests.suspects import NO_CAUSE, Suspicion, has_passed, suspect_error

MOVED = "worker_left"
"""Code of the end of a worker that was draining."""
PROGRESS_TOKENS = 64
"""Tokens of the answer that count as progress. A request that crashes its workers at a certain token makes none."""
WORKER_GONE = ("worker_lost", "worker_stuck", "worker_suspected")
"""Error codes of the loss of a worker: it ended, never ends its step, or is silent."""
MOST_SUSPICIONS = 2
"""Number of workers that a request may have ended. With so many it fails if it is the only possible cause of the last
loss; else it is computed apart from other suspects."""


@dataclass(slots=True)
class Retries:
    """The retry budget of one router. Owner: the router core."""

    config: RouterConfig
    _left: float = field(init=False)
    """Number of retries that may be made now."""

    def __post_init__(self) -> None:
        self._left = float(self.config.retry_burst)

    def request_came(self) -> None:
        """A new request adds `retry_share` of a retry to the budget."""
        if self._left < self.config.retry_burst:
            self._left = min(self.config.retry_burst, self._left + self.config.retry_share)

    def after_fault(
        self, record: RequestRecord, message: str, code: str, *, is_free: bool = False, suspicion: Suspicion = NO_CAUSE
    ) -> DisaggError | None:
        """Count a fault of the request's attempt. Returns the error that ends the request, or None for a retry.
        `is_free`: a fault of the worker while others are healthy."""
        if code == MOVED and not record.is_probe:
            return None
        self.note_progress(record)
        if is_free and not record.is_probe and record.num_free < self.config.max_attempts:
            record.num_free += 1
            return None
        is_loss = code in WORKER_GONE
        record.num_failures += 1
        record.num_losses_ever += is_loss
        if is_loss and suspicion.may_be_cause:
            record.num_losses += 1
            record.num_suspicions += suspicion.was_computed
            if record.num_suspicions >= MOST_SUSPICIONS and not record.is_probe:
                if suspicion.is_sole:
                    return suspect_error(record.num_suspicions, message)
                record.is_isolated = True
        if (
            record.num_failures >= self.config.max_attempts
            or record.num_losses >= self.config.max_losses
            or record.num_losses_ever >= 2 * self.config.max_losses
            or record.is_probe
        ):
            return UnavailableError(f"{record.num_failures} attempts failed; {message}", code)
        if record.num_failures == 1 and is_loss:
            return None
        if self._left < 1:
            return UnavailableError(f"too many attempts fail now to try this one again; {message}", "retry_budget")
        self._left -= 1
        return None

    def note_progress(self, record: RequestRecord) -> None:
        """Reset the counts if the attempt made progress. Idempotent."""
        if has_passed(record):
            record.num_suspicions = 0
        if len(record.output.released) - record.running.num_before >= PROGRESS_TOKENS:
            record.num_failures = record.num_losses = record.num_free = 0

    def after_refusal(
        self, record: RequestRecord, worker_id: WorkerId, end: End, *, can_wait: bool, most: int | None = None
    ) -> UnavailableError | None:
        """Count a refusal of the request's attempt, or reset the count if it was preempted or waiting helps
        (`can_wait`). Returns the error that ends the request, or None for a retry. `most`: refusals that end it, if not
        those of the configuration."""
        is_preempted = end.reason == "preempted"
        record.num_refusals = 0 if is_preempted else record.num_refusals + 1
        record.num_refusals_by_idle = 0 if is_preempted or can_wait else record.num_refusals_by_idle + 1
        if record.num_refusals_by_idle < (most or self.config.max_refusals) and not record.is_probe:
            return None
        if is_preempted:
            return UnavailableError(f"preempted on {worker_id}: {end.detail}")
        return UnavailableError(
            f"refused {record.num_refusals_by_idle or 1} times, the last time by {worker_id}: {end.detail}"
        )
