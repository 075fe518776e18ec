from __future__ import annotations

from typing import Any

import grpc
import pytest

from disagg.proto.ids import RequestId
from disagg.router.gateway.generation import Generator
from disagg.router.gateway.service import InferenceService
from disagg.router.gateway.tokenizer import ServedModel
from disagg.v1 import inference_pb2 as pb
from tests.support.gateway import FINGERPRINT, MODEL_NAME, FakeRouter, forever, limits_of


class GoneContext:
    """A call whose client went away after `num_writes` messages."""

    def __init__(self, num_writes: int, metadata: tuple[tuple[str, str], ...] | None = None) -> None:
        self.num_writes = num_writes
        self.metadata = metadata
        self.code: grpc.StatusCode | None = None

    def invocation_metadata(self) -> tuple[tuple[str, str], ...] | None:
        return self.metadata

    def time_remaining(self) -> None:
        return None

    async def send_initial_metadata(self, metadata: Any) -> None:
        assert metadata == (("x-disagg-request-id", "r1"),)

    async def write(self, message: pb.GenerateResponse) -> None:
        if self.num_writes == 0:
            raise grpc.aio.InternalError("nobody reads")
        self.num_writes -= 1

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: Any) -> None:
        self.code = code
        raise grpc.aio.AbortError(details)


async def test_a_client_that_is_gone_cancels_and_is_no_fault_of_ours(
    model: ServedModel, caplog: pytest.LogCaptureFixture
) -> None:
    router = FakeRouter(lambda _: forever([5]))
    generator = Generator(model, router, limits_of(model), FINGERPRINT, clock=lambda: 0.0, mint_seed=lambda: 0)
    context: Any = GoneContext(num_writes=2)
    service = InferenceService(generator, lambda: RequestId("r1"), lambda: 0.0)
    with pytest.raises(grpc.aio.AbortError):
        await service.Generate(pb.GenerateRequest(model=MODEL_NAME, text="x"), context)
    assert context.code is grpc.StatusCode.CANCELLED
    assert router.handles[0].num_cancels == 1
    assert caplog.record_tuples == []


async def test_a_wrong_target_is_an_answer_and_reaches_nobody(model: ServedModel) -> None:
    router = FakeRouter(lambda _: forever([5]))
    generator = Generator(model, router, limits_of(model), FINGERPRINT, clock=lambda: 0.0, mint_seed=lambda: 0)
    context: Any = GoneContext(num_writes=2, metadata=(("x-slo-ttft-ms", "fast"),))
    service = InferenceService(generator, lambda: RequestId("r1"), lambda: 0.0)
    with pytest.raises(grpc.aio.AbortError, match="x-slo-ttft-ms: must be a number of milliseconds"):
        await service.Generate(pb.GenerateRequest(model=MODEL_NAME, text="x"), context)
    assert context.code is grpc.StatusCode.INVALID_ARGUMENT
    assert router.handles == []


async def test_targets_travel_with_the_request(model: ServedModel) -> None:
    router = FakeRouter(lambda _: forever([5]))
    generator = Generator(model, router, limits_of(model), FINGERPRINT, clock=lambda: 0.0, mint_seed=lambda: 0)
    context: Any = GoneContext(num_writes=0, metadata=(("x-slo-ttft-ms", "400"), ("x-slo-tpot-ms", "20")))
    service = InferenceService(generator, lambda: RequestId("r1"), lambda: 0.0)
    with pytest.raises(grpc.aio.AbortError):
        await service.Generate(pb.GenerateRequest(model=MODEL_NAME, text="x"), context)
    ((routed, _),) = router.submitted
    assert (routed.ttft_slo_s, routed.tpot_slo_s) == (0.4, 0.02)
