"""What do the streams of a worker see while it sends prefixes to another one?

Two worker processes: one decodes some streams all the time and has prefixes in its cache, the other one asks for them,
one every quarter of a second, and computes a few tokens behind each. Phases with fetches and without take turns.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import load
from disagg.engine.checkpoint.checkpoint import read_model_config
from disagg.engine.config import WorkerConfig
from disagg.proto.ids import AttemptKey
from disagg.proto.messages import StepUpdate, WorkerInfo
from tests.support.pace import on_time, steady
from tests.support.workers import GatewayStub, running_workers

AT_REST, FETCHING = "rest", "fetching"
_PREFIXES, _PREFIX_TOKENS, _TAIL_TOKENS = 4, 1024, 32
_STREAMS, _STREAM_PROMPT, _STREAM_TOKENS = 4, 32, 256
_FETCHES_PER_S = 4.0
_TIMEOUT_S = 5.0


class TimedStub(GatewayStub):
    """Notes when tokens of streams came."""

    def __init__(self) -> None:
        super().__init__()
        self.times: dict[AttemptKey, list[float]] = {}

    def _apply(self, update: StepUpdate) -> None:
        now = time.perf_counter()
        for out in update.tokens:
            if (times := self.times.get(AttemptKey(out.request_id, out.attempt))) is not None:
                times.append(now)
        super()._apply(update)


class Sources:
    """Measures all phases. `config`: of a worker of the model."""

    def __init__(self, config: WorkerConfig, repeats: int) -> None:
        common = msgspec.structs.replace(
            config, roles=("prefill", "decode"), transport="shm", max_model_len=2048, fetch=True
        )
        self._repeats = repeats
        self._vocab_size = read_model_config(Path(config.model_path)).vocab_size
        self._source = msgspec.structs.replace(common, worker_id="source", num_blocks=1024)
        self._needy = msgspec.structs.replace(common, worker_id="needy", num_blocks=160)
        self._num_prompts = 0

    def rows(self) -> list[dict[str, Any]]:
        """One for each phase."""
        with running_workers(self._source, self._needy) as infos:
            rows: list[dict[str, Any]] = asyncio.run(self._measure(infos))
            return rows

    async def _measure(self, infos: Sequence[WorkerInfo]) -> list[dict[str, Any]]:
        stub = TimedStub()
        try:
            for info in infos:
                await stub.connect(info)
            prefixes = [load.random_prompt(900 + n, _PREFIX_TOKENS, self._vocab_size) for n in range(_PREFIXES)]
            for prefix in prefixes:
                await stub.run(prefix, worker="source", max_tokens=1)
            await self._phase(stub, FETCHING, prefixes)  # the pair is formed, and all is warm
            rows = []
            for repeat in range(self._repeats):
                phases = (AT_REST, FETCHING) if repeat % 2 == 0 else (FETCHING, AT_REST)
                rows += [{**await self._phase(stub, phase, prefixes), "repeat": repeat} for phase in phases]
            return rows
        finally:
            await stub.close()

    async def _phase(self, stub: TimedStub, phase: str, prefixes: list[list[int]]) -> dict[str, Any]:
        stub.times.clear()
        streams = []
        for _ in range(_STREAMS):
            key, answer = stub.submit(self._prompt(_STREAM_PROMPT), worker="source", max_tokens=_STREAM_TOKENS)
            stub.times[key] = []
            streams.append(answer)
        outcomes: list[str] = []
        fetching = asyncio.create_task(self._fetch(stub, itertools.cycle(prefixes), outcomes))
        if phase == AT_REST:
            fetching.cancel()
        for answer in streams:
            await answer.ended.wait()
        fetching.cancel()
        await asyncio.gather(fetching, return_exceptions=True)
        gaps = [after - before for times in stub.times.values() for before, after in itertools.pairwise(times)]
        return {
            "part": "source",
            "phase": phase,
            "gap_ms": [round(gap * 1e3, 3) for gap in gaps],
            "outcomes": outcomes,
        }

    async def _fetch(self, stub: TimedStub, prefixes: Iterator[list[int]], outcomes: list[str]) -> None:
        async for _ in on_time(steady(_FETCHES_PER_S)):
            answer = await stub.run(
                next(prefixes) + self._prompt(_TAIL_TOKENS),
                worker="needy",
                max_tokens=1,
                fetch_from="source",
                end_token=_PREFIX_TOKENS,
                fetch_timeout_s=_TIMEOUT_S,
            )
            outcomes += [fetched.outcome for fetched in answer.fetched]

    def _prompt(self, num_tokens: int) -> list[int]:
        self._num_prompts += 1
        return load.random_prompt(-self._num_prompts, num_tokens, self._vocab_size)
