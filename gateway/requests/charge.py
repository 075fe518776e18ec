"""The charge of a call before anything is done for it, so that it is refused completely or not at all.

Charge: admitted ──tokenized──> ──submitted, for each answer──> the router's from here on
            └──close──> what was never submitted is given back
"""

from __future__ import annotations

from collections.abc import Sequence

from disagg.gateway.auth.auth import Caller
from disagg.gateway.requests.request import GenerationInput, IdsPrompt
from disagg.proto.errors import LimitError
from disagg.router.api import CallDemand, Router


class Charge:
    """The charge of one call. Owner: the call, which must close it.

    Args:
        router: charges.
        caller: whose call it is.
        inputs: the prompts, checked.

    Raises:
        LimitError: if a limit of the caller's tenant is in the way; nothing is charged then.
    """

    def __init__(self, router: Router, caller: Caller, inputs: Sequence[GenerationInput]) -> None:
        self._router = router
        self._tenant = caller.tenant
        self._most_tokens = caller.limits.tokens_per_minute
        self._num_tokens = 0
        """Tokens of all answers to the prompts that are tokenized."""
        self._left = sum((given.n or 1) * least_tokens(given) for given in inputs)
        self._num_answers = sum(given.n or 1 for given in inputs)
        """Number of answers that are not submitted yet."""
        router.admit(
            CallDemand(tenant=caller.tenant, limits=caller.limits, num_answers=self._num_answers, num_tokens=self._left)
        )

    def tokenized(self, num_tokens: int) -> None:
        """Note that the answers to a prompt have `num_tokens` in all. Raises `LimitError` if those of the call so far
        are more than a whole minute has: each alone may fit, but the next one will never be left its part."""
        self._num_tokens += num_tokens
        if self._most_tokens is not None and self._num_tokens > self._most_tokens:
            raise LimitError.beyond_a_minute(self._tenant, "tokens_per_minute", self._num_tokens, self._most_tokens)

    def submitted(self, num_tokens: int) -> None:
        """Note that the router has taken an answer with `num_tokens` prepaid tokens."""
        self._left -= num_tokens
        self._num_answers -= 1

    def close(self) -> None:
        """Refund the answers that were not submitted. Idempotent."""
        if self._num_answers:
            self._router.refund(self._tenant, self._left, self._num_answers)
            self._left = self._num_answers = 0


def least_tokens(given: GenerationInput) -> int:
    """The least tokens that one answer is charged, as far as they are known before the prompt is tokenized."""
    num_prompt_tokens = len(given.prompt.token_ids) if isinstance(given.prompt, IdsPrompt) else 1
    if given.truncate_prompt_tokens is not None:
        num_prompt_tokens = max(1, min(num_prompt_tokens, given.truncate_prompt_tokens))
    return num_prompt_tokens + (1 if given.max_tokens is None else given.max_tokens)
