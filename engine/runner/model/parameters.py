"""The parameters of the decoder: tensors in the shapes that it computes with, q, k, v and gate, up fused.

`allocate_parameters` makes them empty, `disagg.engine.runner.weights` fills them from a checkpoint, then
`pack_parameters` lays the weights of the linear layers out in the layout that the device's GEMM reads. One rank of
several has the parameters of a smaller model (`model_shards.rank_model`). Shape letters: H hidden, I intermediate, V
vocabulary, Q = (query heads + 2 * KV heads) * head dim, A = query heads * head dim, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from disagg.engine.checkpoint.model_config import (
    DenseConfig,
    ExpertsConfig,
    FfnConfig,
    LatentConfig,
    LayerConfig,
    ModelConfig,
)
from disagg.engine.config import Quantization
from disagg.engine.runner.group_scales import GroupScales
from disagg.engine.sharding.shards import WHOLE, Shard
from disagg.kernels.dispatch import PackedWeight, pack_experts, pack_router, pack_weight
from disagg.kernels.experts import ExpertWeight
from disagg.kernels.mxfp4 import Mxfp4Weight
from disagg.kernels.quantize import STORED
from disagg.proto.errors import ConfigError

Weight = Tensor | PackedWeight
"""Weight of a linear layer, [out, in]; a tensor until it is packed."""


@dataclass(slots=True)
class DenseParameters:
    """A feed-forward network, gate and up fused. Biases are None where there are none."""

    gate_up_weight_2IH: Weight
    gate_up_bias_2I: Tensor | None
    down_weight_HI: Weight
    down_bias_H: Tensor | None


@dataclass(slots=True)
class ExpertsParameters:
    """Experts that a rank holds, all in one tensor, gate and up fused; what chooses among them, in fp32; and what all
    tokens take. None where there is none of it. L experts here, E in all, S features of what all tokens take."""

    router_weight_EH: Weight
    router_bias_E: Tensor | None
    choice_bias_E: Tensor | None
    gate_up_weight_L2IH: ExpertWeight
    gate_up_bias_L2I: Tensor | None
    down_weight_LHI: ExpertWeight
    down_bias_LH: Tensor | None
    shared_gate_up_weight_2SH: Weight | None
    shared_down_weight_HS: Weight | None
    shared_gate_1H: Tensor | None


FfnParameters = DenseParameters | ExpertsParameters


@dataclass(slots=True)
class LatentParameters:
    """What latent attention has beside other attention. `LayerParameters.qkv_weight_QH` gives the latent of the
    queries, or the queries themselves, then that of keys and values, then the part of the keys that is rotated. L
    numbers of a latent, E of a key and U of a value that it is expanded to, P of a query, G of the latent of queries.

    Rotated parts are in the order of `apply_rope`, whatever order the checkpoint has."""

    q_norm_G: Tensor | None
    """None where queries have no latent, as is the next one."""
    q_up_weight_PG: Weight | None
    kv_norm_L: Tensor
    key_weight_NLE: ExpertWeight
    """Of each head, from a query to what is compared with latents."""
    value_weight_NUL: ExpertWeight
    """Of each head, from a latent to a value."""


@dataclass(slots=True)
class LayerParameters:
    """One decoder layer; nothing changes it once its weights are packed. Biases, norms and sinks are None where there
    are none."""

    input_norm_H: Tensor | None
    qkv_weight_QH: Weight
    qkv_bias_Q: Tensor | None
    q_norm_D: Tensor | None
    """[D], or the size of all heads."""
    k_norm_D: Tensor | None
    sinks_N: Tensor | None
    """In fp32."""
    latent: LatentParameters | None
    o_weight_HA: Weight
    o_bias_H: Tensor | None
    attention_out_norm_H: Tensor | None
    ffn_norm_H: Tensor | None
    ffn: FfnParameters
    ffn_out_norm_H: Tensor | None


@dataclass(slots=True)
class ModelParameters:
    """The decoder, or one rank's part of it. With tied embeddings `lm_head_VH` is `embedding_VH`, the same tensor,
    until it is packed; with several stages the last one has the matrix as its head. What another stage has is empty
    here: no rows of a matrix, no numbers of the norm."""

    embedding_VH: Tensor
    layers: tuple[LayerParameters, ...]
    final_norm_H: Tensor
    lm_head_VH: Weight


def allocate_parameters(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, shard: Shard = WHOLE
) -> ModelParameters:
    """Parameters with undefined contents. `config` is the rank's."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    hidden = config.hidden_size
    embedding_VH = empty(config.vocab_size if shard.is_first else 0, hidden)
    is_same = config.tied_embeddings and shard.is_first
    head_VH = empty(config.vocab_size, hidden) if shard.is_last and not is_same else empty(0, hidden)
    return ModelParameters(
        embedding_VH=embedding_VH,
        layers=tuple(_allocate_layer(config, layer, empty, device) for layer in config.layers),
        final_norm_H=empty(hidden if shard.is_last else 0),
        lm_head_VH=embedding_VH if shard.is_last and is_same else head_VH,
    )


