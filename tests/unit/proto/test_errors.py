"""Every error that a client can see has one HTTP status, one gRPC code and one machine-readable code."""

from __future__ import annotations

import re

import grpc
import pytest

from disagg.proto import errors
from disagg.proto.errors import NO_WORKER_YET, DisaggError
from disagg.router.requests.attempts import FAILURE_CODES
from disagg.router.requests.retries import MOVED, WORKER_GONE

TABLE: list[tuple[DisaggError, int, str, str, str]] = [
    (errors.InvalidRequestError("sampling.top_p", "must be in (0, 1], not 2"), 400, "INVALID_ARGUMENT", "invalid_value",
     "sampling.top_p: must be in (0, 1], not 2"),
    (errors.ContextLengthError("prompt", "too long"), 400, "INVALID_ARGUMENT", "context_length_exceeded",
     "too long"),
    (errors.ContentFilterError("prompt", "the guardrail g refuses it"), 400, "INVALID_ARGUMENT", "content_filter",
     "prompt: the guardrail g refuses it"),
    (errors.UnsamplableError("sampling", "nothing left"), 400, "INVALID_ARGUMENT", "no_token_to_sample",
     "sampling: nothing left"),
    (errors.AuthenticationError("no key"), 401, "UNAUTHENTICATED", "authentication_error", "no key"),
    (errors.PermissionDeniedError("no"), 403, "PERMISSION_DENIED", "permission_denied", "no"),
    (errors.ModelDeniedError("not yours"), 403, "PERMISSION_DENIED", "permission_denied", "not yours"),
    (errors.ModelNotFoundError("gpt", ["a", "b"]), 404, "NOT_FOUND", "model_not_found",
     "model: 'gpt' is not served here; there is a, b"),
    (errors.AdapterRemovedError("sql"), 404, "NOT_FOUND", "adapter_removed",
     "model: the adapter 'sql' was removed while this request waited"),
    (errors.AdapterNotFoundError("no sql"), 404, "NOT_FOUND", "model_not_found", "no sql"),
    (errors.DeadlineError("too late"), 408, "DEADLINE_EXCEEDED", "timeout", "too late"),
    (errors.RequestCancelledError("gone"), 499, "CANCELLED", "cancelled", "gone"),
    (errors.RequestNotFoundError("none"), 404, "NOT_FOUND", "request_not_found", "none"),
    (errors.OverloadedError("busy", retry_after_s=1.5), 429, "RESOURCE_EXHAUSTED", "slow_down", "busy"),
    (errors.LimitError("a", "running", "8 answers", 2.5), 429, "RESOURCE_EXHAUSTED", "rate_limit_exceeded",
     "running: 8 answers; try again in 2.5 s"),
    (errors.UnavailableError("no D"), 503, "UNAVAILABLE", "no_decode_capacity", "no D"),
    (errors.UnavailableError("lost", code="kv_transfer_failed"), 503, "UNAVAILABLE", "kv_transfer_failed", "lost"),
    (errors.SuspectRequestError("lost twice"), 500, "INTERNAL", "workers_lost", "lost twice"),
    (errors.InternalError("bug"), 500, "INTERNAL", "server_error", "bug"),
]  # fmt: skip


@pytest.mark.parametrize(("error", "http_status", "grpc_code", "code", "text"), TABLE, ids=lambda v: str(v)[:20])
def test_mapping(error: DisaggError, http_status: int, grpc_code: str, code: str, text: str) -> None:
    assert (error.http_status, error.grpc_code, error.code, str(error)) == (http_status, grpc_code, code, text)
    assert error.detail == text
    assert error.message == errors.CLIENT_MESSAGES.get(code, text)
    assert grpc.StatusCode[error.grpc_code].name == grpc_code


@pytest.mark.parametrize("code", [*FAILURE_CODES.values(), *WORKER_GONE, MOVED, NO_WORKER_YET])
def test_what_happens_to_workers_is_told_in_words_of_clients(code: str) -> None:
    error = errors.UnavailableError("refused on decode-0: no KV block is free", code)
    assert error.message == errors.CLIENT_MESSAGES[code]
    assert str(error) == error.detail == "refused on decode-0: no KV block is free"


@pytest.mark.parametrize("message", errors.CLIENT_MESSAGES.values())
def test_clients_read_what_they_can_do(message: str) -> None:
    assert re.search("try again|send the request again|change it", message)
    assert not re.search(r"worker|prefill|decode|block|\bKV\b|router|attempt|\b[PD]\b", message)


def test_the_table_is_complete() -> None:
    def subclasses(kind: type[DisaggError]) -> set[type[DisaggError]]:
        return {kind}.union(*(subclasses(child) for child in kind.__subclasses__()))

    own = {kind for kind in subclasses(DisaggError) if kind.__module__ == errors.__name__}
    assert own - {DisaggError} == {type(error) for error, *_ in TABLE}


def test_what_the_client_may_use() -> None:
    assert errors.InvalidRequestError("stop", "too many").field == "stop"
    assert errors.OverloadedError("busy", retry_after_s=1.5).retry_after_s == 1.5


def test_configuration_mistakes_are_value_errors_and_never_answers() -> None:
    assert issubclass(errors.ConfigError, ValueError)
    assert not issubclass(errors.ConfigError, DisaggError)
