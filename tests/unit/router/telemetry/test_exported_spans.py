"""What a collector gets of a request: the timeline, under the caller's span."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from disagg.proto.ids import RequestId
from disagg.router.api import AttemptMarks, RequestTrace
from disagg.router.config import TracingOptions
from disagg.router.telemetry.exported_spans import exported_spans, is_sent, span_of, trace_of
from disagg.router.telemetry.spans import spans_of

TRACE, OURS, CALLERS = "a" * 32, "b" * 16, "c" * 16
OPTIONS = TracingOptions(endpoint="http://127.0.0.1:4318/v1/traces", sample=0.0)


def ended(**changes: object) -> RequestTrace:
    """One that P and D answered, from 10 to 14 s, whose caller's trace is not recorded."""
    marks = AttemptMarks(path="pd", queued=10.25, placed=10.5, prefill_worker="p0", decode_worker="d0")  # type: ignore[arg-type]
    marks.computed, marks.handed_over, marks.ended = 11.0, 11.5, 14.0
    given: dict[str, object] = {
        "request_id": RequestId("r0"),
        "arrival": 10.0,
        "stages": {"tokenize": 10.25, "first_token": 11.0, "end": 14.0},
        "outcome": "stop",
        "trace_parent": f"00-{TRACE}-{OURS}-00",
        "parent_span": CALLERS,
        "num_prompt_tokens": 64,
        "num_output_tokens": 5,
        "last_token_at": 14.0,
        "prefill_worker": "p0",
        "decode_worker": "d0",
        "marks": [marks],
    }
    return RequestTrace(**{**given, **changes})  # type: ignore[arg-type]


def test_the_tree_is_the_timeline_under_the_callers_span() -> None:
    trace = ended()
    request, *stages = exported_spans(trace, 1000.0, "m")
    assert request.name == "text_completion m"
    assert (request.trace_id, request.span_id, request.parent_id) == (TRACE, OURS, CALLERS)
    assert (request.start_ns, request.end_ns) == (1010_000_000_000, 1014_000_000_000)
    assert (request.process, request.events, request.error) == ("gateway", (("first_token", 1011_000_000_000),), "")
    assert request.attributes["gen_ai.usage.input_tokens"] == 64
    assert request.attributes["disagg.prefill_worker"] == "p0"
    assert "disagg.met_targets" not in request.attributes
    assert {(stage.trace_id, stage.parent_id) for stage in stages} == {(TRACE, OURS)}
    assert len({stage.span_id for stage in stages}) == len(stages)
    expected = [
        (span.stage, span.worker_id or "gateway", (span.start + 1000) * 1e9, ((span.end or 14.0) + 1000) * 1e9)
        for span in spans_of(trace)
    ]
    assert [(stage.name, stage.process, stage.start_ns, stage.end_ns) for stage in stages] == expected
    assert [stage.name for stage in stages] == ["tokenize", "route", "prefill", "kv_transfer_exposed", "decode"]


def test_without_a_callers_trace_the_ids_are_made_of_the_requests() -> None:
    request, first, *_ = exported_spans(ended(trace_parent="", parent_span=""), 0.0, "m")
    assert (request.trace_id, request.span_id, request.parent_id) == (trace_of("r0"), span_of("r0"), "")
    assert (first.trace_id, first.parent_id) == (trace_of("r0"), span_of("r0"))


def gen_ai(trace: RequestTrace) -> dict[str, object]:
    names = ("operation.name", "provider.name", "request.model", "response.model", "response.id")
    attributes = exported_spans(trace, 0.0, "m")[0].attributes
    found: dict[str, object] = {name: attributes[f"gen_ai.{name}"] for name in names}
    return found | {"reasons": attributes.get("gen_ai.response.finish_reasons"), "error": attributes.get("error.type")}


def test_names_are_those_of_the_conventions_for_generative_ai() -> None:
    request, *stages = exported_spans(ended(is_chat=True, response_id="chatcmpl-r0"), 0.0, "m")
    assert (request.name, request.is_request) == ("chat m", True)
    assert not any(stage.is_request for stage in stages)
    same = {"provider.name": "disagg", "request.model": "m", "response.model": "m"}
    assert gen_ai(ended(is_chat=True, response_id="chatcmpl-r0")) == {
        **same,
        "operation.name": "chat",
        "response.id": "chatcmpl-r0",
        "reasons": ("stop",),
        "error": None,
    }
    assert gen_ai(ended(outcome="slow_down")) == {
        **same,
        "operation.name": "text_completion",
        "response.id": "r0",
        "reasons": None,
        "error": "slow_down",
    }


def test_a_failure_is_an_error_with_its_code() -> None:
    request = exported_spans(ended(outcome="no_decode_capacity"), 0.0, "m")[0]
    assert (request.error, request.attributes["disagg.outcome"]) == ("no_decode_capacity", "no_decode_capacity")


def test_a_refused_request_has_its_span_and_no_first_token() -> None:
    trace = ended(marks=[], stages={"tokenize": 10.25, "end": 10.25}, outcome="slow_down", last_token_at=None)
    request, *stages = exported_spans(trace, 0.0, "m")
    assert (request.events, [stage.name for stage in stages]) == ((), ["tokenize"])


@pytest.mark.parametrize(
    ("changes", "sent"),
    [
        ({}, False),
        ({"outcome": "internal"}, True),
        ({"outcome": "cancelled"}, False),
        ({"ttft_slo_s": 0.5}, True),
        ({"ttft_slo_s": 1.5}, False),
        ({"tpot_slo_s": 0.1}, True),
        ({"trace_parent": f"00-{TRACE}-{OURS}-01"}, True),
        ({"trace_parent": f"00-{TRACE}-{OURS}-01", "is_probe": True}, False),
        ({"outcome": "internal", "is_probe": True}, False),
    ],
)
def test_what_is_sent_is_chosen_at_the_end(changes: dict[str, object], sent: bool) -> None:
    assert is_sent(ended(**changes), OPTIONS) is sent


@pytest.mark.parametrize(("sample", "among"), [(0.0, range(1)), (0.25, range(200, 301)), (1.0, range(1000, 1001))])
def test_the_share_is_chosen_by_the_id(sample: float, among: range) -> None:
    options = TracingOptions(endpoint=OPTIONS.endpoint, sample=sample)
    chosen: Callable[[], list[bool]] = lambda: [  # noqa: E731
        is_sent(ended(request_id=RequestId(f"r{i}")), options) for i in range(1000)
    ]
    assert sum(chosen()) in among
    assert chosen() == chosen()
