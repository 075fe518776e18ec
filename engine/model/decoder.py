"""The decoder of the Llama family: Llama, Mistral, Qwen2, Qwen3 and what is built like them, one code with switches.

It computes one flat batch of tokens, writes their KV into the paged cache, and gives logits for the rows that sample.
All tensor work goes through `disagg.kernels.dispatch`. Numerics follow transformers' modeling files: fp32 inside the
norms and the softmax, the model's dtype between ops.

Shapes: T tokens, S decoding sequences, R rows that sample, H hidden, N query heads, K KV heads, D head dim, A = N * D,
V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from disagg.engine.checkpoint import ModelConfig
from disagg.engine.kv_cache import KvCache
from disagg.engine.model.batch import Batch
from disagg.engine.model.parameters import LayerParameters, ModelParameters
from disagg.engine.model.rope import RopeTable
from disagg.kernels.dispatch import (
    apply_rope,
    kv_write,
    linear,
    linear_add_rms_norm,
    linear_silu_mul,
    paged_decode_attention,
    paged_prefill_attention,
    rms_norm,
)


class Decoder:
    """The model with its parameters. Stateless but for the KV cache that it was given."""

    def __init__(self, config: ModelConfig, parameters: ModelParameters, rope: RopeTable, cache: KvCache) -> None:
        self._parameters = parameters
        self._rope = rope
        self._eps = config.rms_norm_eps
        self._vocab_size = config.vocab_size
        self._layers = tuple(_Layer(config, layer, cache.layer(index)) for index, layer in enumerate(parameters.layers))

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """Logits [R, V] in the model's dtype, one row per sampling row, in order.

        The KV of all T tokens is in the cache then.
        """
        parameters = self._parameters
        cos_TD, sin_TD = self._rope.rows(batch.positions_T)
        residual_TH = F.embedding(batch.token_ids_T, parameters.embedding_VH)
        normed_TH = rms_norm(residual_TH, parameters.layers[0].input_norm_H, self._eps)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            attended_TA = layer.attend(normed_TH, cos_TD, sin_TD, batch)
            if index == last and batch.sample_rows is not None:
                # From here on rows do not meet any more: the others are done once their KV is written.
                attended_TA, residual_TH = attended_TA[batch.sample_rows], residual_TH[batch.sample_rows]
            if attended_TA.shape[0] == 0:
                break
            norm_H = parameters.final_norm_H if index == last else parameters.layers[index + 1].input_norm_H
            normed_TH, residual_TH = layer.transform(attended_TA, residual_TH, norm_H)
        else:
            return linear(normed_TH, parameters.lm_head_VH, None)
        return residual_TH.new_empty((0, self._vocab_size))


class _Layer:
    """One layer with its part of the cache, in two halves: attention up to its output projection, and what follows."""

    def __init__(self, config: ModelConfig, parameters: LayerParameters, cache: tuple[Tensor, Tensor]) -> None:
        self._p = parameters
        self._key_cache_NKBD, self._value_cache_NKBD = cache
        self._eps = config.rms_norm_eps
        self._scale = config.head_dim**-0.5
        self._head_dim = config.head_dim
        self._heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        self._attention_size = config.num_heads * config.head_dim

    def attend(self, normed_TH: Tensor, cos_TD: Tensor, sin_TD: Tensor, batch: Batch) -> Tensor:
        """Write the tokens' KV, then attend; [T, N * D]."""
        p = self._p
        qkv = linear(normed_TH, p.qkv_weight_QH, p.qkv_bias_Q)
        q_TND, k_TKD, v_TKD = torch.split(qkv.view(qkv.shape[0], -1, self._head_dim), self._heads, dim=1)
        if p.q_norm_D is not None and p.k_norm_D is not None:
            q_TND, k_TKD = rms_norm(q_TND, p.q_norm_D, self._eps), rms_norm(k_TKD, p.k_norm_D, self._eps)
        q_TND, k_TKD = apply_rope(q_TND, k_TKD, cos_TD, sin_TD)
        kv_write(k_TKD, v_TKD, self._key_cache_NKBD, self._value_cache_NKBD, batch.slot_mapping_T)
        return self._attention(q_TND, batch).reshape(-1, self._attention_size)

    def transform(self, attended_TA: Tensor, residual_TH: Tensor, next_norm_H: Tensor) -> tuple[Tensor, Tensor]:
        """Output projection and MLP, each added to the residual stream; that stream's norm, and the stream."""
        p, eps = self._p, self._eps
        normed_TH, residual_TH = linear_add_rms_norm(
            attended_TA, p.o_weight_HA, p.o_bias_H, residual_TH, p.post_norm_H, eps
        )
        activated_TI = linear_silu_mul(normed_TH, p.gate_up_weight_2IH, p.gate_up_bias_2I)
        return linear_add_rms_norm(activated_TI, p.down_weight_HI, p.down_bias_H, residual_TH, next_norm_H, eps)

    def _attention(self, q_TND: Tensor, batch: Batch) -> Tensor:
        keys, values, scale = self._key_cache_NKBD, self._value_cache_NKBD, self._scale
        parts = [
            paged_prefill_attention(q_TND[chunk.rows], keys, values, chunk.block_table_M, chunk.start, scale)
            for chunk in batch.prefills
        ]
        if batch.num_decodes:
            q_SND = q_TND[: batch.num_decodes]
            tables_SM, lens_S = batch.block_tables_SM, batch.context_lens_S
            parts.insert(0, paged_decode_attention(q_SND, keys, values, tables_SM, lens_S, scale))
        return parts[0] if len(parts) == 1 else torch.cat(parts)
