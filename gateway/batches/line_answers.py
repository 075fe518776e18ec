"""A line of a batch as a request of its tenant: behind all interactive ones, tried again until there is a verdict."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from disagg.gateway.auth.auth import CALLER, Authenticator
from disagg.gateway.auth.shell.rights import require_inference
from disagg.gateway.batches.begun_lines import MAX_ENDS
from disagg.gateway.batches.lines import Line
from disagg.gateway.batches.runner import MAX_WAIT_S, Later, LineResult
from disagg.gateway.batches.store import Batch
from disagg.gateway.batches.tries import Tries
from disagg.gateway.calls import Origin
from disagg.gateway.http.errors import error_json
from disagg.gateway.openai.shell.completions import Completions
from disagg.gateway.other_apis.shell.responses import RESPONSES, Responses
from disagg.gateway.requests.call_use import CallUse
from disagg.gateway.requests.request import Targets
from disagg.gateway.requests.verdicts import UNJUDGED
from disagg.proto.errors import DisaggError, InternalError, UnavailableError, retry_after_s
from disagg.proto.ids import RequestId

logger = logging.getLogger(__name__)

PRIORITY: Final = -1
_TARGETS: Final = Targets(ttft_s=86_400.0, tpot_s=3600.0)
"""That a line cannot miss: the configured ones are for people who wait."""
_MAX_LOST: Final = 5
"""Attempts that ended with a lost worker, each of which the router had tried again by itself: the line may be why."""
_MAX_UNJUDGED: Final = 20
"""Attempts that ended without a guardrail's verdict, over some six minutes: an outage must not fail a whole batch, and
a line that is why must end."""


class LineAnswers:
    """Answers lines, see `runner.AnswerLine`.

    Args:
        completions: what answers HTTP requests too.
        authenticator: knows what the key that ordered a batch may do now.
        mint_id: a request id that was never used.
    """

    def __init__(
        self, completions: Completions, authenticator: Authenticator, mint_id: Callable[[], RequestId]
    ) -> None:
        self._completions = completions
        self._responses = Responses(completions)
        self._authenticator = authenticator
        self._mint_id = mint_id

    async def __call__(self, batch: Batch, line: Line, tries: Tries) -> LineResult | Later:
        """Status, body and use; or when to try again."""
        use = CallUse()
        try:
            if tries.num_ends >= MAX_ENDS:
                raise InternalError(f"{tries.num_ends} gateways ended while this line ran; it is not run again")
            return LineResult(200, await self._run(batch, line, use), use)
        except DisaggError as error:
            if (later := _later(error, tries)) is not None:
                return later
            use.failed = True
            return LineResult(error.http_status, error_json(error), use)
        except Exception:
            logger.exception("batch %s: line %r failed by a bug", batch.id, line.custom_id)
            use.failed = True
            return LineResult(500, error_json(InternalError("the gateway failed; its log has the reason")), use)

    def most_running(self, batch: Batch) -> int | None:
        """By the limits of the key that ordered the batch, as they are now."""
        try:
            return self._authenticator.find(batch.tenant, batch.credential).limits.running
        except DisaggError:
            return None  # the line's own try says what is wrong

    async def _run(self, batch: Batch, line: Line, use: CallUse) -> bytes:
        caller = self._authenticator.find(batch.tenant, batch.credential)
        require_inference(caller)
        CALLER.set(caller)  # of this line's task
        origin = Origin(request_id=self._mint_id(), caller=caller, max_priority=PRIORITY, targets=_TARGETS, use=use)
        if batch.endpoint == RESPONSES:
            return await self._responses.line(bytes(line.body), origin)
        return await self._completions.line(batch.endpoint, bytes(line.body), origin)


def _later(error: DisaggError, tries: Tries) -> Later | None:
    """When a line is tried again that ended so; None where this is its answer. Notes the try."""
    is_unjudged = error.code == UNJUDGED
    is_lost = isinstance(error, UnavailableError) and not error.code.startswith("no_") and not is_unjudged
    tries.num += 1
    tries.num_unjudged += is_unjudged
    tries.num_lost += is_lost
    wait_s = retry_after_s(error)
    if wait_s is None or tries.num_lost >= _MAX_LOST or tries.num_unjudged >= _MAX_UNJUDGED:
        return None
    wait_s = min(MAX_WAIT_S, max(wait_s, 0.05 * 2 ** min(tries.num, 10)))
    return Later(wait_s, holds_others=not is_lost and not is_unjudged)
