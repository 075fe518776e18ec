"""The decoder: one class for all families, whose layers are made of the parts that `ModelConfig.layers` names.

It computes one flat batch of tokens, writes their KV into the paged cache, and gives logits for the rows that sample.
All tensor work goes through `disagg.kernels.dispatch`. Numerics follow transformers' modeling files: fp32 inside the
norms and the softmax, the model's dtype between ops.

As one rank of several it has some of the heads, of the MLP's columns and of the vocabulary. Twice a layer, behind the
output projection and behind the MLP, the ranks add up what each of them has, in the model's dtype; so do they for the
embedding, and rank 0 gathers the logits. What is replicated (norms, residual stream) is equal on all ranks.

On one of several stages it has that stage's layers. Between two stages goes the residual stream alone: norms are
computed again from it, with the same bits. `stage.py` moves it.

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
from disagg.engine.sharding.stages import stage_layers
from disagg.kernels.attention import AttentionProvider, OwnKernels
from disagg.kernels.dispatch import embed, linear, new_output, pointwise, take_rows
from disagg.kernels.ops import AttentionSpec


class Decoder:
    """The model with its parameters. Stateless but for the KV cache that it was given.

    `config` is the whole model's; parameters and cache are those of the collective's rank, or whole without one.
    `attention` computes that of prompts; None is our own kernels. `loras`: slots of adapters in each layer that the
    rank has.
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
        if shard.size == 1:
            collective = None  # nothing is added up within a stage of one rank
        heads = rank_model(config, shard.in_stage)
        local = rank_model(config, shard)
        numbers = stage_layers(config, shard)
        self._parameters = parameters
        self._norms = Norms(config.rms_norm_eps, config.plus_one_norms)
        self._vocab_size = config.vocab_size
        self._vocab_part = vocab_part(config, shard)
        self._vocab_share = local.vocab_size
        self.shard = shard
        self._collective = collective
        self.attention = attention or OwnKernels(
            attention_spec(
                heads,
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
        parts = AttentionParts(config, heads, self._norms, ropes, self._prompts, collective)
        self._layers = tuple(
            _Layer(
                parts,
                layer,
                held,
                LayerCache(*cache.layer(number), cache.group_of(number)),
                {} if loras is None else loras[place],
            )
            for place, (number, layer, held) in enumerate(zip(numbers, local.layers, parameters.layers, strict=True))
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
        other than 0. Of a model in one stage.

        The KV of all T tokens is in the cache then.

        Raises:
            RuntimeError: if another rank is lost.
        """
        _, logits_RV = self.hidden(batch, with_logits=True)
        return logits_RV if self.shard.rank == 0 else None

    @torch.inference_mode()
    def hidden(self, batch: Batch, *, with_logits: bool) -> tuple[Tensor, Tensor]:
        """Rows behind the final norm [R, H], those that `forward` gives logits for; and with `with_logits` the logits
        on rank 0, else no rows. All ranks are asked for the same. Of a model in one stage.

        Raises:
            RuntimeError: as `forward`.
        """
        normed_RH = self.through(batch, self.embedded(batch.token_ids_T))
        if normed_RH is None:
            return self.no_rows(), self.no_logits()
        logits_RV = self._gathered(self.logits_part(normed_RH)) if with_logits else None
        return normed_RH, self.no_logits() if logits_RV is None else logits_RV

    # ------------------------------------------------------------ parts of a step

    def no_rows(self) -> Tensor:
        """Rows where no row samples, [0, H]."""
        return self.new_rows(0)

    def new_rows(self, num_rows: int) -> Tensor:
        """Memory for rows of the residual stream, or behind the final norm, [R, H]."""
        embedding_VH = self._parameters.embedding_VH
        return new_output((num_rows, embedding_VH.shape[1]), embedding_VH)

    def no_logits(self) -> Tensor:
        """Logits where no row samples, [0, V]."""
        return new_output((0, self._vocab_size), self._parameters.embedding_VH)

    def new_logits_part(self, num_rows: int) -> Tensor:
        """Memory for what `logits_part` gives, of any rank."""
        return new_output((num_rows, self._vocab_share), self._parameters.embedding_VH)

    def embedded(self, token_ids_T: Tensor) -> Tensor:
        """The residual stream before the first layer, [T, H]; on the first stage."""
        rows_TH = self._embedded(token_ids_T)
        multiplier = self._embedding_multiplier
        return rows_TH if multiplier == 1.0 else pointwise(rows_TH, "multiply", multiplier)

    def through(self, batch: Batch, residual_TH: Tensor) -> Tensor | None:
        """Through the layers of the stage: the residual stream behind them [T, H]. On the last stage, of the rows that
        sample, what the final norm makes of it [R, H]; None where no row does.

        The KV of all T tokens is in the cache then, for these layers.
        """
        parameters, is_last_stage = self._parameters, self.shard.is_last
        if batch.prefills is not None:
            self._plan_prompts(batch)
        normed_TH = self._norms.norm(residual_TH, parameters.layers[0].input_norm_H)
        last = len(self._layers) - 1
        slots_T = None if batch.adapters is None else batch.adapters.slots_T
        for index, layer in enumerate(self._layers):
            attended_TA = layer.attend(normed_TH, batch)
            if index == last and is_last_stage and batch.sample_rows is not None:
                # From here on rows do not meet any more: the others are done once their KV is written.
                attended_TA = take_rows(attended_TA, batch.sample_rows)
                residual_TH = take_rows(residual_TH, batch.sample_rows)
                slots_T = None if batch.adapters is None else batch.adapters.sampled_R
            if attended_TA.shape[0] == 0:
                return None
            if index < last:
                norm_H = parameters.layers[index + 1].input_norm_H
            else:
                norm_H = parameters.final_norm_H if is_last_stage else None
            normed_TH, residual_TH = layer.transform(attended_TA, residual_TH, norm_H, slots_T)
        return normed_TH if is_last_stage else residual_TH

    def _plan_prompts(self, batch: Batch) -> None:
        assert batch.prefills is not None
        self.attention.plan(batch.prefills)
        for prompts, window in zip(self._prompts[1:], batch.windows, strict=True):
            assert window.prefills is not None, "all groups have the same chunks"
            prompts.plan(window.prefills)

    def _embedded(self, token_ids_T: Tensor) -> Tensor:
        embedding_VH, part = self._parameters.embedding_VH, self._vocab_part
        if self._collective is None:
            return embed(token_ids_T, embedding_VH)
        elsewhere_T = (token_ids_T < part.start) | (token_ids_T >= part.stop)
        local_ids_T = (token_ids_T - part.start).masked_fill_(elsewhere_T, 0)
        rows_TH = embed(local_ids_T, embedding_VH).masked_fill_(elsewhere_T[:, None], 0.0)
        return self._collective.all_reduce(rows_TH)

    def logits_part(self, normed_RH: Tensor) -> Tensor:
        """This rank's columns of the logits, on the last stage. All ranks have as many; the last ones may have some
        behind the vocabulary."""
        logits_RV = linear(normed_RH, self._parameters.lm_head_VH, None)
        if self._logits_divisor != 1.0:
            logits_RV = pointwise(logits_RV, "divide", self._logits_divisor)
        if self._logits_soft_cap is not None:
            logits_RV = pointwise(logits_RV, "soft_cap", self._logits_soft_cap)
        return logits_RV

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Logits [R, V], of the parts of the ranks of the last stage in order."""
        return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)[:, : self._vocab_size]

    def _gathered(self, logits_RV: Tensor) -> Tensor | None:
        if self._collective is None:
            return logits_RV
        gathered_RV = self._collective.gather_columns(logits_RV)
        return None if gathered_RV is None else gathered_RV[:, : self._vocab_size]


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
