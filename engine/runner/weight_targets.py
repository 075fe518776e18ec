"""Which tensor of a checkpoint fills which (slice of a) parameter, by name and shape; of what ranks share, which part
each of them takes. Nothing is read here."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from disagg.engine.checkpoint.families.family import TensorNames
from disagg.engine.checkpoint.families.registry import family_of
from disagg.engine.checkpoint.model_config import DenseConfig, ExpertsConfig, LatentConfig, LayerConfig, ModelConfig
from disagg.engine.runner.model.parameters import (
    DenseParameters,
    ExpertsParameters,
    LatentParameters,
    LayerParameters,
    ModelParameters,
    plain,
)
from disagg.engine.sharding.model_shards import vocab_part
from disagg.engine.sharding.shards import WHOLE, Shard
from disagg.engine.sharding.stages import stage_layers

LM_HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """What a tensor of the checkpoint fills."""

    shape: tuple[int, ...]
    """Shape of the whole tensor in the checkpoint."""
    parameter: Tensor
    """A (slice of a) parameter, not packed yet; it has the shape of `parts`, perhaps with a dim divided in two."""
    dim: int = 0
    """The dimension along which ranks share the tensor."""
    parts: tuple[range, ...] = ()
    """The indices along `dim` that this rank takes, in this order; empty for all."""
    into: tuple[Tensor, ...] = ()
    """What each of `parts` fills, where these are slices of several parameters; `parameter` is one of those."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that is filled."""
        return self.into or (self.parameter,)

    @property
    def nbytes(self) -> int:
        """Bytes of what is filled."""
        return sum([each.numel() * each.element_size() for each in self.tensors])


def checkpoint_tensors(config: ModelConfig, parameters: ModelParameters, shard: Shard = WHOLE) -> dict[str, Target]:
    """Checkpoint name -> what it fills of a rank's parameters, which are not packed yet. `config` is the whole model's;
    of several stages only the tensors that the rank's stage has."""
    vocabulary, num_ids = vocab_part(config, shard), config.vocab_size
    targets = dict[str, Target]()
    if shard.is_first:
        targets[EMBEDDING] = _rows(parameters.embedding_VH[: len(vocabulary)], num_ids, vocabulary)
    if shard.is_last:
        targets["model.norm.weight"] = _whole(parameters.final_norm_H)
        head = EMBEDDING if config.tied_embeddings else LM_HEAD
        targets[head] = _rows(plain(parameters.lm_head_VH)[: len(vocabulary)], num_ids, vocabulary)
    names = family_of(config.architecture).names
    for index, held in zip(stage_layers(config, shard), parameters.layers, strict=True):
        for name, target in _layer_tensors(config, names, config.layers[index], held, shard).items():
            targets[f"model.layers.{index}.{name}"] = target
    return targets


def _layer_tensors(
    config: ModelConfig, names: TensorNames, layer: LayerConfig, held: LayerParameters, shard: Shard
) -> dict[str, Target]:
    """Biases of the row-parallel layers are whole on every rank; the decoder adds them once."""
    single = (
        (f"{names.input_norm}.weight", held.input_norm_H),
        (f"{names.attention_out_norm}.weight", held.attention_out_norm_H),
        (f"{names.ffn_norm}.weight", held.ffn_norm_H),
        (f"{names.ffn_out_norm}.weight", held.ffn_out_norm_H),
        (f"{names.o}.bias", held.o_bias_H),
    )
    targets = {name: _whole(tensor) for name, tensor in single if tensor is not None}
    if layer.attention.latent is not None and held.latent is not None:
        targets |= _latent_tensors(config, names, layer.attention.latent, held, held.latent, shard)
    else:
        targets |= _attention_tensors(config, names, layer, held, shard)
    if isinstance(layer.ffn, ExpertsConfig):
        assert isinstance(held.ffn, ExpertsParameters), "both are of one layer"
        return targets | _expert_tensors(names, layer.ffn, held.ffn, shard)
    assert isinstance(held.ffn, DenseParameters), "both are of one layer"
    return targets | _dense_tensors(names, layer.ffn, held.ffn, shard)


