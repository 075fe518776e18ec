"""How much quicker prompts are computed by a worker of several stages than by one of the same arithmetic in one stage.

    python -m benchmarks.engine.stages [--stages 4] [--prompts 1 2 8] [--chunks 16] [--stage-ms 20] [--repeats 3]
                                       [--json FILE]

No model computes: each stage sleeps for `--stage-ms` a step, and the worker of one stage for all of them together, so
that the figure is that of what launches steps and waits for them. That is what serves: the engine thread, its core, and
rank 0's runner over followers, each of which is a thread of this process. The KV of each chunk is copied out of all
stages as soon as it is ordered, as for a hand-over. All prompts come at once. The ideal is that of stages which never
wait for the host: a worker of S stages computes N chunks in N + S - 1 stage times.

Both workers are measured in turns, and each rate is the median of the repeats.
"""

from __future__ import annotations

import argparse
import queue
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from typing_extensions import override

from disagg.engine.batch_arrays import BatchArrays
from disagg.engine.commands import Add, ChunkPlanned, Gather, Gathered, PrefillComputed, Release
from disagg.engine.config import WorkerConfig
from disagg.engine.core.engine_core import EngineCore
from disagg.engine.fake_runner import FakeModelRunner
from disagg.engine.plan import ModelRunner, QueuedStep, StepPlan, StepResult
from disagg.engine.sharding.shards import Shard
from disagg.engine.shell.engine_thread import Batch, EngineThread
from disagg.proto.ids import AttemptKey
from disagg.proto.messages import StepSample
from tests.support.engine import VOCAB_SIZE, expected_output, key_of, make_prompt, make_spec
from tests.support.rank_connections import rank_group
from tests.support.reports import positive, print_table, report, write_json

