"""What one tenant may take of a gateway, and what one call asks for. Plain data."""

from __future__ import annotations

import msgspec


class TenantLimits(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Of one tenant, whatever key it uses. None is no limit. The gateway's file of keys says them, see
    `gateway/api_keys.py`."""

    requests_per_minute: int | None = None
    """Answers that it may ask for: each of the `n` of each prompt is one."""
    tokens_per_minute: int | None = None
    """Prompt tokens, and output tokens. An answer is charged `max_tokens`; what it did not take is given back."""
    running: int | None = None
    """Answers that workers are at; further ones wait."""
    queued: int | None = None
    """Answers that wait for a worker."""
    weight: float = 1.0
    """Its share of tokens while others wait, compared with theirs."""
    max_priority: int | None = None
    """Requests of a higher priority get this one."""
    min_ttft_s: float = 0.0
    """Requests with a tighter target for the first token are queued as if they had this one."""
    boosted: int | None = None
    """Requests at a time that are queued by a target of their own; further ones are queued as if they had none."""
    is_sole: bool = True
    """Whether there is no other tenant. Else it gets a share of the queue and of the places to decode at most, so that
    there is always room for others."""


NO_LIMITS = TenantLimits()
"""Where there are no keys."""


class CallDemand(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one call of a client asks for, as far as it can be seen before it is tokenized."""

    tenant: str
    limits: TenantLimits
    num_answers: int
    """Of all its prompts together."""
    num_tokens: int
    """That they take at least, charged as a request is."""
