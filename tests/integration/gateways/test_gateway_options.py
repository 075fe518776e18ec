"""The gateway over loopback gRPC: several answers, logprobs, biases, traces, and clients that stop reading."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import pytest

from disagg.client import AsyncClient, Client, Delta, TokenLogprob, error_of
from disagg.proto.errors import InvalidRequestError, UnavailableError
from disagg.proto.messages import TokenLogprobs
from disagg.router.api import RoutedRequest, TokenBatch
from disagg.v1 import inference_pb2 as pb
from disagg.v1 import inference_pb2_grpc as pb_grpc
from tests.support.gateway import MODEL_NAME, FakeRouter, Step, Wait, forever
from tests.support.gateway_server import running

WAIT_S = 60.0
"""How long anything may take before a test fails."""
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


async def read_into(seen: list[Delta], deltas: AsyncIterator[Delta]) -> None:
    """Read to the end; `seen` has what came before an error."""
    async for delta in deltas:
        seen.append(delta)  # noqa: PERF401 - a comprehension would lose what came before an error


def of_seed(seed: int) -> tuple[int, int]:
    """Two tokens."""
    return 5 + seed % 200, 5 + seed // 200 % 200


def by_seed(routed: RoutedRequest) -> list[Step]:
    return [[token_id] for token_id in of_seed(routed.sampling.seed)]


async def test_several_answers(folder: Path) -> None:
    router = FakeRouter(by_seed)
    async with running(folder, router) as server, AsyncClient(server.address) as client:
        async with aclosing(client.stream("x", n=4, seed=9)) as stream:
            deltas = [delta async for delta in stream]
        alone = await client.generate("x", seed=9)
    assert len(router.submitted) == 5
    ids_of: dict[int, tuple[int, ...]] = dict.fromkeys(range(4), ())
    ends: dict[int, str] = {}
    for delta in deltas:
        ids_of[delta.answer_index] += delta.token_ids
        if delta.finished is not None:
            assert delta.answer_index not in ends
            ends[delta.answer_index] = delta.finished.request_id
    assert ids_of == {i: of_seed(routed.sampling.seed) for i, (routed, _) in enumerate(router.submitted[:4])}
    assert ids_of[0] == alone.token_ids
    assert ends == {i: routed.request_id for i, (routed, _) in enumerate(router.submitted[:4])}
    assert len({*ends.values(), alone.request_id}) == 5


async def test_leaving_cancels_every_answer(folder: Path) -> None:
    router = FakeRouter([[5], Wait()])
    async with running(folder, router) as server, AsyncClient(server.address) as client:
        async with aclosing(client.stream("x", n=3)) as deltas:
            await anext(deltas)
        for handle in router.handles:
            await asyncio.wait_for(handle.cancelled.wait(), WAIT_S)
    assert [handle.num_cancels for handle in router.handles] == [1, 1, 1]


async def test_one_answer_that_fails_ends_the_call(folder: Path) -> None:
    scripts: list[list[Step]] = [[Wait()], [[5], UnavailableError("lost", "worker_lost")], [Wait()]]
    router = FakeRouter(lambda _: scripts[len(router.handles)])
    async with running(folder, router) as server, AsyncClient(server.address) as client:
        seen: list[Delta] = []
        with pytest.raises(UnavailableError) as caught:
            await read_into(seen, client.stream("x", n=3))
    assert caught.value.code == "worker_lost"
    assert [delta.answer_index for delta in seen] == [1]
    assert [handle.num_cancels for handle in router.handles] == [1, 1, 1]


async def test_several_answers_need_a_stream(folder: Path) -> None:
    router = FakeRouter()
    async with running(folder, router) as server, AsyncClient(server.address) as client:
        with pytest.raises(InvalidRequestError) as caught:
            await client.generate("x", n=2)
    assert caught.value.field == "n"
    assert router.submitted == []


async def test_logprobs(folder: Path) -> None:
    router = FakeRouter([TokenBatch([5], [TokenLogprobs(-0.5, (5, 6), (-0.5, -1.25))])])

    def blocking(address: str) -> list[Delta]:
        with Client(address) as client:
            return list(client.stream("x", logprobs=2))

    async with running(folder, router) as server, AsyncClient(server.address) as client:
        answer = await client.generate("x", logprobs=2)
        deltas = await asyncio.to_thread(blocking, server.address)
    expected = (TokenLogprob(-0.5, ((5, -0.5), (6, -1.25))),)
    assert answer.logprobs == expected
    assert deltas[0].logprobs == expected
    assert [routed.sampling.logprobs for routed, _ in router.submitted] == [2, 2]


async def test_biases_and_salts_reach_the_router(folder: Path) -> None:
    router = FakeRouter()
    async with running(folder, router) as server, AsyncClient(server.address) as client:
        await client.generate("x", logit_bias={7: -100.0, 3: 0.5}, cache_salt="a")
        await client.generate("x", cache_salt="b")
    first, second = (routed for routed, _ in router.submitted)
    assert first.sampling.logit_bias == ((3, 0.5), (7, -100.0))
    assert first.root_hash != second.root_hash


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"n": 129}, "n"),
        ({"logprobs": 21}, "sampling.logprobs"),
        ({"logit_bias": {5: float("nan")}}, "sampling.logit_bias[5]"),
        ({"logit_bias": {10**6: 1.0}}, "sampling.logit_bias"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
    ],
)
async def test_a_wrong_field_is_named(folder: Path, options: dict[str, Any], field: str) -> None:
    router = FakeRouter()
    async with running(folder, router) as server, AsyncClient(server.address) as client:
        with pytest.raises(InvalidRequestError) as caught:
            await anext(client.stream("x", **options))
    assert caught.value.field == field
    assert router.submitted == []


async def test_a_trace_goes_on(folder: Path) -> None:
    router = FakeRouter([[5]])
    async with running(folder, router) as server, grpc.aio.insecure_channel(server.address) as channel:
        stub: Any = pb_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        request = pb.GenerateRequest(model=MODEL_NAME, text="x")
        given = f"00-{TRACE}-00f067aa0ba902b7-01"
        call = stub.Generate(request, metadata=(("traceparent", given),))
        told = dict(await call.initial_metadata())["traceparent"]
        await asyncio.wait_for(drain(call), WAIT_S)
        untraced = stub.Generate(request)
        assert "traceparent" not in dict(await untraced.initial_metadata())
        await asyncio.wait_for(drain(untraced), WAIT_S)
    version, trace, span, flags = told.split("-")
    assert (version, trace, flags) == ("00", TRACE, "01")
    assert len(span) == 16
    assert span != "00f067aa0ba902b7"
    assert [routed.trace_parent for routed, _ in router.submitted] == [told, ""]


async def drain(call: Any) -> None:
    """Read what is left, to the end or the error."""
    while (await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]  # not in the stubs
        pass


@pytest.mark.parametrize("num_answers", [1, 3])
async def test_a_client_that_stops_reading_loses_its_stream(folder: Path, num_answers: int) -> None:
    router = FakeRouter(lambda _: forever([5] * 1000))
    async with running(folder, router, write_timeout_s=0.3) as server, AsyncClient(server.address) as other:
        channel = grpc.aio.insecure_channel(server.address, options=(("grpc.http2.bdp_probe", 0),))
        stub: Any = pb_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        call = stub.Generate(pb.GenerateRequest(model=MODEL_NAME, text="x", n=num_answers))
        await call.read()
        silent = list(router.handles)
        for handle in silent:
            await asyncio.wait_for(handle.cancelled.wait(), WAIT_S)
        router.script = lambda _: [[5]]
        assert (await other.generate("x")).token_ids == (5,)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(drain(call), WAIT_S)
        error = error_of(caught.value)
        await channel.close(None)
    assert (type(error), error.code) == (UnavailableError, "stream_lost")
    assert error.message == "nothing was read for 0.3 s"
    assert [handle.num_cancels for handle in silent] == [1] * num_answers


async def test_a_connection_that_takes_half_a_second_to_be_made_serves(folder: Path) -> None:
    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
        writer.close()

    async with running(folder, FakeRouter([[5]])) as server:

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await asyncio.sleep(0.5)
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", server.port)
            await asyncio.gather(forward(reader, up_writer), forward(up_reader, writer))

        slow = await asyncio.start_server(accept, "127.0.0.1", 0)
        async with slow:
            port = slow.sockets[0].getsockname()[1]
            async with AsyncClient(f"127.0.0.1:{port}", resume_s=0.0) as client:
                assert (await client.generate("x")).token_ids == (5,)
