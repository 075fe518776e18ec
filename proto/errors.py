"""What can go wrong, as one tree, with its mapping to gRPC and HTTP.

    DisaggError
    ├── InvalidRequestError        400  INVALID_ARGUMENT     the client's input; names the field
    │   ├── ContextLengthError     400  INVALID_ARGUMENT
    │   ├── ContentFilterError     400  INVALID_ARGUMENT     a guardrail refuses the prompt
    │   └── UnsamplableError       400  INVALID_ARGUMENT
    ├── AuthenticationError        401  UNAUTHENTICATED
    ├── PermissionDeniedError      403  PERMISSION_DENIED
    │   └── ModelDeniedError       403  PERMISSION_DENIED    the caller's key is for other models
    ├── ModelNotFoundError         404  NOT_FOUND
    │   ├── AdapterRemovedError    404  NOT_FOUND            the request waited while its adapter was removed
    │   └── AdapterNotFoundError   404  NOT_FOUND
    ├── RequestNotFoundError       404  NOT_FOUND
    ├── DeadlineError              408  DEADLINE_EXCEEDED
    ├── RequestCancelledError      499  CANCELLED
    ├── OverloadedError            429  RESOURCE_EXHAUSTED   carries when to come back
    │   └── LimitError             429  RESOURCE_EXHAUSTED   a limit of the caller's tenant; names it
    ├── UnavailableError           503  UNAVAILABLE          no worker, or a leg of the request was lost
    └── InternalError              500  INTERNAL
        └── SuspectRequestError    500  INTERNAL             workers were lost while they computed it

Configuration and start-up mistakes are `ConfigError` (a `ValueError`): they never reach a client.

A client reads `message`, which says what it can do. What only an operator can use, such as the worker and the reason
that it gave, is `detail`: for the log, and for `disagg explain` of an admin.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

_TRY_AGAIN: Final = "the model cannot answer now; try again in some seconds"
_BROKE_OFF: Final = "the answer broke off, and the server could not continue it by itself; try again"

CLIENT_MESSAGES: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(("no_prefill_capacity", "no_decode_capacity", "retry_budget"), _TRY_AGAIN),
        "no_worker_yet": "the model is started for the requests that come; try again in some seconds",
        "no_version_capacity": "the model was changed after this answer began, so nothing can continue it; send the "
        "request again from its beginning",
        **dict.fromkeys(("worker_lost", "worker_stuck", "worker_suspected", "worker_left"), _BROKE_OFF),
        **dict.fromkeys(("prefill_failed", "kv_transfer_failed", "decode_failed"), _BROKE_OFF),
        "workers_lost": "this request failed again and again while it was computed, so it is not tried any more; "
        "change it, for example by a shorter prompt",
        "adapter_unavailable": "the adapter cannot be loaded now, as its files were moved or changed; try again "
        "when its owner has added it anew",
        "shutting_down": "the server is stopping; try again in some seconds",
    }
)
"""Messages by error code that clients read about errors inside the cluster."""


ADAPTER_DETAIL: Final = "adapter "
"""Beginning of the detail of a sequence whose end is due to its adapter: `adapter NAME: reason`."""

GRAMMAR_TOO_LARGE: Final = (
    "the form of the answer cannot be followed any further: repetitions inside repetitions are too many"
)
"""Detail of a sequence whose grammar went beyond a limit while it was used."""


class DisaggError(Exception):
    """Base of all errors that are answered to a client.

    Args:
        message: for the client.
        detail: for operators; the message where it is empty.
    """

    http_status = 500
    grpc_code = "INTERNAL"
    code = "server_error"

    def __init__(self, message: str, detail: str = "") -> None:
        self.detail = detail or message
        super().__init__(self.detail)
        self.message = message


class InvalidRequestError(DisaggError):
    """The input is wrong; `field` is the path of the field as the client wrote it, such as `sampling.top_p`."""

    http_status = 400
    grpc_code = "INVALID_ARGUMENT"
    code = "invalid_value"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class ContextLengthError(InvalidRequestError):
    """Prompt plus answer can never fit.

    The message begins as that of other servers does, since their clients fall back to another model by it; the field is
    named beside it only. Use `too_long` to make one.
    """

    code = "context_length_exceeded"

    def __init__(self, field: str, message: str) -> None:
        DisaggError.__init__(self, message)
        self.field = field

    @classmethod
    def too_long(cls, field: str, context_length: int, why: str) -> ContextLengthError:
        """The error of a sequence that does not fit into `context_length` tokens."""
        return cls(field, f"This model's maximum context length is {context_length} tokens. However, {why}")


class ContentFilterError(InvalidRequestError):
    """A guardrail of the operator refuses the prompt."""

    code = "content_filter"


class UnsamplableError(InvalidRequestError):
    """The sampling settings, each of which is allowed, leave no token that can be sampled. Found while sampling."""

    code = "no_token_to_sample"


class AuthenticationError(DisaggError):
    """There is no API key where one is needed, or an unknown one. The message never repeats it."""

    http_status = 401
    grpc_code = "UNAUTHENTICATED"
    code = "authentication_error"


class PermissionDeniedError(DisaggError):
    """The caller is known and may not do this."""

    http_status = 403
    grpc_code = "PERMISSION_DENIED"
    code = "permission_denied"


class ModelDeniedError(PermissionDeniedError):
    """The model is not one of those that the caller's key is for."""


