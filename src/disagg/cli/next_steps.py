"""What a user can do after an error of the gateway. Pure."""

from __future__ import annotations

from disagg.cluster.system.program import command
from disagg.proto import errors
from disagg.proto.errors import DisaggError


def with_next_step(error: DisaggError) -> str:
    """The error in one line, with the next step where there is one."""
    step = next_step(error)
    return f"{error}; next: {step}" if step else str(error)


def next_step(error: DisaggError) -> str:
    """The next step after an error of the gateway; empty where its message names it, or nothing can be done."""
    match error:
        case errors.AuthenticationError():
            return "set DISAGG_API_KEY to a key of this cluster"
        case errors.PermissionDeniedError():
            return "set DISAGG_API_KEY to the key of an administrator"
        case errors.RequestNotFoundError():
            return command("explain --list")
        case errors.UnavailableError(code="unreachable"):
            return command("doctor")
        case errors.UnavailableError():
            return command("status")
        case errors.OverloadedError(retry_after_s=wait_s):
            return "" if wait_s is None else f"try again in {wait_s:g} s, or add workers: {command('scale decode=2')}"
    return ""
