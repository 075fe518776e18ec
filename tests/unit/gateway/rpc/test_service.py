from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from disagg.gateway.answers.generator import Generator
from disagg.gateway.auth.auth import CALLER, Caller
from disagg.gateway.calls import Calls
from disagg.gateway.metrics.registry import GatewayMetrics
from disagg.gateway.models.models import Models
from disagg.gateway.readiness import Readiness
from disagg.gateway.requests.refusals import Refusals
from disagg.gateway.rpc.shell.service import InferenceService
from disagg.gateway.text.tokenizer import ServedModel
from disagg.gateway.usage.recorder import UsageRecorder
from disagg.proto.errors import DisaggError, UnavailableError
from disagg.proto.ids import RequestId
from disagg.proto.messages import TokenLogprobs
from disagg.router.api import ClusterView, TokenBatch
from disagg.v1 import inference_pb2 as pb
from tests.support.gateway import FINGERPRINT, MODEL_NAME, FakeRouter, Wait, forever, grammars_here, limits_of

TRACE = "0af7651916cd43dd8448eb211c80319c"
REQUEST = pb.GenerateRequest(model=MODEL_NAME, text="x")


class CountedCalls(GatewayMetrics):
    """Keeps what is counted."""

    def __init__(self) -> None:
        super().__init__({MODEL_NAME: lambda: ClusterView((), 0, 0)})
        self.calls: list[tuple[str, str]] = []

    def count_call(self, protocol: str, outcome: str) -> None:
        self.calls.append((protocol, outcome))


def make(
    model: ServedModel,
    router: FakeRouter,
    write_timeout_s: float = 60.0,
    metrics: GatewayMetrics | None = None,
    usage: UsageRecorder | None = None,
) -> InferenceService:
    def mint_id() -> RequestId:
        return RequestId("r1")

    generator = Generator(
        model,
        router,
        limits_of(model),
        FINGERPRINT,
        clock=lambda: 0.0,
        mint_seed=lambda: 0,
        mint_id=mint_id,
        grammars=grammars_here(model),
    )
    usage = usage or UsageRecorder(None, lambda: 0.0)
    counted, refusals = metrics or CountedCalls(), Refusals(lambda: 0.0)
    calls = Calls(Models([generator]), counted, Readiness(router.view), usage, mint_id, refusals)
    return InferenceService(calls, mint_id, lambda: 0.0, lambda: 0xABC, write_timeout_s=write_timeout_s)


class FakeContext:
    """A call whose client reads everything, goes away after `num_writes` messages, or stops reading then."""

    def __init__(
        self, num_writes: int | None = None, metadata: tuple[tuple[str, str], ...] | None = None, stays: bool = False
    ) -> None:
        self.num_writes = num_writes
        self.metadata = metadata
        self.stays = stays
        self.code: grpc.StatusCode | None = None
        self.reason = ""
        self.sent_metadata: Any = None
        self.written: list[pb.GenerateResponse] = []

    def invocation_metadata(self) -> tuple[tuple[str, str], ...] | None:
        return self.metadata

    def time_remaining(self) -> None:
        return None

    async def send_initial_metadata(self, metadata: Any) -> None:
        self.sent_metadata = metadata

    async def write(self, message: pb.GenerateResponse) -> None:
        if len(self.written) == self.num_writes:
            if self.stays:
                await asyncio.Event().wait()
            raise grpc.aio.InternalError("nobody reads")
        self.written.append(message)

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: Any) -> None:
        self.code = code
        status = status_pb2.Status.FromString(dict(trailing_metadata)["grpc-status-details-bin"])
        info = error_details_pb2.ErrorInfo()
        status.details[0].Unpack(info)
        self.reason = info.reason
        raise grpc.aio.AbortError(details)


async def test_a_client_that_is_gone_cancels_and_is_no_fault_of_ours(
    model: ServedModel, caplog: pytest.LogCaptureFixture
) -> None:
    router, metrics = FakeRouter(lambda _: forever([5])), CountedCalls()
    context: Any = FakeContext(num_writes=2)
    with pytest.raises(grpc.aio.AbortError):
        await make(model, router, metrics=metrics).Generate(REQUEST, context)
    assert (context.code, context.reason) == (grpc.StatusCode.CANCELLED, "cancelled")
    assert router.handles[0].num_cancels == 1
    assert metrics.calls == [("grpc", "cancelled")]
    assert caplog.record_tuples == []