class ModelNotFoundError(DisaggError):
    """The model is not served here."""

    http_status = 404
    grpc_code = "NOT_FOUND"
    code = "model_not_found"

    def __init__(self, model: str, served: list[str]) -> None:
        super().__init__(f"model: {model!r} is not served here; there is {', '.join(served)}")


class AdapterRemovedError(ModelNotFoundError):
    """The request named an adapter that was removed before it was placed on a worker."""

    code = "adapter_removed"

    def __init__(self, name: str) -> None:
        DisaggError.__init__(self, f"model: the adapter {name!r} was removed while this request waited")


class AdapterNotFoundError(ModelNotFoundError):
    """An operator named an adapter that is not there."""

    def __init__(self, message: str) -> None:
        DisaggError.__init__(self, message)


class RequestNotFoundError(DisaggError):
    """No request of this id runs or is remembered."""

    http_status = 404
    grpc_code = "NOT_FOUND"
    code = "request_not_found"


class DeadlineError(DisaggError):
    """The request's deadline passed."""

    http_status = 408
    grpc_code = "DEADLINE_EXCEEDED"
    code = "timeout"


class RequestCancelledError(DisaggError):
    """The client disconnected or cancelled."""

    http_status = 499
    grpc_code = "CANCELLED"
    code = "cancelled"


class OverloadedError(DisaggError):
    """The request was refused because of load. It may be accepted `retry_after_s` seconds from now; None if it would be
    refused at any time."""

    http_status = 429
    grpc_code = "RESOURCE_EXHAUSTED"
    code = "slow_down"

    def __init__(self, message: str, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class LimitError(OverloadedError):
    """The tenant of the caller is at one of its limits."""

    code = "rate_limit_exceeded"

    def __init__(self, tenant: str, limit: str, message: str, retry_after_s: float | None) -> None:
        when = "" if retry_after_s is None else f"; try again in {max(retry_after_s, 0.001):.3g} s"
        super().__init__(f"{limit}: {message}{when}", retry_after_s)
        self.tenant = tenant
        self.limit = limit

    @classmethod
    def beyond_a_minute(cls, tenant: str, limit: str, num_asked: int, per_minute: int) -> LimitError:
        """The error of a call that asks for more than a whole minute has, and is refused at any time."""
        what = limit.partition("_")[0]
        hint = "set a smaller max_tokens" if what == "tokens" else "ask for fewer answers in one call"
        asked = f"tenant {tenant} asks for {num_asked} {what} at once, and may have {per_minute} a minute"
        return cls(tenant, limit, f"{asked}; {hint}", None)


class UnavailableError(DisaggError):
    """No worker can serve this now; `code` names the leg that is missing or failed."""

    http_status = 503
    grpc_code = "UNAVAILABLE"
    code = "no_decode_capacity"

    def __init__(self, detail: str, code: str = "no_decode_capacity") -> None:
        super().__init__(CLIENT_MESSAGES.get(code, detail), detail)
        self.code = code


NO_WORKER_YET = "no_worker_yet"
"""Code of an `UnavailableError`: a worker is being started, because one died or because the request needs one."""


class InternalError(DisaggError):
    """A bug or fault inside the cluster."""


class SuspectRequestError(InternalError):
    """Worker after worker was lost while it computed this request, which is not tried again for that reason."""

    code = "workers_lost"

    def __init__(self, detail: str) -> None:
        super().__init__(CLIENT_MESSAGES[self.code], detail)


class ConfigError(ValueError):
    """A configuration, checkpoint or command line that cannot work; the message names the place and what is allowed."""


UNAVAILABLE_RETRY_S = 1.0
"""Seconds after which to try again after an `UnavailableError`, which carries no time: a restarted worker is found
within them."""


def retry_after_s(error: DisaggError) -> float | None:
    """Seconds after which what failed with `error` may be tried again; None where that would be pointless."""
    if isinstance(error, OverloadedError):
        return error.retry_after_s
    return UNAVAILABLE_RETRY_S if isinstance(error, UnavailableError) else None
