"""The Triton kernels as `ops.Ops`, and the draws, which only they have.

A method returns None when its kernel does not take the tensors: another device or dtype, or a layout that it does not
read.

No method reads anything from the device, so a step made of them can be captured in a CUDA graph. Tensors are those of
the current CUDA device; under `TRITON_INTERPRET=1`, which is for tests, they are on the CPU. The linear layers are
torch's (cuBLAS): no kernel here multiplies matrices but attention and experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from disagg.kernels.experts import Experts, ExpertWeight, Router, Shared
from disagg.kernels.lora import Lora
from disagg.kernels.ops import (
    AttentionForm,
    AttentionSpec,
    Filters,
    HeadSquares,
    LatentWrite,
    Ops,
    Pointwise,
    Prefills,
    RopeWrite,
)
from disagg.kernels.prefill_work import ChunkPlace, PrefillWork
from disagg.kernels.triton import (
    argmax,
    attention,
    copy,
    embed,
    experts,
    latent_write,
    lora,
    norm,
    pointwise,
    rope_write,
    sampling,
    silu,
)
from disagg.kernels.triton.jit import INTERPRETED

_INTEGERS = (torch.int64, torch.int32)


class TritonOps(Ops):
    """All Triton kernels. Stateless; any thread."""

    @override
    def embed(self, token_ids_T: Tensor, embedding_VH: Tensor) -> Tensor | None:
        """An id outside the table gives zeros, since a kernel cannot raise."""
        if _runs(token_ids_T, embedding_VH) and _are_vectors(token_ids_T) and _are_rows(embedding_VH):
            return embed.embed(token_ids_T, embedding_VH)
        return None

    @override
    def take_rows(self, x_TH: Tensor, rows_R: Tensor) -> Tensor:
        """Computed by torch: there is no Triton kernel for it."""
        return x_TH[rows_R]

    @override
    def rms_norm(self, x_TH: Tensor, weight_H: Tensor, eps: float, plus_one: bool = False) -> Tensor | None:
        """Takes [T, H] or [T, heads, D]."""
        fits = x_TH.dim() in (2, 3) and x_TH.stride(-1) == 1 and x_TH.shape[-1] <= norm.MAX_ROW
        if fits and _runs(x_TH, weight_H) and _are_floats(x_TH, weight_H):
            return norm.rms_norm(x_TH, weight_H, eps, plus_one)
        return None

    @override
    def add_rms_norm(
        self, x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float, plus_one: bool = False
    ) -> tuple[Tensor, Tensor] | None:
        """Takes matrices of shape [T, H]."""
        tensors = (x_TH, residual_TH, weight_H)
        fits = _are_rows(x_TH, residual_TH) and x_TH.shape[1] <= norm.MAX_ROW
        if fits and _runs(*tensors) and _are_floats(*tensors):
            return norm.add_rms_norm(x_TH, residual_TH, weight_H, eps, plus_one)
        return None

    @override
    def silu_mul(self, gate_up_T2F: Tensor) -> Tensor | None:
        """Takes a matrix of shape [T, 2F]."""
        if _are_rows(gate_up_T2F) and _runs(gate_up_T2F) and _are_floats(gate_up_T2F):
            return silu.silu_mul(gate_up_T2F)
        return None

    @override
    def gelu_tanh_mul(self, gate_up_T2F: Tensor) -> Tensor | None:
        """Takes a matrix of shape [T, 2F]."""
        if _are_rows(gate_up_T2F) and _runs(gate_up_T2F) and _are_floats(gate_up_T2F):
            return silu.silu_mul(gate_up_T2F, gelu=True)
        return None

    @override
    def add(self, x_TH: Tensor, y_TH: Tensor) -> Tensor | None:
        """Takes matrices of shape [T, H]."""
        if _are_rows(x_TH, y_TH) and _runs(x_TH, y_TH) and _are_floats(x_TH, y_TH):
            return pointwise.add(x_TH, y_TH)
        return None

    @override
    def lora_add(self, x_TI: Tensor, y_TO: Tensor, adapters: Lora, slots_T: Tensor) -> Tensor | None:
        """Takes matrices and a largest rank that is a power of two."""
        a, b, rank = adapters.a_SPRI, adapters.b_SRO, adapters.a_SPRI.shape[2]
        if not (_are_rows(x_TI, y_TO) and _runs(x_TI, y_TO, slots_T) and _are_floats(x_TI, y_TO, a, b)):
            return None
        if rank & (rank - 1) or slots_T.dtype != torch.int32 or not slots_T.is_contiguous():
            return None
        return lora.lora_add(x_TI, y_TO, adapters, slots_T)

    @override
    def pointwise(self, x_TH: Tensor, function: Pointwise, number: float) -> Tensor | None:
        """Takes a matrix of shape [T, H]."""
        if _are_rows(x_TH) and _runs(x_TH) and _are_floats(x_TH):
            return pointwise.pointwise(x_TH, function, number)
        return None

    @override
    def moe_ffn(self, x_TH: Tensor, router: Router, layer: Experts, shared: Shared | None) -> Tensor | None:
        """Takes plain weights of the rows' dtype, and a router in fp32."""
        weights = (router.weight_EH, layer.gate_up_L2IH, layer.down_LHI)
        if not all(isinstance(weight, Tensor) and weight.is_contiguous() for weight in weights):
            return None
        router_EH, gate_up, down = (weight for weight in weights if isinstance(weight, Tensor))
        fits = _are_rows(x_TH) and _are_floats(x_TH, gate_up, down) and router_EH.dtype == torch.float32
        return experts.moe_ffn(x_TH, router, layer, shared) if fits and _runs(x_TH, gate_up, down, router_EH) else None

    @override
    def argmax_rows(self, logits_TV: Tensor, vocab_size: int) -> Tensor | None:
        """Reads the first `vocab_size` columns."""
        if _are_rows(logits_TV) and _runs(logits_TV) and _are_floats(logits_TV):
            return argmax.argmax_rows(logits_TV, vocab_size)
        return None

    @override
    def draw_unfiltered(
        self, logits_RV: Tensor, vocab_size: int, temperatures_R: Tensor, uniform_R: Tensor
    ) -> Tensor | None:
        """Takes nothing, because `draw_rows` draws rows of all kinds."""
        return None

    def runs_on(self, device: torch.device) -> bool:
        """Whether the kernels take tensors on this device."""
        return _takes(device)

    def draw_rows(self, logits_RV: Tensor, vocab_size: int, filters: Filters) -> Tensor:
        """Draw from the first `vocab_size` columns. Takes rows of any stride on a device where the kernels run."""
        return sampling.sample(logits_RV, vocab_size, filters)

    @override
    def linear_by_head(self, x_TNI: Tensor, weight_NOI: ExpertWeight) -> Tensor | None:
        """By torch, whose products of batches are cuBLAS'; they write rows of any stride."""
        if not isinstance(weight_NOI, Tensor):
            return None
        out_TNO = x_TNI.new_empty((*x_TNI.shape[:2], weight_NOI.shape[1]))
        torch.bmm(x_TNI.transpose(0, 1), weight_NOI.transpose(1, 2), out=out_TNO.transpose(0, 1))
        return out_TNO

    @override
    def latent_rope_write(
        self,
        latent_TL: Tensor,
        k_TR: Tensor,
        absorbed_TNL: Tensor,
        q_TNR: Tensor,
        positions_T: Tensor,
        slot_mapping_T: Tensor,
        layer: LatentWrite,
    ) -> Tensor | None:
        """Takes rows and heads of any stride. The cache has their dtype, or is fp8 (e4m3)."""
        rows, heads, tables = (latent_TL, k_TR), (absorbed_TNL, q_TNR), (layer.cos_PR, layer.sin_PR)
        vectors, R = (positions_T, slot_mapping_T), k_TR.shape[1]
        fits = (
            _are_rows(*rows)
            and all(each.dim() == 3 and each.stride(2) == 1 for each in heads)
            and _are_vectors(*vectors)
            and all(table.is_contiguous() and table.shape[1] == R for table in tables)
            and layer.cache_N1BD.shape[1] == 1
            and layer.cache_N1BD.shape[3] == latent_TL.shape[1] + R
            and R % 2 == 0
            and _is_cache(layer.cache_N1BD, latent_TL.dtype)
        )
        if fits and _runs(*rows, *heads, *tables, *vectors, layer.cache_N1BD) and _are_floats(*rows, *heads, *tables):
            args = (latent_TL, k_TR, absorbed_TNL, q_TNR, positions_T, slot_mapping_T, layer)
            return latent_write.latent_rope_write(*args)
        return None

    @override
    def qkv_rope_write(
        self,
        qkv_TQ: Tensor,
        positions_T: Tensor,
        slot_mapping_T: Tensor,
        layer: RopeWrite,
        squares: HeadSquares | None = None,
    ) -> Tensor | None:
        """The cache has the dtype of the rows, or is fp8 (e4m3) that stores values as they are. Norms of all heads take
        one more launch, for their sums."""
        factors = (layer.q_norm_D, layer.k_norm_D, layer.query_scale_P)
        rows = (qkv_TQ, layer.cos_PR, layer.sin_PR, *(factor for factor in factors if factor is not None))
        caches = (layer.key_cache_NKBD, layer.value_cache_NKBD)
        vectors = (positions_T, slot_mapping_T)
        fits = (
            _are_rows(qkv_TQ)
            and _are_vectors(*vectors)
            and layer.cos_PR.is_contiguous()
            and layer.sin_PR.is_contiguous()
            and all(_is_cache(cache_NKBD, qkv_TQ.dtype) for cache_NKBD in caches)
        )
        if fits and _runs(*rows, *caches, *vectors) and _are_floats(*rows):
            return rope_write.qkv_rope_write(qkv_TQ, positions_T, slot_mapping_T, layer, squares=squares)
        return None

    @override
    def head_squares(self, qkv_TQ: Tensor, num_kv_heads: int, head_dim: int) -> Tensor | None:
        """Takes rows of any stride."""
        if _are_rows(qkv_TQ) and _runs(qkv_TQ) and _are_floats(qkv_TQ):
            return rope_write.head_squares(qkv_TQ, num_kv_heads, head_dim)
        return None

    @override
    def paged_decode_attention(
        self,
        q_SND: Tensor,
        key_cache_NKBD: Tensor,
        value_cache_NKBD: Tensor,
        block_tables_SM: Tensor,
        context_lens_S: Tensor,
        form: AttentionForm,
        out_SND: Tensor | None = None,
    ) -> Tensor | None:
        """Splits contexts among programs (split-KV)."""
        if not _runs(q_SND, key_cache_NKBD, value_cache_NKBD, block_tables_SM, context_lens_S):
            return None
        return attention.paged_decode_attention(
            q_SND, key_cache_NKBD, value_cache_NKBD, block_tables_SM, context_lens_S, form, out_SND=out_SND
        )

    def plan_prefills(self, chunks: Sequence[ChunkPlace], spec: AttentionSpec) -> Mapping[int | None, PrefillWork]:
        """Make the work lists of a step for `paged_prefill_attention`, by window."""
        return {window: attention.plan_prefills(chunks, spec, window) for window in spec.windows}

    @override
    def paged_prefill_attention(
        self,
        q_TND: Tensor,
        key_cache_NKBD: Tensor,
        value_cache_NKBD: Tensor,
        prefills: Prefills,
        form: AttentionForm,
        out_TND: Tensor,
    ) -> Tensor | None:
        """Takes one launch for all chunks, and one more where contexts are split."""
        planned = prefills.planned.get(form.window)
        if planned is None or not _runs(
            q_TND, key_cache_NKBD, value_cache_NKBD, planned.numbers, planned.block_tables, out_TND
        ):
            return None
        return attention.paged_prefill_attention(q_TND, key_cache_NKBD, value_cache_NKBD, planned, form, out_TND)

    @override
    def gather_kv(
        self, cache_NL2KBD: Tensor, block_ids: Sequence[int], start: int, end: int, out: Tensor
    ) -> Tensor | None:
        """ValueError when the range or the size of `out` does not fit."""
        if not (_runs(cache_NL2KBD) and copy.takes(cache_NL2KBD)):
            return None
        copy.gather_kv(cache_NL2KBD, block_ids, start, end, out)
        return out

    @override
    def scatter_kv(
        self, cache_NL2KBD: Tensor, block_ids: Sequence[int], start: int, end: int, data: Tensor
    ) -> Tensor | None:
        """ValueError when the range or the size of `data` does not fit."""
        if not (_runs(cache_NL2KBD) and copy.takes(cache_NL2KBD)):
            return None
        copy.scatter_kv(cache_NL2KBD, block_ids, start, end, data)
        return cache_NL2KBD

    @override
    def digest_sums(self, words: Tensor, seed: int) -> Tensor | None:
        """Takes words at any address."""
        return copy.digest_sums(words, seed) if _runs(words) else None


