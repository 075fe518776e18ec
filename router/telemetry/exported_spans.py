"""An ended request as spans for an OpenTelemetry collector, and whether it is sent. Pure.

    chat MODEL             the gateway's span, child of the caller's; name and attributes of OpenTelemetry's GenAI
                           conventions (`text_completion MODEL` of a prompt that is no conversation)
      tokenize, route, ... one for each span of the timeline (`spans.py`), of the gateway or of a worker

The tree has exactly the spans that `disagg explain` shows: both are made of the same trace.

Where no ids of the trace and its spans (W3C Trace Context) came with the request, they are hashes of what they name, so
that all processes find the same without telling each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Final, NamedTuple

from disagg.proto.errors import RequestCancelledError
from disagg.router.api import RequestTrace
from disagg.router.config import TracingOptions
from disagg.router.telemetry.spans import spans_of
from disagg.router.telemetry.telemetry import ANSWERED, met_targets

_TRACE_BYTES = 16
_SPAN_BYTES = 8


def trace_of(name: str) -> str:
    """The id of a trace: 32 hex digits."""
    return blake2b(name.encode(), digest_size=_TRACE_BYTES, person=b"trace").hexdigest()


def span_of(name: str) -> str:
    """The id of a span: 16 hex digits."""
    return blake2b(name.encode(), digest_size=_SPAN_BYTES, person=b"span").hexdigest()


GATEWAY: Final = "gateway"
_RECORDED: Final = 1
"""The flag of a `traceparent` whose caller records its trace."""
_HASH_DIGITS: Final = 8
_NUM_HASHES: Final = 16**_HASH_DIGITS

Value = str | int | float | bool | tuple[str, ...]


class ExportedSpan(NamedTuple):
    """One span. Ids are hex digits; times are nanoseconds since the epoch."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    """Empty for the first span of a trace."""
    process: str
    """`gateway`, or a worker's id."""
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Value]
    events: tuple[tuple[str, int], ...] = ()
    """Events of the span: name, and nanoseconds since the epoch."""
    error: str = ""
    """Code of the error of a failed request; empty otherwise."""
    is_request: bool = False
    """Whether it is the span of the whole request."""


def is_sent(trace: RequestTrace, options: TracingOptions) -> bool:
    """Whether an ended request is sent: for a missed target, a failure, a caller that records, or as one of the sampled
    share, which is chosen by the id, so that all gateways choose alike."""
    if trace.is_probe:
        return False
    if trace.outcome not in (*ANSWERED, RequestCancelledError.code) or met_targets(trace) is False:
        return True
    if trace.trace_parent and int(trace.trace_parent.rsplit("-", 1)[1], 16) & _RECORDED:
        return True
    return int(span_of(trace.request_id)[:_HASH_DIGITS], 16) < options.sample * _NUM_HASHES


def exported_spans(trace: RequestTrace, clock_to_epoch_s: float, model: str) -> list[ExportedSpan]:
    """The spans of an ended request, that of the whole request first. `clock_to_epoch_s` added to the gateway's clock
    gives seconds since the epoch."""
    if trace.trace_parent:
        _, trace_id, span_id, _ = trace.trace_parent.split("-")
    else:
        trace_id, span_id = trace_of(trace.request_id), span_of(trace.request_id)

    def nanoseconds(time: float) -> int:
        return round((time + clock_to_epoch_s) * 1e9)

    end = trace.stages["end"]
    first = trace.stages.get("first_token")
    found = [
        ExportedSpan(
            f"{_operation(trace)} {model}",
            trace_id,
            span_id,
            trace.parent_span,
            GATEWAY,
            nanoseconds(trace.arrival),
            nanoseconds(end),
            _attributes(trace, model),
            () if first is None else (("first_token", nanoseconds(first)),),
            "" if trace.outcome in ANSWERED else trace.outcome,
            is_request=True,
        )
    ]
    for index, span in enumerate(spans_of(trace)):
        found.append(
            ExportedSpan(
                span.stage,
                trace_id,
                span_of(f"{trace.request_id} {index}"),
                span_id,
                GATEWAY if span.worker_id is None else span.worker_id,
                nanoseconds(span.start),
                nanoseconds(end if span.end is None else span.end),
                {"disagg.request_id": trace.request_id},
            )
        )
    return found


def _operation(trace: RequestTrace) -> str:
    return "chat" if trace.is_chat else "text_completion"


def _attributes(trace: RequestTrace, model: str) -> dict[str, Value]:
    given: dict[str, Value | None] = {
        "gen_ai.operation.name": _operation(trace),
        "gen_ai.provider.name": "disagg",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": trace.response_id or trace.request_id,
        "gen_ai.response.finish_reasons": (trace.outcome,) if trace.outcome in ANSWERED else None,
        "error.type": None if trace.outcome in ANSWERED else trace.outcome,
        "gen_ai.request.max_tokens": trace.most_output_tokens,
        "gen_ai.usage.input_tokens": trace.num_prompt_tokens,
        "gen_ai.usage.output_tokens": trace.num_output_tokens,
        "disagg.request_id": trace.request_id,
        "disagg.outcome": trace.outcome,
        "disagg.tenant": trace.tenant or None,
        "disagg.attempts": trace.attempts,
        "disagg.prefill_worker": trace.prefill_worker,
        "disagg.decode_worker": trace.decode_worker,
        "disagg.kv_bytes": trace.kv_bytes,
        "disagg.transport": trace.transport or None,
        "disagg.cached_tokens.prefill": trace.prefill_cached_tokens,
        "disagg.cached_tokens.decode": trace.decode_cached_tokens,
        "disagg.ttft_target_s": trace.ttft_slo_s,
        "disagg.tpot_target_s": trace.tpot_slo_s,
        "disagg.met_targets": met_targets(trace),
        "disagg.longest_gap_s": trace.max_itl_s,
    }
    return {name: value for name, value in given.items() if value is not None}
