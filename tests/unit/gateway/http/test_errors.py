"""Every error has one form, and says whether to come back."""

from __future__ import annotations

import json

import pytest

from disagg.gateway.http.errors import (
    MethodNotAllowedError,
    SlowBodyError,
    UnknownUrlError,
    error_headers,
    error_json,
)
from disagg.proto.errors import (
    AuthenticationError,
    ContextLengthError,
    DeadlineError,
    DisaggError,
    InternalError,
    InvalidRequestError,
    LimitError,
    ModelNotFoundError,
    OverloadedError,
    PermissionDeniedError,
    RequestCancelledError,
    UnavailableError,
)

CASES: list[tuple[DisaggError, int, str, str | None, str]] = [
    (InvalidRequestError("top_p", "x"), 400, "invalid_request_error", "top_p", "invalid_value"),
    (ContextLengthError("max_tokens", "x"), 400, "invalid_request_error", "max_tokens", "context_length_exceeded"),
    (AuthenticationError("x"), 401, "authentication_error", None, "authentication_error"),
    (PermissionDeniedError("x"), 403, "permission_error", None, "permission_denied"),
    (ModelNotFoundError("a", ["b"]), 404, "invalid_request_error", "model", "model_not_found"),
    (UnknownUrlError("x"), 404, "invalid_request_error", None, "unknown_url"),
    (MethodNotAllowedError("x", "POST"), 405, "invalid_request_error", None, "method_not_allowed"),
    (DeadlineError("x"), 408, "timeout_error", None, "timeout"),
    (SlowBodyError("x"), 408, "timeout_error", None, "timeout"),
    (OverloadedError("x", 0.25), 429, "rate_limit_error", None, "slow_down"),
    (RequestCancelledError("x"), 499, "cancelled", None, "cancelled"),
    (InternalError("x"), 500, "server_error", None, "server_error"),
    (UnavailableError("x"), 503, "server_error", None, "no_decode_capacity"),
    (UnavailableError("x", "kv_transfer_failed"), 503, "server_error", None, "kv_transfer_failed"),
]


@pytest.mark.parametrize(("error", "status", "kind", "param", "code"), CASES)
def test_the_form_of_an_error(error: DisaggError, status: int, kind: str, param: str | None, code: str) -> None:
    assert error.http_status == status
    assert json.loads(error_json(error)) == {
        "error": {"message": error.message, "type": kind, "param": param, "code": code}
    }


@pytest.mark.parametrize(("error", "status"), [(case[0], case[1]) for case in CASES])
def test_what_clients_try_again_by_themselves_says_when_or_that_it_is_pointless(
    error: DisaggError, status: int
) -> None:
    names = {name for name, _ in error_headers(error)}
    by_themselves = status in (408, 409, 429) or status >= 500
    assert ("retry-after-ms" in {name.decode() for name in names}) == (status in (429, 503))
    assert bool(names & {b"retry-after-ms", b"x-should-retry"}) == by_themselves


def test_when_to_come_back_is_told_in_both_units() -> None:
    assert error_headers(OverloadedError("x", 1.2001)) == [(b"retry-after-ms", b"1201"), (b"retry-after", b"2")]
    assert error_headers(OverloadedError("x", 0.0)) == [(b"retry-after-ms", b"1"), (b"retry-after", b"1")]
    assert error_headers(DeadlineError("x")) == [(b"x-should-retry", b"false")]


def test_who_may_try_again_with_a_key_and_which_methods_there_are() -> None:
    assert error_headers(AuthenticationError("x")) == [(b"www-authenticate", b"Bearer")]
    assert error_headers(MethodNotAllowedError("x", "GET, HEAD")) == [(b"allow", b"GET, HEAD")]


def test_a_long_message_is_cut() -> None:
    message = json.loads(error_json(InternalError("x" * 5000)))["error"]["message"]
    assert message == "x" * 1000 + "..."


def test_a_limit_that_will_always_be_in_the_way_says_not_to_try_again() -> None:
    error = LimitError("a", "tokens_per_minute", "asks for too many", None)
    assert error_headers(error) == [(b"x-should-retry", b"false")]
    assert b'"message":"tokens_per_minute: asks for too many","type":"rate_limit_error"' in error_json(error)