def without(names: Sequence[str]) -> TritonOps:
    """All kernels but those of the ops `names`, whose methods take no tensors: torch computes them."""
    ops = TritonOps()
    for name in names:
        setattr(ops, name, _declines)
    return ops


def _declines(*_: object) -> None:
    """Stands for an op that is switched off."""


def _takes(device: torch.device) -> bool:
    return device.type == ("cpu" if INTERPRETED else "cuda")


def _runs(*tensors: Tensor) -> bool:
    """Whether all tensors are on one device where kernels run."""
    device = tensors[0].device
    return _takes(device) and all(tensor.device == device for tensor in tensors)


def _are_floats(*tensors: Tensor) -> bool:
    """Whether all tensors have one dtype, which the kernels support."""
    return tensors[0].dtype in attention.FLOAT_DTYPES and all(tensor.dtype == tensors[0].dtype for tensor in tensors)


def _are_rows(*tensors: Tensor) -> bool:
    """Whether all are matrices whose rows are contiguous, with any stride between rows."""
    return all(tensor.dim() == 2 and tensor.stride(1) == 1 for tensor in tensors)


def _are_vectors(*tensors: Tensor) -> bool:
    """Whether all are contiguous vectors of integers."""
    return all(tensor.dim() == 1 and tensor.is_contiguous() and tensor.dtype in _INTEGERS for tensor in tensors)


def _is_cache(cache_NKBD: Tensor, dtype: torch.dtype) -> bool:
    """Whether a cache of one layer can be written to from this dtype: heads of even size, contiguous in a block."""
    block_size, D = cache_NKBD.shape[2:]
    is_contiguous = cache_NKBD.stride()[1:] == (block_size * D, D, 1)
    return is_contiguous and D % 2 == 0 and cache_NKBD.dtype in (dtype, torch.float8_e4m3fn)
