"""Attention of a layer, with its part of the KV cache: from the layer's normed input to what its output projection
takes.

Shapes, on each rank: T tokens, S decoding sequences, N query heads, D head dim, U numbers of a value, A = N * U. Of
latent attention: G numbers of the queries' latent, P of a query, of which the last R are rotated, L of the latent of
keys and values; a row of the cache has D = L + R.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor
from typing_extensions import override

from disagg.engine.checkpoint.model_config import AttentionConfig, LatentConfig, ModelConfig
from disagg.engine.runner.collectives import Collective
from disagg.engine.runner.model.batch import Batch
from disagg.engine.runner.model.ffn import Norms, beside, with_adapters
from disagg.engine.runner.model.parameters import LatentParameters, LayerParameters
from disagg.engine.runner.model.rope import RopeTables
from disagg.kernels.attention import AttentionProvider
from disagg.kernels.dispatch import (
    head_squares,
    latent_rope_write,
    linear,
    linear_by_head,
    new_output,
    paged_decode_attention,
    qkv_rope_write,
    rms_norm,
)
from disagg.kernels.kv_rows import width
from disagg.kernels.lora import Lora
from disagg.kernels.ops import AttentionForm, HeadSquares, LatentWrite, RopeWrite


class AttentionParts(NamedTuple):
    """What the attention of all layers has in common."""

    config: ModelConfig
    """The whole model's."""
    local: ModelConfig
    """The rank's."""
    norms: Norms
    ropes: RopeTables
    prompts: tuple[AttentionProvider, ...]
    """Of each cache group."""
    collective: Collective | None


class LayerCache(NamedTuple):
    """A layer's part of the KV cache, and the number of its cache group."""

    keys_NKBD: Tensor
    values_NKBD: Tensor
    group: int


class Attention(Protocol):
    """Attention of one layer. Stateless but for the KV cache."""

    def attend(self, normed_TH: Tensor, batch: Batch) -> Tensor:
        """Write the tokens' KV, then attend; [T, A]."""
        ...


class _CachedAttention:
    """Queries over what the cache holds."""

    def __init__(self, form: AttentionForm, cache: LayerCache, prompts: AttentionProvider) -> None:
        self._form = form
        self._cache = cache
        self._prompts = prompts

    def over(self, q_TND: Tensor, batch: Batch) -> Tensor:
        """The result of each head, [T, N, U]."""
        (keys, values, group), form = self._cache, self._form
        out_TNU = new_output((*q_TND.shape[:2], width(values)), q_TND)
        if batch.num_decodes:
            rows = slice(batch.num_decodes)
            tables_SM, lens_S = batch.group(group).block_tables_SM, batch.context_lens_S
            paged_decode_attention(q_TND[rows], keys, values, tables_SM, lens_S, form, out_TNU[rows])
        if batch.prefills is not None:
            self._prompts.attend(q_TND, keys, values, form, out_TNU)
        return out_TNU


class HeadsAttention(Attention):
    """Attention whose heads have keys and values of their own, or share them in groups."""

    def __init__(
        self,
        parts: AttentionParts,
        attention: AttentionConfig,
        parameters: LayerParameters,
        cache: LayerCache,
        lora: Lora | None = None,
    ) -> None:
        """`attention` is the rank's."""
        self._lora = lora
        local, norms, table = parts.local, parts.norms, parts.ropes.of(attention.rope)
        self._p = parameters
        self._group = cache.group
        self._collective = parts.collective
        self._write = RopeWrite(
            parameters.q_norm_D,
            parameters.k_norm_D,
            norms.eps,
            table.cos_PR,
            table.sin_PR,
            cache.keys_NKBD,
            cache.values_NKBD,
            plus_one=norms.plus_one,
            query_scale_P=table.query_scale_P,
            is_whole=attention.qk_norm == "whole",
        )
        self._cached = _CachedAttention(_form(attention, parameters), cache, parts.prompts[cache.group])
        self._num_kv_heads, self._head_dim = local.num_kv_heads, local.head_dim
        self._attention_size = local.num_heads * local.head_dim
        self._whole_sizes = parts.config.num_heads * local.head_dim, parts.config.num_kv_heads * local.head_dim

    @override
    def attend(self, normed_TH: Tensor, batch: Batch) -> Tensor:
        p = self._p
        qkv_TQ = linear(normed_TH, p.qkv_weight_QH, p.qkv_bias_Q)
        if batch.adapters is not None:
            qkv_TQ = with_adapters(normed_TH, qkv_TQ, beside(self._lora, batch.adapters.slots_T))
        squares = self._squares(qkv_TQ)
        q_TND = qkv_rope_write(qkv_TQ, batch.positions_T, batch.group(self._group).slot_mapping_T, self._write, squares)
        return self._cached.over(q_TND, batch).reshape(-1, self._attention_size)

    def _squares(self, qkv_TQ: Tensor) -> HeadSquares | None:
        """The sums for norms of all heads, of which this rank has a part. Ranks that have the same KV head count it in
        equal shares."""
        collective = self._collective
        if collective is None or not self._write.is_whole:
            return None
        sums_T2 = head_squares(qkv_TQ, self._num_kv_heads, self._head_dim)
        q_size, k_size = self._whole_sizes
        held = collective.shard.size * self._num_kv_heads * self._head_dim // k_size
        if held > 1:
            sums_T2[:, 1] /= held
        return HeadSquares(collective.all_reduce(sums_T2), q_size, k_size)


