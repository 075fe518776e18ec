"""What masks cost a decode step: the engine alone, the same batch with a grammar in every row and in none."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.load import random_prompt
from disagg.engine.commands import Add, Release
from disagg.engine.config import WorkerConfig
from disagg.engine.core.engine_core import EngineCore
from disagg.engine.parallel.factories import make_runner, warm_up
from disagg.proto.ids import GatewayId, RequestId
from disagg.proto.messages import Sampling, SequenceSpec
from disagg.proto.token_ids import pack_token_ids

KINDS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "drawn": {"temperature": 0.8, "top_p": 0.9}}
PROMPT_TOKENS = 32
_SETTLING_STEPS = 4
ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "kind": {"enum": ["small", "medium", "large"]},
        "amount": {"type": "integer", "minimum": 0, "maximum": 100_000},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
    },
    "required": ["name", "kind", "amount", "tags"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": ITEM, "minItems": 1000}
"""Its answers do not end within the steps that are timed."""


class StepBench:
    """An engine on the calling thread."""

    def __init__(self, model_path: Path, batch: int) -> None:
        config = WorkerConfig(
            worker_id="bench",
            roles=("prefill", "decode"),
            model_path=str(model_path),
            max_num_seqs=batch,
            skip_forced=False,  # so that all steps are alike
        )
        self._runner = make_runner(config)
        warm_up(self._runner, config)
        self._core = EngineCore(self._runner, config=config)
        self._batch = batch
        self._num_requests = 0

    def step_ms(self, kind: str, *, structured: bool, num_steps: int) -> list[float]:
        """Milliseconds of each of `num_steps` steps of a full batch."""
        grammar = msgspec.json.encode({"grammars": [{"json_schema": SCHEMA}]}).decode() if structured else ""
        specs = [self._spec(kind, grammar) for _ in range(self._batch)]
        for spec in specs:
            self._core.handle(Add(spec), time.monotonic())
        times: list[float] = []
        while len(times) < num_steps + _SETTLING_STEPS:
            began = time.perf_counter()
            self._core.step(time.monotonic())
            elapsed_ms = (time.perf_counter() - began) * 1e3
            if self._core.last_plan.prefills or len(self._core.last_plan.decodes) < self._batch:
                assert not times, "an answer ended before its steps were timed"
                continue
            times.append(elapsed_ms)
        for spec in specs:
            self._core.handle(Release(spec.key), time.monotonic())
        return times[_SETTLING_STEPS:]

    def _spec(self, kind: str, grammar: str) -> SequenceSpec:
        self._num_requests += 1
        prompt = random_prompt(self._num_requests, PROMPT_TOKENS, self._runner.vocab_size)
        return SequenceSpec(
            request_id=RequestId(f"bench-{self._num_requests}"),
            attempt=0,
            gateway_id=GatewayId("bench"),
            prompt_token_ids=pack_token_ids(prompt),
            sampling=Sampling(max_tokens=400, seed=self._num_requests, grammar=grammar, **KINDS[kind]),
        )


def measure(model_path: Path, batch: int, num_steps: int, repeats: int) -> list[dict[str, Any]]:
    """Pairs in turns, in both orders; milliseconds and the ratio of the medians."""
    bench, rows = StepBench(model_path, batch), []
    for kind in KINDS:
        bench.step_ms(kind, structured=True, num_steps=2)
        for repeat in range(repeats):
            found: dict[bool, float] = {}
            for structured in (False, True) if repeat % 2 == 0 else (True, False):
                found[structured] = statistics.median(bench.step_ms(kind, structured=structured, num_steps=num_steps))
            rows.append({"kind": kind, "repeat": repeat, "plain_ms": found[False], "masked_ms": found[True]})
    return rows
