"""The list of requests: the state of each, and what a filter lets through."""

from __future__ import annotations

from typing import Any

import pytest

from disagg.gateway.operators.requests_list import RequestFilter, request_line, state_of_request
from disagg.proto.ids import RequestId
from disagg.router.api import RequestTrace


def trace(**changes: Any) -> RequestTrace:
    return RequestTrace(**{"request_id": RequestId("a1b2"), "arrival": 10.0, **changes})


@pytest.mark.parametrize(
    ("outcome", "attempts", "state"),
    [
        ("running", 0, "waiting"),
        ("running", 2, "running"),
        ("stop", 1, "answered"),
        ("length", 1, "answered"),
        ("stop", 0, "answered"),  # resumed after its end
        ("cancelled", 0, "cancelled"),
        ("cancelled", 1, "cancelled"),
        ("rate_limit_exceeded", 0, "refused"),
        ("worker_lost", 2, "failed"),
    ],
)
def test_the_state_of_a_request(outcome: str, attempts: int, state: str) -> None:
    assert state_of_request(trace(outcome=outcome, attempts=attempts)) == state


@pytest.mark.parametrize(
    ("changes", "passes"),
    [
        ({}, True),
        ({"id": "1b"}, True),
        ({"id": "1c"}, False),
        ({"model": "llama"}, True),
        ({"model": "lla"}, False),
        ({"state": "running"}, True),
        ({"state": "refused"}, False),
        ({"worker": "prefill-3"}, True),
        ({"worker": "decode"}, True),
        ({"worker": "decode-1"}, False),
        ({"id": "a1", "model": "llama", "state": "running", "worker": "decode-0"}, True),
        ({"id": "a1", "model": "llama", "state": "running", "worker": "decode-1"}, False),
    ],
)
def test_a_filter(changes: dict[str, str], passes: bool) -> None:
    found: Any = trace(model="llama", attempts=1, prefill_worker="prefill-3", decode_worker="decode-0")
    assert RequestFilter(**changes).lets_through(found) == passes


def test_a_request_without_a_worker_is_on_none() -> None:
    assert RequestFilter().lets_through(trace())
    assert not RequestFilter(worker="decode").lets_through(trace())


def test_a_line_of_the_list() -> None:
    found = trace(
        outcome="timeout",
        detail="no time left",
        model="llama",
        num_prompt_tokens=7,
        stages={"tokenize": 10.001, "first_token": 10.25, "end": 12.0},
    )
    assert request_line(found, 1000.0) == {
        "id": "a1b2",
        "arrived_at": 1010.0,
        "state": "refused",
        "outcome": "timeout",
        "reason": "no time left",
        "model": "llama",
        "prefill": "",
        "decode": "",
        "prompt_tokens": 7,
        "completion_tokens": 0,
        "kv_bytes": 0,
        "ttft_ms": 250.0,
        "total_ms": 2000.0,
        "is_probe": False,
    }
