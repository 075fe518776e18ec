"""The ops that the engine computes with, as one protocol, and the structs that they take.

`reference.py` (the module itself), `cpu/ops.py` and `triton/ops.py` implement it; `dispatch.py` chooses for each call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from disagg.kernels.experts import Experts, ExpertWeight, Router, Shared
from disagg.kernels.lora import Lora
from disagg.kernels.prefill_work import PrefillWork


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec:
    """Attention of a rank, fixed from its start: its own heads, and its cache. Dtypes are torch's names."""

    device: str
    dtype: str
    kv_dtype: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    scale: float
    """Scale of the attention scores, the same in all layers."""
    windows: tuple[int | None, ...] = (None,)
    """Windows of the layers, each once, see `AttentionForm`; None for layers that see all."""
    has_soft_cap: bool = False
    has_sinks: bool = False
    value_dim: int | None = None
    """Number of the keys' first columns that are the values, of latent attention; None where values have a cache of
    their own."""

    @property
    def is_plain(self) -> bool:
        """Whether no layer has a window, a soft cap or sinks."""
        return not (any(self.windows) or self.has_soft_cap or self.has_sinks)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionForm:
    """How a layer makes weights of the products of a query and the keys.

    A score is `product * scale`, with a soft cap `soft_cap * tanh(product * scale / soft_cap)`. The weights are the
    softmax of the scores of the tokens that the query sees: all up to its own, or the last `window` of them.
    """

    scale: float
    window: int | None = None
    """Number of tokens that a query sees, its own included; None sees all."""
    soft_cap: float | None = None
    sinks_N: Tensor | None = None
    """A further score of each query head, fp32, which takes part in the softmax's denominator alone."""

    def __post_init__(self) -> None:
        assert self.window is None or self.window >= 1, self.window
        assert self.soft_cap is None or self.soft_cap > 0.0, self.soft_cap

    @property
    def is_plain(self) -> bool:
        """Whether the weights are the softmax of all scaled products."""
        return self.window is None and self.soft_cap is None and self.sinks_N is None


@dataclass(frozen=True, slots=True, eq=False)
class PrefillChunk:
    """Consecutive tokens of one sequence, from position `start`, whose KV is written."""

    rows: slice
    """Rows of the chunk in the batch."""
    start: int
    block_table_M: Tensor
    """Block table, int32; covers the chunk's last token."""


@dataclass(frozen=True, slots=True, eq=False)
class Prefills:
    """The prompts of a step, at least one."""

    chunks: tuple[PrefillChunk, ...]
    planned: Mapping[int | None, PlannedPrefills] = field(default_factory=dict)
    """Work lists by the layers' windows, for a device that computes all chunks at once (`dispatch.plan_prefills`)."""


@dataclass(frozen=True, slots=True, eq=False)
class PlannedPrefills:
    """A work list of the step, and its numbers on the device, both tensors aligned to 16 bytes."""

    work: PrefillWork
    numbers: Tensor
    """The numbers of `work` on the device, int32."""
    block_tables: Tensor
    """Block tables of all chunks, one behind the other; int32."""


@dataclass(frozen=True, slots=True, eq=False)
class RopeWrite:
    """Arguments of `qkv_rope_write` that are fixed for each layer. R is the number of dims of a head that are rotated,
    the first ones."""

    q_norm_D: Tensor | None
    """Weight of the norm of each head of q, or [N * D] of the norm of all heads at once; None without a norm."""
    k_norm_D: Tensor | None
    eps: float
    """Epsilon of the norms of q and k."""
    cos_PR: Tensor
    """Cosines, one row for each position; R may be 0."""
    sin_PR: Tensor
    key_cache_NKBD: Tensor
    value_cache_NKBD: Tensor
    plus_one: bool = False
    """The norms are those of `rms_norm` with `plus_one`."""
    query_scale_P: Tensor | None = None
    """Factor of the rotated q at each position, in its dtype; None for one."""
    is_whole: bool = False
    """All heads of q, and all of k, have one norm."""


@dataclass(frozen=True, slots=True, eq=False)
class LatentWrite:
    """Arguments of `latent_rope_write` that are fixed for each layer. The cache has one head, whose rows are L numbers
    of the latent, then R rotated ones."""

    cos_PR: Tensor
    """Cosines, one row for each position."""
    sin_PR: Tensor
    cache_N1BD: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class HeadSquares:
    """Sums for the norms of all heads at once, where a rank has a part of them."""

    sums_T2: Tensor
    """Sums of squares of all of q and all of k, fp32."""
    q_size: int
    """Number of values in each sum."""
    k_size: int


Pointwise = Literal["multiply", "divide", "soft_cap"]
"""Function of each value and one number: x * number, x / number, number * tanh(x / number)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Filters:
    """Sampling parameters of each row; all tensors are on the logits' device, so that a captured graph reads new
    values."""

    temperatures_R: Tensor
    """Temperatures, fp32; below 1e-5 is greedy."""
    top_k_R: Tensor
    """Top-k, int32; 0 keeps all."""
    top_p_R: Tensor
    """Top-p, fp64; 1 keeps all."""
    min_p_R: Tensor
    """Min-p, fp64; 0 keeps all."""
    seeds_R: Tensor
    """Bits of the seeds modulo 2^64, int64."""
    indices_R: Tensor
    """Number of tokens that the row's sequence has drawn so far, int64."""


