"""What is looked at when a figure is not as expected: a trace of a decode step, of a prefill step and of a hand-over's
copies, saved beside the logs for chrome://tracing or Perfetto, and what it takes to choose the tokens of a step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.model import TINY, OneByOne, TensorSizes, decoding, make_runner, next_step
from benchmarks.gpu.report import RowFile
from benchmarks.gpu.timing import attempt, parse, row_file, wall_ms
from disagg.engine.plan import ScheduledSequence, StepPlan
from disagg.engine.request import dummy_sequence
from disagg.engine.runner import model_runner
from disagg.engine.runner.model_runner import TorchModelRunner

LAYERS = 4
"""Enough to see what a step consists of."""
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature 1": {"temperature": 1.0},
    "top-k 50, top-p 0.9": {"temperature": 1.0, "top_k": 50, "top_p": 0.9},
    "min-p 0.05": {"temperature": 0.8, "min_p": 0.05},
}


def save_trace(rows: RowFile, name: str, file: Path, run: Callable[[], object]) -> None:
    """Save the trace of one call of `run`, after one that is not traced."""
    run()
    has_cuda = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if has_cuda else [])]
    with profile(activities=activities) as profiler:
        run()
        if has_cuda:
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(file))
    events = profiler.key_averages()
    rows.add(f"trace, {name}", file.stat().st_size / 1e6, "MB", detail=f"{file.name}; {len(events)} kinds of calls")


def measure_sampling(
    rows: RowFile, shape: TensorSizes, runner: TorchModelRunner, label: str, sampling: dict[str, Any]
) -> None:
    """What a decode step takes beyond one whose tokens are greedy, where the host waits for each step. Random weights
    give flat distributions: the worst case for drawing."""
    batch = max(shape.decode_batches)
    sequences = decoding(shape, batch, **sampling)
    plan = next_step(sequences, 0)
    greedy = next_step(decoding(shape, batch), 0)
    ms, base_ms = (wall_ms(functools.partial(runner.run, each), repeats=10) for each in (plan, greedy))
    detail = f"a step {ms:.2f} ms, a greedy one {base_ms:.2f} ms"
    rows.add(f"choosing tokens, {label}, batch {batch}", ms - base_ms, "ms", detail=detail)


def trace_all(rows: RowFile, shape: TensorSizes, runner: TorchModelRunner, folder: Path) -> None:
    """Three traces."""
    decode = OneByOne(shape, runner, max(shape.decode_batches)).step
    num_tokens = shape.prefill_tokens[0]
    prompt = dummy_sequence(num_tokens, 0, runner.block_size)
    plan = StepPlan(prefills=(ScheduledSequence(prompt, 0, num_tokens, samples=True),))
    staged = runner.new_staging(num_tokens * runner.layout.bytes_per_token)

    def hand_over() -> None:
        """As workers do, but for the wait between the two."""
        leaving = runner.start_gather(prompt.block_table, 0, num_tokens, staged, digests=runner.digests)
        if not isinstance(leaving, int):
            leaving.wait()
        arriving = runner.start_scatter(prompt.block_table, 0, num_tokens, staged, digests=runner.digests)
        if arriving is not None:
            arriving.wait()

    runs = {"decode step": decode, "prefill step": lambda: runner.run(plan), "hand-over": hand_over}
    for name, run in runs.items():
        file = folder / f"{name.replace(' ', '-')}.trace.json"
        attempt(rows, f"trace, {name}", functools.partial(save_trace, rows, name, file, run))


def main() -> None:
    """The section `traces`."""
    arguments = parse(main.__doc__)
    device, rows = torch.device(arguments.device), row_file(arguments, "traces")
    small = TensorSizes(num_layers=LAYERS, decode_batches=(1, 64), prefill_tokens=(2048,))
    shape = small if device.type == "cuda" else TINY
    runner = make_runner(shape, device)
    attempt(rows, "warm-up", functools.partial(model_runner.warm_up, runner))
    trace_all(rows, shape, runner, arguments.rows.parent)
    for label, sampling in SAMPLINGS.items():
        name = f"choosing tokens, {label}"
        attempt(rows, name, functools.partial(measure_sampling, rows, shape, runner, label, sampling))


if __name__ == "__main__":
    main()
