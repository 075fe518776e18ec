"""Whole steps of the engine on a GPU: a model with the shapes of Llama-3-8B and random weights made on the device.

Everything is real but the weights: plans, block tables, the model runner with its captured decode steps, sampling on
the device, token ids on the host a step later. The limit of a decode step is the time to read its bytes (weights
without the embedding, KV of the contexts) at the measured bandwidth; that of a prefill the time of its operations at
the measured rate of matrix products.

Decode steps come first: they need no warm-up of prompts. Beside them steps of several rows of one sequence, as drafts
of speculative decoding have them, and a step in plain torch ops (`torch_step.py`), and
at the end, in a process of its own that has a limited time, `transformers` compiled (`compiled_peer.py`).
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file

from benchmarks.gpu.report import RowFile
from benchmarks.gpu.timing import Ceilings, attempt, parse, read_ceilings, row_file, wall_ms
from benchmarks.gpu.torch_step import PlainStep, is_plain
from disagg.engine.checkpoint.model_config import ModelConfig
from disagg.engine.config import WorkerConfig
from disagg.engine.plan import QueuedStep, ScheduledSequence, StepPlan, StepQueue, StepResult
from disagg.engine.request import Sequence, dummy_sequence
from disagg.engine.runner import loaded_weights, model_runner
from disagg.engine.runner.model.parameters import DenseParameters, ModelParameters, allocate_parameters
from disagg.engine.runner.model_runner import TorchModelRunner

DECODE_TARGET = 0.80
PREFILL_TARGETS = {2048: 0.60, 8192: 0.65}
"""By tokens of the prompt, of the measured matrix product."""
PEER_LIMIT_S = 75.0
"""Each batch is compiled anew."""
BLOCK_SIZE = 64
"""Prefill reads such blocks by the GPU's copy engine."""


@dataclass(frozen=True, kw_only=True)
class TensorSizes:
    """The model and the batches that are measured."""

    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_layers: int = 32
    num_heads: int = 32
    num_kv_heads: int = 8
    vocab_size: int = 128256
    dtype: str = "bfloat16"
    decode_batches: tuple[int, ...] = (1, 8, 64, 256)
    context_len: int = 1024
    num_steps: int = 30
    draft_rows: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Rows of one sequence in a step."""
    prefill_tokens: tuple[int, ...] = (512, 2048, 8192)

    def write_config(self, folder: Path) -> None:
        """A checkpoint whose weights are not read: config.json, and one file to take a fingerprint of."""
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": 16384,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
            "eos_token_id": 0,
        }
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        save_file({"none": torch.zeros(1)}, str(folder / "model.safetensors"))

    @property
    def num_cached_tokens(self) -> int:
        """Tokens that the KV cache must hold."""
        decoding = max(self.decode_batches) * (self.context_len + self.num_steps + 2 * BLOCK_SIZE)
        return max(decoding, *self.prefill_tokens)


TINY = TensorSizes(
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    vocab_size=128,
    dtype="float32",
    decode_batches=(1, 3),
    context_len=20,
    num_steps=3,
    draft_rows=(1, 2),
    prefill_tokens=(32,),
)


def random_parameters(
    folder: str | Path, config: ModelConfig, dtype: torch.dtype, device: torch.device, *_: Any
) -> ModelParameters:
    """In place of `load_parameters`: weights whose outputs keep their size from layer to layer, norms of one."""
    parameters = allocate_parameters(config, dtype, device)
    parameters.embedding_VH.normal_()
    parameters.final_norm_H.fill_(1.0)
    weights: list[Any] = [parameters.lm_head_VH]
    for layer in parameters.layers:
        for norm_H in (layer.input_norm_H, layer.ffn_norm_H):
            assert norm_H is not None, "a model of the Llama family"
            norm_H.fill_(1.0)
        assert isinstance(layer.ffn, DenseParameters), "a model without experts"
        weights += [layer.qkv_weight_QH, layer.o_weight_HA, layer.ffn.gate_up_weight_2IH, layer.ffn.down_weight_HI]
    for weight in weights:
        weight.normal_(0.0, weight.shape[1] ** -0.5)
    return parameters


def make_runner(shape: TensorSizes, device: torch.device, **changes: Any) -> TorchModelRunner:
    """The engine's own runner on random weights; `changes` are fields of `WorkerConfig`."""
    with tempfile.TemporaryDirectory() as folder:
        shape.write_config(Path(folder))
        fields: dict[str, Any] = {
            "worker_id": "gpu-check",
            "roles": ("prefill", "decode"),
            "model_path": folder,
            "device": str(device),
            "dtype": shape.dtype,
            "block_size": BLOCK_SIZE,
            "num_blocks": shape.num_cached_tokens // BLOCK_SIZE + 8,
            "max_num_seqs": max(shape.decode_batches),
        }
        config = WorkerConfig(**{**fields, **changes})
        with mock.patch.object(loaded_weights, "load_parameters", random_parameters):
            return TorchModelRunner(config)


