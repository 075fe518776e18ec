"""One measured gateway: a process of its own, with a paced worker and the clients in this one.

async with Rig(...) as rig:
    async with rig.streams("http", 32) as streams: ...  await rig.sample()
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal, Self

import msgspec

from disagg.cluster.models.catalog import DEFAULT_MODEL, resolve_model
from disagg.gateway.config import GatewayConfig, ModelSource
from disagg.gateway.text.tokenizer import FAKE_MODEL_PATH, load_model
from disagg.v1 import inference_pb2 as pb
from tests.support.gateway_rig.process import GatewayJob, Sample, Started
from tests.support.gateway_rig.worker import FINGERPRINT, PacedWorker
from tests.support.raw_clients import COMPLETIONS, GrpcStreams, HttpStream, Stream, http_request, open_grpc, open_http
from tests.support.reports import REPOSITORY

Protocol = Literal["grpc", "http"]
PROTOCOLS: tuple[Protocol, Protocol] = ("grpc", "http")

PROMPT = "The quick brown fox"
TEXT = (
    "A cache keeps what was computed before, so that nobody has to compute it again. It is small, it is quick, and it "
    "is wrong whenever somebody forgot to tell it that the world has changed. Naïve façades cost 12 € in Zürich; "
    "日本語 and Ελληνικά need several tokens for one character, and so do 🙂 and 🚀.\n\n"
    "def total(values: list[float]) -> float:\n    return sum(value for value in values if value > 0.0)\n"
)
"""The text of every stream: prose, code, and characters that are cut between tokens."""
FAKE_TOKENS = range(1000, 2000)
"""The text of every stream of the model without weights, repeated, each from a place of its own."""
MAX_MODEL_LEN = 8192
LONG = 8000
"""Output tokens of a stream that the benchmark leaves before its end."""
MAX_GRPC_CONNECTIONS = 16
WAIT_S = 60.0
_POLL_S = 0.01
_CONNECT_AT_ONCE = 64
_EXIT_S = 15.0


class Rig:
    """Owner of the gateway's process and of the worker.

    Args:
        profile: have the gateway write a profile at its end.
        time_turns: time the turns of the gateway's event loop, see `Sample`.
        is_fake: serve the model without weights instead of the default model. Its streams are `FAKE_TOKENS`.
        changes: of the gateway's configuration.
    """

    def __init__(
        self, *, profile: bool = False, time_turns: bool = False, is_fake: bool = False, **changes: Any
    ) -> None:
        self._profile = profile
        self._time_turns = time_turns
        name = FAKE_MODEL_PATH if is_fake else DEFAULT_MODEL
        path = name if is_fake else str(resolve_model(name))  # ConfigError names the command that imports it
        self._config = GatewayConfig(
            models=(ModelSource(name=name, path=path, prefix_root=FINGERPRINT, max_model_len=MAX_MODEL_LEN),),
            http_port=0,
            **changes,
        )
        tokens = FAKE_TOKENS if is_fake else load_model(path, name).tokenizer.encode_text(TEXT)
        self.worker = PacedWorker(tokens, MAX_MODEL_LEN)
        self.max_message_bytes = self._config.max_message_bytes(MAX_MODEL_LEN)
        self._process: asyncio.subprocess.Process | None = None
        self.addresses: dict[Protocol, str] = {}

    async def __aenter__(self) -> Self:
        await self.worker.__aenter__()
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.support.gateway_rig.process",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=REPOSITORY,
        )
        job = GatewayJob(
            gateway=self._config, worker=self.worker.info, profile=self._profile, time_turns=self._time_turns
        )
        await self._tell(msgspec.json.encode(job))
        started = msgspec.json.decode(await self._hear(), type=Started)
        self.addresses = {"grpc": started.grpc, "http": started.http}
        return self

    async def __aexit__(self, *error: object) -> None:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), _EXIT_S)
        except TimeoutError:
            process.kill()
            await process.wait()
        await self.worker.__aexit__()

    async def sample(self) -> Sample:
        """What the gateway's process has used up to now."""
        await self._tell(b"")
        return msgspec.json.decode(await self._hear(), type=Sample)

    async def _tell(self, line: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(line + b"\n")
        await self._process.stdin.drain()

    async def _hear(self) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), WAIT_S)
        if not line:
            raise RuntimeError("the gateway's process ended; its reason is above")
        return line

    @asynccontextmanager
    async def streams(
        self, protocol: Protocol, count: int, *, max_tokens: int = LONG, paused: bool = False, timed: bool = False
    ) -> AsyncIterator[list[Stream]]:
        """`count` streams, requested; at the end they are cancelled, and the worker has got the cancels."""
        clock = asyncio.get_running_loop().time if timed else None
        before = self.worker.steps.num_sequences
        opened = await self._open(protocol, count, max_tokens, paused, clock)
        try:
            yield [stream for connection in opened for stream in _streams_of(connection)]
        finally:
            for connection in opened:
                connection.close()
        await wait_until(lambda: self.worker.steps.num_sequences <= before, "the gateway lets go of the streams")

    async def _open(
        self, protocol: Protocol, count: int, max_tokens: int, paused: bool, clock: Callable[[], float] | None
    ) -> Sequence[GrpcStreams | HttpStream]:
        address = self.addresses[protocol]
        if protocol == "grpc":
            message = grpc_request(max_tokens)
            shares = split(count, min(count, MAX_GRPC_CONNECTIONS))
            return [await open_grpc(address, [message] * share, paused=paused, clock=clock) for share in shares]
        body = http_body(max_tokens)
        opened: list[HttpStream] = []
        for first in range(0, count, _CONNECT_AT_ONCE):
            share = range(first, min(count, first + _CONNECT_AT_ONCE))
            opened += await asyncio.gather(*(open_http(address, body, paused=paused, clock=clock) for _ in share))
        return opened


def _streams_of(connection: GrpcStreams | HttpStream) -> list[Stream]:
    return connection.streams if isinstance(connection, GrpcStreams) else [connection.stream]


def split(count: int, parts: int) -> list[int]:
    """`count` in `parts` shares that differ by at most one."""
    return [count // parts + (i < count % parts) for i in range(parts)]


def grpc_request(max_tokens: int) -> bytes:
    """A stream of `max_tokens` tokens."""
    stopping = pb.StopConditions(max_tokens=max_tokens, ignore_eos=True)
    return pb.GenerateRequest(model=DEFAULT_MODEL, text=PROMPT, stopping=stopping).SerializeToString()


def http_body(max_tokens: int) -> bytes:
    """The same as a whole HTTP request."""
    body = {"model": DEFAULT_MODEL, "prompt": PROMPT, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    return http_request(COMPLETIONS, body)


async def wait_until(is_so: Callable[[], bool], what: str) -> None:
    """Raises `TimeoutError` that says `what` did not happen."""
    for _ in range(round(WAIT_S / _POLL_S)):
        if is_so():
            return
        await asyncio.sleep(_POLL_S)
    raise TimeoutError(f"not within {WAIT_S:g} s: {what}")