_Empty = Callable[..., Tensor]
"""Allocates a tensor of a shape, in the model's dtype."""


def _allocate_layer(config: ModelConfig, layer: LayerConfig, empty: _Empty, device: torch.device) -> LayerParameters:
    hidden, head_dim, attention = config.hidden_size, config.head_dim, layer.attention
    attention_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    qkv_size, latent = attention_size + 2 * kv_size, attention.latent
    if latent is not None:
        qkv_size = (latent.query_rank or config.num_heads * latent.query_dim) + latent.cache_dim
        attention_size = config.num_heads * latent.value_dim
    norm_sizes = {"none": None, "head": (head_dim, head_dim), "whole": (attention_size, kv_size)}[attention.qk_norm]
    before, after = layer.norms != "after", layer.norms != "before"
    return LayerParameters(
        input_norm_H=empty(hidden) if before else None,
        qkv_weight_QH=empty(qkv_size, hidden),
        qkv_bias_Q=empty(qkv_size) if attention.qkv_bias else None,
        q_norm_D=empty(norm_sizes[0]) if norm_sizes else None,
        k_norm_D=empty(norm_sizes[1]) if norm_sizes else None,
        sinks_N=torch.empty(config.num_heads, dtype=torch.float32, device=device) if attention.sinks else None,
        latent=None if latent is None else _allocate_latent(latent, config.num_heads, empty),
        o_weight_HA=empty(hidden, attention_size),
        o_bias_H=empty(hidden) if attention.o_bias else None,
        attention_out_norm_H=empty(hidden) if after else None,
        ffn_norm_H=empty(hidden) if before else None,
        ffn=_allocate_ffn(hidden, layer.ffn, empty),
        ffn_out_norm_H=empty(hidden) if after else None,
    )


def _allocate_latent(latent: LatentConfig, num_heads: int, empty: _Empty) -> LatentParameters:
    rank = latent.query_rank
    return LatentParameters(
        q_norm_G=None if rank is None else empty(rank),
        q_up_weight_PG=None if rank is None else empty(num_heads * latent.query_dim, rank),
        kv_norm_L=empty(latent.latent_dim),
        key_weight_NLE=empty(num_heads, latent.latent_dim, latent.key_dim),
        value_weight_NUL=empty(num_heads, latent.value_dim, latent.latent_dim),
    )


def _allocate_ffn(hidden: int, ffn: FfnConfig, empty: _Empty) -> FfnParameters:
    if isinstance(ffn, DenseConfig):
        return _allocate_dense(hidden, ffn, empty)
    return _allocate_experts(hidden, ffn, empty)


def _allocate_experts(hidden: int, ffn: ExpertsConfig, empty: _Empty) -> ExpertsParameters:
    total, held, inner, shared = ffn.routing.num_experts, len(ffn.held), ffn.intermediate_size, ffn.shared_size

    def wide(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=empty(0).device)

    return ExpertsParameters(
        router_weight_EH=wide(total, hidden),
        router_bias_E=wide(total) if ffn.router_bias else None,
        choice_bias_E=wide(total) if ffn.choice_bias else None,
        gate_up_weight_L2IH=empty(held, 2 * inner, hidden),
        gate_up_bias_L2I=empty(held, 2 * inner) if ffn.bias else None,
        down_weight_LHI=empty(held, hidden, inner),
        down_bias_LH=empty(held, hidden) if ffn.bias else None,
        shared_gate_up_weight_2SH=empty(2 * shared, hidden) if shared else None,
        shared_down_weight_HS=empty(hidden, shared) if shared else None,
        shared_gate_1H=empty(1, hidden) if ffn.shared_gate else None,
    )


