"""For the gateway's tests: one prompt through a call, without a front end."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from disagg.gateway.answers.generator import Generator
from disagg.gateway.calls import Calls, Origin, Times
from disagg.gateway.metrics.registry import GatewayMetrics
from disagg.gateway.models.models import Models
from disagg.gateway.readiness import Readiness
from disagg.gateway.requests.answer_events import Delta, Finish
from disagg.gateway.requests.refusals import Refusals
from disagg.gateway.requests.request import Call, GenerationInput
from disagg.gateway.usage.recorder import UsageRecorder
from disagg.proto.ids import RequestId
from disagg.router.api import ClusterView

NO_CLUSTER = ClusterView((), 0, 0)


def calls_of(generator: Generator) -> Calls:
    """The calls of a gateway with one model, which records no use."""
    models, usage = Models([generator]), UsageRecorder(None, lambda: 0.0)
    refusals = Refusals(lambda: 0.0)
    return Calls(
        models, GatewayMetrics({}), Readiness(lambda: NO_CLUSTER), usage, lambda: RequestId("another"), refusals
    )


async def answer(generator: Generator, given: GenerationInput, call: Call) -> AsyncGenerator[Delta | Finish, None]:
    """The events of a call with one prompt. Close them (`contextlib.aclosing`) when leaving them early. Raises
    whatever is wrong with the call."""
    origin = Origin(
        request_id=call.request_id,
        caller=call.caller,
        trace_parent=call.trace_parent,
        parent_span=call.parent_span,
        use=call.use,
    )
    async with calls_of(generator).open(origin) as scope:
        scope.find(given.model)
        times = Times(deadline=call.deadline, targets=call.targets)
        async for event in scope.events(await scope.admit([given], times=times, priority=call.priority)):
            yield event
