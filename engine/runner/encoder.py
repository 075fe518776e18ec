"""The runner of an encoder (BERT): texts at once, all tokens of which attend to each other, and no KV.

A step has whole prompts only (`ModelRunner.whole_prompts`). Blocks are counted as for any model, so that a step has as
many texts as the batch has places, but there is no memory behind them. A sequence that wants tokens gets token 0: only
probes and measured steps do.

Products are over the tokens of all texts of a step; attention is over one text after the other. The model's dtype is
between ops.

Shapes: T tokens of a step, L of a text, H hidden, N heads, D numbers of a head.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from disagg.engine.batch_arrays import BatchArrays, BatchBuilder, blocks_for_tokens
from disagg.engine.checkpoint.checkpoint import model_fingerprint, read_model_config
from disagg.engine.checkpoint.formats.reader import TensorReader
from disagg.engine.checkpoint.formats.stored import stored_tensors
from disagg.engine.checkpoint.model_config import ModelConfig
from disagg.engine.checkpoint.weight_headers import read_headers
from disagg.engine.config import WorkerConfig
from disagg.engine.kv_transfer.transport import UNKEYED, Checksum
from disagg.engine.parallel.interfaces import ShardRunner
from disagg.engine.plan import Buffer, StepPlan, StepQueue, StepResult
from disagg.engine.runner.collectives import Collective
from disagg.engine.runner.device import torch_device
from disagg.engine.runner.pooling import with_vectors
from disagg.engine.sharding.shards import WHOLE
from disagg.kernels.dispatch import set_num_threads
from disagg.proto.errors import ConfigError
from disagg.proto.messages import KvLayout, ParallelShape

logger = logging.getLogger(__name__)

_PREFIX: Final = "bert."
_UNUSED: Final = ("pooler.", "embeddings.position_ids")
"""Tensors of a checkpoint that no vector needs."""


class EncoderRunner(ShardRunner):
    """The model with its parameters. Owner: the engine thread.

    Raises:
        ConfigError: the checkpoint, the device or a setting cannot work.
    """

    checksum: Checksum = UNKEYED
    shard = WHOLE
    arithmetic = "torch"
    whole_prompts = True
    step_queue: StepQueue | None = None
    capture_sizes: tuple[int, ...] = ()

    def __init__(self, config: WorkerConfig) -> None:
        model = read_model_config(config.model_path)
        longest = config.max_model_len or min(model.max_positions, config.token_budget)
        _check(config, model, longest)
        set_num_threads(config.num_threads)
        self._model = model
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        self._device = torch_device(config.device)
        self._weights = load_encoder(config.model_path, model, self._dtype, self._device)
        self.fingerprint = model_fingerprint(config.model_path, config.dtype)
        self.vocab_size, self.max_model_len, self.block_size = model.vocab_size, longest, config.block_size
        self.num_blocks = config.num_blocks or config.num_places * blocks_for_tokens(longest, config.block_size)
        self.layout = KvLayout.dense(num_layers=1, num_kv_heads=1, head_dim=1, dtype="none", bytes_per_token=1)
        self._batches = BatchBuilder(config.block_size, longest)

    @override
    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Compute the plan; of pooled requests the vectors."""
        if not plan.entries:
            return StepResult([])
        texts = [entry.sequence.token_ids[entry.start : entry.end] for entry in plan.entries]
        hidden_TH, rows, end = self.hidden(texts), [], 0
        for number, entry in enumerate(plan.entries):
            end += entry.num_tokens
            if number < len(plan.decodes) or entry.sequence.keeps_rows:
                rows.append(hidden_TH[end - entry.num_tokens : end])
            elif entry.samples:
                rows.append(hidden_TH[end - 1 : end])
        result = StepResult([0 for entry in plan.entries if entry.samples])
        return with_vectors(plan, result, torch.cat(rows), hidden_TH[:0]) if plan.pools and rows else result

    @torch.inference_mode()
    def hidden(self, texts: Seq[Seq[int]]) -> Tensor:
        """Hidden states behind the last layer, [T, H], of all texts one behind the other."""
        weights, eps, lengths = self._weights, self._model.rms_norm_eps, [len(text) for text in texts]
        ids_T = torch.tensor([token_id for text in texts for token_id in text], device=self._device)
        positions_T = torch.cat([torch.arange(length, device=self._device) for length in lengths])
        summed_TH = weights["embeddings.word_embeddings.weight"][ids_T]
        summed_TH = summed_TH + weights["embeddings.token_type_embeddings.weight"][0]
        summed_TH = summed_TH + weights["embeddings.position_embeddings.weight"][positions_T]
        hidden_TH = self._norm(summed_TH, "embeddings.LayerNorm", eps)
        for index in range(self._model.num_layers):
            layer = f"encoder.layer.{index}"
            attended_TH = self._attend(hidden_TH, f"{layer}.attention.self", lengths)
            projected_TH = self._linear(attended_TH, f"{layer}.attention.output.dense")
            hidden_TH = self._norm(projected_TH + hidden_TH, f"{layer}.attention.output.LayerNorm", eps)
            inner_TF = functional.gelu(self._linear(hidden_TH, f"{layer}.intermediate.dense"))
            outer_TH = self._linear(inner_TF, f"{layer}.output.dense")
            hidden_TH = self._norm(outer_TH + hidden_TH, f"{layer}.output.LayerNorm", eps)
        return hidden_TH

    def _attend(self, hidden_TH: Tensor, name: str, lengths: Seq[int]) -> Tensor:
        num_heads, head_dim = self._model.num_heads, self._model.head_dim
        q, k, v = (
            self._linear(hidden_TH, f"{name}.{part}").view(-1, num_heads, head_dim).transpose(0, 1)
            for part in ("query", "key", "value")
        )
        out, start = [], 0
        for length in lengths:
            text = slice(start, start + length)
            attended_NLD = functional.scaled_dot_product_attention(q[:, text], k[:, text], v[:, text])
            out.append(attended_NLD.transpose(0, 1).reshape(length, num_heads * head_dim))
            start += length
        return torch.cat(out)

    def _linear(self, rows: Tensor, name: str) -> Tensor:
        return functional.linear(rows, self._weights[f"{name}.weight"], self._weights[f"{name}.bias"])

    def _norm(self, rows_TH: Tensor, name: str, eps: float) -> Tensor:
        weight_H, bias_H = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
        return functional.layer_norm(rows_TH, weight_H.shape, weight_H, bias_H, eps)

    # ------------------------------------------------------------ one rank, and no KV

    @override
    def join(self, collective: Collective | None, num_blocks: int) -> None:
        assert collective is None, "an encoder has one rank"

    @override
    def arrays(self, plan: StepPlan) -> BatchArrays:
        return self._batches.arrays(plan)

    @override
    def step(self, plan: StepPlan, arrays: BatchArrays) -> StepResult:
        return self.run(plan)

    @override
    def compute(self, arrays: BatchArrays) -> None:
        raise AssertionError("an encoder has one rank")

    @override
    def new_staging(self, nbytes: int) -> Buffer:
        return np.empty(nbytes, dtype=np.uint8)

    @override
    def gather_part(
        self, block_table: Seq[int], start: int, end: int, out: Buffer, peer: ParallelShape, group: int = 0
    ) -> list[int]:
        """Copies nothing: a sequence that comes back is computed without KV."""
        return []

    @override
    def scatter_part(
        self, block_table: Seq[int], start: int, end: int, data: Buffer, peer: ParallelShape, group: int = 0
    ) -> None:
        """Copies nothing."""