def _allocate_dense(hidden: int, ffn: DenseConfig, empty: _Empty) -> DenseParameters:
    inner = ffn.intermediate_size
    return DenseParameters(
        gate_up_weight_2IH=empty(2 * inner, hidden),
        gate_up_bias_2I=empty(2 * inner) if ffn.bias else None,
        down_weight_HI=empty(hidden, inner),
        down_bias_H=empty(hidden) if ffn.bias else None,
    )


def pack_parameters(
    parameters: ModelParameters, quantization: Quantization = "none", scales: GroupScales | None = None
) -> None:
    """Pack every linear weight in place, one after the other in the order of a step, so that only one is held twice.
    With `stored` and `stored_sums`, a weight whose `scales` are given is packed in fewer bits, as are experts that they
    keep in MXFP4, if both products of a layer are.

    Tied embeddings are kept as they are, beside the packed head: one embedding matrix more.

    Raises:
        ConfigError: a weight that is to be quantized is not finite, or cannot be; or none is stored in 4 or 8 bits.
    """
    if quantization in STORED and (scales is None or scales.are_none):
        others = " and no experts in MXFP4" if quantization == "stored" else ""
        raise ConfigError(
            f"quantization: {quantization}, but the checkpoint has no linear weights in groups of 4 or 8 bits{others}"
        )

    try:
        for layer in parameters.layers:
            layer.qkv_weight_QH = _packed(layer.qkv_weight_QH, quantization, scales)
            if layer.latent is not None:
                _pack_latent(layer.latent, quantization, scales)
            layer.o_weight_HA = _packed(layer.o_weight_HA, quantization, scales)
            _pack_ffn(layer.ffn, quantization, scales)
        if len(plain(parameters.lm_head_VH)):  # else another stage has it
            parameters.lm_head_VH = _packed(parameters.lm_head_VH, quantization, scales)
    except ValueError as error:
        raise ConfigError(f"quantization: {error}") from error


def _pack_latent(latent: LatentParameters, quantization: Quantization, scales: GroupScales | None) -> None:
    """The products by head keep the model's dtype."""
    if latent.q_up_weight_PG is not None:
        latent.q_up_weight_PG = _packed(latent.q_up_weight_PG, quantization, scales)
    latent.key_weight_NLE = pack_experts(plain(latent.key_weight_NLE))
    latent.value_weight_NUL = pack_experts(plain(latent.value_weight_NUL))


def _pack_ffn(ffn: FfnParameters, quantization: Quantization, scales: GroupScales | None) -> None:
    if isinstance(ffn, DenseParameters):
        ffn.gate_up_weight_2IH = _packed(ffn.gate_up_weight_2IH, quantization, scales)
        ffn.down_weight_HI = _packed(ffn.down_weight_HI, quantization, scales)
        return
    gate_up, down = _experts_of(ffn, scales)
    ffn.gate_up_weight_L2IH, ffn.down_weight_LHI = pack_experts(gate_up, quantization), pack_experts(down, quantization)
    ffn.router_weight_EH = pack_router(plain(ffn.router_weight_EH), ffn.gate_up_weight_L2IH)
    if ffn.shared_gate_up_weight_2SH is not None and ffn.shared_down_weight_HS is not None:
        ffn.shared_gate_up_weight_2SH = _packed(ffn.shared_gate_up_weight_2SH, quantization, scales)
        ffn.shared_down_weight_HS = _packed(ffn.shared_down_weight_HS, quantization, scales)


def _experts_of(
    ffn: ExpertsParameters, scales: GroupScales | None
) -> tuple[Tensor, Tensor] | tuple[Mxfp4Weight, Mxfp4Weight]:
    """The weights of a layer's experts: both products in MXFP4, or both plain."""
    gate_up_L2IH, down_LHI = plain(ffn.gate_up_weight_L2IH), plain(ffn.down_weight_LHI)
    if scales is None or scales.experts is None:
        return gate_up_L2IH, down_LHI
    gate_up, down = scales.experts.take(gate_up_L2IH), scales.experts.take(down_LHI)
    if gate_up is not None and down is not None:
        return gate_up, down
    return (
        gate_up_L2IH if gate_up is None else gate_up.dequantized(),
        down_LHI if down is None else down.dequantized(),
    )


def _packed(weight: Weight, quantization: Quantization, scales: GroupScales | None) -> Weight:
    tensor = plain(weight)
    return pack_weight(tensor, quantization, None if scales is None else scales.of(tensor))


def plain(weight: Weight | ExpertWeight) -> Tensor:
    """The tensor of a weight that is not packed yet."""
    assert isinstance(weight, Tensor), "weights are filled before they are packed"
    return weight
