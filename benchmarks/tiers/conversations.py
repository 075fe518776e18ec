"""Conversations that come back with their whole history, in rounds: every conversation has its first turn, then every
one its second, so that between two turns of one the others use the caches.

    opening ──> answer ──> opening + answer + new tokens ──> answer ──> ...

Beside them some streams of other clients decode all the time: what they see is the price of the copies.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc.aio

from benchmarks import load
from disagg.v1 import inference_pb2 as pb
from disagg.v1.inference_pb2_grpc import InferenceServiceStub
from tests.support.pace import in_flight

_OTHERS_PROMPT, _OTHERS_TOKENS = 32, 64


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Conversations of one run."""

    name: str
    num_conversations: int
    num_turns: int
    opening_tokens: int
    turn_tokens: int
    """New tokens of each later prompt, behind the answer before it."""
    output_tokens: int
    prefill_blocks: int
    """Blocks of the device cache of each of the two prefill workers."""
    decode_blocks: int
    local_prefill: str = "auto"
    """Whether decode workers may compute prompts: `auto` or `never`."""
    concurrency: int = 2
    num_others: int = 2
    """Streams beside them."""
    seed: int = 1

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and its answer, with one turn more than `num_turns`."""
        return self.opening_tokens + self.num_turns * (self.turn_tokens + self.output_tokens) + self.output_tokens

    @property
    def over_caches(self) -> float:
        """Tokens of all histories over those that the device caches of both prefill workers hold."""
        last = self.opening_tokens + (self.num_turns - 1) * (self.turn_tokens + self.output_tokens)
        return self.num_conversations * last / (2 * 16 * self.prefill_blocks)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One request of a conversation, as its client saw it."""

    conversation: int
    turn: int
    prompt_tokens: int
    cached_tokens: int = 0
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    token_ids: tuple[int, ...] = ()
    error: str = ""
    """Why it failed; empty where it did not."""

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens whose KV no worker had."""
        return 0 if self.error else self.prompt_tokens - self.cached_tokens


class Client:
    """The clients of all conversations, on one cluster.

    Args:
        stub: the gateway.
        model: what it serves.
        workload: the conversations.
    """

    def __init__(self, stub: InferenceServiceStub, model: pb.Model, workload: Workload) -> None:
        self._stub = stub
        self._model = model
        self._workload = workload
        self._histories = [
            self._tokens(number, 0, workload.opening_tokens) for number in range(workload.num_conversations)
        ]
        self._turn = 0
        self._is_over = False
        self.other_gaps_s: list[float] = []
        """Times between two messages of the streams beside the conversations."""
        self.other_tpots_s: list[float] = []
        """Times per token of each of their answers."""
        self.other_errors: list[str] = []

    async def round(self) -> list[Turn]:
        """The next turn of every conversation."""
        found: list[Turn] = []

        async def one(number: int) -> None:
            found.append(await self._ask(number))

        await in_flight(one, range(self._workload.num_conversations), self._workload.concurrency)
        self._turn += 1
        return sorted(found, key=lambda turn: turn.conversation)

    @asynccontextmanager
    async def others(self) -> AsyncIterator[None]:
        """The streams beside the conversations run within; the last answer of each ends."""
        self._is_over = False
        async with asyncio.TaskGroup() as group:
            for number in range(self._workload.num_others):
                group.create_task(self._stream_on(number))
            try:
                yield
            finally:
                self._is_over = True

    # ------------------------------------------------------------ inside

    def _tokens(self, conversation: int, turn: int, count: int) -> list[int]:
        seed = (self._workload.seed * 10_000 + conversation) * 100 + turn
        return load.random_prompt(seed, count, self._model.vocab_size)

    def _request(self, prompt: Iterable[int], max_tokens: int) -> pb.GenerateRequest:
        return pb.GenerateRequest(
            model=self._model.name,
            token_ids=pb.TokenIds(ids=prompt),
            sampling=pb.SamplingParams(temperature=0.0),
            stopping=pb.StopConditions(max_tokens=max_tokens, ignore_eos=True),
        )

    async def _ask(self, number: int) -> Turn:
        history, workload, turn = self._histories[number], self._workload, self._turn
        request = self._request(history, workload.output_tokens)
        sent = time.perf_counter()
        first = last = sent
        answer: list[int] = []
        cached = 0
        try:
            async for response in self._stub.Generate(request):
                if response.delta.token_ids:
                    last = time.perf_counter()
                    first = first if answer else last
                    answer += response.delta.token_ids
                elif response.HasField("finished"):
                    cached = response.finished.usage.cached_tokens
        except grpc.aio.AioRpcError as error:
            return Turn(conversation=number, turn=turn, prompt_tokens=len(history), error=_text_of(error))
        found = Turn(
            conversation=number,
            turn=turn,
            prompt_tokens=len(history),
            cached_tokens=cached,
            ttft_s=first - sent,
            tpot_s=(last - first) / max(1, len(answer) - 1),
            token_ids=tuple(answer),
            error="" if len(answer) == workload.output_tokens else f"{len(answer)} tokens came",
        )
        history += [*answer, *self._tokens(number, turn + 1, workload.turn_tokens)]
        return found

    async def _stream_on(self, number: int) -> None:
        for index in itertools.count():
            seed = -1 - number - index * self._workload.num_others
            prompt = load.random_prompt(seed, _OTHERS_PROMPT, self._model.vocab_size)
            call = self._stub.Generate(self._request(prompt, _OTHERS_TOKENS))
            try:
                times = [time.perf_counter() async for response in call if response.delta.token_ids]
            except grpc.aio.AioRpcError as error:
                self.other_errors.append(_text_of(error))
                return
            if self._is_over and self.other_tpots_s:
                return
            self.other_gaps_s += [after - before for before, after in itertools.pairwise(times)]
            self.other_tpots_s.append((times[-1] - times[0]) / (_OTHERS_TOKENS - 1))


def _text_of(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name}: {error.details()}"