def _attention_tensors(
    config: ModelConfig, names: TensorNames, layer: LayerConfig, held: LayerParameters, shard: Shard
) -> dict[str, Target]:
    targets = {}
    heads, kv_heads = shard.part(config.num_heads), shard.kv_heads(config.num_kv_heads)
    attention, num_columns = _times(heads, config.head_dim), config.num_heads * config.head_dim
    targets[f"{names.o}.weight"] = _columns(plain(held.o_weight_HA), num_columns, attention)
    kv, num_kv = _times(kv_heads, config.head_dim), config.num_kv_heads * config.head_dim
    qkv_rows = ((num_columns, attention), (num_kv, kv), (num_kv, kv))
    targets |= _fused(plain(held.qkv_weight_QH), names.qkv, "weight", qkv_rows)
    targets |= _fused(held.qkv_bias_Q, names.qkv, "bias", qkv_rows)
    for name, norm, rows in ((names.q_norm, held.q_norm_D, qkv_rows[0]), (names.k_norm, held.k_norm_D, qkv_rows[1])):
        if norm is not None:
            is_whole = layer.attention.qk_norm == "whole"
            targets[f"{name}.weight"] = _rows(norm, *rows) if is_whole else _whole(norm)
    if held.sinks_N is not None:
        targets[names.sinks] = _rows(held.sinks_N, config.num_heads, heads)
    return targets


def _latent_tensors(
    config: ModelConfig,
    names: TensorNames,
    latent: LatentConfig,
    held: LayerParameters,
    weights: LatentParameters,
    shard: Shard,
) -> dict[str, Target]:
    """Each rank has the latents whole, and some of the heads. The tensor that expands latents has of each head the rows
    of its key, then those of its value."""
    heads = shard.part(config.num_heads)
    queries, num_queries = _times(heads, latent.query_dim), config.num_heads * latent.query_dim
    values, num_values = _times(heads, latent.value_dim), config.num_heads * latent.value_dim
    kv = latent.cache_dim, range(latent.cache_dim)
    qkv_weight_QH = plain(held.qkv_weight_QH)
    targets = {
        f"{names.o}.weight": _columns(plain(held.o_weight_HA), num_values, values),
        f"{names.kv_latent_norm}.weight": _whole(weights.kv_norm_L),
        f"{names.kv_up}.weight": _expansion(latent, weights, config.num_heads, heads),
    }
    if latent.query_rank is None or weights.q_norm_G is None or weights.q_up_weight_PG is None:
        rows = ((num_queries, queries), kv)
        return targets | _fused(qkv_weight_QH, (names.qkv[0], names.kv_down), "weight", rows)
    targets[f"{names.q_latent_norm}.weight"] = _whole(weights.q_norm_G)
    targets[f"{names.q_up}.weight"] = _rows(plain(weights.q_up_weight_PG), num_queries, queries)
    rows = ((latent.query_rank, range(latent.query_rank)), kv)
    return targets | _fused(qkv_weight_QH, (names.q_down, names.kv_down), "weight", rows)


def _expansion(latent: LatentConfig, weights: LatentParameters, num_heads: int, heads: range) -> Target:
    key_weight_NLE, value_weight_NUL = plain(weights.key_weight_NLE), plain(weights.value_weight_NUL)
    parts, into = list[range](), list[Tensor]()
    size = latent.key_dim + latent.value_dim
    for index, head in enumerate(heads):
        start = head * size
        parts += [range(start, start + latent.key_dim), range(start + latent.key_dim, start + size)]
        into += [key_weight_NLE[index].t(), value_weight_NUL[index]]
    shape = (num_heads * size, latent.latent_dim)
    return Target(shape, key_weight_NLE, 0, tuple(parts), tuple(into))


def _dense_tensors(names: TensorNames, ffn: DenseConfig, held: DenseParameters, shard: Shard) -> dict[str, Target]:
    inner = shard.part(ffn.intermediate_size)
    targets = {f"{names.down}.weight": _columns(plain(held.down_weight_HI), ffn.intermediate_size, inner)}
    if held.down_bias_H is not None:
        targets[f"{names.down}.bias"] = _whole(held.down_bias_H)
    rows = ((ffn.intermediate_size, inner),) * 2
    targets |= _fused(plain(held.gate_up_weight_2IH), names.gate_up, "weight", rows)
    return targets | _fused(held.gate_up_bias_2I, names.gate_up, "bias", rows)


def _expert_tensors(names: TensorNames, ffn: ExpertsConfig, held: ExpertsParameters, shard: Shard) -> dict[str, Target]:
    single = {
        f"{names.router}.weight": plain(held.router_weight_EH),
        f"{names.router}.bias": held.router_bias_E,
        names.choice_bias: held.choice_bias_E,
        f"{names.shared_gate}.weight": held.shared_gate_1H,
    }
    targets = {name: _whole(tensor) for name, tensor in single.items() if tensor is not None}
    if held.shared_gate_up_weight_2SH is not None and held.shared_down_weight_HS is not None:
        part, count = shard.part(ffn.shared_size), ffn.shared_size
        gate_up = (f"{names.shared}.gate_proj", f"{names.shared}.up_proj")
        targets |= _fused(plain(held.shared_gate_up_weight_2SH), gate_up, "weight", ((count, part),) * 2)
        targets[f"{names.shared}.down_proj.weight"] = _columns(plain(held.shared_down_weight_HS), count, part)
    experts, inner = range(ffn.routing.num_experts), range(ffn.intermediate_size)
    if ffn.whole_experts:
        experts = shard.part(len(experts))
    else:
        inner = shard.part(len(inner))
    stored = _one_tensor if names.experts_are_one else _each_expert
    return targets | stored(names, ffn, held, experts, inner)


