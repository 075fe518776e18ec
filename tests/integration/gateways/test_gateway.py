"""The gateway over loopback gRPC, with a router that follows a script: everything that a client can see."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, closing
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from disagg.client import Answer, AsyncClient, Client, Delta, Finished, Usage, error_of
from disagg.gateway.config import GatewayConfig
from disagg.gateway.requests.headers import LABEL, REQUEST_ID
from disagg.gateway.server import SERVICE_NAMES, GatewayServer
from disagg.proto.errors import (
    ConfigError,
    ContextLengthError,
    DeadlineError,
    DisaggError,
    InternalError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    RequestCancelledError,
    RequestNotFoundError,
    UnavailableError,
)
from disagg.proto.ids import Incarnation, RequestId, WorkerId
from disagg.proto.messages import KvLayout, Load, WorkerInfo
from disagg.proto.token_ids import unpack_token_ids
from disagg.router.api import ClusterView, Completion, RequestTrace, WorkerView
from disagg.v1 import inference_pb2 as pb
from disagg.v1 import inference_pb2_grpc as pb_grpc
from tests.support.gateway import (
    EOS,
    FINGERPRINT,
    MAX_MODEL_LEN,
    MODEL_NAME,
    VOCAB_SIZE,
    FakeRouter,
    Wait,
    forever,
)
from tests.support.gateway_server import running, sources
from tests.support.waiting import eventually

WAIT_S = 60.0
"""How long anything may take before a test fails."""


def ids(server: GatewayServer, text: str) -> list[int]:
    return server.models[""].tokenizer.encode_text(text)[1:]


async def collect(client: AsyncClient, *args: Any, **kwargs: Any) -> list[Delta]:
    async with aclosing(client.stream(*args, **kwargs)) as deltas:
        return [delta async for delta in deltas]


async def drain(call: Any) -> None:
    """Read what is left, to the end or the error."""
    while (await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]  # not in the stubs
        pass


async def read_into(seen: list[Delta], events: AsyncIterator[Delta]) -> None:
    """Read to the end; `seen` has what came before an error."""
    async for event in events:
        seen.append(event)  # noqa: PERF401 - a comprehension would lose what came before an error


# ---------------------------------------------------------------- answers


async def test_a_stream(folder: Path) -> None:
    router = FakeRouter()
    async with running(folder, router) as server, AsyncClient(server.address) as client:
        first, second = ids(server, "hello 🙂")[:-1], ids(server, "🙂")[-1:]
        router.script = lambda _: [first, second, [EOS], Completion("stop", 0, 16)]
        deltas = await collect(client, "the cat", max_tokens=50, seed=5)
    routed = router.submitted[0][0]
    assert server.models[""].tokenizer.decode(unpack_token_ids(routed.prompt_token_ids)) == "the cat"
    assert (routed.sampling.max_tokens, routed.sampling.seed) == (50, 5)
    usage = Usage(routed.num_prompt_tokens, 16, len(first) + 2)
    assert deltas == [
        Delta("hello ", tuple(first)),
        Delta("🙂", tuple(second)),
        Delta("", (EOS,)),
        Delta("", (), Finished("stop", usage, routed.request_id)),
    ]
    assert router.handles[0].num_cancels == 0


async def test_a_whole_answer(folder: Path) -> None:
    router = FakeRouter([[5], [6, 7]])
    async with running(folder, router) as server, AsyncClient(server.address) as client:
        answer = await client.generate([9, 10, 11], model=MODEL_NAME)
        text = await client.detokenize([5, 6, 7])
    routed = router.submitted[0][0]
    assert unpack_token_ids(routed.prompt_token_ids) == [9, 10, 11]
    assert answer == Answer(text, (5, 6, 7), "length", Usage(3, 0, 3), routed.request_id)


async def test_a_stop_string_ends_the_stream_and_cancels(folder: Path) -> None:
    router = FakeRouter()
    async with running(folder, router) as server, AsyncClient(server.address) as client:
        router.script = lambda _: [ids(server, "one E"), ids(server, "ND two"), Wait()]
        answer = await client.generate("x", stop="END")
    assert (answer.text, answer.reason) == ("one ", "stop")
    assert router.handles[0].num_cancels == 1


async def test_the_blocking_client(folder: Path) -> None:
    def use(address: str) -> tuple[list[Delta], Answer, list[int], str, list[pb.Model]]:
        with Client(address) as client:
            deltas = list(client.stream("x", max_tokens=3))
            tokens = client.tokenize("hello")
            return deltas, client.generate("x"), tokens, client.detokenize(tokens), client.models()

    router = FakeRouter([[5, 6]])
    async with running(folder, router) as server:
        deltas, answer, tokens, text, models = await asyncio.to_thread(use, server.address)
        expected = server.models[""].tokenizer.encode_text("hello")
    assert [delta.token_ids for delta in deltas] == [(5, 6), ()]
    assert answer.token_ids == (5, 6)
    assert (tokens, text) == (expected, "hello")
    assert models == [pb.Model(name=MODEL_NAME, max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB_SIZE)]


async def test_tokenize(folder: Path) -> None:
    router = FakeRouter()
    async with running(folder, router) as server, AsyncClient(server.address) as client:
        chat = [{"role": "user", "content": "hi"}]
        await client.generate(chat)
        assert await client.tokenize(chat) == unpack_token_ids(router.submitted[0][0].prompt_token_ids)
        assert await client.detokenize([]) == ""
        large = await client.tokenize("the cat " * 4000)
        assert await client.detokenize(large) == "the cat " * 4000
        assert [model.name for model in await client.models()] == [MODEL_NAME]


async def test_the_label_comes_back_with_our_id(folder: Path) -> None:
    router = FakeRouter([[5]])
    async with running(folder, router) as server, grpc.aio.insecure_channel(server.address) as channel:
        stub: Any = pb_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        request = pb.GenerateRequest(model=MODEL_NAME, text="x")
        for label in ("mine", "mine"):
            call = stub.Generate(request, metadata=((LABEL, label),))
            metadata = dict(await call.initial_metadata())
            finished = [response async for response in call][-1].finished
            assert metadata[LABEL] == "mine"
            assert metadata[REQUEST_ID] == finished.request_id
        bad = stub.Generate(pb.GenerateRequest(), metadata=((LABEL, "x" * 300),))
        metadata = dict(await bad.initial_metadata())
        assert metadata[LABEL] == "x" * 256
        assert await bad.code() is grpc.StatusCode.NOT_FOUND
    assert len({routed.request_id for routed, _ in router.submitted}) == 2


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"temperature": float("nan")}, "sampling.temperature"),
        ({"top_p": 1.5}, "sampling.top_p"),
        ({"max_tokens": 0}, "stopping.max_tokens"),
        ({"stop": ["a", ""]}, "stopping.stop[1]"),
        ({"prompt": []}, "prompt.token_ids"),
        ({"prompt": [1, 2, 3, VOCAB_SIZE]}, "prompt.token_ids[3]"),
        ({"prompt": [{"role": "user", "content": "x"}, {"role": "robot", "content": "x"}]}, "chat.messages[1].role"),
        ({"prompt": [{"role": "user", "content": "x"}, {"role": "system", "content": "x"}]}, "chat.messages"),
        ({"prompt": "x" * ((1 << 20) + 1)}, "prompt.text"),
    ],
)
async def test_a_wrong_field_is_named(folder: Path, options: dict[str, Any], field: str) -> None:
    router = FakeRouter()
    async with running(folder, router) as server, AsyncClient(server.address) as client:
        for call in (collect, AsyncClient.generate):
            with pytest.raises(InvalidRequestError) as caught:
                await call(client, **({"prompt": "x"} | options))
            assert type(caught.value) is InvalidRequestError
            assert caught.value.field == field
    assert router.submitted == []


async def test_what_does_not_fit_the_context(folder: Path) -> None:
    async with running(folder, FakeRouter()) as server, AsyncClient(server.address) as client:
        for prompt, options, field in (
            ([1] * MAX_MODEL_LEN, {}, "prompt.token_ids"),
            ("qz" * 5000, {}, "prompt.text"),
            ("x", {"max_tokens": MAX_MODEL_LEN}, "stopping.max_tokens"),
        ):
            with pytest.raises(ContextLengthError) as caught:
                await client.generate(prompt, **options)  # type: ignore[arg-type]
            assert caught.value.field == field


async def test_unknown_models_ids_and_requests(folder: Path) -> None:
    async with running(folder, FakeRouter()) as server, AsyncClient(server.address) as client:
        for call in (
            client.generate("x", model="y"),
            client.tokenize("x", model="y"),
            client.detokenize([1], model="y"),
        ):
            with pytest.raises(ModelNotFoundError, match="'y' is not served here; there is tiny"):
                await call
        with pytest.raises(InvalidRequestError) as caught:
            await client.detokenize([1, VOCAB_SIZE])
        assert caught.value.field == "token_ids[1]"
        with pytest.raises(InvalidRequestError) as caught:
            await client.tokenize("x" * ((1 << 20) + 1))
        assert caught.value.field == "text"
        with pytest.raises(RequestNotFoundError):
            await client.explain("nobody")


@pytest.mark.parametrize(
    "error",
    [
        OverloadedError("full", 1.5),
        UnavailableError("no worker", "no_prefill_capacity"),
        DeadlineError("late"),
        RequestCancelledError("drained"),
        InternalError("broken"),
    ],
)
@pytest.mark.parametrize("refused", [True, False], ids=["at once", "after a token"])
async def test_the_routers_errors_arrive(folder: Path, error: DisaggError, refused: bool) -> None:
    router = FakeRouter(refusal=error) if refused else FakeRouter([[5], error])
    async with running(folder, router) as server, AsyncClient(server.address) as client:
        seen: list[Delta] = []
        with pytest.raises(type(error)) as caught:
            await read_into(seen, client.stream("x"))
        with pytest.raises(type(error)):
            await client.generate("x")
    assert (caught.value.message, caught.value.code) == (error.message, error.code)
    assert getattr(caught.value, "retry_after_s", None) == getattr(error, "retry_after_s", None)
    assert len(seen) == (0 if refused else 1)


async def test_a_bug_is_logged_and_not_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    router = FakeRouter([ValueError("secret")])
    async with running(folder, router) as server, AsyncClient(server.address) as client:
        with pytest.raises(InternalError) as caught:
            await client.generate("x")
    assert "secret" not in caught.value.message
    assert "ValueError: secret" in caplog.text
    assert router.handles[0].num_cancels == 1


async def test_a_text_that_is_too_large(folder: Path) -> None:
    async with running(folder, FakeRouter()) as server, AsyncClient(server.address) as client:
        with pytest.raises(InvalidRequestError, match=r"prompt\.text: at most 1048576 bytes, not 1048577"):
            await client.generate("x" * ((1 << 20) + 1), model=MODEL_NAME)
        with pytest.raises(DisaggError) as caught:
            await client.generate("x" * (5 << 20), model=MODEL_NAME)
    assert caught.value.grpc_code == "RESOURCE_EXHAUSTED"


@pytest.mark.parametrize("method", ["Generate", "GenerateOnce", "ListModels", "Tokenize", "Detokenize"])
async def test_bytes_that_are_no_message(folder: Path, method: str, caplog: pytest.LogCaptureFixture) -> None:
    router = FakeRouter()
    async with running(folder, router) as server, grpc.aio.insecure_channel(server.address) as channel:
        path = f"/disagg.v1.InferenceService/{method}"
        call: Any = (channel.unary_stream if method == "Generate" else channel.unary_unary)(path, None, None)(
            b"\xff\xff"
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await (drain(call) if method == "Generate" else call)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == f"request: is no disagg.v1.{method}Request message"
    assert (router.handles, caplog.text) == ([], "")


async def test_a_text_that_is_not_utf8(folder: Path) -> None:
    raw = pb.GenerateRequest(model=MODEL_NAME, text="XX").SerializeToString().replace(b"XX", b"\xff\xfe")
    async with running(folder, FakeRouter()) as server, grpc.aio.insecure_channel(server.address) as channel:
        call: Any = channel.unary_stream("/disagg.v1.InferenceService/Generate", None, None)(raw)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await drain(call)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error_of(caught.value).__dict__["field"] == "prompt.text"


async def test_nobody_listens() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
        async with AsyncClient(address) as client:
            with pytest.raises(UnavailableError) as caught:
                await client.models()
    assert caught.value.code == "unreachable"


# ---------------------------------------------------------------- leaving early


async def test_the_calls_deadline_is_the_requests(folder: Path) -> None:
    router = FakeRouter([[5], Wait()])
    async with running(folder, router) as server, AsyncClient(server.address) as client:
        with pytest.raises(DeadlineError):
            await client.generate("x", model=MODEL_NAME, timeout_s=2.0)
        routed, arrival = router.submitted[0]
        assert routed.deadline is not None
        assert 0 < routed.deadline - arrival <= 2.01  # gRPC rounds a timeout up on its way
        await asyncio.wait_for(router.handles[0].cancelled.wait(), WAIT_S)
        router.script = lambda _: ()
        await client.generate("x")
        assert router.submitted[1][0].deadline is None


async def test_leaving_a_stream_cancels(folder: Path) -> None:
    router = FakeRouter([[5], Wait()])
    async with running(folder, router) as server, AsyncClient(server.address) as client:
        async with aclosing(client.stream("x")) as deltas:
            assert (await anext(deltas)).token_ids == (5,)
        await asyncio.wait_for(router.handles[0].cancelled.wait(), WAIT_S)


async def test_leaving_a_blocking_stream_cancels(folder: Path) -> None:
    def leave(client: Client) -> tuple[int, ...]:
        with closing(client.stream("x")) as deltas:
            return next(deltas).token_ids

    router = FakeRouter([[5], Wait()])
    async with running(folder, router) as server:
        with Client(server.address) as client:
            assert await asyncio.to_thread(leave, client) == (5,)
            await asyncio.wait_for(router.handles[0].cancelled.wait(), WAIT_S)


async def test_a_cancelled_call_cancels(folder: Path) -> None:
    router = FakeRouter([Wait()])
    async with running(folder, router) as server, AsyncClient(server.address) as client:
        call = asyncio.create_task(client.generate("x"))
        await asyncio.wait_for(router.arrived.wait(), WAIT_S)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.wait_for(router.handles[0].cancelled.wait(), WAIT_S)


FIXED_WINDOW = (("grpc.http2.bdp_probe", 0),)
"""Keeps the client's flow control window, which bounds what is in flight, small; else it grows with the bandwidth."""