BLOCK, CHUNK = 16, 64
WAIT_S = 120.0
NO_CONTEXT_COST = [StepSample(1.0 + n, n, n * start + n * (n + 1) // 2) for n in (16, 64) for start in (0, 1000)]
"""Steps whose time depends on their tokens alone, as that of a sleep does: all chunks are as long then."""


class SleepingStage(FakeModelRunner):
    """One stage, which sleeps for each step once it has the rows of the stage before it. `rows`: a queue between each
    stage and the next one, and from the last one to rank 0."""

    def __init__(self, rows: list[queue.SimpleQueue[None]], stage_s: float, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._rows = rows
        self._stage_s = stage_s

    @override
    def compute(self, arrays: BatchArrays) -> None:
        self._rows[self.shard.stage - 1].get(timeout=WAIT_S)
        time.sleep(self._stage_s)
        super().compute(arrays)
        self._send_on(samples=arrays.sample_rows is None or len(arrays.sample_rows) > 0)

    @override
    def launch(self, plan: StepPlan, arrays: BatchArrays) -> QueuedStep:
        time.sleep(self._stage_s)
        result = self.run(plan)
        samples = any(entry.samples for entry in plan.entries)
        self._send_on(samples=samples)
        return _Launched(result, self._rows[-1] if samples else None)

    def _send_on(self, *, samples: bool) -> None:
        """To the next stage; the last one sends something only where rows sample."""
        if samples or not self.shard.is_last:
            self._rows[self.shard.stage].put(None)


class _Launched(QueuedStep):
    def __init__(self, result: StepResult, logits: queue.SimpleQueue[None] | None) -> None:
        self._result = result
        self._logits = logits

    @override
    def result(self) -> StepResult:
        if self._logits is not None:
            self._logits.get(timeout=WAIT_S)
        return self._result


@contextmanager
def worker(stages: int, stage_s: float, num_blocks: int) -> Iterator[ModelRunner]:
    """The runner of a worker of that many stages, each of which sleeps for so long."""
    new = partial(FakeModelRunner, num_blocks, BLOCK, CHUNK * num_blocks, VOCAB_SIZE)
    if stages == 1:
        yield new(step_time_s=lambda plan: stage_s, sleep=time.sleep)
        return
    rows: list[queue.SimpleQueue[None]] = [queue.SimpleQueue() for _ in range(stages)]
    make = partial(SleepingStage, rows, stage_s, num_blocks, BLOCK, CHUNK * num_blocks, VOCAB_SIZE, num_layers=stages)
    with rank_group([make(shard=Shard(stage=stage, stages=stages)) for stage in range(stages)], num_blocks) as group:
        yield group.runner


@dataclass
class HandOver:
    """What a prefill role does: orders the KV of each chunk, and releases a prompt whose KV is out."""

    runner: ModelRunner
    expected: dict[AttemptKey, int]
    """Token 0 of each prompt."""

    def __post_init__(self) -> None:
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._token_bytes = self.runner.layout.groups[0].bytes_per_token
        self._ends = dict.fromkeys(self.expected, 0)
        self._open = dict.fromkeys(self.expected, 1)
        """Copies and the prompt itself, as far as they are not done."""

    def deliver(self, batch: Batch) -> None:
        """Of the engine thread."""
        for event in batch.events:
            self.events.put(event)

    def run(self, post: Callable[[Any], None]) -> None:
        """Until all prompts are computed and copied."""
        while self._open:
            event = self.events.get(timeout=WAIT_S)
            match event:
                case ChunkPlanned(key, end):
                    start, self._ends[key] = self._ends[key], end
                    out = self.runner.new_staging((end - start) * self._token_bytes)
                    self._open[key] += 1
                    post(Gather(key, start, start, end, out))
                case PrefillComputed():
                    assert event.token_id == self.expected[event.key], "another token"
                    self._close(event.key, post)
                case Gathered():
                    assert event.ok
                    self._close(event.key, post)

    def _close(self, key: AttemptKey, post: Callable[[Any], None]) -> None:
        self._open[key] -= 1
        if not self._open[key]:
            del self._open[key]
            post(Release(key))


def prefill_s(stages: int, stage_s: float, num_prompts: int, num_chunks: int) -> float:
    """Seconds until all prompts are computed, and their KV is copied."""
    num_tokens = num_chunks * CHUNK
    num_blocks = (num_prompts + 1) * (num_tokens // BLOCK + 1)
    prompts = {key_of(f"r{number}"): make_prompt(num_tokens, seed=number) for number in range(num_prompts)}
    config = WorkerConfig(
        worker_id="benchmark", roles=("prefill",), model_path="fake", token_budget=CHUNK, watermark=0.0, pp=stages
    )
    with worker(stages, stage_s, num_blocks) as runner:
        role = HandOver(runner, {key: expected_output(prompt, 1)[0] for key, prompt in prompts.items()})
        core = EngineCore(runner, config=config, calibration=NO_CONTEXT_COST)
        crashes: list[BaseException] = []
        thread = EngineThread(core, role.deliver, crashes.append, role.events.put)
        for key, prompt in prompts.items():
            thread.post(Add(make_spec(key.request_id, prompt, cached=False), hold_after_prefill=True))
        began = time.perf_counter()
        thread.start()
        role.run(thread.post)
        elapsed = time.perf_counter() - began
        assert thread.stop(WAIT_S)
        assert not crashes
    return elapsed


def main() -> None:
    """Measure and print."""
    arguments = _parse()
    stages, stage_s = arguments.stages, arguments.stage_ms / 1e3
    rows, summary = [], dict[str, float | None]()
    for num_prompts in arguments.prompts:
        found: dict[int, list[float]] = {1: [], stages: []}
        for _ in range(arguments.repeats):
            for number, times in found.items():
                each_s = stage_s * stages / number
                times.append(prefill_s(number, each_s, num_prompts, arguments.chunks))
        alone_s, staged_s = (statistics.median(times) for times in found.values())
        num_steps = num_prompts * arguments.chunks
        ideal = num_steps * stages / (num_steps + stages - 1)
        ratio, least = alone_s / staged_s, min(found[1]) / max(found[stages])
        rows.append(
            {
                "prompts": num_prompts,
                "tokens/s, 1 stage": round(num_steps * CHUNK / alone_s),
                f"{stages} stages": round(num_steps * CHUNK / staged_s),
                "ratio": round(ratio, 3),
                "least of all pairs": round(least, 3),
                "ideal": round(ideal, 3),
            }
        )
        summary[f"ratio_{num_prompts}"] = ratio
    title = f"prompts of {arguments.chunks} chunks, {arguments.stage_ms} ms a stage and chunk"
    print_table(title, list(rows[0]), [[str(value) for value in row.values()] for row in rows])
    if arguments.json:
        write_json(arguments.json, report(rows, summary))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--stages", type=positive, default=4, help="stages of the worker that is compared with one")
    parser.add_argument("--prompts", type=positive, nargs="+", default=[1, 2, 8], help="prompts that come at once")
    parser.add_argument("--chunks", type=positive, default=16, help=f"steps of each prompt, of {CHUNK} tokens")
    parser.add_argument("--stage-ms", type=float, default=20.0, help="milliseconds of a step in one of the stages")
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