def _each_expert(
    names: TensorNames, ffn: ExpertsConfig, held: ExpertsParameters, experts: range, inner: range
) -> dict[str, Target]:
    """Each expert has tensors of its own. Of those that another rank has, nothing is read."""
    gate_up_L2IH, down_LHI = plain(held.gate_up_weight_L2IH), plain(held.down_weight_LHI)
    gate, up, down = names.of_expert
    targets = {}
    for expert in range(ffn.routing.num_experts):
        prefix, is_here = f"{names.experts}.{expert}", expert in experts
        index, part = (experts.index(expert), inner) if is_here else (0, range(0))
        for name, tensor_IH in zip((gate, up), gate_up_L2IH[index].chunk(2), strict=True):
            targets[f"{prefix}.{name}.weight"] = _rows(tensor_IH[: len(part)], ffn.intermediate_size, part)
        down_HI = down_LHI[index][:, : len(part)]
        targets[f"{prefix}.{down}.weight"] = _columns(down_HI, ffn.intermediate_size, part)
    return targets


def _one_tensor(
    names: TensorNames, ffn: ExpertsConfig, held: ExpertsParameters, experts: range, inner: range
) -> dict[str, Target]:
    """All experts are one tensor, inputs before outputs, gate and up of one feature after the other."""
    total, features = ffn.routing.num_experts, ffn.intermediate_size
    gate_up_L2IH, down_LHI = plain(held.gate_up_weight_L2IH), plain(held.down_weight_LHI)
    L, H, I = down_LHI.shape  # noqa: E741 - the shape letters of the name
    gate_up, down = f"{names.experts}.gate_up_proj", f"{names.experts}.down_proj"

    def target(shape: tuple[int, ...], parameter: Tensor, dim: int, part: range) -> Target:
        """Ranks share the experts, or along `dim` their features."""
        if len(experts) < total:
            return Target(shape, parameter, 0, (experts,))
        return Target(shape, parameter, dim, () if len(part) == shape[dim] else (part,))

    pairs = _times(inner, 2)
    gate_up_LHI2 = gate_up_L2IH.view(L, 2, I, H).permute(0, 3, 2, 1)
    targets = {
        gate_up: target((total, H, 2 * features), gate_up_LHI2, 2, pairs),
        down: target((total, features, H), down_LHI.transpose(1, 2), 1, inner),
    }
    if held.gate_up_bias_L2I is not None and held.down_bias_LH is not None:
        bias_LI2 = held.gate_up_bias_L2I.view(L, 2, I).transpose(1, 2)
        targets[f"{gate_up}_bias"] = target((total, 2 * features), bias_LI2, 1, pairs)
        targets[f"{down}_bias"] = target((total, H), held.down_bias_LH, 1, range(H))
    return targets


def _fused(
    fused: Tensor | None, names: tuple[str, ...], suffix: str, rows: tuple[tuple[int, range], ...]
) -> dict[str, Target]:
    """A parameter that holds several tensors one below the other, which may be one tensor of the checkpoint, too.
    `rows`: how many rows each has, and which of them are wanted."""
    if fused is None:
        return {}
    if len(names) == 1:
        ends = tuple(itertools.accumulate((count for count, _ in rows), initial=0))
        parts = tuple(range(end + part.start, end + part.stop) for end, (_, part) in zip(ends, rows, strict=False))
        is_all = len(fused) == ends[-1]
        return {f"{names[0]}.{suffix}": Target((ends[-1], *fused.shape[1:]), fused, 0, () if is_all else parts)}
    pieces = torch.split(fused, [len(part) for _, part in rows])
    return {
        f"{name}.{suffix}": _rows(piece, count, part)
        for name, piece, (count, part) in zip(names, pieces, rows, strict=True)
    }


def _whole(parameter: Tensor) -> Target:
    return Target(tuple(parameter.shape), parameter)


def _rows(parameter: Tensor, count: int, part: range) -> Target:
    return Target((count, *parameter.shape[1:]), parameter, 0, () if len(part) == count else (part,))


def _columns(parameter: Tensor, count: int, part: range) -> Target:
    return Target((parameter.shape[0], count), parameter, 1, () if len(part) == count else (part,))


def _times(part: range, size: int) -> range:
    """The elements of consecutive things of `size` elements each."""
    return range(part.start * size, part.stop * size)
