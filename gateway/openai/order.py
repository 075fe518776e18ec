"""In which order requests are served: OpenAI's `service_tier` and vLLM's `priority`, as those of the router's queue.

A tenant's key limits how far its requests come before those of others (`max_priority`, 0 where there are several
tenants); to go behind them is always possible.
"""

from __future__ import annotations

from typing import Final

from disagg.gateway.requests.values import check_int, shown
from disagg.proto.errors import InvalidRequestError

MAX_PRIORITY: Final = 1000
TIERS: Final = {"auto": 0, "default": 0, "flex": -1, "priority": 1}
"""The priority of each in the router's queue; `flex` is that of batches."""


def read_priority(tier: str | None, priority: int | None) -> int:
    """The priority in the router's queue, where a larger one comes first; of vLLM's a smaller one does. Raises
    `InvalidRequestError`."""
    if tier is not None and tier not in TIERS:
        raise InvalidRequestError("service_tier", f"must be one of {', '.join(TIERS)}, not {shown(tier)}")
    if priority is None:
        return 0 if tier is None else TIERS[tier]
    if tier not in (None, "auto"):
        raise InvalidRequestError("priority", f"contradicts service_tier {tier}: both say when the request is served")
    return -check_int(priority, "priority", -MAX_PRIORITY, MAX_PRIORITY)


def tier_of(priority: int) -> str:
    """The tier that a request of this priority was served in."""
    return "default" if priority == 0 else "priority" if priority > 0 else "flex"
