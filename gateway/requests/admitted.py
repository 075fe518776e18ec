"""A prompt that may be queued: what a generator answers. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from disagg.gateway.requests.charge import Charge
from disagg.gateway.requests.request import Call
from disagg.gateway.requests.validate import CheckedRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmittedPrompt:
    """One prompt of a call that is valid, charged, and allowed by the guardrails; `calls.CallScope.admit` makes it."""

    call: Call
    """With the id of this prompt's first answer."""
    checked: CheckedRequest
    arrival: float
    """When the call was found valid, on the generator's clock."""
    charge: Charge | None
    """What was charged for the whole call; None where the tenant has no limits."""
    least_tokens: int
    """Tokens that were charged for each answer."""

    @property
    def prepaid_tokens(self) -> int | None:
        """What the router finds charged already with each answer; None where nothing was."""
        return None if self.charge is None else self.least_tokens
