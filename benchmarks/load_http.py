"""The closed loop of load.py over HTTP, for any server of the OpenAI completions API that takes prompts of token ids.

    request bytes -> `HttpCall` (first and last event, the end of the text) -> `Timing`

One connection a request. Tokens are what the server's usage block counts, since an event may hold several. `ignore_eos`
is not in OpenAI's own API; disagg, vLLM and SGLang have it.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
import urllib.request
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

from benchmarks.load import RequestSizes, Timing, random_prompt
from tests.support.pace import in_flight
from tests.support.raw_clients import COMPLETIONS, HttpStream, http_request

_STATUS_OK = b"HTTP/1.1 200"
_TAIL_BYTES = 8192
_COMPLETION_TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')
_FIRST_BYTES = 300
"""Number of bytes of an answer that error messages quote."""


class HttpCall(HttpStream):
    """One POST and its events. `done` gets the timing, or a RuntimeError that says what came instead."""

    def __init__(self, request: bytes, num_tokens: int, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(request, clock)
        self.done: asyncio.Future[Timing] = asyncio.get_running_loop().create_future()
        self._now = clock
        self._num_tokens = num_tokens
        self._head = b""
        self._latest = b""
        self._sent = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        self._sent = self._now()
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Keep the beginning, for errors, and the end, which has the usage."""
        super().data_received(data)
        if len(self._head) < _FIRST_BYTES:
            self._head += data[:_FIRST_BYTES]
        self._latest = (self._latest + data)[-_TAIL_BYTES:]
        if self.stream.completed:
            self._end()

    def connection_lost(self, error: Exception | None) -> None:
        """The server closed; by then the end has come, or never will."""
        super().connection_lost(error)
        self._fail("the connection ended before the answer did")

    def _end(self) -> None:
        counts, times = _COMPLETION_TOKENS.findall(self._latest), self.stream.times
        if not (self._head.startswith(_STATUS_OK) and counts and times):
            self._fail("no stream with a usage block came")
        elif int(counts[-1]) != self._num_tokens:
            self._fail(f"{int(counts[-1])} tokens came, {self._num_tokens} were asked for")
        elif not self.done.done():
            ttft_s, e2e_s = times[0] - self._sent, times[-1] - self._sent
            self.done.set_result(Timing(ttft_s=ttft_s, e2e_s=e2e_s, output_tokens=self._num_tokens))
        self.close()

    def _fail(self, why: str) -> None:
        if not self.done.done():
            self.done.set_exception(RuntimeError(f"{why}: {self._head!r}"))


def request_bytes(model: str, vocab_size: int, shape: RequestSizes, seed: int) -> bytes:
    """A greedy streaming request of exactly this shape, with the prompt that `load.requests` makes of the seed."""
    body = {
        "model": model,
        "prompt": random_prompt(seed, shape.input_tokens, vocab_size),
        "max_tokens": shape.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return http_request(COMPLETIONS, body)


async def closed_loop(
    address: str, requests: Iterator[bytes], num_tokens: int, concurrency: int
) -> tuple[float, tuple[Timing, ...]]:
    """Keep `concurrency` requests in flight until `requests` is used up: the seconds taken, the timings as they ended.

    Args:
        address: host:port.
        num_tokens: what each answer must have.
    """
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    timings: list[Timing] = []

    async def one(request: bytes) -> None:
        _, call = await loop.create_connection(lambda: HttpCall(request, num_tokens), host, int(port))
        timings.append(await call.done)

    started = time.perf_counter()
    await in_flight(one, requests, concurrency)
    return time.perf_counter() - started, tuple(timings)


def address_of(url: str) -> str:
    """host:port of an `http://` URL.

    Raises:
        ValueError: for another URL.
    """
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.hostname is None or parts.path.strip("/"):
        raise ValueError(f"a server is given as http://HOST:PORT, not {url!r}")
    return f"{parts.hostname}:{parts.port or 80}"


def only_model(address: str) -> str:
    """The name of the model that a server lists first; not through a proxy of the environment."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{address}/v1/models", timeout=5.0) as answer:
        return str(json.load(answer)["data"][0]["id"])
