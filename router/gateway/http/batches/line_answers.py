"""A line of a batch as a request of its tenant: behind all interactive ones, tried again until there is a verdict."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from disagg.proto.errors import DisaggError, InternalError, UnavailableError, retry_after_s
from disagg.proto.ids import RequestId
from disagg.router.gateway.auth.auth import CALLER, Authenticator
from disagg.router.gateway.auth.rights import require_inference
from disagg.router.gateway.batches.lines import Line
from disagg.router.gateway.batches.runner import LineResult
from disagg.router.gateway.batches.store import Batch
from disagg.router.gateway.guardrails.judges import UNAVAILABLE as GUARDRAIL_UNAVAILABLE
from disagg.router.gateway.http.completions import Completions
from disagg.router.gateway.http.responses.responses import RESPONSES, Responses
from disagg.router.gateway.http.transport.errors import error_json
from disagg.router.gateway.requests.request import Call, Targets
from disagg.router.gateway.usage.counts import CallUse

logger = logging.getLogger(__name__)

PRIORITY: Final = -1
_TARGETS: Final = Targets(ttft_s=86_400.0, tpot_s=3600.0)
"""That a line cannot miss: the configured ones are for people who wait."""
_MAX_LOST: Final = 5
"""Attempts that ended with a lost worker, each of which the router had tried again by itself: the line may be why."""
_MAX_UNJUDGED: Final = 20
"""Attempts that ended without a guardrail's verdict, over some six minutes: an outage must not fail a whole batch, and
a line that is why must end."""
_MAX_RETRY_S: Final = 30.0


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

    async def __call__(self, batch: Batch, line: Line) -> LineResult:
        """Status, body, and what the last try used."""
        num_lost = num_unjudged = num_tries = 0
        while True:
            use = CallUse()
            try:
                return LineResult(200, await self._run(batch, line, use), use)
            except DisaggError as error:
                num_tries += 1
                is_unjudged = error.code == GUARDRAIL_UNAVAILABLE
                num_unjudged += is_unjudged
                num_lost += isinstance(error, UnavailableError) and not error.code.startswith("no_") and not is_unjudged
                wait_s = retry_after_s(error)
                if wait_s is None or num_lost >= _MAX_LOST or num_unjudged >= _MAX_UNJUDGED:
                    use.failed = True
                    return LineResult(error.http_status, error_json(error), use)
            except Exception:
                logger.exception("batch %s: line %r failed by a bug", batch.id, line.custom_id)
                use.failed = True
                return LineResult(500, error_json(InternalError("the gateway failed; its log has the reason")), use)
            await asyncio.sleep(min(_MAX_RETRY_S, max(wait_s, 0.05 * 2 ** min(num_tries, 10))))

    async def _run(self, batch: Batch, line: Line, use: CallUse) -> bytes:
        caller = self._authenticator.find(batch.tenant, batch.credential)
        require_inference(caller)
        CALLER.set(caller)  # of this line's task
        call = Call(request_id=self._mint_id(), targets=_TARGETS, caller=caller, priority=PRIORITY, use=use)
        if batch.endpoint == RESPONSES:
            return await self._responses.line(bytes(line.body), call)
        return await self._completions.line(batch.endpoint, bytes(line.body), call)
