"""The engine alone: `EngineCore` over the model, driven as the engine thread of a worker drives it, without a worker
around it.

decode        sequences come in as on a decode worker (reserve, scatter, join), with random KV; each step is timed
prefill       prompts together, from their `Add` to their first tokens
closed_loop   prompts in, answers out, the next prompt when an answer ends: what a server can at best serve
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from benchmarks.load import random_prompt
from disagg.engine.commands import Add, Ended, Event, Join, Joined, Release, Reserve, Reserved, Scatter, TokenSampled
from disagg.engine.config import WorkerConfig
from disagg.engine.core.engine_core import EngineCore
from disagg.engine.parallel.factories import make_runner, warm_up
from disagg.engine.plan import Buffer
from disagg.kernels import kv_rows
from disagg.proto.block_hash import chain_hashes, root_hash
from disagg.proto.ids import AttemptKey, GatewayId, RequestId
from disagg.proto.messages import Sampling, SequenceSpec
from disagg.proto.token_ids import pack_token_ids, unpack_token_ids

PIECE_TOKENS = 128
"""Tokens of the KV that comes in at a time."""

WARM_UP_STEPS = 3
"""Steps of a batch that are not counted: the first ones of a size may prepare what the others use."""


class LoopShape(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of a closed loop."""

    concurrency: int
    requests: int
    input_tokens: int
    output_tokens: int
    first_seed: int