async def test_a_client_that_does_not_read_loses_its_stream(model: ServedModel) -> None:
    router, metrics = FakeRouter(lambda _: forever([5])), CountedCalls()
    context: Any = FakeContext(num_writes=2, stays=True)
    with pytest.raises(grpc.aio.AbortError, match=r"nothing was read for 1e-06 s"):
        await make(model, router, write_timeout_s=1e-6, metrics=metrics).Generate(REQUEST, context)
    assert (context.code, context.reason) == (grpc.StatusCode.UNAVAILABLE, "stream_lost")
    assert len(context.written) == 2
    assert router.handles[0].num_cancels == 1
    assert metrics.calls == [("grpc", "stream_lost")]


async def test_a_timeout_of_another_kind_is_a_fault(model: ServedModel, caplog: pytest.LogCaptureFixture) -> None:
    router, metrics = FakeRouter([TimeoutError("a bug")]), CountedCalls()
    context: Any = FakeContext()
    with pytest.raises(grpc.aio.AbortError):
        await make(model, router, metrics=metrics).Generate(REQUEST, context)
    assert context.code is grpc.StatusCode.INTERNAL
    assert "TimeoutError: a bug" in caplog.text
    assert metrics.calls == [("grpc", "server_error")]


async def test_a_wrong_target_is_an_answer_and_reaches_nobody(model: ServedModel) -> None:
    router, metrics = FakeRouter(lambda _: forever([5])), CountedCalls()
    context: Any = FakeContext(metadata=(("x-slo-ttft-ms", "fast"),))
    with pytest.raises(grpc.aio.AbortError, match="x-slo-ttft-ms: must be a number of milliseconds"):
        await make(model, router, metrics=metrics).Generate(REQUEST, context)
    assert context.code is grpc.StatusCode.INVALID_ARGUMENT
    assert router.handles == []
    assert metrics.calls == [("grpc", "invalid_value")]


async def test_targets_and_the_caller_travel_with_the_request(model: ServedModel) -> None:
    router = FakeRouter([[5]])
    context: Any = FakeContext(metadata=(("x-slo-ttft-ms", "400"), ("x-slo-tpot-ms", "20")))
    token = CALLER.set(Caller("acme", False))
    await make(model, router).Generate(REQUEST, context)
    CALLER.reset(token)
    ((routed, _),) = router.submitted
    assert (routed.ttft_slo_s, routed.tpot_slo_s, routed.tenant) == (0.4, 0.02, "acme")


@pytest.mark.parametrize(
    ("metadata", "session_id", "in_session"),
    [((), "", False), ((("x-session-id", "a"),), "", True), ((), "a", True)],
)
async def test_a_session_is_named_by_metadata_or_the_field(
    model: ServedModel, metadata: tuple[tuple[str, str], ...], session_id: str, in_session: bool
) -> None:
    router = FakeRouter([[5]])
    context: Any = FakeContext(metadata=metadata)
    await make(model, router).Generate(
        pb.GenerateRequest(model=REQUEST.model, text="x", session_id=session_id), context
    )
    assert router.submitted[0][0].in_session == in_session


@pytest.mark.parametrize(
    ("metadata", "sent", "trace_parent"),
    [
        (None, (), ""),
        ((("x-request-id", "a" * 300), ("x-request-id", "b")), (("x-request-id", "a" * 256),), ""),
        ((("x-request-id", "a\nb"),), (), ""),
        ((("x-request-id", "\u00e9"),), (), ""),
        ((("x-request-id", ""),), (), ""),
        (
            (("traceparent", f"00-{TRACE}-b7ad6b7169203331-00"),),
            (("traceparent", f"00-{TRACE}-0000000000000abc-00"),),
            f"00-{TRACE}-0000000000000abc-00",
        ),
    ],
    ids=["nothing", "label", "label with a line end", "label not ASCII", "empty label", "trace"],
)
async def test_the_call_begins_with_its_metadata(
    model: ServedModel,
    metadata: tuple[tuple[str, str], ...] | None,
    sent: tuple[tuple[str, str], ...],
    trace_parent: str,
) -> None:
    router = FakeRouter([[5]])
    context: Any = FakeContext(metadata=metadata)
    await make(model, router).Generate(REQUEST, context)
    assert context.sent_metadata == (("x-disagg-request-id", "r1"), *sent)
    assert router.submitted[0][0].trace_parent == trace_parent


