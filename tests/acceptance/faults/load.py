"""Open-loop load whose every answer is known beforehand.

    Model ── reference ──> prompts with their greedy tokens ── one request every 1/rate s, come what may ──> `Stream`s

Times are taken in the client, on its monotonic clock. A token-history check is part of every stream: a token that is
lost, doubled or altered makes it wrong.
"""

from __future__ import annotations

import asyncio
import functools
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import grpc.aio
from typing_extensions import override

from disagg.client import AsyncClient, Targets
from disagg.engine.fake_runner import DEFAULT_VOCAB_SIZE, fake_generate
from disagg.proto.errors import DisaggError, OverloadedError
from tests.support.pace import on_time, steady

NUM_PROMPTS = 16
MIN_PROMPT, MAX_PROMPT = 20, 200


class Model:
    """What is served, and what it must answer."""

    name = "fake"
    path = "fake"
    dtype = "bfloat16"
    vocab_size = DEFAULT_VOCAB_SIZE

    def answer(self, prompt: Sequence[int], num_tokens: int) -> tuple[int, ...]:
        """The greedy tokens after a prompt."""
        return tuple(fake_generate(prompt, num_tokens))

    def close(self) -> None:
        """Remove what was made for it."""

    @functools.lru_cache(maxsize=4)  # noqa: B019 - one model a run
    def pairs(self, num_tokens: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Prompts of many lengths, no two with a common prefix, and the `num_tokens` tokens after each."""
        rng = random.Random(7)
        prompts = [
            tuple(rng.randrange(self.vocab_size) for _ in range(rng.randint(MIN_PROMPT, MAX_PROMPT)))
            for _ in range(NUM_PROMPTS)
        ]
        return [(prompt, self.answer(prompt, num_tokens)) for prompt in prompts]


class TinyModel(Model):
    """A random model of three layers in fp32, with `transformers` as its reference."""

    name = "tiny"
    dtype = "float32"

    def __init__(self) -> None:
        from tests.support.tiny_models import VOCAB_SIZE, make_checkpoint

        self._folder = tempfile.TemporaryDirectory(prefix="disagg-tiny-")
        self.vocab_size = VOCAB_SIZE
        self.path = str(make_checkpoint("llama", Path(self._folder.name) / "tiny"))

    @override
    def answer(self, prompt: Sequence[int], num_tokens: int) -> tuple[int, ...]:
        from tests.support.reference import generate

        return tuple(generate(Path(self.path), prompt, num_tokens))

    @override
    def close(self) -> None:
        self._folder.cleanup()


@dataclass(slots=True)
class Stream:
    """One request and what came of it."""

    sent: float
    expected: tuple[int, ...]
    times: list[float] = field(default_factory=list)
    """When each message with tokens came."""
    token_ids: list[int] = field(default_factory=list)
    error: str = ""
    ended: float = 0.0
    counts: list[int] = field(default_factory=list)
    """How many tokens each of these messages had."""
    is_refused: bool = False
    """`error` says that there is too much load."""

    @property
    def is_whole(self) -> bool:
        """Whether it ended as it should, whatever its tokens."""
        return not self.error and len(self.token_ids) == len(self.expected)

    @property
    def is_wrong(self) -> bool:
        """Whether a token that came differs from the reference."""
        return tuple(self.token_ids) != self.expected[: len(self.token_ids)]

    @property
    def longest_gap_s(self) -> float:
        """Between two messages with tokens."""
        return max((later - earlier for earlier, later in pairwise(self.times)), default=0.0)

    @property
    def ttft_s(self) -> float:
        """From sending to the first token, or to the end without one."""
        return (self.times[0] if self.times else self.ended) - self.sent

    def tokens_in(self, begin: float, end: float) -> int:
        """Those that came in a window."""
        return sum(count for when, count in zip(self.times, self.counts, strict=True) if begin <= when < end)


async def send(
    client: AsyncClient,
    prompt: Sequence[int],
    expected: tuple[int, ...],
    timeout_s: float | None = 60.0,
    targets: Targets | None = None,
) -> Stream:
    """One request, to its end."""
    stream = Stream(time.monotonic(), expected)
    try:
        deltas = client.stream(
            prompt,
            max_tokens=len(expected),
            temperature=0.0,
            ignore_eos=True,
            timeout_s=timeout_s,
            targets=targets or Targets(),
        )
        async with aclosing(deltas):
            async for delta in deltas:
                if delta.token_ids:
                    stream.times.append(time.monotonic())
                    stream.counts.append(len(delta.token_ids))
                    stream.token_ids += delta.token_ids
    except (DisaggError, grpc.aio.AioRpcError) as error:
        stream.error = f"{type(error).__name__}: {error}"[:200]
        stream.is_refused = isinstance(error, OverloadedError)
    stream.ended = time.monotonic()
    return stream


class Load:
    """Streams that begin at a steady rate, until it is stopped; an asynchronous context manager that waits for all."""

    def __init__(self, address: str, model: Model, *, rate: float, num_tokens: int, key: str | None = None) -> None:
        self._client = AsyncClient(address, key, resume_s=0.0)  # the rows are about the cluster, not its client
        self._pairs = model.pairs(num_tokens)
        self._rate = rate
        self._tasks: list[asyncio.Task[Stream]] = []
        self._starter: asyncio.Task[None] | None = None

    async def __aenter__(self) -> list[Stream]:
        """The list that has all streams after the block."""
        self._streams: list[Stream] = []
        self._starter = asyncio.create_task(self._start())
        return self._streams

    async def __aexit__(self, *_: object) -> None:
        assert self._starter is not None, "it was entered"
        self._starter.cancel()
        await asyncio.gather(self._starter, return_exceptions=True)
        self._streams += await asyncio.gather(*self._tasks)
        await self._client.close()

    async def _start(self) -> None:
        async for number in on_time(steady(self._rate)):
            prompt, expected = self._pairs[number % len(self._pairs)]
            self._tasks.append(asyncio.create_task(send(self._client, prompt, expected)))