@pytest.mark.parametrize("leave", ["cancel", "close", "stay"])
async def test_a_client_that_does_not_read_stops_the_reading(
    folder: Path, leave: str, caplog: pytest.LogCaptureFixture
) -> None:
    """gRPC's flow control reaches the router's handle: nothing is buffered without bound in between."""
    batch = [5] * 1000
    router = FakeRouter(lambda _: forever(batch))
    async with running(folder, router) as server:
        channel = grpc.aio.insecure_channel(server.address, options=FIXED_WINDOW)
        stub: Any = pb_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        call = stub.Generate(pb.GenerateRequest(model=MODEL_NAME, text="x"))
        first = await call.read()
        handle, seen = router.handles[0], -1
        while handle.num_reads != seen:
            seen = handle.num_reads
            await asyncio.sleep(0.2)
        assert seen * first.ByteSize() < 256 << 10
        for _ in range(3 * seen):
            await call.read()
        assert handle.num_reads > 3 * seen
        if leave == "cancel":
            call.cancel()
        if leave == "close":
            await channel.close(None)
        if leave == "stay":
            await server.stop(0.0)
            with pytest.raises(grpc.aio.AioRpcError):
                await drain(call)
        await asyncio.wait_for(handle.cancelled.wait(), WAIT_S)
        await channel.close(None)
    assert handle.num_cancels == 1
    assert caplog.record_tuples == []


