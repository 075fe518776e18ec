"""The records of requests: a trace of each, and the sums over all of them.

    arrived ──> token* ──> ended          refused: recorded without having begun

A target is met or missed by the times at the gateway: of the first token's arrival, and the mean time between tokens. A
request that failed or was refused missed all of its targets. One that its client cancelled missed those that were
missed by then; the others are unknown, and not counted.

Owner: the router core.
"""

from __future__ import annotations

import logging
import math

from disagg.proto.errors import LimitError, RequestCancelledError
from disagg.router.api import RUNNING, RequestTrace
from disagg.router.statistics import Rates, RouterStats, SlidingWindowCounter, TenantUsage
from disagg.router.telemetry.spans import durations_of
from disagg.router.telemetry.traces import TraceRing

logger = logging.getLogger(__name__)

ANSWERED = ("stop", "length")
"""Outcomes of requests that were answered."""
RATE_WINDOW_S = 10
SLO_WINDOW_S = 60
SLOS = ("ttft", "tpot", "both")
_QUEUED = ("route", "kv_alloc_wait", "prefill_queue")
"""Stages in which a request waits before its prompt is computed."""
_TRACE_ID_PART = 1
"""Index of the trace id in a `traceparent`, split at dashes."""


class Telemetry:
    """The traces and the statistics of one router.

    Args:
        num_traces: ended requests whose traces are kept.
    """

    def __init__(self, num_traces: int) -> None:
        self.stats = RouterStats()
        self.traces = TraceRing(num_traces)
        self._recent = SlidingWindowCounter(SLO_WINDOW_S)

    # ---------------------------------------------------------------- events

    def arrived(self, trace: RequestTrace) -> None:
        """Begin the trace of an accepted request."""
        self.traces.begin(trace)

    def tokens(self, trace: RequestTrace, num_tokens: int, now: float) -> None:
        """Count the next tokens of an answer: at least one, all of which came together."""
        trace.num_output_tokens += num_tokens
        before, trace.last_token_at = trace.last_token_at, now
        if trace.is_probe:
            trace.stages.setdefault("first_token", now)
            return
        stats = self.stats
        stats.num_output_tokens += num_tokens
        self._recent.add(now, "tokens", num_tokens)
        if before is None:
            trace.stages["first_token"] = now
            stats.ttft[trace.marks[-1].path].observe(now - trace.arrival)
        else:
            gap = now - before
            stats.itl.observe(gap)
            if gap > trace.max_itl_s:
                trace.max_itl_s = gap
        if num_tokens > 1:
            stats.itl.observe(0.0, num_tokens - 1)

    def moved(self, trace: RequestTrace, now: float) -> None:
        """Note the first token from the worker to which an answer moved; to be called before `tokens`."""
        if trace.last_token_at is not None:
            self.stats.migration_pause.observe(now - trace.last_token_at)

    def ended(
        self, trace: RequestTrace, outcome: str, now: float, *, cached_tokens: int = 0, num_answered: int | None = None
    ) -> None:
        """Record the end of a request, or its refusal.

        Args:
            trace: the trace of the request.
            outcome: `stop`, `length`, or the code of an error.
            now: the time.
            cached_tokens: prompt tokens that no worker had to compute.
            num_answered: output tokens that the client got, if the rest was cut off.
        """
        trace.outcome = outcome
        if num_answered is not None:
            trace.num_output_tokens = num_answered
        self.traces.end(trace, now)
        if not trace.is_probe:
            self._count(trace, cached_tokens, now)
        if logger.isEnabledFor(logging.DEBUG):
            _log(trace, now)

    def refused(self, error: LimitError) -> None:
        """Count a call or a request that a limit of its tenant refused."""
        self._usage(error.tenant).refused[error.limit] += 1

    # ---------------------------------------------------------------- questions

    def rates(self, now: float) -> Rates:
        """The rates over the last ten seconds, of which the present one is not over."""
        totals = self._recent.totals(now, RATE_WINDOW_S)
        span_s = RATE_WINDOW_S - 1 + now % 1.0
        return Rates(totals["requests"] / span_s, totals["tokens"] / span_s)

    def slos(self, now: float) -> dict[str, tuple[int, int]]:
        """Targets in the last minute: target -> (requests that met it, requests that had it)."""
        totals = self._recent.totals(now)
        return {slo: (met := totals[f"{slo} met"], met + totals[f"{slo} missed"]) for slo in SLOS}

    # ---------------------------------------------------------------- inside

    def _usage(self, tenant: str) -> TenantUsage:
        usage = self.stats.tenants.get(tenant)
        if usage is None:
            usage = self.stats.tenants[tenant] = TenantUsage()
        return usage

    def _count(self, trace: RequestTrace, cached_tokens: int, now: float) -> None:
        stats = self.stats
        stats.outcomes[trace.outcome] += 1
        usage = self._usage(trace.tenant)
        usage.outcomes[trace.outcome] += 1
        usage.output_tokens += trace.num_output_tokens
        if trace.marks:
            usage.prompt_tokens += trace.num_prompt_tokens
        self._recent.add(now, "requests")
        for slo, met in slos_met(trace, now).items():
            stats.slos[slo, met] += 1
            self._recent.add(now, f"{slo} {'met' if met else 'missed'}")
        durations_s = durations_of(trace)
        for stage, duration_s in durations_s.items():
            stats.stages[stage].observe(duration_s)
        if trace.outcome not in ANSWERED:
            return
        stats.e2e.observe(now - trace.arrival)
        stats.queue_time.observe(sum(durations_s.get(stage, 0.0) for stage in _QUEUED))
        stats.prefill_time.observe(durations_s.get("prefill", 0.0))
        if trace.last_token_at is not None:
            stats.decode_time.observe(trace.last_token_at - trace.stages.get("first_token", trace.last_token_at))
        stats.prompt_tokens.observe(trace.num_prompt_tokens)
        stats.output_tokens.observe(trace.num_output_tokens)
        stats.cached_tokens += cached_tokens
        for what, ratio in prediction_ratios(trace).items():
            stats.prediction_ratio[what].observe(ratio)


