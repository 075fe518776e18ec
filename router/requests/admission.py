"""Refusals before anything is held: deadline passed, no worker, too long, queue full, or a predicted miss of the
target.

When the first token of a request can be expected:

    first in the queue     the backlog of the first worker in the ranking, then its own prefill
    others before it       (all backlogs + the prefills queued before it) / number of workers that prefill, then its own

The second line is the queueing term: without it a router accepts everything and answers it minutes late. When a decode
place opens is predicted by `placement/forecast.py`; admission takes the later of the two.

Trials: requests that are admitted although they are predicted to miss their TTFT target even on an idle worker.

    predicted miss ──no prompt was computed recently, no trial runs, the pause is over──> admitted ──> met or missed
                                                                                           first pause <─┴─> doubled

Such a prediction would never be corrected: refused requests are not computed, so no step shows that a worker is faster
than predicted, for example because its machine was busy when it calibrated. Compared with a refusal, an admitted
request loses only the time until its end. Owner of the trials: the router core.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from disagg.proto.block_hash import HASH_BLOCK_TOKENS, max_cached_tokens
from disagg.proto.errors import (
    NO_WORKER_YET,
    ContextLengthError,
    DeadlineError,
    DisaggError,
    OverloadedError,
    UnavailableError,
)
from disagg.proto.ids import BlockHash
from disagg.proto.messages import RoleName
from disagg.router.api import RUNNING, RequestTrace, RoutedRequest
from disagg.router.config import RouterConfig
from disagg.router.placement.fleet import Fleet
from disagg.router.placement.forecast import prefill_ms
from disagg.router.queueing.queue import RequestQueue
from disagg.router.requests.attempts import Attempts
from disagg.router.requests.record import RequestRecord

FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0
"""Shortest and longest pause in seconds from one trial to the next."""
MOST_WRONG = 1000.0
"""Ratio of prediction to target from which on the target cannot be met, however wrong the prediction is: there is no
trial."""


class Trials:
    """Decides which requests are trials, one at a time."""

    def __init__(self) -> None:
        self._trace: RequestTrace | None = None
        """The trace of the present trial, or of the last one until its result was read."""
        self._pause_s = FIRST_PAUSE_S
        self._next_at = 0.0

    def may_begin(self, confirmed_at: float, now: float) -> bool:
        """Whether a request may be a trial now. `confirmed_at`: when the predicted workers last computed a prompt."""
        if self._trace is not None:
            met = _result(self._trace)
            if met is None:
                return False
            self._pause_s = FIRST_PAUSE_S if met else min(LONGEST_PAUSE_S, 2 * self._pause_s)
            self._next_at = max(self._next_at, now if met else now + self._pause_s)
            self._trace = None
        return now >= self._next_at and now >= confirmed_at + FIRST_PAUSE_S

    def begin(self, trace: RequestTrace, now: float) -> None:
        """Note that this request is a trial."""
        self._trace, self._next_at = trace, now + FIRST_PAUSE_S


def _result(trace: RequestTrace) -> bool | None:
    """Whether a request met its TTFT target; None while that is not known."""
    first_at = trace.stages.get("first_token")
    if first_at is not None and trace.ttft_slo_s is not None:
        return first_at - trace.arrival <= trace.ttft_slo_s
    return None if trace.outcome == RUNNING else False


_MIN_RETRY_S = 0.05
_MARGIN = 0.1
"""Safety margin of the wait for a decode place: lengths of answers and steps vary, and a request that is admitted and
misses its target takes a place from one that would have met its own."""


def refusal(
    request: RoutedRequest, num_prompt_tokens: int, fleet: Fleet, num_waiting: int, config: RouterConfig, now: float
) -> DisaggError | None:
    """The error if this request cannot be queued now, apart from limits of its tenant; None when it can."""
    if request.deadline is not None and request.deadline <= now:
        return DeadlineError("the deadline passed before the request was queued")
    is_pooled = request.pooling is not None
    limit = fleet.longest_pooled if is_pooled else fleet.longest_sequence
    if num_prompt_tokens - is_pooled >= limit:
        role: RoleName | None = fleet.missing_role()
        if is_pooled:
            role = None if limit else "prefill"
        if role is not None:
            if not _may_wait(request, fleet.expected.next_in_s(role, now), config):
                return missing_worker(role, f"there is no {role} worker", fleet, config, now)
            return queue_refusal(num_waiting, config)
        return ContextLengthError.too_long(
            "prompt", limit, f"the prompt is too long: {num_prompt_tokens} tokens > {limit - 1 + is_pooled} maximum"
        )
    return queue_refusal(num_waiting, config)


def _may_wait(request: RoutedRequest, in_s: float | None, config: RouterConfig) -> bool:
    """Whether a new request is queued for a worker that is coming in `in_s` seconds."""
    target_s = config.ttft_slo_s if request.ttft_slo_s is None else request.ttft_slo_s
    return in_s is not None and in_s < min(config.expected_worker_grace_s, target_s or math.inf) and not request.pair


def missing_worker(role: RoleName, message: str, fleet: Fleet, config: RouterConfig, now: float) -> UnavailableError:
    """The error for a request if no worker of a role is present."""
    in_s = fleet.expected.next_in_s(role, now)
    if in_s is not None:
        return UnavailableError(f"{message}; the next one is expected in {in_s:.0f} s", NO_WORKER_YET)
    if config.starts_workers:
        return UnavailableError(f"{message}; one is started for the requests that come", NO_WORKER_YET)
    return UnavailableError(message, f"no_{role}_capacity")


def queue_refusal(num_waiting: int, config: RouterConfig) -> OverloadedError | None:
    """The error for any request while too many wait."""
    if num_waiting >= config.max_queued:
        return OverloadedError("too many requests are waiting", config.retry_after_s)
    return None


def predicted_miss(
    record: RequestRecord,
    fleet: Fleet,
    queue: RequestQueue,
    attempts: Attempts,
    trials: Trials,
    config: RouterConfig,
    now: float,
) -> OverloadedError | None:
    """The error for a request that is predicted to miss its TTFT target; None if it has none, is predicted to meet it,
    is a trial, or no step was measured yet. The retry time is the excess of the predicted wait."""
    if record.trace.ttft_slo_s is None:
        return None
    position = queue.position(record.urgency, record.tenant.share, record.tenant.num_kept)
    expected = forecast(fleet, queue, position, record.block_hashes, record.num_tokens, now)
    if expected is None:
        return None
    wait_ms = expected.wait_ms
    decode_wait_ms = attempts.decode_wait_ms(record, position, now)
    if decode_wait_ms:  # The requests before it wait for places too: their prompts are computed when places open.
        wait_ms = max(
            wait_ms, decode_wait_ms * (1 + _MARGIN) + queue.work_before(position) / max(1, fleet.backlog()[1])
        )
    age_s = now - record.trace.arrival
    ttft_s = age_s + (wait_ms + expected.prefill_ms) / 1000
    if ttft_s <= record.trace.ttft_slo_s:
        return None
    message = f"the first token is expected after {ttft_s:.3g} s, the target is {record.trace.ttft_slo_s:g} s"
    if expected.prefill_ms / 1000 > record.trace.ttft_slo_s:  # It would miss its target there if that were idle, too.
        queued_ms = queue.work_before(position) / max(1, fleet.backlog()[1])
        placed_ms = None if decode_wait_ms else attempts.ttft_ms(record, now, queued_ms)
        if placed_ms is not None and age_s + placed_ms / 1000 <= record.trace.ttft_slo_s:
            return None
        is_possible = expected.prefill_ms <= MOST_WRONG * 1000 * record.trace.ttft_slo_s
        if is_possible and trials.may_begin(fleet.computed_at, now):
            trials.begin(record.trace, now)
            record.trace.trial = f"of the prediction that its first token comes after {ttft_s:.3g} s, which is too late"
            return None
        return OverloadedError(message, config.retry_after_s)
    return OverloadedError(message, max(_MIN_RETRY_S, ttft_s - record.trace.ttft_slo_s))


class Forecast(NamedTuple):
    """The expected times of a request in milliseconds: its wait from now on, and its prefill."""

    wait_ms: float
    prefill_ms: float


def forecast(
    fleet: Fleet, queue: RequestQueue, position: int, hashes: Sequence[BlockHash], num_tokens: int, now: float
) -> Forecast | None:
    """The forecast for a request of `num_tokens` at `position` of the queue. None until a worker that could compute it
    was measured."""
    worker = fleet.fastest()
    if worker is None or not worker.is_measured:
        return None
    wait_ms = worker.backlog_ms
    if position:
        backlog_ms, num_workers = fleet.backlog()
        wait_ms = (backlog_ms + queue.work_before(position)) / num_workers
    return Forecast(wait_ms, work_ms(fleet, hashes, num_tokens, now))


def work_ms(fleet: Fleet, hashes: Sequence[BlockHash], num_tokens: int, now: float) -> float:
    """Milliseconds of a prompt's prefill on the worker that has most of it cached. 0 without a worker."""
    worker = fleet.fastest()
    if worker is None:
        return 0.0
    num_blocks = max((blocks for _, blocks in fleet.matched(hashes, now).best(1)), default=0) if hashes else 0
    cached = min(num_blocks * HASH_BLOCK_TOKENS, max_cached_tokens(num_tokens))
    return prefill_ms(worker, cached, num_tokens)