# ---------------------------------------------------------------- operators


async def test_the_state_of_the_cluster(folder: Path) -> None:
    info = WorkerInfo(
        worker_id=WorkerId("decode-0"),
        incarnation=Incarnation("i1"),
        roles=("prefill", "decode"),
        address="10.0.0.1:7",
        pid=42,
        fingerprint=FINGERPRINT,
        kv_layout=KvLayout.dense(num_layers=1, num_kv_heads=1, head_dim=1, dtype="fake", bytes_per_token=8),
        num_blocks=100,
        block_size=16,
        max_num_seqs=8,
        token_budget=64,
        max_model_len=128,
    )
    load = Load(num_running=3, num_waiting=2, blocks_total=100, blocks_active=40, blocks_cached=7, blocks_reserved=5)
    router = FakeRouter()
    router.cluster = ClusterView((WorkerView(info, load),), num_queued=11, num_running=5)
    async with running(folder, router) as server, AsyncClient(server.address) as client:
        state = await client.cluster_state()
    worker = pb.WorkerState(
        worker_id="decode-0",
        roles=["prefill", "decode"],
        address="10.0.0.1:7",
        incarnation="i1",
        pid=42,
        sequences=5,
        kv_blocks_total=100,
        kv_blocks_active=40,
        kv_blocks_cached=7,
        kv_blocks_reserved=5,
        fingerprint=FINGERPRINT,
        tokens_per_step=1.0,
        tp=1,
        pp=1,
    )
    assert state == pb.GetClusterStateResponse(workers=[worker], queued_requests=11, running_requests=5)