def slos_met(trace: RequestTrace, now: float) -> dict[str, bool]:
    """Whether an ended request met each of its targets, and all of them: `ttft`, `tpot`, `both`. Targets that it did
    not have are left out, and those that are unknown because its client left first; so are all of a background
    request."""
    if trace.is_background or (trace.ttft_slo_s is None and trace.tpot_slo_s is None):
        return {}
    targets = {"ttft": trace.ttft_slo_s, "tpot": trace.tpot_slo_s}
    had = {slo: limit_s for slo, limit_s in targets.items() if limit_s is not None}
    answered = trace.outcome in ANSWERED
    if not answered and trace.outcome != RequestCancelledError.code:
        return {**dict.fromkeys(had, False), "both": False}
    missed = {slo for slo, limit_s in had.items() if _measured(trace, slo, now) > limit_s}
    if answered:
        return {**{slo: slo not in missed for slo in had}, "both": not missed}
    return dict.fromkeys((*missed, "both"), False) if missed else {}


def met_targets(trace: RequestTrace) -> bool | None:
    """Whether a request met all of its targets; None while it runs, if it has none, and if its client left."""
    if trace.outcome in (RUNNING, RequestCancelledError.code):
        return None
    return slos_met(trace, math.inf).get("both")


def prediction_ratios(trace: RequestTrace) -> dict[str, float]:
    """The ratios of measured to predicted times of an answer that took one attempt and whose policy predicts times."""
    placement = trace.placement
    if placement is None or len(trace.marks) != 1:
        return {}
    marks = trace.marks[0]
    pairs: list[tuple[str, float, float | None]] = []
    if "first_token" in trace.stages:
        pairs.append(("ttft", trace.stages["first_token"] - marks.placed, placement.ttft_ms))
    decode_from = marks.handed_over or trace.stages.get("first_token")
    if decode_from is not None and trace.last_token_at is not None and trace.num_output_tokens > 1:
        mean_s = (trace.last_token_at - decode_from) / (trace.num_output_tokens - 1)
        pairs.append(("tpot", mean_s, placement.tpot_ms))
    if marks.handed_over is not None and marks.computed is not None and placement.ttft_ms is not None:
        pairs.append(("transfer", max(0.0, marks.handed_over - marks.computed), placement.transfer_ms))
    return {what: 1000 * seen_s / expected_ms for what, seen_s, expected_ms in pairs if expected_ms}


def _measured(trace: RequestTrace, slo: str, now: float) -> float:
    """The measured seconds of a target: until now without a first token; 0 without a gap to measure."""
    if slo == "ttft":
        return trace.stages.get("first_token", now) - trace.arrival
    return _mean_gap(trace) or 0.0


def _mean_gap(trace: RequestTrace) -> float | None:
    """Mean seconds between two tokens; None with fewer than two. Of a cut answer all tokens count."""
    first, last = trace.stages.get("first_token"), trace.last_token_at
    if first is None or last is None or trace.num_output_tokens < 2:
        return None
    return (last - first) / (trace.num_output_tokens - 1)


def _log(trace: RequestTrace, now: float) -> None:
    parts = trace.trace_parent.split("-")
    extra = {"request_id": trace.request_id, "trace_id": parts[_TRACE_ID_PART] if len(parts) > 1 else ""}
    logger.debug(
        "%s: %s after %.1f ms, %d + %d tokens, %s -> %s",
        trace.request_id,
        trace.outcome,
        (now - trace.arrival) * 1000,
        trace.num_prompt_tokens,
        trace.num_output_tokens,
        trace.prefill_worker,
        trace.decode_worker,
        extra=extra,
    )