class LatentAttention(Attention):
    """Attention over latents (DeepSeek V2, arXiv 2405.04434), in the absorbed form: a query is multiplied by the matrix
    that would expand latents to its head's keys, and what it gathers of latents by the one that expands them to values.
    So all heads read one row of the cache, of each token its latent and its rotated key, of which the latent is the
    value."""

    def __init__(
        self,
        parts: AttentionParts,
        attention: AttentionConfig,
        latent: LatentConfig,
        parameters: LayerParameters,
        weights: LatentParameters,
        cache: LayerCache,
    ) -> None:
        self._p, self._w, self._latent = parameters, weights, latent
        self._group = cache.group
        self._num_heads = parts.local.num_heads
        table = parts.ropes.of(attention.rope)
        self._write = LatentWrite(table.cos_PR, table.sin_PR, cache.keys_NKBD)
        self._cached = _CachedAttention(_form(attention, parameters), cache, parts.prompts[cache.group])

    @override
    def attend(self, normed_TH: Tensor, batch: Batch) -> Tensor:
        w, latent = self._w, self._latent
        num_tokens, num_heads = normed_TH.shape[0], self._num_heads
        down_TQ = linear(normed_TH, self._p.qkv_weight_QH, None)
        queries_TG, kv_TD = down_TQ[:, : -latent.cache_dim], down_TQ[:, -latent.cache_dim :]
        if w.q_norm_G is not None and w.q_up_weight_PG is not None:
            queries_TG = linear(rms_norm(queries_TG, w.q_norm_G, latent.norm_eps), w.q_up_weight_PG, None)
        q_TNP = queries_TG.view(num_tokens, num_heads, latent.query_dim)
        q_TND = latent_rope_write(
            rms_norm(kv_TD[:, : latent.latent_dim], w.kv_norm_L, latent.norm_eps),
            kv_TD[:, latent.latent_dim :],
            linear_by_head(q_TNP[..., : latent.key_dim], w.key_weight_NLE),
            q_TNP[..., latent.key_dim :],
            batch.positions_T,
            batch.group(self._group).slot_mapping_T,
            self._write,
        )
        values_TNU = linear_by_head(self._cached.over(q_TND, batch), w.value_weight_NUL)
        return values_TNU.view(num_tokens, num_heads * latent.value_dim)


def make_attention(
    parts: AttentionParts,
    attention: AttentionConfig,
    parameters: LayerParameters,
    cache: LayerCache,
    lora: Lora | None = None,
) -> Attention:
    """The attention that a rank's configuration describes. `lora`: adapters beside q, k and v."""
    if attention.latent is None:
        return HeadsAttention(parts, attention, parameters, cache, lora)
    assert parameters.latent is not None, "both are of one layer"
    return LatentAttention(parts, attention, attention.latent, parameters, parameters.latent, cache)


def _form(attention: AttentionConfig, parameters: LayerParameters) -> AttentionForm:
    return AttentionForm(attention.scale, attention.window, attention.soft_cap, parameters.sinks_N)
