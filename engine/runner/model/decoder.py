"""The decoder: one class for all families, whose layers are made of the parts that `ModelConfig.layers` names.

It computes one flat batch of tokens, writes their KV into the paged cache, and gives logits for the rows that sample.
All tensor work goes through `disagg.kernels.dispatch`. Numerics follow transformers' modeling files: fp32 inside the
norms and the softmax, the model's dtype between ops.

As one rank of several it has some of the heads, of the MLP's columns and of the vocabulary. Twice a layer, behind the
output projection and behind the MLP, the ranks add up what each of them has, in the model's dtype; so do they for the
embedding, and rank 0 gathers the logits. What is replicated (norms, residual stream) is equal on all ranks.

Shapes, on each rank: T tokens, R rows that sample, H hidden, A numbers that attention gives, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from disagg.engine.checkpoint.model_config import LayerConfig, ModelConfig
from disagg.engine.runner.adapters import LayerLoras
from disagg.engine.runner.collectives import Collective
from disagg.engine.runner.model.attention import AttentionParts, LayerCache, make_attention
from disagg.engine.runner.model.batch import Batch
from disagg.engine.runner.model.ffn import ExpertsFfn, Join, Norms, beside, make_ffn, rounded
from disagg.engine.runner.model.kv_cache import KvCache
from disagg.engine.runner.model.parameters import LayerParameters, ModelParameters
from disagg.engine.runner.model.rope import RopeTables
from disagg.engine.sharding.model_shards import rank_model, vocab_part
from disagg.engine.sharding.shards import WHOLE
from disagg.kernels.attention import AttentionProvider, OwnKernels
from disagg.kernels.dispatch import embed, linear, new_output, pointwise, take_rows
from disagg.kernels.ops import AttentionSpec


class Decoder:
    """The model with its parameters. Stateless but for the KV cache that it was given.

    `config` is the whole model's; parameters and cache are those of the collective's rank, or whole without one.
    `attention` computes that of prompts; None is our own kernels. `loras`: slots of adapters in each layer.
    """

    def __init__(
        self,
        config: ModelConfig,
        parameters: ModelParameters,
        ropes: RopeTables,
        cache: KvCache,
        collective: Collective | None = None,
        attention: AttentionProvider | None = None,
        loras: Sequence[LayerLoras] | None = None,
    ) -> None:
        shard = WHOLE if collective is None else collective.shard
        local = rank_model(config, shard)
        self._parameters = parameters
        self._norms = Norms(config.rms_norm_eps, config.plus_one_norms)
        self._vocab_size = config.vocab_size
        self._vocab_part = vocab_part(config, shard)
        self._has_logits = shard.rank == 0
        self._collective = collective
        self.attention = attention or OwnKernels(
            attention_spec(
                local,
                device=str(cache.tensor_NL2KBD.device),
                dtype=_name(parameters.embedding_VH.dtype),
                kv_dtype=_name(cache.tensor_NL2KBD.dtype),
                block_size=cache.block_size,
            )
        )
        """Provider of the attention of prompts, for which batches are made."""
        others = [type(self.attention).of(self.attention.spec) for _ in cache.layout.groups[1:]]
        self._prompts = (self.attention, *others)
        """The same for each cache group, whose layers read other block tables."""
        parts = AttentionParts(config, local, self._norms, ropes, self._prompts, collective)
        self._layers = tuple(
            _Layer(
                parts,
                layer,
                held,
                LayerCache(*cache.layer(index), cache.group_of(index)),
                {} if loras is None else loras[index],
            )
            for index, (layer, held) in enumerate(zip(local.layers, parameters.layers, strict=True))
        )
        multiplier = config.embedding_multiplier
        dtype = parameters.embedding_VH.dtype
        self._embedding_multiplier = rounded(multiplier, dtype) if config.rounds_embedding_multiplier else multiplier
        self._logits_divisor, self._logits_soft_cap = config.logits_divisor, config.logits_soft_cap

    @property
    def expert_counts(self) -> tuple[Tensor, ...]:
        """Of each layer with experts, the number of tokens that each of them had so far, int64."""
        return tuple(layer.ffn.counts_E for layer in self._layers if isinstance(layer.ffn, ExpertsFfn))

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor | None:
        """Logits [R, V of the whole model] in the model's dtype, one row per sampling row, in order; None on ranks
        other than 0.

        The KV of all T tokens is in the cache then.

        Raises:
            RuntimeError: if another rank is lost.
        """
        normed_RH = self._rows(batch)
        if normed_RH is None:
            return new_output((0, self._vocab_size), self._parameters.embedding_VH) if self._has_logits else None
        return self._logits(normed_RH)

    @torch.inference_mode()
    def hidden(self, batch: Batch, *, with_logits: bool) -> tuple[Tensor, Tensor]:
        """Rows behind the final norm [R, H], those that `forward` gives logits for; and with `with_logits` the logits,
        else no rows. With several ranks they are needed, because the other ranks compute their part of them.

        Raises:
            RuntimeError: as `forward`.
        """
        assert with_logits or self._collective is None, "the other ranks compute logits"
        embedding_VH, normed_RH = self._parameters.embedding_VH, self._rows(batch)
        if normed_RH is None:
            normed_RH, with_logits = new_output((0, embedding_VH.shape[1]), embedding_VH), False
        logits_RV = self._logits(normed_RH) if with_logits else None
        return normed_RH, new_output((0, self._vocab_size), embedding_VH) if logits_RV is None else logits_RV

    def _rows(self, batch: Batch) -> Tensor | None:
        """Rows behind the final norm, of those that sample; None where no row does."""
        parameters = self._parameters
        if batch.prefills is not None:
            self.attention.plan(batch.prefills)
            for prompts, window in zip(self._prompts[1:], batch.windows, strict=True):
                assert window.prefills is not None, "all groups have the same chunks"
                prompts.plan(window.prefills)
        residual_TH = self._embed(batch.token_ids_T)
        normed_TH = self._norms.norm(residual_TH, parameters.layers[0].input_norm_H)
        last = len(self._layers) - 1
        slots_T = None if batch.adapters is None else batch.adapters.slots_T
        for index, layer in enumerate(self._layers):
            attended_TA = layer.attend(normed_TH, batch)
            if index == last and batch.sample_rows is not None:
                # From here on rows do not meet any more: the others are done once their KV is written.
                attended_TA = take_rows(attended_TA, batch.sample_rows)
                residual_TH = take_rows(residual_TH, batch.sample_rows)
                slots_T = None if batch.adapters is None else batch.adapters.sampled_R
            if attended_TA.shape[0] == 0:
                return None
            norm_H = parameters.final_norm_H if index == last else parameters.layers[index + 1].input_norm_H
            normed_TH, residual_TH = layer.transform(attended_TA, residual_TH, norm_H, slots_T)
        return normed_TH

    def _embed(self, token_ids_T: Tensor) -> Tensor:
        rows_TH = self._embedded(token_ids_T)
        multiplier = self._embedding_multiplier
        return rows_TH if multiplier == 1.0 else pointwise(rows_TH, "multiply", multiplier)

    def _embedded(self, token_ids_T: Tensor) -> Tensor:
        embedding_VH, part = self._parameters.embedding_VH, self._vocab_part
        if self._collective is None:
            return embed(token_ids_T, embedding_VH)
        elsewhere_T = (token_ids_T < part.start) | (token_ids_T >= part.stop)
        local_ids_T = (token_ids_T - part.start).masked_fill_(elsewhere_T, 0)
        rows_TH = embed(local_ids_T, embedding_VH).masked_fill_(elsewhere_T[:, None], 0.0)
        return self._collective.all_reduce(rows_TH)

    def _logits(self, normed_TH: Tensor) -> Tensor | None:
        logits_TV = linear(normed_TH, self._parameters.lm_head_VH, None)
        if self._logits_divisor != 1.0:
            logits_TV = pointwise(logits_TV, "divide", self._logits_divisor)
        if self._logits_soft_cap is not None:
            logits_TV = pointwise(logits_TV, "soft_cap", self._logits_soft_cap)
        if self._collective is None:
            return logits_TV
        gathered_TV = self._collective.gather_columns(logits_TV)
        return None if gathered_TV is None else gathered_TV[:, : self._vocab_size]


class _Layer:
    """One layer with its part of the cache, in two halves: attention up to its output projection, and what follows."""

    def __init__(
        self,
        parts: AttentionParts,
        layer: LayerConfig,
        parameters: LayerParameters,
        cache: LayerCache,
        loras: LayerLoras,
    ) -> None:
        """`layer` is the rank's."""
        norms, multiplier = parts.norms, parts.config.residual_multiplier
        self._p = parameters
        self._attention = make_attention(parts, layer.attention, parameters, cache, loras.get("qkv"))
        self._o_lora = loras.get("o")
        self._join = Join(norms, parts.collective, parameters.attention_out_norm_H, multiplier)
        self.ffn = make_ffn(
            layer.ffn, parameters.ffn, Join(norms, parts.collective, parameters.ffn_out_norm_H, multiplier), loras
        )

    def attend(self, normed_TH: Tensor, batch: Batch) -> Tensor:
        """Write the tokens' KV, then attend; [T, A]."""
        return self._attention.attend(normed_TH, batch)

    def transform(
        self, attended_TA: Tensor, residual_TH: Tensor, next_norm_H: Tensor | None, slots_T: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Output projection and feed-forward network, each added to the residual stream; that stream's norm, and the
        stream. `slots` are those of the rows' adapters."""
        p, adapters = self._p, beside(self._o_lora, slots_T)
        normed_TH, residual_TH = self._join.project(
            attended_TA, p.o_weight_HA, p.o_bias_H, residual_TH, p.ffn_norm_H, adapters
        )
        return self.ffn.transform(normed_TH, residual_TH, next_norm_H, slots_T)


def attention_spec(local: ModelConfig, *, device: str, dtype: str, kv_dtype: str, block_size: int) -> AttentionSpec:
    """What the attention of a rank has to compute, whose model is `local`."""
    attentions = [layer.attention for layer in local.layers]
    latent = attentions[0].latent
    return AttentionSpec(
        device=device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        num_heads=local.num_heads,
        num_kv_heads=local.num_kv_heads,
        head_dim=local.head_dim,
        block_size=block_size,
        scale=attentions[0].scale,
        windows=tuple(dict.fromkeys(attention.window for attention in attentions)),
        has_soft_cap=any(attention.soft_cap is not None for attention in attentions),
        has_sinks=any(attention.sinks for attention in attentions),
        value_dim=None if latent is None else latent.latent_dim,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