def _check(config: WorkerConfig, model: ModelConfig, longest: int) -> None:
    """Raises `ConfigError` for what an encoder cannot do."""
    if config.num_ranks > 1:
        key = "tp" if config.tp > 1 else "pp"
        raise ConfigError(f"{key}: {model.architecture} runs on one rank, not on {config.num_ranks}")
    if set(config.roles) != {"prefill", "decode"} or config.is_elastic:
        raise ConfigError(f"mode: {model.architecture} has no KV to hand over: set mode to colocated")
    if config.quantization != "none":
        raise ConfigError(f"quantization: {config.quantization} is not for {model.architecture}")
    if config.tiers is not None or config.fetch:
        raise ConfigError(f"kv_cache.{'fetch' if config.tiers is None else 'tiers'}: {model.architecture} has no KV")
    if longest > model.max_positions:
        raise ConfigError(f"max_model_len {longest} is more than the model's {model.max_positions}")
    if longest > config.token_budget:
        raise ConfigError(
            f"token_budget: {config.token_budget} is less than {longest}, the longest text: {model.architecture} "
            "computes a text in one step"
        )


def encoder_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of an encoder by name."""
    assert model.encoder is not None, "it is an encoder"
    hidden, layers = model.hidden_size, range(model.num_layers)
    inner = model.layers[0].ffn.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (model.vocab_size, hidden),
        "embeddings.position_embeddings.weight": (model.max_positions, hidden),
        "embeddings.token_type_embeddings.weight": (model.encoder.num_token_types, hidden),
    }
    norms = ["embeddings.LayerNorm"]
    linears: dict[str, tuple[int, int]] = {}
    for layer in (f"encoder.layer.{index}" for index in layers):
        norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
        linears |= {f"{layer}.attention.self.{part}": (hidden, hidden) for part in ("query", "key", "value")}
        linears |= {
            f"{layer}.attention.output.dense": (hidden, hidden),
            f"{layer}.intermediate.dense": (inner, hidden),
            f"{layer}.output.dense": (hidden, inner),
        }
    for name in norms:
        shapes |= {f"{name}.weight": (hidden,), f"{name}.bias": (hidden,)}
    for name, shape in linears.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return shapes


def check_encoder(folder: str, model: ModelConfig) -> dict[str, str]:
    """Hold the weight files of an encoder against its config.json, without loading them; the names of the files by the
    names here.

    Raises:
        ConfigError: a tensor is missing, of another shape, or not part of the model.
    """
    shapes, found = encoder_shapes(model), dict[str, str]()
    for stored, entry in read_headers(folder).items():
        name = stored.removeprefix(_PREFIX)
        if name.startswith(_UNUSED):
            continue
        if name not in shapes:
            raise ConfigError(f"{entry.file}: tensor {stored} is not part of {model.architecture}")
        if entry.shape != shapes[name]:
            required = list(shapes[name])
            raise ConfigError(
                f"{entry.file}: tensor {stored} has shape {list(entry.shape)}; config.json requires {required}"
            )
        found[name] = stored
    if missing := [name for name in shapes if name not in found]:
        raise ConfigError(f"{folder}: the weights lack {', '.join(missing[:3])}")
    return found


def load_encoder(folder: str, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """The tensors of an encoder by name. Raises `ConfigError` as `check_encoder`."""
    names, entries, loaded = check_encoder(folder, model), read_headers(folder), dict[str, Tensor]()
    with TensorReader(stored_tensors(entries, None), entries) as reader:
        for name, stored in names.items():
            for _, piece in reader.pieces(stored, [range(size) for size in entries[stored].shape]):
                loaded[name] = piece.to(device, dtype, copy=True)
    return loaded