class LoopResult(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a closed loop; of each request, in the order in which they were sent."""

    elapsed_s: float
    ttft_s: list[float]
    e2e_s: list[float]


@dataclass(slots=True)
class _Watch:
    """The times of one request."""

    added: float
    first: float = 0.0
    last: float = 0.0
    num_tokens: int = 0

    def note(self, now: float) -> None:
        """A token came."""
        self.first = now if self.num_tokens == 0 else self.first
        self.last = now
        self.num_tokens += 1


class EngineRig:
    """An engine on the calling thread."""

    def __init__(self, config: WorkerConfig) -> None:
        runner = make_runner(config)
        warm_up(runner, config)
        self._runner = runner
        self._core = EngineCore(runner, config=config)
        self._root = root_hash(runner.fingerprint)
        self._num_requests = 0

    # ------------------------------------------------------------ decode

    def decode(self, batch: int, context: int, num_steps: int) -> list[float]:
        """Milliseconds of each of `num_steps` steps, each of `batch` decodes. The first of them attends to about
        `context` tokens, the last one to `num_steps` more.

        Raises:
            RuntimeError: where the engine does not take the sequences, or a step is not what was asked for.
        """
        specs = [self._spec(context - WARM_UP_STEPS, WARM_UP_STEPS + num_steps + 2) for _ in range(batch)]
        self._place(specs)
        for _ in range(WARM_UP_STEPS):
            self._core.step(time.monotonic())
        gc.collect()
        times_ms = [self._timed_step(batch) for _ in range(num_steps)]
        for spec in specs:
            self._core.handle(Release(spec.key), time.monotonic())
        return times_ms

    def _place(self, specs: list[SequenceSpec]) -> None:
        """Their KV comes in pieces of `PIECE_TOKENS`, of each sequence in turn, as from several prefill workers at a
        time: none has all its blocks in a row."""
        core, now, num_tokens = self._core, time.monotonic(), specs[0].num_known_tokens
        events = [event for spec in specs for event in core.handle(Reserve(spec), now)]
        for start in range(0, num_tokens, PIECE_TOKENS):
            end = min(start + PIECE_TOKENS, num_tokens)
            data = self._random_kv(end - start)
            for spec in specs:
                events += core.handle(Scatter(spec.key, start // PIECE_TOKENS, start, end, data), now)
        for spec in specs:
            events += core.handle(Join(spec.key, unpack_token_ids(spec.prompt_token_ids)[0]), now)
        kinds = Counter(type(event) for event in events)
        if not kinds[Reserved] == kinds[Joined] == len(specs):
            raise RuntimeError(f"the engine does not decode {len(specs)} sequences of {num_tokens} tokens: {kinds}")

    def _timed_step(self, batch: int) -> float:
        started = time.perf_counter()
        events = self._core.step(time.monotonic())
        elapsed_ms = (time.perf_counter() - started) * 1e3
        _expect_tokens(events, batch)
        return elapsed_ms

    def _random_kv(self, num_tokens: int) -> Buffer:
        layout = self._runner.layout
        data = self._runner.new_staging(layout.bytes_per_token * num_tokens)
        random = torch.Generator().manual_seed(0)
        if layout.dtype == "bfloat16":
            values = torch.from_numpy(data).view(torch.bfloat16)
            values.copy_(torch.randn(values.shape, generator=random))
        elif layout.dtype == "int8":
            dim = layout.groups[0].key_dim
            rows = torch.from_numpy(data).view(torch.int8).view(-1, dim + kv_rows.SCALE_BYTES)
            rows.copy_(kv_rows.quantized_rows(torch.randn((len(rows), dim), generator=random)))
        else:
            data.view(np.float32)[:] = np.random.default_rng(0).standard_normal(data.size // 4, dtype=np.float32)
        return data

    # ------------------------------------------------------------ prefill

    def prefill(self, num_tokens: int, num_prompts: int = 1) -> float:
        """Milliseconds of all steps of uncached prompts that come together."""
        specs = [self._spec(num_tokens, 1) for _ in range(num_prompts)]
        gc.collect()
        started = time.perf_counter()
        events = [event for spec in specs for event in self._core.handle(Add(spec), time.monotonic())]
        while self._core.has_work:
            events += self._core.step(time.monotonic())
        elapsed_ms = (time.perf_counter() - started) * 1e3
        _expect_tokens(events, num_prompts)
        return elapsed_ms

    # ------------------------------------------------------------ closed loop

    def closed_loop(self, shape: LoopShape) -> LoopResult:
        """All requests, `concurrency` at a time: an ended one makes place for the next at once.

        Raises:
            RuntimeError: if an answer is missing, or has another length.
        """
        core, clock = self._core, time.perf_counter
        waiting = self._requests(shape)
        watches: dict[AttemptKey, _Watch] = {}

        def add(spec: SequenceSpec) -> None:
            watches[spec.key] = _Watch(added=clock())
            core.handle(Add(spec), time.monotonic())

        started = clock()
        for _, spec in zip(range(shape.concurrency), waiting, strict=False):  # takes no request more than it needs
            add(spec)
        while core.has_work:
            events = core.step(time.monotonic())
            now = clock()
            for event in events:
                if isinstance(event, TokenSampled):
                    watches[event.key].note(now)
                elif isinstance(event, Ended) and (following := next(waiting, None)) is not None:
                    add(following)
        elapsed_s = clock() - started
        if [watch.num_tokens for watch in watches.values()] != [shape.output_tokens] * shape.requests:
            raise RuntimeError(f"not all of the {shape.requests} requests got {shape.output_tokens} tokens")
        return LoopResult(
            elapsed_s=elapsed_s,
            ttft_s=[watch.first - watch.added for watch in watches.values()],
            e2e_s=[watch.last - watch.added for watch in watches.values()],
        )

    def _requests(self, shape: LoopShape) -> Iterator[SequenceSpec]:
        """Made before they are needed, as a gateway would: the engine does not hash prompts."""
        specs = [
            self._spec(shape.input_tokens, shape.output_tokens, seed)
            for seed in range(shape.first_seed, shape.first_seed + shape.requests)
        ]
        return iter(specs)

    def _spec(self, num_input: int, num_output: int, seed: int | None = None) -> SequenceSpec:
        """A greedy request that ends after `num_output` tokens, and not before."""
        self._num_requests += 1
        if seed is None:
            seed = (1 << 48) + self._num_requests
        prompt = pack_token_ids(random_prompt(seed, num_input, self._runner.vocab_size))
        return SequenceSpec(
            request_id=RequestId(f"bench-{self._num_requests}"),
            attempt=0,
            gateway_id=GatewayId("bench"),
            prompt_token_ids=prompt,
            block_hashes=tuple(chain_hashes(self._root, prompt)),
            root_hash=self._root,
            sampling=Sampling(temperature=0.0, max_tokens=num_output),
        )


def _expect_tokens(events: list[Event], count: int) -> None:
    sampled = sum(isinstance(event, TokenSampled) for event in events)
    if sampled != count:
        raise RuntimeError(f"{sampled} tokens were sampled instead of {count}: {events[-3:]}")
