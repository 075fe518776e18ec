"""What LoRA adapters cost a step: of a batch in which none, one or all sequences have one, in turns.

    python -m benchmarks.engine.adapters [--batch 8] [--rank 16] [--input-tokens 512] [--threads 1] [--json FILE]

Adapters change all seven modules of each layer. The kinds take turns step by step, on one runner with eight slots;
`plain` is a runner without slots. Prompts are one chunk of `--input-tokens`. Loading is reading a folder that was just
written, and putting it into a slot.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from disagg.cluster.models.catalog import DEFAULT_MODEL, resolve_model
from disagg.cluster.system.cores import available_cores
from disagg.engine.adapters.folder import CONFIG, PREFIX, TENSORS
from disagg.engine.adapters.modules import modules_of
from disagg.engine.checkpoint.model_config import ModelConfig
from disagg.engine.config import AdapterOptions, WorkerConfig
from disagg.engine.plan import ScheduledSequence, StepPlan
from disagg.engine.request import dummy_sequence
from disagg.engine.runner.model_runner import TorchModelRunner
from disagg.proto.messages import Adapter
from tests.support.reports import positive, print_table, report, write_json

NUM_SLOTS = 8
WARM_UP_STEPS = 5


def write_adapter(folder: Path, model: ModelConfig, rank: int, seed: int) -> None:
    """An adapter of all modules, with small random numbers in bf16."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in modules_of(model).items():
        for kind, shape in (("A", (rank, module.inputs)), ("B", (module.outputs, rank))):
            tensors[f"{PREFIX}{name}.lora_{kind}.weight"] = (torch.randn(shape, generator=generator) / 100).bfloat16()
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}))
    save_file(tensors, folder / TENSORS)


def plan_of(runner: TorchModelRunner, slots: list[int], context: int) -> StepPlan:
    """A decode of a sequence for each slot."""
    per_sequence = -(-(context + 1) // runner.block_size)
    entries = []
    for number, slot in enumerate(slots):
        sequence = dummy_sequence(context + 1, number * per_sequence, runner.block_size)
        sequence.adapter_slot = slot
        entries.append(ScheduledSequence(sequence, context, 1, samples=True))
    return StepPlan(tuple(entries))


def prompt_of(runner: TorchModelRunner, slot: int, num_tokens: int) -> StepPlan:
    """A prompt that is computed in one step."""
    sequence = dummy_sequence(num_tokens, 0, runner.block_size)
    sequence.adapter_slot = slot
    return StepPlan(prefills=(ScheduledSequence(sequence, 0, num_tokens, samples=True),))


def median_ms(cases: Mapping[str, tuple[TorchModelRunner, StepPlan]], num_steps: int) -> dict[str, float]:
    """Median milliseconds of each case, which take turns."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for step in range(WARM_UP_STEPS + num_steps):
        for name, (runner, plan) in cases.items():
            began = time.perf_counter()
            runner.run(plan)
            if step >= WARM_UP_STEPS:
                times[name].append((time.perf_counter() - began) * 1e3)
    return {name: statistics.median(found) for name, found in times.items()}


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows."""
    with tempfile.TemporaryDirectory() as root:
        fields: dict[str, Any] = {
            "worker_id": "bench",
            "roles": ("prefill", "decode"),
            "model_path": str(resolve_model(arguments.model)),
            "cores": available_cores()[: arguments.threads],
            "num_threads": arguments.threads,
            "num_blocks": arguments.batch * (arguments.input_tokens // 16 + 2) + arguments.input_tokens // 16,
        }
        options = AdapterOptions(folder=root, max_loaded=NUM_SLOTS, max_rank=max(64, arguments.rank))
        without = TorchModelRunner(WorkerConfig(**fields))
        runner = TorchModelRunner(WorkerConfig(**fields, adapters=options))
        load_ms = []
        for slot in range(NUM_SLOTS):
            write_adapter(Path(root) / str(slot), runner.model_config, arguments.rank, slot)
            began = time.perf_counter()
            runner.put_adapter(slot, runner.read_adapter(Adapter(name=str(slot), path=str(slot))))
            load_ms.append((time.perf_counter() - began) * 1e3)
        none, tokens = [-1] * arguments.batch, arguments.input_tokens
        every = [slot % NUM_SLOTS for slot in range(arguments.batch)]
        decodes = {
            "plain": (without, plan_of(without, none, tokens)),
            "none": (runner, plan_of(runner, none, tokens)),
            "one": (runner, plan_of(runner, [0, *none[1:]], tokens)),
            "all": (runner, plan_of(runner, every, tokens)),
        }
        prompts = {
            "plain": (without, prompt_of(without, -1, tokens)),
            "none": (runner, prompt_of(runner, -1, tokens)),
            "all": (runner, prompt_of(runner, 0, tokens)),
        }
        rows = []
        for what, cases, count in (("decode", decodes, arguments.steps), ("prompt", prompts, arguments.steps // 10)):
            found = median_ms(cases, max(3, count))
            rows += [
                {"what": what, "adapters": name, "ms": round(ms, 3), "of_plain": round(ms / found["plain"], 3)}
                for name, ms in found.items()
            ]
        return [
            *rows,
            {"what": "load", "adapters": "one", "ms": round(statistics.median(load_ms), 3), "of_plain": None},
        ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--batch", type=positive, default=8)
    parser.add_argument("--rank", type=positive, default=16)
    parser.add_argument("--input-tokens", type=positive, default=512)
    parser.add_argument("--threads", type=positive, default=1)
    parser.add_argument("--steps", type=positive, default=100)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = measure(arguments)
    print_table(
        f"Steps of {arguments.batch} sequences of {arguments.input_tokens} tokens, adapters of rank {arguments.rank}",
        ["step", "with adapters", "ms", "of plain"],
        [[row["what"], row["adapters"], str(row["ms"]), str(row["of_plain"] or "")] for row in rows],
    )
    if arguments.json:
        write_json(arguments.json, report(rows, {f"{row['what']}_{row['adapters']}_ms": row["ms"] for row in rows}))


if __name__ == "__main__":
    main()