async def test_where_a_request_ran(folder: Path) -> None:
    router = FakeRouter()
    router.traces[RequestId("r1")] = RequestTrace(
        request_id=RequestId("r1"),
        prefill_worker=WorkerId("prefill-0"),
        decode_worker=None,
        transport="gloo",
        kv_bytes=1 << 40,
        prefill_cached_tokens=16,
        decode_cached_tokens=32,
        attempts=2,
        arrival=10.0,
        stages={"tokenize": 10.5, "end": 12.0},
    )
    async with running(folder, router) as server, AsyncClient(server.address) as client:
        found = await client.explain("r1")
    assert found.arrived_at > 0
    found.ClearField("arrived_at")
    assert found == pb.ExplainRequestResponse(
        request_id="r1",
        prefill_worker="prefill-0",
        transport="gloo",
        kv_bytes=1 << 40,
        prefill_cached_tokens=16,
        decode_cached_tokens=32,
        attempts=2,
        stages=[pb.StageTime(stage="tokenize", at_ms=500.0), pb.StageTime(stage="end", at_ms=2000.0)],
        outcome="running",
        model=MODEL_NAME,
        spans=[
            pb.StageSpan(stage="tokenize", start_ms=0.0, end_ms=500.0),
            pb.StageSpan(stage="route", start_ms=500.0, end_ms=2000.0),
        ],
    )


