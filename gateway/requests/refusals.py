"""The calls that a gateway refused before a router had them: wrong fields, no quota left, a guardrail. Operators see
them beside the requests of the routers. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from disagg.gateway.requests.request import Call
from disagg.proto.errors import DisaggError
from disagg.router.api import RequestTrace
from disagg.router.telemetry.traces import TraceRing

MAX_REFUSALS: Final = 1000
"""Refused calls that are kept, of all tenants together."""
MAX_DETAIL_CHARS: Final = 500
"""Length of a kept reason: it may repeat what a client wrote."""


class Refusals:
    """Owner of the traces of refused calls. Of each call the first one is kept.

    Args:
        clock: monotonic seconds, the routers' clock.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.traces = TraceRing(MAX_REFUSALS)

    def note(
        self,
        call: Call,
        model: str,
        error: DisaggError,
        guardrails: Mapping[tuple[str, str, str, str, str], int] | None = None,
    ) -> None:
        """Keep the trace of a call.

        Args:
            call: was refused.
            model: its name; empty where it is not known.
            error: what the client gets.
            guardrails: number of results of guardrails, as a trace has them.
        """
        now = self._clock()
        trace = RequestTrace(
            request_id=call.request_id,
            arrival=now,
            stages={},
            outcome=error.code,
            detail=error.detail[:MAX_DETAIL_CHARS],
            tenant=call.caller.tenant,
            trace_parent=call.trace_parent,
            parent_span=call.parent_span,
            model=model,
            guardrails={} if guardrails is None else guardrails,
        )
        self.traces.end(trace, now)
