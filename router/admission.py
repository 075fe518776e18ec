"""What is refused at once, before anything is held: out of time, no worker, too long, too many in the queue."""

from __future__ import annotations

from disagg.proto.errors import ContextLengthError, DeadlineError, DisaggError, OverloadedError, UnavailableError
from disagg.router.api import RoutedRequest
from disagg.router.config import RouterConfig
from disagg.router.fleet import Fleet


def refusal(
    request: RoutedRequest, fleet: Fleet, num_queued: int, config: RouterConfig, now: float
) -> DisaggError | None:
    """Why this request cannot be taken now; None when it can be queued."""
    if request.deadline is not None and request.deadline <= now:
        return DeadlineError("the deadline passed before the request was queued")
    num_prompt_tokens = len(request.prompt_token_ids)
    if not fleet.could_take(request.block_hashes, num_prompt_tokens, config.short_suffix_tokens):
        role = fleet.missing_role()
        if role is not None:
            return UnavailableError(f"there is no {role} worker", f"no_{role}_capacity")
        limit = fleet.longest_sequence
        return ContextLengthError(
            "prompt", f"{num_prompt_tokens} tokens and at least one of the answer do not fit into {limit} tokens"
        )
    if num_queued >= config.max_queued:
        return OverloadedError(f"{num_queued} requests are waiting", config.retry_after_s)
    return None