class Ops(Protocol):
    """One implementation of all ops. Shapes and numerics are those of the functions of `reference.py`.

    A method returns None when it does not take the tensors (their dtype, device or layout); then nothing was written.
    Stateless; any thread.
    """

    def embed(self, token_ids_T: Tensor, embedding_VH: Tensor, /) -> Tensor | None:
        """The rows of the embedding, [T, H]."""
        ...

    def take_rows(self, x_TH: Tensor, rows_R: Tensor, /) -> Tensor | None:
        """Rows of a matrix by their indices, [R, H]."""
        ...

    def rms_norm(self, x_TH: Tensor, weight_H: Tensor, eps: float, plus_one: bool = False, /) -> Tensor | None:
        """Root mean square norm over the last dim, times the weight, or one more than it; [T, H] or [T, heads, D]."""
        ...

    def add_rms_norm(
        self, x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float, plus_one: bool = False, /
    ) -> tuple[Tensor, Tensor] | None:
        """(rms_norm(x + residual), x + residual)."""
        ...

    def add(self, x_TH: Tensor, y_TH: Tensor, /) -> Tensor | None:
        """x + y, [T, H]."""
        ...

    def lora_add(self, x_TI: Tensor, y_TO: Tensor, lora: Lora, slots_T: Tensor, /) -> Tensor | None:
        """`y`, to which is added what the adapters in these slots (int32, -1 for none) make of `x`, [T, O]."""
        ...

    def pointwise(self, x_TH: Tensor, function: Pointwise, number: float, /) -> Tensor | None:
        """A function of each value, [T, H]."""
        ...

    def silu_mul(self, gate_up_T2F: Tensor, /) -> Tensor | None:
        """silu(gate) * up, [T, F]; gate is the first half."""
        ...

    def gelu_tanh_mul(self, gate_up_T2F: Tensor, /) -> Tensor | None:
        """gelu(gate) * up with the approximation by tanh, [T, F]; gate is the first half."""
        ...

    def moe_ffn(self, x_TH: Tensor, router: Router, experts: Experts, shared: Shared | None, /) -> Tensor | None:
        """The sum of what each row's experts give, times their weights, and of what is shared, [T, H]."""
        ...

    def argmax_rows(self, logits_TV: Tensor, vocab_size: int, /) -> Tensor | None:
        """The first index of each row's largest logit, -1 where nothing can be chosen; int64 [T]."""
        ...

    def draw_unfiltered(
        self, logits_RV: Tensor, vocab_size: int, temperatures_R: Tensor, uniform_R: Tensor, /
    ) -> Tensor | None:
        """A token for each row without filters, int64 [R]; -1 where nothing can be chosen. See `weights`."""
        ...

    def qkv_rope_write(
        self,
        qkv_TQ: Tensor,
        positions_T: Tensor,
        slot_mapping_T: Tensor,
        layer: RopeWrite,
        squares: HeadSquares | None = None,
        /,
    ) -> Tensor | None:
        """Norm (where given) and rotate the heads of q and k, write K and V at the tokens' slots; q, [T, N, D]."""
        ...

    def linear_by_head(self, x_TNI: Tensor, weight_NOI: ExpertWeight, /) -> Tensor | None:
        """The row of each head times the head's own weight, [T, N, O]."""
        ...

    def latent_rope_write(
        self,
        latent_TL: Tensor,
        k_TR: Tensor,
        absorbed_TNL: Tensor,
        q_TNR: Tensor,
        positions_T: Tensor,
        slot_mapping_T: Tensor,
        layer: LatentWrite,
        /,
    ) -> Tensor | None:
        """Rotate the rope parts of q and k, write the latents (normed) and k at the tokens' slots; the absorbed q with
        its rotated part, [T, N, L + R]."""
        ...

    def head_squares(self, qkv_TQ: Tensor, num_kv_heads: int, head_dim: int, /) -> Tensor | None:
        """Sums of squares of all heads of q, and of all heads of k, fp32 [T, 2]."""
        ...

    def paged_decode_attention(
        self,
        q_SND: Tensor,
        key_cache_NKBD: Tensor,
        value_cache_NKBD: Tensor,
        block_tables_SM: Tensor,
        context_lens_S: Tensor,
        form: AttentionForm,
        out_SND: Tensor | None = None,
        /,
    ) -> Tensor | None:
        """Attention of one query row per sequence over its cached context; [S, N, D], in `out` (contiguous) if
        given.

        Values may be the first columns of the keys: a view of that cache. The result has as many."""
        ...

    def paged_prefill_attention(
        self,
        q_TND: Tensor,
        key_cache_NKBD: Tensor,
        value_cache_NKBD: Tensor,
        prefills: Prefills,
        form: AttentionForm,
        out_TND: Tensor,
        /,
    ) -> Tensor | None:
        """Causal attention of the prompts of a step over their cached contexts. Their rows of `out` (contiguous) are
        written, and no others; `out`."""
        ...

    def gather_kv(
        self, cache_NL2KBD: Tensor, block_ids: Sequence[int], start: int, end: int, out: Tensor, /
    ) -> Tensor | None:
        """Copy the KV of tokens [start, end) of a sequence into a flat uint8 tensor; that tensor."""
        ...

    def scatter_kv(
        self, cache_NL2KBD: Tensor, block_ids: Sequence[int], start: int, end: int, data: Tensor, /
    ) -> Tensor | None:
        """Copy what `gather_kv` wrote into tokens [start, end) of a sequence; the cache."""
        ...

    def digest_sums(self, words: Tensor, seed: int, /) -> Tensor | None:
        """Two keyed sums of int64 words, int64 [2]; `seed` is signed."""
        ...


def can_hold(out: Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether a kernel can write a result of this shape and dtype into `out`; None stands for a new tensor."""
    return out is None or (out.dtype == dtype and out.shape == shape and out.is_contiguous())