async def health(channel: grpc.aio.Channel, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    response = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return int(response.status)


async def test_health_follows_readiness(folder: Path) -> None:
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    names = ("", *SERVICE_NAMES)
    async with running(folder, FakeRouter()) as server, grpc.aio.insecure_channel(server.address) as channel:
        assert [await health(channel, name) for name in names] == [serving] * 3
        await server.set_serving(False)
        assert [await health(channel, name) for name in names] == [not_serving] * 3
        await server.set_serving(True)
        assert [await health(channel, name) for name in names] == [serving] * 3
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health(channel, "disagg.v1.NoSuchService")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_gateway_may_start_before_it_is_ready(folder: Path) -> None:
    config = GatewayConfig(models=sources(folder))
    server = GatewayServer(config, {"": FakeRouter()})
    with pytest.raises(RuntimeError, match="has not started"):
        _ = server.address
    await server.start(serving=False)
    async with grpc.aio.insecure_channel(server.address) as channel:
        assert await health(channel, "") == health_pb2.HealthCheckResponse.NOT_SERVING
    await server.stop()
    await server.stop()


async def test_reflection_lists_the_services(folder: Path) -> None:
    async with running(folder, FakeRouter()) as server, grpc.aio.insecure_channel(server.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        listed = [entry.name async for response in call for entry in response.list_services_response.service]
    assert set(SERVICE_NAMES) == {"disagg.v1.InferenceService", "disagg.v1.AdminService"}
    assert sorted(listed) == sorted(
        [*SERVICE_NAMES, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"]
    )


# ---------------------------------------------------------------- start and stop


async def test_stop_lets_running_calls_end_and_then_cancels(folder: Path) -> None:
    router = FakeRouter([[5], Wait()])
    async with running(folder, router) as server, AsyncClient(server.address, resume_s=0.0) as client:
        stream = client.stream("x")
        await anext(stream)
        started = time.monotonic()
        stopping = asyncio.create_task(server.stop(0.2))
        with pytest.raises((RequestCancelledError, UnavailableError)):
            await anext(stream)
        await stopping
        assert time.monotonic() - started >= 0.2
        await asyncio.wait_for(router.handles[0].cancelled.wait(), WAIT_S)


async def test_when_stop_returns_every_call_has_ended(folder: Path) -> None:
    router = FakeRouter([[5], Wait()])
    async with running(folder, router) as server, AsyncClient(server.address) as client:
        streams = [client.stream("x") for _ in range(5)]
        for stream in streams:
            await anext(stream)
        await server.stop(0.0)
        assert [handle.num_cancels for handle in router.handles] == [1] * 5
        for stream in streams:
            await stream.aclose()


async def test_a_port_that_is_taken(folder: Path) -> None:
    async with running(folder, FakeRouter()) as server:
        config = GatewayConfig(models=sources(folder), port=server.port)
        second = GatewayServer(config, {"": FakeRouter()})
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{server.port}"):
            await second.start()


async def test_many_streams_at_once_end_whole(folder: Path) -> None:
    router = FakeRouter(lambda routed: [unpack_token_ids(routed.prompt_token_ids)[:1]] * 20)
    async with running(folder, router) as server, AsyncClient(server.address) as client:
        answers = await asyncio.gather(*(client.generate([i + 5]) for i in range(64)))
    assert [answer.token_ids for answer in answers] == [(i + 5,) * 20 for i in range(64)]
    assert len({answer.request_id for answer in answers}) == 64


async def test_one_of_several_that_drains_leaves_the_shared_ports_at_once(folder: Path) -> None:
    """Its streams go on, whoever comes is served by the other one, and its own port says that it drains."""
    router, other = FakeRouter(lambda _: forever([5])), FakeRouter([[7]])
    async with running(folder, router, shares_ports=True, http_port=0) as server, AsyncClient(server.address) as client:
        stream = client.stream("x")
        assert set((await anext(stream)).token_ids) == {5}
        http_port = int(server.http_address.rpartition(":")[2])
        async with (
            running(folder, other, shares_ports=True, port=server.port, http_port=http_port) as second,
            httpx.AsyncClient() as http,
        ):
            assert second.address == server.address
            stopping = asyncio.create_task(server.stop(120.0))

            async def drains() -> bool:
                return (await http.get(f"http://{server.own_http_address}/readyz")).status_code != 200

            await eventually(drains)
            for _ in range(12):  # each a connection of its own
                async with AsyncClient(second.address) as fresh:
                    assert (await fresh.generate("x", max_tokens=1)).token_ids == (7,)
                body = {"model": MODEL_NAME, "prompt": "x", "max_tokens": 1}
                async with httpx.AsyncClient() as new:
                    answer = await new.post(f"http://{second.http_address}/v1/completions", json=body)
                assert answer.status_code == 200
            assert (await client.generate("x", max_tokens=1)).token_ids == (7,)  # a client that was connected
            assert not stopping.done()
            for _ in range(20):
                assert set((await anext(stream)).token_ids) == {5}
            await stream.aclose()
            await stopping
    assert (len(router.submitted), len(other.submitted)) == (1, 25)