def weight_bytes(shape: TensorSizes) -> int:
    """Weights that every step reads: all but the embedding."""
    head_dim = shape.hidden_size // shape.num_heads
    attention = shape.hidden_size * head_dim * (2 * shape.num_heads + 2 * shape.num_kv_heads)
    mlp = 3 * shape.hidden_size * shape.intermediate_size
    numbers = shape.num_layers * (attention + mlp) + shape.hidden_size * shape.vocab_size
    return numbers * int(getattr(torch, shape.dtype).itemsize)


def measure_decode(
    rows: RowFile,
    shape: TensorSizes,
    runner: TorchModelRunner,
    batch: int,
    ceilings: Ceilings,
    *,
    label: str = "decode step",
    weight_share: float = 1.0,
    target: float | None = DECODE_TARGET,
) -> None:
    """Steps of `batch` sequences, each of `context_len` tokens at first; their KV is whatever the cache holds. Launched
    as the engine launches them; beside that one by one, and drawn (random weights give flat distributions, which need
    the search behind the ranked tokens more often than a model's)."""
    step_queue = runner.step_queue
    ways: dict[str, Callable[[], object]] = {label: OneByOne(shape, runner, batch).step}
    if step_queue is not None:
        ways = {
            label: Ahead(shape, step_queue, batch).step,
            f"{label}, one by one": ways[label],
            f"{label}, drawn": Ahead(shape, step_queue, batch, temperature=1.0).step,
        }
    kv_bytes = batch * (shape.context_len + shape.num_steps // 2) * runner.layout.bytes_per_token
    limit_ms = (weight_bytes(shape) * weight_share + kv_bytes) / ceilings.read_gb_s / 1e6
    for name, step in ways.items():
        ms = wall_ms(step, repeats=shape.num_steps)
        rows.add(
            f"{name}, batch {batch}",
            ms,
            "ms",
            share=limit_ms / ms,
            target=target if name == label else None,
            detail=f"limit {limit_ms:.3f} ms at {ceilings.read_gb_s:.0f} GB/s; {batch / ms * 1e3:.0f} tokens/s",
        )


def decoding(shape: TensorSizes, batch: int, **sampling: Any) -> list[Sequence]:
    """Sequences with blocks for all their tokens, greedy unless `sampling` is given."""
    blocks_each = -(-(shape.context_len + shape.num_steps + 3) // BLOCK_SIZE)
    sequences = [dummy_sequence(shape.context_len, 0, BLOCK_SIZE, **sampling) for _ in range(batch)]
    for row, sequence in enumerate(sequences):
        sequence.block_table = list(range(row * blocks_each, (row + 1) * blocks_each))
    return sequences


class OneByOne:
    """A step is computed, and its tokens are on the host, before the next one is planned."""

    def __init__(self, shape: TensorSizes, runner: TorchModelRunner, batch: int) -> None:
        self._runner = runner
        self._sequences = decoding(shape, batch)

    def step(self) -> None:
        """Compute the next one."""
        plan = next_step(self._sequences, 0)
        append(self._sequences, self._runner.run(plan))


class Ahead:
    """The next step is queued before the tokens of the last one are read."""

    def __init__(self, shape: TensorSizes, step_queue: StepQueue, batch: int, **sampling: Any) -> None:
        self._step_queue = step_queue
        self._sequences = decoding(shape, batch, **sampling)
        self._under_way: QueuedStep | None = None

    def step(self) -> None:
        """Queue one, and read the one before it."""
        before = self._under_way
        plan = next_step(self._sequences, 0 if before is None else 1)
        self._under_way = self._step_queue.enqueue(plan, before)
        if before is not None:
            append(self._sequences, before.result())


def next_step(sequences: list[Sequence], num_pending: int) -> StepPlan:
    """Of all sequences, behind so many tokens that are not known yet."""
    return StepPlan(
        decodes=tuple(ScheduledSequence(each, each.num_tokens - 1 + num_pending, 1, samples=True) for each in sequences)
    )


def append(sequences: list[Sequence], result: StepResult) -> None:
    """The tokens of a step."""
    for sequence, token_id in zip(sequences, result.token_ids, strict=True):
        sequence.token_ids.append(token_id)


def measure_prefill(
    rows: RowFile, shape: TensorSizes, runner: TorchModelRunner, num_tokens: int, ceilings: Ceilings
) -> None:
    """One prompt in one step."""
    sequence = dummy_sequence(num_tokens, 0, BLOCK_SIZE)
    plan = StepPlan(prefills=(ScheduledSequence(sequence, 0, num_tokens, samples=True),))
    ms = wall_ms(lambda: runner.run(plan), repeats=5)
    head_numbers = shape.hidden_size * shape.vocab_size
    layer_numbers = weight_bytes(shape) // int(getattr(torch, shape.dtype).itemsize) - head_numbers
    attention = 4.0 * shape.hidden_size * shape.num_layers * num_tokens * (num_tokens + 1) / 2
    rate = (2.0 * layer_numbers * num_tokens + 2.0 * head_numbers + attention) / ms / 1e9
    rows.add(
        f"prefill, {num_tokens} tokens",
        rate,
        "TFLOP/s",
        share=rate / ceilings.gemm_tflop_s,
        target=PREFILL_TARGETS.get(num_tokens),
        detail=f"{ms:.2f} ms, {num_tokens / ms * 1e3:.0f} tokens/s; limit {ceilings.gemm_tflop_s:.0f} TFLOP/s",
    )


def measure_rows(rows: RowFile, shape: TensorSizes, runner: TorchModelRunner) -> None:
    """Steps of several rows of one sequence, at its last positions: what it takes to check the tokens of a draft,
    beside a step of one row. They are launched and waited for one by one, as captured for as many sequences."""
    alone_ms = 0.0
    for count in shape.draft_rows:
        sequence = dummy_sequence(shape.context_len + count - 1, 0, BLOCK_SIZE)
        starts = range(shape.context_len - 1, shape.context_len - 1 + count)
        plan = StepPlan(decodes=tuple(ScheduledSequence(sequence, start, 1, samples=True) for start in starts))
        ms = wall_ms(functools.partial(runner.run, plan), repeats=shape.num_steps)
        alone_ms = alone_ms or ms
        detail = f"{count / ms * 1e3:.0f} rows/s; a row alone {alone_ms:.3f} ms"
        rows.add(f"decode step, {count} rows of one sequence", ms, "ms", share=ms / alone_ms, detail=detail)


def measure_plain(rows: RowFile, shape: TensorSizes, runner: TorchModelRunner, batch: int) -> None:
    """A step in plain torch ops; the share is its time over that of ours, which was measured just before."""
    parameters = runner._parameters
    if not is_plain(parameters):
        dtype: torch.dtype = getattr(torch, shape.dtype)
        parameters = random_parameters("", runner.model_config, dtype, parameters.embedding_VH.device)
    plain = PlainStep(shape, parameters, runner, batch, shape.context_len)
    ours = OneByOne(shape, runner, batch) if runner.step_queue is None else Ahead(shape, runner.step_queue, batch)
    ms, our_ms = (wall_ms(step, repeats=10) for step in (plain.step, ours.step))
    detail = f"without captures; ours {our_ms:.3f} ms"
    rows.add(f"decode step in plain torch, batch {batch}", ms, "ms", share=ms / our_ms, detail=detail)


def run_peer(arguments: argparse.Namespace) -> None:
    """`compiled_peer.py`, which writes its rows itself.

    Raises:
        RuntimeError: it took too long, or ended with an error.
    """
    program = [sys.executable, "-m", "benchmarks.gpu.compiled_peer", "--device", arguments.device]
    files = ["--rows", str(arguments.rows), "--ceilings", str(arguments.ceilings)]
    try:
        ended = subprocess.run([*program, *files], timeout=PEER_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"stopped after {PEER_LIMIT_S:.0f} s") from None
    if ended.returncode:
        raise RuntimeError(f"exit status {ended.returncode}")


def main() -> None:
    """The section `model`."""
    arguments = parse(main.__doc__)
    device, rows = torch.device(arguments.device), row_file(arguments, "model")
    ceilings = read_ceilings(arguments.ceilings)
    shape = TensorSizes() if device.type == "cuda" else TINY
    try:
        runner = make_runner(shape, device)
    except Exception as error:
        rows.failed("start", error)
        sys.exit(1)
    attempt(rows, "capture", runner.capture_steps)
    for batch in shape.decode_batches:
        name = f"decode step, batch {batch}"
        attempt(rows, name, functools.partial(measure_decode, rows, shape, runner, batch, ceilings))
    attempt(rows, "rows of one sequence", functools.partial(measure_rows, rows, shape, runner))
    attempt(rows, "warm-up of prompts", functools.partial(model_runner.warm_up, runner))
    for num_tokens in shape.prefill_tokens:
        name = f"prefill, {num_tokens} tokens"
        attempt(rows, name, functools.partial(measure_prefill, rows, shape, runner, num_tokens, ceilings))
    for batch in shape.decode_batches:
        name = f"decode step in plain torch, batch {batch}"
        attempt(rows, name, functools.partial(measure_plain, rows, shape, runner, batch))
    del runner
    gc.collect()
    attempt(rows, "transformers compiled", functools.partial(run_peer, arguments))


if __name__ == "__main__":
    main()
