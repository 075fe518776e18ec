"""What a call takes, in which order, and that it gives everything back once, however it is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from typing_extensions import override

from disagg.gateway.answers.generator import Generator
from disagg.gateway.auth.auth import Caller
from disagg.gateway.calls import Calls, CallScope, Origin, Times
from disagg.gateway.metrics.registry import GatewayMetrics
from disagg.gateway.metrics.registry import Protocol as ProtocolName
from disagg.gateway.models.models import Models
from disagg.gateway.openai.to_input import FieldNames
from disagg.gateway.readiness import Readiness
from disagg.gateway.requests.answer_events import Delta, Finish
from disagg.gateway.requests.call_use import CallUse
from disagg.gateway.requests.refusals import MAX_DETAIL_CHARS, Refusals
from disagg.gateway.requests.request import Call, GenerationInput, IdsPrompt, Targets
from disagg.gateway.requests.structured import StructuredOutput
from disagg.gateway.requests.validate import CheckedRequest
from disagg.gateway.text.tokenizer import ServedModel
from disagg.gateway.usage.recorder import UsageRecorder
from disagg.proto.errors import (
    ContentFilterError,
    DeadlineError,
    DisaggError,
    InvalidRequestError,
    LimitError,
    ModelNotFoundError,
    RequestCancelledError,
    UnavailableError,
)
from disagg.proto.ids import RequestId
from disagg.router.api import CallDemand, RequestTrace, RoutedRequest, TenantLimits
from tests.support.gateway import FINGERPRINT, MODEL_NAME, FakeHandle, FakeRouter, Wait, grammars_here, limits_of

NOW = 100.0
CALLER = Caller("a", False, TenantLimits(requests_per_minute=60))
LEAST_TOKENS = 1 + 8
"""Of one answer to a prompt of one id."""


class Recorder(UsageRecorder):
    """Notes what would be written."""

    def __init__(self, log: list[str]) -> None:
        super().__init__(None, lambda: NOW)
        self._log = log

    @override
    def _add(self, tenant: str, use: CallUse, *, failed: bool, is_open: bool) -> bool:
        if use.model:
            self._log.append(f"recorded, failed {failed}: {use.completion_tokens} tokens")
        return False


class Metrics(GatewayMetrics):
    def __init__(self, log: list[str]) -> None:
        super().__init__({})
        self._log = log

    @override
    def count_call(self, protocol: ProtocolName, outcome: str) -> None:
        self._log.append(f"counted {protocol} {outcome}")


class Router(FakeRouter):
    def __init__(self, log: list[str], script: Any) -> None:
        super().__init__(script)
        self._log = log

    @override
    def admit(self, call: CallDemand) -> None:
        super().admit(call)
        self._log.append(f"charged {call.num_answers} answers")

    @override
    def refund(self, tenant: str, num_tokens: int, num_answers: int) -> None:
        super().refund(tenant, num_tokens, num_answers)
        self._log.append(f"refunded {num_answers} answers")

    @override
    def submit(self, request: RoutedRequest, arrival: float) -> FakeHandle:
        self._log.append("submitted")
        return super().submit(request, arrival)


class LoggedGenerator(Generator):
    """Refuses prompts that begin with a 9, as a guardrail would."""

    log: list[str]

    @override
    async def check_grammar(self, checked: CheckedRequest, call: Call) -> None:
        self.log.append("grammar")
        await super().check_grammar(checked, call)

    @override
    async def check_prompt(self, checked: CheckedRequest, call: Call) -> CheckedRequest:
        assert isinstance(checked.prompt, IdsPrompt)
        self.log.append(f"guardrails {checked.prompt.token_ids[0]}")
        if checked.prompt.token_ids[0] == 9:
            raise ContentFilterError("prompt.token_ids", "no")
        return await super().check_prompt(checked, call)


class Gateway:
    """A gateway with one model, without front ends."""

    def __init__(self, model: ServedModel, script: Any = ((75,), (76,))) -> None:
        self.log: list[str] = []
        self.router = Router(self.log, [list(step) if isinstance(step, tuple) else step for step in script])
        ids = (RequestId(f"r{i}") for i in range(1, 99))
        self.generator = LoggedGenerator(
            model,
            self.router,
            limits_of(model),
            FINGERPRINT,
            clock=lambda: NOW,
            mint_seed=lambda: 7,
            mint_id=lambda: next(ids),
            grammars=grammars_here(model),
        )
        self.generator.log = self.log
        self.readiness = Readiness(self.router.view)
        models = Models([self.generator])
        self.refusals = Refusals(lambda: 5.0)
        self.calls = Calls(
            models, Metrics(self.log), self.readiness, Recorder(self.log), lambda: next(ids), self.refusals
        )

    @property
    def num_running(self) -> int:
        """Calls for which a drain would wait."""
        return self.readiness._num_running

    @asynccontextmanager
    async def call(self, *inputs: GenerationInput, times: Times | None = None) -> AsyncIterator[CallScope]:
        """A call over HTTP that is admitted."""
        async with self.calls.open(origin(protocol="http")) as scope:
            scope.find(inputs[0].model)
            self.admitted = await scope.admit(inputs, times=times)
            assert self.num_running == 1
            yield scope

    async def answer(self, *inputs: GenerationInput, times: Times | None = None) -> list[Delta | Finish]:
        """All events of a call."""
        async with self.call(*inputs, times=times) as scope:
            events = [event async for event in scope.events(self.admitted)]
            self.log.append("ended")
            await scope.finished()
            self.log.append("sent")
            return events


def origin(**fields: Any) -> Origin:
    return Origin(request_id=RequestId("r0"), caller=CALLER, **fields)


def asked(*token_ids: int, **fields: Any) -> GenerationInput:
    usual: dict[str, Any] = {"model": MODEL_NAME, "prompt": IdsPrompt(token_ids or (5,)), "max_tokens": 8}
    return GenerationInput(**{**usual, **fields})


@pytest.fixture
def gateway(model: ServedModel) -> Gateway:
    return Gateway(model)


async def test_a_call_takes_everything_in_one_order_and_its_use_is_recorded_before_its_end(gateway: Gateway) -> None:
    await gateway.answer(asked(5, n=2), asked(6, n=2))
    assert gateway.log == [
        "charged 4 answers",
        "grammar",
        "guardrails 5",
        "guardrails 6",
        *["submitted"] * 4,
        "ended",
        "recorded, failed False: 8 tokens",
        "sent",
        "counted http ok",
    ]
    assert (gateway.router.given_back, gateway.num_running) == ([], 0)


async def test_answers_are_counted_through_all_prompts_and_have_ids_of_their_own(gateway: Gateway) -> None:
    events = await gateway.answer(asked(5, n=2), asked(6, n=2), asked(7, n=2))
    ends = [event for event in events if isinstance(event, Finish)]
    assert sorted(end.answer_index for end in ends) == [0, 1, 2, 3, 4, 5]
    assert len({end.request_id for end in ends}) == 6
    first = next(end for end in ends if end.answer_index == 0)
    assert first.request_id == "r0"


@pytest.mark.parametrize(
    ("inputs", "times", "error", "log"),
    [
        ([asked(model="another")], None, ModelNotFoundError, ["counted http model_not_found"]),
        ([asked(5, top_p=7.0)], None, InvalidRequestError, ["counted http invalid_value"]),
        (
            [asked(5)],
            Times(deadline=NOW),
            DeadlineError,
            ["recorded, failed True: 0 tokens", "counted http timeout"],
        ),
        (
            [asked(5), asked(9), asked(6)],
            None,
            ContentFilterError,
            [
                "charged 3 answers",
                "grammar",
                "guardrails 5",
                "guardrails 9",
                "refunded 3 answers",
                "recorded, failed True: 0 tokens",
                "counted http content_filter",
            ],
        ),
    ],
)
async def test_a_call_that_is_refused_gives_back_what_it_took_until_then(
    gateway: Gateway, inputs: Sequence[GenerationInput], times: Times | None, error: type[Exception], log: list[str]
) -> None:
    with pytest.raises(error):
        await gateway.answer(*inputs, times=times)
    assert (gateway.log, gateway.num_running, gateway.router.submitted) == (log, 0, [])


async def test_a_limit_refuses_a_call_before_anybody_is_asked_about_it(gateway: Gateway) -> None:
    gateway.router.limit = LimitError("a", "requests_per_minute", "too many", 1.0)
    with pytest.raises(LimitError):
        await gateway.answer(asked(5), asked(6))
    assert gateway.log == ["recorded, failed True: 0 tokens", "counted http rate_limit_exceeded"]
    assert (gateway.router.given_back, gateway.num_running) == ([], 0)


async def test_a_grammar_is_looked_at_before_the_guardrails_and_once(gateway: Gateway, model: ServedModel) -> None:
    form = StructuredOutput("regex", "(", "structured.regex")
    with pytest.raises(InvalidRequestError) as caught:
        await gateway.answer(asked(9, structured=form), asked(6, structured=form))
    assert caught.value.field == "structured.regex"
    assert gateway.log[:3] == ["charged 2 answers", "grammar", "refunded 2 answers"]


async def test_an_answer_that_fails_fails_the_call(model: ServedModel) -> None:
    gateway = Gateway(model, [(75, 76), UnavailableError("gone", "worker_lost")])
    with pytest.raises(UnavailableError):
        await gateway.answer(asked(5), asked(6))
    assert gateway.log[-2:] == ["recorded, failed True: 4 tokens", "counted http worker_lost"]
    assert [handle.num_cancels for handle in gateway.router.handles] == [1, 1]
    assert (gateway.router.given_back, gateway.num_running) == ([], 0)


async def test_what_was_charged_for_answers_that_nobody_read_is_given_back(gateway: Gateway) -> None:
    async with gateway.call(asked(5, n=2)):
        pass
    assert gateway.log[-3:] == ["refunded 2 answers", "recorded, failed False: 0 tokens", "counted http ok"]
    assert gateway.router.given_back == [("a", 2 * LEAST_TOKENS, 2)]


class FrontEndError(Exception):
    """A bug of a front end."""


@pytest.mark.parametrize(
    ("error", "recorded", "outcome"),
    [
        (None, "failed False", "ok"),
        (RequestCancelledError("the client is gone"), "failed False", "cancelled"),
        (UnavailableError("nothing was read", "stream_lost"), "failed True", "stream_lost"),
        (FrontEndError(), "failed True", "server_error"),
    ],
)
async def test_a_front_end_that_leaves_the_events_cancels_the_answers(
    model: ServedModel, error: Exception | None, recorded: str, outcome: str
) -> None:
    gateway = Gateway(model, [(75,), Wait()])

    async def leave() -> None:
        async with gateway.call(asked(5), asked(6)) as scope:
            async for _ in scope.events(gateway.admitted):
                if error is not None:
                    raise error
                break

    if error is None:
        await leave()
    else:
        with pytest.raises(type(error)):
            await leave()
    *_, written, counted = gateway.log
    assert written.startswith(f"recorded, {recorded}: ")
    assert counted == f"counted http {outcome}"
    assert sum(line.startswith("recorded") for line in gateway.log) == 1
    assert [handle.cancelled.is_set() for handle in gateway.router.handles] == [True] * len(gateway.router.handles)
    assert len(gateway.router.handles) + sum(num for _, _, num in gateway.router.given_back) == 2
    assert gateway.num_running == 0


async def test_a_cancelled_task_gives_everything_back(model: ServedModel) -> None:
    gateway = Gateway(model, [(75,), Wait()])
    task = asyncio.create_task(gateway.answer(asked(5), asked(6)))
    await gateway.router.arrived.wait()
    for handle in gateway.router.handles:
        await handle.waiting.wait()
    assert gateway.num_running == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert gateway.log[-2:] == ["recorded, failed False: 2 tokens", "counted http cancelled"]
    assert [handle.num_cancels for handle in gateway.router.handles] == [1, 1]
    assert (gateway.router.given_back, gateway.num_running) == ([], 0)


async def test_a_finished_call_is_recorded_once_though_its_end_cannot_be_sent(gateway: Gateway) -> None:
    async def lose_the_end() -> None:
        async with gateway.call(asked()) as scope:
            async for _ in scope.events(gateway.admitted):
                pass
            await scope.finished()
            raise UnavailableError("nothing was read", "stream_lost")

    with pytest.raises(UnavailableError):
        await lose_the_end()
    assert gateway.log[-2:] == ["recorded, failed False: 2 tokens", "counted http stream_lost"]


async def test_a_gateway_that_stops_takes_no_call_but_lines_of_its_batches(gateway: Gateway) -> None:
    gateway.readiness.begin_drain()
    with pytest.raises(UnavailableError):
        async with gateway.calls.open(origin(protocol="http")):
            pytest.fail("it is open")
    assert gateway.log == ["counted http gateway_stopping"]
    async with gateway.calls.open(origin()) as scope:
        assert gateway.num_running == 0
        scope.find(MODEL_NAME)
        async for _ in scope.events(await scope.admit([asked()])):
            pass
        await scope.finished()
    assert gateway.log[1:] == ["charged 1 answers", "grammar", "guardrails 5", "submitted"]
    assert (scope.call.use.completion_tokens, scope.call.use.is_recorded) == (2, False)


@pytest.mark.parametrize(("largest", "given", "priority"), [(None, 3, 3), (1, 3, 1), (1, -2, -2), (-1, 0, -1)])
async def test_an_origin_bounds_the_priority(gateway: Gateway, largest: int | None, given: int, priority: int) -> None:
    async with gateway.calls.open(origin(max_priority=largest)) as scope:
        scope.find(MODEL_NAME)
        await scope.admit([asked()], priority=given)
        assert scope.call.priority == priority


async def test_targets_are_those_of_the_client_or_of_the_origin(gateway: Gateway) -> None:
    for times, targets in ((None, Targets(9.0, 8.0)), (Times(targets=Targets(ttft_s=1.0)), Targets(1.0))):
        async with gateway.calls.open(origin(targets=Targets(9.0, 8.0))) as scope:
            scope.find(MODEL_NAME)
            await scope.admit([asked()], times=times)
            assert scope.call.targets == targets


@pytest.mark.parametrize(
    ("inputs", "field"),
    [
        ([asked(5), asked(prompt=IdsPrompt(()))], "prompt[1]"),
        ([asked(5), asked(9)], "prompt[1]"),
        ([asked(5, max_tokens=200), asked(6, max_tokens=200)], "max_completion_tokens"),
    ],
)
async def test_errors_name_the_fields_of_the_protocol(
    gateway: Gateway, inputs: Sequence[GenerationInput], field: str
) -> None:
    names = [FieldNames(f"prompt[{i}]", "logprobs", "max_completion_tokens") for i in range(len(inputs))]

    async def answer() -> None:
        async with gateway.calls.open(origin(protocol="http")) as scope:
            scope.find(MODEL_NAME)
            async for _ in scope.events(await scope.admit(inputs, names)):
                pytest.fail("nothing is answered")

    with pytest.raises(InvalidRequestError) as caught:
        await answer()
    assert caught.value.field == field


async def refused(gateway: Gateway, error: DisaggError | None = None, protocol: ProtocolName | None = "http") -> None:
    """A call that the gateway refuses, for a wrong field or with `error` once its model is found."""

    async def call() -> None:
        async with gateway.calls.open(origin(protocol=protocol)) as scope:
            scope.find(MODEL_NAME)
            if error is not None:
                raise error
            await scope.admit([asked(max_tokens=0)])

    with pytest.raises(DisaggError):
        await call()


async def test_a_refused_call_is_kept_for_operators_with_its_reason(gateway: Gateway) -> None:
    await refused(gateway)
    (kept,) = gateway.refusals.traces.latest(9)
    assert (kept.request_id, kept.arrival, kept.outcome, kept.attempts) == ("r0", 5.0, "invalid_value", 0)
    assert kept.detail == "stopping.max_tokens: must be at least 1, not 0"
    assert (kept.tenant, kept.model) == ("a", MODEL_NAME)


async def test_a_reason_that_is_kept_is_bounded(gateway: Gateway) -> None:
    await refused(gateway, InvalidRequestError("stop", "x" * 10_000))
    (kept,) = gateway.refusals.traces.latest(9)
    assert len(kept.detail) == MAX_DETAIL_CHARS


async def test_a_call_that_begins_while_the_gateway_stops_is_kept_without_a_model(gateway: Gateway) -> None:
    gateway.readiness.begin_drain()
    with pytest.raises(UnavailableError):
        async with gateway.calls.open(origin(protocol="http")):
            pytest.fail("it is open")
    assert [(kept.outcome, kept.model) for kept in gateway.refusals.traces.latest(9)] == [("gateway_stopping", "")]


async def test_what_the_router_had_a_client_that_left_and_lines_of_batches_are_no_refusals(gateway: Gateway) -> None:
    await refused(gateway, protocol=None)
    await refused(gateway, RequestCancelledError("gone"))
    gateway.router.traces[RequestId("r0")] = RequestTrace(request_id=RequestId("r0"))
    await refused(gateway)
    assert gateway.refusals.traces.latest(9) == []