def with_logprobs() -> FakeRouter:
    logprobs = [TokenLogprobs(-0.5, (5, 6), (-0.5, -1.5)), TokenLogprobs(-2.0, (7, 8), (-0.25, -2.0))]
    return FakeRouter([TokenBatch([5, 8], logprobs)])


def written_logprobs() -> list[pb.TokenLogprob]:
    def top(token_id: int, logprob: float) -> pb.TopLogprob:
        return pb.TopLogprob(token_id=token_id, logprob=logprob)

    return [
        pb.TokenLogprob(logprob=-0.5, top=[top(5, -0.5), top(6, -1.5)]),
        pb.TokenLogprob(logprob=-2.0, top=[top(7, -0.25), top(8, -2.0)]),
    ]


async def test_what_is_streamed(model: ServedModel) -> None:
    context: Any = FakeContext()
    metrics = CountedCalls()
    request = pb.GenerateRequest(model=MODEL_NAME, text="x", sampling=pb.SamplingParams(logprobs=2))
    await make(model, with_logprobs(), metrics=metrics).Generate(request, context)
    text = model.tokenizer.decode([5, 8])
    finished = pb.Finished(
        reason=pb.FINISH_REASON_LENGTH, usage=pb.Usage(prompt_tokens=2, completion_tokens=2), request_id="r1"
    )
    assert context.written == [
        pb.GenerateResponse(delta=pb.TokenDelta(token_ids=[5, 8], text=text, logprobs=written_logprobs())),
        pb.GenerateResponse(finished=finished),
    ]
    assert metrics.calls == [("grpc", "ok")]


async def test_several_answers_say_which_they_are(model: ServedModel) -> None:
    context: Any = FakeContext()
    await make(model, FakeRouter([[5]])).Generate(pb.GenerateRequest(model=MODEL_NAME, text="x", n=2), context)
    deltas = [response.delta.answer_index for response in context.written if response.HasField("delta")]
    ends = [response.finished.answer_index for response in context.written if response.HasField("finished")]
    assert (sorted(deltas), sorted(ends)) == ([0, 1], [0, 1])


async def test_an_answer_at_once(model: ServedModel) -> None:
    context: Any = FakeContext()
    request = pb.GenerateRequest(model=MODEL_NAME, text="x", n=1, sampling=pb.SamplingParams(logprobs=2))
    metrics = CountedCalls()
    service = make(model, with_logprobs(), metrics=metrics)
    answer = await service.GenerateOnce(pb.GenerateOnceRequest(request=request), context)
    assert list(answer.token_ids) == [5, 8]
    assert list(answer.logprobs) == written_logprobs()
    assert answer.text == model.tokenizer.decode([5, 8])
    assert answer.finished.request_id == "r1"
    assert metrics.calls == [("grpc", "ok")]


async def test_several_answers_do_not_come_at_once(model: ServedModel) -> None:
    router, metrics = FakeRouter([[5]]), CountedCalls()
    context: Any = FakeContext()
    once = pb.GenerateOnceRequest(request=pb.GenerateRequest(model=MODEL_NAME, text="x", n=2))
    with pytest.raises(grpc.aio.AbortError, match="n: GenerateOnce gives one answer"):
        await make(model, router, metrics=metrics).GenerateOnce(once, context)
    assert context.code is grpc.StatusCode.INVALID_ARGUMENT
    assert router.handles == []
    assert metrics.calls == [("grpc", "invalid_value")]


@pytest.mark.parametrize("error", [UnavailableError("lost", "worker_lost"), asyncio.CancelledError()])
async def test_calls_are_counted_by_their_end(model: ServedModel, error: DisaggError | asyncio.CancelledError) -> None:
    metrics = CountedCalls()
    context: Any = FakeContext()
    router = FakeRouter([Wait()] if isinstance(error, asyncio.CancelledError) else [error])
    task = asyncio.create_task(make(model, router, metrics=metrics).Generate(REQUEST, context))
    await router.arrived.wait()
    if isinstance(error, asyncio.CancelledError):
        task.cancel()
    with pytest.raises((grpc.aio.AbortError, asyncio.CancelledError)):
        await task
    assert metrics.calls == [("grpc", "cancelled" if isinstance(error, asyncio.CancelledError) else "worker_lost")]
    assert router.handles[0].num_cancels == 1
