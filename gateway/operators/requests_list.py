"""The list of requests for operators: its lines, and which requests a filter lets through. Pure."""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple

from disagg.router.api import RUNNING, RequestTrace
from disagg.router.telemetry.telemetry import ANSWERED

RequestState = Literal["waiting", "running", "answered", "cancelled", "refused", "failed"]
CANCELLED: Final = "cancelled"


class RequestFilter(NamedTuple):
    """What all requests of a list have in common; an empty field lets all through."""

    id: str = ""
    """A part of the id."""
    model: str = ""
    """The name of the model."""
    state: str = ""
    """A `RequestState`."""
    worker: str = ""
    """A part of the id of the prefill or the decode worker."""

    def lets_through(self, trace: RequestTrace) -> bool:
        """Whether the request is in the list."""
        return (
            self.id in trace.request_id
            and self.model in ("", trace.model)
            and self.state in ("", state_of_request(trace))
            and (self.worker in (trace.prefill_worker or "") or self.worker in (trace.decode_worker or ""))
        )


class FoundRequests(NamedTuple):
    """The requests that a filter lets through, or the first ones of them."""

    requests: list[dict[str, Any]]
    """Lines of the list, the latest arrival first."""
    num_matching: int
    num_searched: int
    """Number of requests that were looked at: all that the gateway remembers, up to a limit."""


def state_of_request(trace: RequestTrace) -> RequestState:
    """Where a request is, or how it ended. It is refused if it ended without an attempt."""
    if trace.outcome == RUNNING:
        return "running" if trace.attempts else "waiting"
    if trace.outcome in ANSWERED:
        return "answered"
    if trace.outcome == CANCELLED:
        return "cancelled"
    return "failed" if trace.attempts else "refused"


def outcome_of(trace: RequestTrace) -> str:
    """The outcome for the operator. To the router, an answer that a guardrail stopped was ended by the gateway, as by a
    stop string."""
    stopped = any(subject == "answer" and action == "stop" for _, _, subject, action, _ in trace.guardrails)
    return "content_filter" if stopped and trace.outcome in ANSWERED else trace.outcome


def request_line(trace: RequestTrace, clock_to_epoch_s: float) -> dict[str, Any]:
    """One line of the list. `clock_to_epoch_s` is added to the gateway's clock to get seconds since the epoch."""
    ended = {stage: (at - trace.arrival) * 1000 for stage, at in trace.stages.items()}
    return {
        "id": trace.request_id,
        "arrived_at": trace.arrival + clock_to_epoch_s,
        "state": state_of_request(trace),
        "outcome": outcome_of(trace),
        "reason": trace.detail,
        "model": trace.model,
        "prefill": trace.prefill_worker or "",
        "decode": trace.decode_worker or "",
        "prompt_tokens": trace.num_prompt_tokens,
        "completion_tokens": trace.num_output_tokens,
        "kv_bytes": trace.kv_bytes,
        "ttft_ms": ended.get("first_token"),
        "total_ms": ended.get("end"),
        "is_probe": trace.is_probe,
    }
