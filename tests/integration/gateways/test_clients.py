"""Both clients against a gateway that follows a script: what a stream does when it is left, closed, or breaks."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, closing
from typing import Any, Protocol

import grpc
import pytest

from disagg.client import Answer, AsyncClient, Client, Delta
from disagg.proto.errors import DisaggError, InvalidRequestError, RequestCancelledError
from disagg.v1 import inference_pb2 as pb
from disagg.v1 import inference_pb2_grpc as pb_grpc
from tests.support.architecture import REPOSITORY

WAIT_S = 120.0
"""How long anything may take before a test fails."""
NUM_TOKENS = 5
END = pb.Finished(reason=pb.FINISH_REASON_STOP, usage=pb.Usage(prompt_tokens=1, completion_tokens=NUM_TOKENS))


class Gateway(pb_grpc.InferenceServiceServicer):
    """Answers with `NUM_TOKENS` tokens; the prompt says what goes wrong.

    `wait`: nothing comes after the first token. `break`: the connection breaks once, after two tokens. `refuse`: an
    error.
    """

    def __init__(self) -> None:
        self.left = threading.Event()
        """Whether a call that waits for ever has ended, by its client."""
        self.resumed: list[list[int]] = []
        """The token ids with which clients went on."""
        self.num_broken = 0
        """Number of whole answers that broke."""
        self.models = ["m"]
        self.address = ""

    def ListModels(  # noqa: N802
        self, request: pb.ListModelsRequest, context: grpc.ServicerContext
    ) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[pb.Model(name=name) for name in self.models])

    def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GenerateResponse]:
        context.send_initial_metadata((("x-disagg-request-id", "r"),))
        if request.text == "refuse":
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not this one")
        if request.text == "wait":
            context.add_callback(self.left.set)  # before a token: the client may leave with the first one
        first = len(request.resume.token_ids)
        if first:
            self.resumed.append(list(request.resume.token_ids))
        for index in range(first, NUM_TOKENS):
            yield pb.GenerateResponse(delta=pb.TokenDelta(first_index=index, token_ids=[index], text=str(index)))
            if request.text == "wait":
                self.left.wait(WAIT_S)
                return
            if request.text == "break" and index == 1:
                context.abort(grpc.StatusCode.UNAVAILABLE, "socket closed")
        yield pb.GenerateResponse(finished=END)

    def GenerateOnce(  # noqa: N802
        self, request: pb.GenerateOnceRequest, context: grpc.ServicerContext
    ) -> pb.GenerateOnceResponse:
        if request.request.text == "refuse":
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not this one")
        if request.request.text == "break" and not self.num_broken:
            self.num_broken += 1
            context.send_initial_metadata((("x-disagg-request-id", "r"),))
            context.abort(grpc.StatusCode.UNAVAILABLE, "socket closed")
        ids = range(NUM_TOKENS)
        return pb.GenerateOnceResponse(text="".join(map(str, ids)), token_ids=ids, finished=END)


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    served = Gateway()
    server = grpc.server(ThreadPoolExecutor(16))
    pb_grpc.add_InferenceServiceServicer_to_server(served, server)  # type: ignore[no-untyped-call]
    served.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield served
    server.stop(None).wait(WAIT_S)


class Caller(Protocol):
    """What a test does with a client, the same with both."""

    def generate(self, address: str, prompt: str, times: int = 1) -> list[Answer]:
        """Whole answers, asked for at the same time."""

    def stream(self, address: str, prompt: str, times: int = 1) -> list[list[Delta]]:
        """All deltas of streams that run at the same time."""

    def leave(self, address: str, prompt: str, left: threading.Event) -> tuple[Delta, bool]:
        """The first delta of a stream that is then left, and whether `left` is set while the client is still open."""

    def close_during(self, address: str, prompt: str) -> None:
        """Closes the client when the first delta of a stream has come, and reads on."""


class Blocking:
    """The blocking client, in threads."""

    def generate(self, address: str, prompt: str, times: int = 1) -> list[Answer]:
        with Client(address) as client, ThreadPoolExecutor(times) as threads:
            return list(threads.map(lambda _: client.generate(prompt), range(times)))

    def stream(self, address: str, prompt: str, times: int = 1) -> list[list[Delta]]:
        with Client(address) as client, ThreadPoolExecutor(times) as threads:
            return list(threads.map(lambda _: list(client.stream(prompt)), range(times)))

    def leave(self, address: str, prompt: str, left: threading.Event) -> tuple[Delta, bool]:
        with Client(address) as client:
            with closing(client.stream(prompt)) as deltas:
                first = next(deltas)
            return first, left.wait(WAIT_S)

    def close_during(self, address: str, prompt: str) -> None:
        client = Client(address)
        deltas = client.stream(prompt)
        next(deltas)
        closer = threading.Timer(0, client.close)
        closer.start()
        try:
            next(deltas)
        finally:
            closer.join()


class Asynchronous:
    """The client for asyncio, in tasks."""

    def generate(self, address: str, prompt: str, times: int = 1) -> list[Answer]:
        async def run() -> list[Answer]:
            async with AsyncClient(address) as client:
                return await asyncio.gather(*(client.generate(prompt) for _ in range(times)))

        return asyncio.run(run())

    def stream(self, address: str, prompt: str, times: int = 1) -> list[list[Delta]]:
        async def read(client: AsyncClient) -> list[Delta]:
            return [delta async for delta in client.stream(prompt)]

        async def run() -> list[list[Delta]]:
            async with AsyncClient(address) as client:
                return await asyncio.gather(*(read(client) for _ in range(times)))

        return asyncio.run(run())

    def leave(self, address: str, prompt: str, left: threading.Event) -> tuple[Delta, bool]:
        async def run() -> tuple[Delta, bool]:
            async with AsyncClient(address) as client:
                async with aclosing(client.stream(prompt)) as deltas:
                    first = await anext(deltas)
                return first, await asyncio.to_thread(left.wait, WAIT_S)

        return asyncio.run(run())

    def close_during(self, address: str, prompt: str) -> None:
        async def run() -> None:
            client = AsyncClient(address)
            async with aclosing(client.stream(prompt)) as deltas:
                await anext(deltas)
                reading = asyncio.ensure_future(anext(deltas))
                await client.close()
                await reading

        asyncio.run(run())


both = pytest.mark.parametrize("make", [Blocking, Asynchronous])
Make = Callable[[], Caller]
TOKENS = [(str(index), (index,)) for index in range(NUM_TOKENS)]


def read(deltas: list[Delta]) -> list[tuple[str, tuple[int, ...]]]:
    assert [delta.finished is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    return [(delta.text, delta.token_ids) for delta in deltas[:-1]]


@both
def test_several_at_the_same_time(gateway: Gateway, make: Make) -> None:
    assert [answer.text for answer in make().generate(gateway.address, "x", 8)] == ["01234"] * 8
    assert [read(deltas) for deltas in make().stream(gateway.address, "x", 8)] == [TOKENS] * 8


@both
def test_a_stream_that_is_left_is_cancelled(gateway: Gateway, make: Make) -> None:
    assert make().leave(gateway.address, "wait", gateway.left) == (Delta("0", (0,)), True)


@both
def test_a_client_that_is_closed_ends_its_calls_as_cancelled(gateway: Gateway, make: Make) -> None:
    with pytest.raises((RequestCancelledError, asyncio.CancelledError)):
        make().close_during(gateway.address, "wait")
    assert gateway.left.wait(WAIT_S)


@both
def test_a_stream_that_breaks_goes_on_where_it_was(gateway: Gateway, make: Make) -> None:
    assert read(make().stream(gateway.address, "break")[0]) == TOKENS
    assert gateway.resumed == [[0, 1]]


@both
def test_a_whole_answer_whose_connection_breaks_is_asked_for_again(gateway: Gateway, make: Make) -> None:
    assert [answer.text for answer in make().generate(gateway.address, "break")] == ["01234"]
    assert gateway.num_broken == 1


@both
@pytest.mark.parametrize("method", ["generate", "stream"])
def test_a_refusal_is_an_error_of_ours(gateway: Gateway, make: Make, method: str) -> None:
    with pytest.raises(DisaggError, match="not this one") as caught:
        getattr(make(), method)(gateway.address, "refuse")
    assert isinstance(caught.value.__cause__, grpc.RpcError)


@both
def test_two_models_need_a_choice(gateway: Gateway, make: Make) -> None:
    gateway.models = ["a", "b"]
    with pytest.raises(InvalidRequestError, match="must be set, to one of a, b"):
        make().stream(gateway.address, "x")


# ---------------------------------------------------------------- the blocking client alone


def run_script(code: str, address: str, **kwargs: Any) -> subprocess.Popen[str]:
    environment = {"PYTHONPATH": f"{REPOSITORY / 'src'}:{REPOSITORY}", "PATH": "", "ADDRESS": address}
    program = f"import os, signal, threading\nfrom disagg.client import Client\n{textwrap.dedent(code)}"
    command = [sys.executable, "-c", program]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, **kwargs)


def test_a_child_of_a_fork_makes_calls_of_its_own(gateway: Gateway) -> None:
    """Where the parent has used its client, too: with a new client, and with its parent's after the first call."""
    script = run_script(
        """
        client = Client(os.environ["ADDRESS"])
        print(client.generate("x").text, flush=True)
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            print(Client(os.environ["ADDRESS"]).generate("x").text, flush=True)
            try:
                client.generate("x")
            except Exception:
                pass
            print(client.generate("x").text, flush=True)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        print(client.generate("x").text, flush=True)
        """,
        gateway.address,
    )
    assert script.communicate(timeout=WAIT_S)[0] == "01234\n" * 4


def test_ctrl_c_ends_the_wait_for_a_token_and_nothing_else(gateway: Gateway) -> None:
    script = run_script(
        """
        client = Client(os.environ["ADDRESS"])
        try:
            for delta in client.stream("wait"):
                print(delta.text, flush=True)
        except KeyboardInterrupt:
            print(client.generate("x").text, flush=True)
        client.close()
        print([thread.name for thread in threading.enumerate()])
        """,
        gateway.address,
    )
    assert script.stdout is not None
    assert script.stdout.readline() == "0\n"
    script.send_signal(signal.SIGINT)
    assert script.communicate(timeout=WAIT_S)[0] == "01234\n['MainThread']\n"
    assert script.returncode == 0
