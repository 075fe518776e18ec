"""Torch references of all ops: the oracle of every faster kernel, and the path that runs where there is none.

Plain and stateless; any device, any dtype. The module implements `ops.Ops`, and takes all tensors; callers import
`disagg.kernels.dispatch`.

Shapes: T tokens, S sequences, H hidden, I/O in and out features, F half of the MLP's gate_up, N query heads, K KV
heads, D head dim, B tokens of a block, M blocks of a table (padded with 0), NKBD a cache of one layer [num_blocks, K,
B, D]: a view `cache[:, layer, 0 | 1]` of the whole cache NL2KBD [num_blocks, layers, 2, K, B, D], which may be strided,
its inner [K, B, D] contiguous. A cache of dtype int8 has rows of D + 2 bytes (`kv_rows.py`).

Cache slots that no token was written to may hold anything, NaN included; no op lets them reach a result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from disagg.kernels import kv_rows, weights
from disagg.kernels.expert_reference import moe_ffn as moe_ffn
from disagg.kernels.experts import ExpertWeight
from disagg.kernels.lora import Lora
from disagg.kernels.ops import AttentionForm, HeadSquares, LatentWrite, Pointwise, PrefillChunk, Prefills, RopeWrite


def embed(token_ids_T: Tensor, embedding_VH: Tensor) -> Tensor:
    """The rows of the embedding, [T, H]. Ids (int64) must be within the vocabulary."""
    return F.embedding(token_ids_T, embedding_VH)


def take_rows(x_TH: Tensor, rows_R: Tensor) -> Tensor:
    """Rows of a matrix by their indices, int64, which must be within; [R, H]."""
    return x_TH[rows_R]


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float, plus_one: bool = False) -> Tensor:
    """Root mean square norm over the last dim (any leading dims), then times the weight, or one more than the weight.

    Numerics of transformers' `LlamaRMSNorm`: fp32 inside, cast back to the input dtype, then multiplied by the weight.
    With `plus_one` those of `GemmaRMSNorm`: fp32 inside, the product with the weight included, then cast.
    """
    x = x_TH.float()
    return _normed(x, x.square().mean(-1, keepdim=True), weight_H, eps, plus_one, x_TH.dtype)


def _normed(x: Tensor, mean_squares: Tensor, weight: Tensor, eps: float, plus_one: bool, dtype: torch.dtype) -> Tensor:
    """`rms_norm` of an fp32 tensor, given its mean squares."""
    x = x * torch.rsqrt(mean_squares + eps)
    return (x * (1.0 + weight.float())).to(dtype) if plus_one else weight * x.to(dtype)


def add_rms_norm(
    x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float, plus_one: bool = False
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual); the sum is rounded to the input dtype. Inputs stay as they are."""
    residual = x_TH + residual_TH
    return rms_norm(residual, weight_H, eps, plus_one), residual


def add(x_TH: Tensor, y_TH: Tensor) -> Tensor:
    """x + y, [T, H]."""
    return x_TH + y_TH


def lora_add(x_TI: Tensor, y_TO: Tensor, lora: Lora, slots_T: Tensor) -> Tensor:
    """Add to each row of `y` what the adapter in its slot makes of the row of `x`, in place: sums in fp32, rounded once
    with `y`. Rows with slot -1 are not touched. Slots are int32."""
    for slot, ranks_P, scales_P in zip(range(lora.num_slots), lora.ranks_SP, lora.scales_SP, strict=True):
        for part, columns in enumerate(torch.split(y_TO, list(lora.columns), dim=1)):
            start, rank = sum(lora.columns[:part]), ranks_P[part]
            b_RO = lora.b_SRO[slot, :, start : start + lora.columns[part]].float()
            hidden_TR = x_TI.float() @ lora.a_SPRI[slot, part].float().T
            is_read_R = torch.arange(len(b_RO), device=x_TI.device) < rank
            added = (torch.where(is_read_R, hidden_TR, 0.0) @ b_RO) * scales_P[part]
            is_changed_T1 = ((slots_T == slot) & (rank > 0))[:, None]
            columns.copy_(torch.where(is_changed_T1, (columns.float() + added).to(y_TO.dtype), columns))
    return y_TO


def pointwise(x_TH: Tensor, function: Pointwise, number: float) -> Tensor:
    """A function of each value and a number, [T, H]: in fp32, rounded once."""
    x = x_TH.float()
    if function == "multiply":
        x = x * number
    elif function == "divide":
        x = x / number
    else:
        x = torch.tanh(x / number) * number
    return x.to(x_TH.dtype)


def _rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def apply_rope(q_TND: Tensor, k_TKD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary position embedding of the first R dims of each head, Llama's half rotation: pairs are (i, i + R/2). cos
    and sin repeat their first half."""
    cos, sin = cos_TR.unsqueeze(1), sin_TR.unsqueeze(1)
    return _rotated(q_TND, cos, sin), _rotated(k_TKD, cos, sin)


def _rotated(x_TND: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> Tensor:
    size = cos_T1R.shape[-1]
    turned = x_TND[..., :size]
    turned = turned * cos_T1R + _rotate_half(turned) * sin_T1R
    return turned if size == x_TND.shape[-1] else torch.cat((turned, x_TND[..., size:]), dim=-1)


def silu_mul(gate_up_T2F: Tensor) -> Tensor:
    """silu(gate) * up, where gate is the first half of the last dim."""
    gate, up = gate_up_T2F.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_tanh_mul(gate_up_T2F: Tensor) -> Tensor:
    """gelu(gate) * up, where gate is the first half of the last dim and gelu the approximation by tanh."""
    gate, up = gate_up_T2F.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """x @ weight.T + bias, as [T, O]."""
    return F.linear(x_TI, weight_OI, bias_O)


def kv_write(
    k_TKD: Tensor, v_TKD: Tensor, key_cache_NKBD: Tensor, value_cache_NKBD: Tensor, slot_mapping_T: Tensor
) -> None:
    """Write each token's K and V at its slot (block * B + offset, int64). Slots must be valid and distinct; a token
    whose slot is -1 is skipped.

    Nothing is asked of the host, so a CUDA graph can hold it: a token that is skipped repeats the first other one,
    same slot and same value. Where all are skipped they write back what slot 0 holds.
    """
    _write_rows(k_TKD, key_cache_NKBD, slot_mapping_T)
    _write_rows(v_TKD, value_cache_NKBD, slot_mapping_T)


def _write_rows(rows_TKD: Tensor, cache_NKBD: Tensor, slot_mapping_T: Tensor) -> None:
    num_tokens, block_size = slot_mapping_T.shape[0], cache_NKBD.shape[2]
    if num_tokens == 0:
        return
    keep_T = slot_mapping_T >= 0
    numbers_T = torch.arange(num_tokens, device=slot_mapping_T.device)
    rows_T = torch.where(keep_T, numbers_T, keep_T.to(torch.int8).argmax())
    slots_T = slot_mapping_T[rows_T]
    block_T, offset_T = slots_T.clamp(min=0) // block_size, slots_T.clamp(min=0) % block_size
    kept_TKD = rows_TKD[rows_T]
    kept_TKD = kv_rows.quantized_rows(kept_TKD) if cache_NKBD.dtype == torch.int8 else kept_TKD.to(cache_NKBD.dtype)
    bits_NKBD, bits_TKD = _bits(cache_NKBD), _bits(kept_TKD)
    bits_NKBD[block_T, :, offset_T] = torch.where(
        (slots_T >= 0)[:, None, None], bits_TKD, bits_NKBD[block_T, :, offset_T]
    )


def _bits(tensor: Tensor) -> Tensor:
    """The tensor itself, or its bytes where it holds numbers of 8 bits: some of torch's ops do not take floats of
    these."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def qkv_rope_write(
    qkv_TQ: Tensor,
    positions_T: Tensor,
    slot_mapping_T: Tensor,
    layer: RopeWrite,
    squares: HeadSquares | None = None,
) -> Tensor:
    """All that is between the QKV GEMM and attention. Returns the rotated q, contiguous [T, N, D].

    A row of `qkv_TQ` holds the heads of q, then of k, then of v. Where norms are given, each head of q and k is normed,
    or all heads of q, and all of k, at once: by `squares`, where a rank has a part of the heads. Both are rotated by
    the row of the tables [max positions, R] at the token's position (int64); then K and V are written as by `kv_write`.
    """
    K, D = layer.key_cache_NKBD.shape[1], kv_rows.width(layer.key_cache_NKBD)
    T, N = qkv_TQ.shape[0], qkv_TQ.shape[1] // D - 2 * K
    q_TND, k_TKD, v_TKD = torch.split(qkv_TQ.reshape(T, N + 2 * K, D), [N, K, K], dim=1)
    if layer.is_whole:
        sums_T2 = head_squares(qkv_TQ, K, D) if squares is None else squares.sums_T2
        sizes = (N * D, K * D) if squares is None else (squares.q_size, squares.k_size)
        q_TND = _normed_whole(q_TND, sums_T2[:, 0] / sizes[0], layer.q_norm_D, layer)
        k_TKD = _normed_whole(k_TKD, sums_T2[:, 1] / sizes[1], layer.k_norm_D, layer)
    else:
        if layer.q_norm_D is not None:
            q_TND = rms_norm(q_TND, layer.q_norm_D, layer.eps, layer.plus_one)
        if layer.k_norm_D is not None:
            k_TKD = rms_norm(k_TKD, layer.k_norm_D, layer.eps, layer.plus_one)
    q_TND, k_TKD = apply_rope(q_TND, k_TKD, layer.cos_PR[positions_T], layer.sin_PR[positions_T])
    if layer.query_scale_P is not None:
        q_TND = q_TND * layer.query_scale_P[positions_T][:, None, None]
    kv_write(k_TKD, v_TKD, layer.key_cache_NKBD, layer.value_cache_NKBD, slot_mapping_T)
    return q_TND.contiguous()


def _normed_whole(heads_TND: Tensor, means_T: Tensor, weight_A: Tensor | None, layer: RopeWrite) -> Tensor:
    assert weight_A is not None, "both are normed at once"
    weight_ND = weight_A.view(heads_TND.shape[1:])
    return _normed(heads_TND.float(), means_T[:, None, None], weight_ND, layer.eps, layer.plus_one, heads_TND.dtype)


def linear_by_head(x_TNI: Tensor, weight_NOI: ExpertWeight) -> Tensor:
    """The row of each head times the head's own weight, contiguous [T, N, O]. Takes plain weights."""
    assert isinstance(weight_NOI, Tensor), "packed weights have a kernel"
    return (x_TNI.transpose(0, 1) @ weight_NOI.transpose(1, 2)).transpose(0, 1).contiguous()


def latent_rope_write(
    latent_TL: Tensor,
    k_TR: Tensor,
    absorbed_TNL: Tensor,
    q_TNR: Tensor,
    positions_T: Tensor,
    slot_mapping_T: Tensor,
    layer: LatentWrite,
) -> Tensor:
    """All that is between the products and attention over latents (DeepSeek V2, 2024): the rope parts of q and k, which
    all heads share, are rotated by the row of the tables at the token's position (int64). A token's latent, which is
    normed, and k behind it are written at its slot as by `kv_write`. Returns the queries, contiguous [T, N, L + R]:
    the absorbed ones, which are products with the keys' part of the latents' projection, and the rotated part.
    """
    q_TNR, k_T1R = apply_rope(q_TNR, k_TR.unsqueeze(1), layer.cos_PR[positions_T], layer.sin_PR[positions_T])
    _write_rows(torch.cat((latent_TL.unsqueeze(1), k_T1R), dim=-1), layer.cache_N1BD, slot_mapping_T)
    return torch.cat((absorbed_TNL, q_TNR), dim=-1)


def head_squares(qkv_TQ: Tensor, num_kv_heads: int, head_dim: int) -> Tensor:
    """Sums of squares of all heads of q, and of all heads of k, fp32 [T, 2]."""
    kv_size = num_kv_heads * head_dim
    q_TA, k_TE, _ = torch.split(qkv_TQ.float(), [qkv_TQ.shape[1] - 2 * kv_size, kv_size, kv_size], dim=1)
    return torch.stack((q_TA.square().sum(1), k_TE.square().sum(1)), dim=1)


def argmax_rows(logits_TV: Tensor, vocab_size: int) -> Tensor:
    """The first index of the largest of each row's first `vocab_size` logits, int64; -1 for a row that nothing can be
    chosen from: it holds NaN, +inf, or nothing finite."""
    logits_TV = logits_TV[:, :vocab_size]
    ids_T = logits_TV.argmax(dim=-1)
    largest_T = logits_TV.gather(1, ids_T[:, None])[:, 0]
    return torch.where(largest_T.isfinite(), ids_T, -1)


def draw_unfiltered(logits_RV: Tensor, vocab_size: int, temperatures_R: Tensor, uniform_R: Tensor) -> Tensor:
    """A token for each row without filters, int64 [R]; -1 where nothing can be chosen. See `weights`."""
    return weights.draw_unfiltered(logits_RV, vocab_size, temperatures_R, uniform_R)


def paged_decode_attention(
    q_SND: Tensor,
    key_cache_NKBD: Tensor,
    value_cache_NKBD: Tensor,
    block_tables_SM: Tensor,
    context_lens_S: Tensor,
    form: AttentionForm,
    out_SND: Tensor | None = None,
) -> Tensor:
    """Attention of one query row per sequence over its first `context_lens` cached tokens, or the last of these that
    the window leaves; [S, N, D], in `out` if given.

    Grouped queries: query head n reads KV head n // (N / K). Values may be the first columns of the keys, a view of
    that cache; the result has as many. Tables are int32, padded with 0, as are their entries
    before the window. Scores, softmax and the sum are fp32. A sequence of length 0 gives zeros.
    """
    S, N, D = q_SND.shape
    K, value_dim = key_cache_NKBD.shape[1], kv_rows.width(value_cache_NKBD)
    tables = block_tables_SM.long()
    key_SKCD, key_scales = _floats(key_cache_NKBD[tables].transpose(1, 2).flatten(2, 3))
    value_SKCD, value_scales = _floats(value_cache_NKBD[tables].transpose(1, 2).flatten(2, 3))
    positions_C = torch.arange(key_SKCD.shape[2], device=q_SND.device)
    hidden_SC = positions_C[None, :] >= context_lens_S[:, None]
    if form.window is not None:
        hidden_SC = hidden_SC | (positions_C[None, :] < context_lens_S[:, None] - form.window)
    q_SKGD = q_SND.view(S, K, N // K, D).float()
    weights_SKGC = _weights(_scaled(q_SKGD @ key_SKCD.transpose(2, 3), key_scales), hidden_SC, form)
    weights_SKGC = _scaled(weights_SKGC, value_scales).masked_fill(hidden_SC[:, None, None], 0.0)
    value_SKCD = value_SKCD.masked_fill(hidden_SC[:, None, :, None], 0.0)
    return _placed((weights_SKGC @ value_SKCD).view(S, N, value_dim).to(q_SND.dtype), out_SND)


def _floats(rows: Tensor) -> tuple[Tensor, Tensor | None]:
    """Rows of a cache as fp32, of 8-bit ones the integers, and the scales of these [..., 1]."""
    if rows.dtype != torch.int8:
        return rows.float(), None
    return kv_rows.integers_of(rows), kv_rows.scales_of(rows)


def _scaled(numbers_KRC: Tensor, scales_KC1: Tensor | None) -> Tensor:
    """Numbers of rows and tokens, [..., K, R, C], times the scales of the tokens, if they have some."""
    return numbers_KRC if scales_KC1 is None else numbers_KRC * scales_KC1.transpose(-1, -2)


def _weights(products_RKGC: Tensor, hidden_RC: Tensor, form: AttentionForm) -> Tensor:
    """Weights of C tokens for R rows, from the fp32 products of queries and keys; none of tokens that are hidden."""
    hidden_R11C = hidden_RC[:, None, None, :]
    scores_RKGC = products_RKGC * form.scale
    if form.soft_cap is not None:
        scores_RKGC = torch.tanh(scores_RKGC / form.soft_cap) * form.soft_cap
    scores_RKGC = scores_RKGC.masked_fill_(hidden_R11C, float("-inf"))
    if form.sinks_N is not None:
        R, K, G, C = scores_RKGC.shape
        sinks_RKG1 = form.sinks_N.float().view(1, K, G, 1).expand(R, K, G, 1)
        scores_RKGC = torch.cat((scores_RKGC, sinks_RKG1), dim=-1)
        return torch.softmax(scores_RKGC, dim=-1)[..., :C].masked_fill(hidden_R11C, 0.0)
    return torch.softmax(scores_RKGC, dim=-1).masked_fill_(hidden_R11C, 0.0)


def paged_prefill_attention(
    q_TND: Tensor,
    key_cache_NKBD: Tensor,
    value_cache_NKBD: Tensor,
    prefills: Prefills,
    form: AttentionForm,
    out_TND: Tensor,
) -> Tensor:
    """Causal attention of the prompts of a step, whose KV is already written: their rows of `out` [T, N, D], which is
    the result.

    Query i of a chunk sees positions <= start + i, or the last of these that the window leaves. Copies each context's K
    and V once; then, without window, soft cap and sinks, torch's scaled dot product attention.
    """
    for chunk in prefills.chunks:
        out_TND[chunk.rows] = _chunk_attention(q_TND[chunk.rows], key_cache_NKBD, value_cache_NKBD, chunk, form)
    return out_TND


def _chunk_attention(
    q_TND: Tensor, key_cache_NKBD: Tensor, value_cache_NKBD: Tensor, chunk: PrefillChunk, form: AttentionForm
) -> Tensor:
    (T, N, D), start = q_TND.shape, chunk.start
    K, block_size = key_cache_NKBD.shape[1:3]
    end = start + T
    blocks = chunk.block_table_M[: (end + block_size - 1) // block_size].long()
    key_KCD, value_KCD = (
        cache_NKBD[blocks].transpose(0, 1).reshape(K, -1, cache_NKBD.shape[3])[:, :end]
        for cache_NKBD in (key_cache_NKBD, value_cache_NKBD)
    )
    query_positions_T = torch.arange(start, end, device=q_TND.device)
    positions_C = torch.arange(end, device=q_TND.device)
    visible_TC = positions_C[None, :] <= query_positions_T[:, None]
    if form.is_plain and key_KCD.dtype != torch.int8:
        out_NTD = F.scaled_dot_product_attention(
            q_TND.transpose(0, 1)[None],
            key_KCD.to(q_TND.dtype)[None],
            value_KCD.to(q_TND.dtype)[None],
            attn_mask=None if start == 0 else visible_TC,
            is_causal=start == 0,
            scale=form.scale,
            enable_gqa=N != K,
        )[0]
        return out_NTD.transpose(0, 1)
    if form.window is not None:
        visible_TC &= positions_C[None, :] > query_positions_T[:, None] - form.window
    q_KRD = q_TND.float().view(T, K, N // K, D).transpose(0, 1).reshape(K, -1, D)
    (key_KCD, key_scales), (value_KCD, value_scales) = _floats(key_KCD), _floats(value_KCD)
    products_KRC = _scaled(q_KRD @ key_KCD.transpose(1, 2), key_scales)
    weights_RKGC = _weights(products_KRC.view(K, T, N // K, end).transpose(0, 1), ~visible_TC, form)
    seen_KC1 = visible_TC.any(0)[None, :, None]  # not before all windows
    if value_scales is not None:
        value_scales = value_scales.masked_fill(~seen_KC1, 0.0)
    weights_KRC = _scaled(weights_RKGC.transpose(0, 1).reshape(K, -1, end), value_scales)
    out_KRD = weights_KRC @ value_KCD.masked_fill(~seen_KC1, 0.0)
    return out_KRD.view(K, T, N // K, out_KRD.shape[2]).transpose(0, 1).reshape(T, N, out_KRD.shape[2]).to(q_TND.dtype)


def _placed(found: Tensor, out: Tensor | None) -> Tensor:
    return found if out is None else out.copy_(found)


def _token_bytes(cache_NL2KBD: Tensor, data: Tensor, start: int, end: int, num_blocks: int) -> tuple[Tensor, Tensor]:
    """Both as bytes: the cache [num_blocks, L, 2, K, B, D * itemsize], the flat buffer [L, 2, K, end - start, ...]."""
    cache = cache_NL2KBD.view(torch.uint8)
    _, L, two, K, block_size, row_bytes = cache.shape
    if not 0 <= start <= end <= num_blocks * block_size:
        raise ValueError(f"tokens [{start}, {end}) are not within {num_blocks} blocks of {block_size}")
    nbytes = L * two * K * (end - start) * row_bytes
    if data.dtype != torch.uint8 or data.dim() != 1 or data.numel() != nbytes:
        raise ValueError(
            f"tokens [{start}, {end}) take {nbytes} bytes; the buffer is {data.dtype} of shape {list(data.shape)}"
        )
    return cache, data.view(L, two, K, end - start, row_bytes)


def _runs(block_ids: Sequence[int], block_size: int, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Tokens [start, end) as (first token, end, first block, number of blocks): neighbours in the sequence that are
    neighbours in the cache, or a part of a block alone."""
    token = start
    while token < end:
        first = token // block_size
        count = 1
        if token % block_size == 0:
            while (first + count + 1) * block_size <= end and block_ids[first + count] == block_ids[first] + count:
                count += 1
        run_end = min((first + count) * block_size, end)
        yield token, run_end, block_ids[first], count
        token = run_end


def _pairs(
    cache_NL2KBD: Tensor, flat: Tensor, block_ids: Sequence[int], start: int, end: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """The same tokens in the cache and in the flat buffer, `[L, 2, K, blocks, tokens, row_bytes]`."""
    cache, flat_L2KT = _token_bytes(cache_NL2KBD, flat, start, end, len(block_ids))
    block_size = cache.shape[4]
    for token, run_end, block, count in _runs(block_ids, block_size, start, end):
        if not 0 <= block <= cache.shape[0] - count:
            raise IndexError(f"blocks [{block}, {block + count}) are not within a cache of {cache.shape[0]}")
        num_tokens = (run_end - token) // count
        offset = token % block_size
        held = cache[block : block + count, :, :, :, offset : offset + num_tokens].permute(1, 2, 3, 0, 4, 5)
        yield held, flat_L2KT[:, :, :, token - start : run_end - start].view(held.shape)


def gather_kv(cache_NL2KBD: Tensor, block_ids: Sequence[int], start: int, end: int, out: Tensor) -> Tensor:
    """Copy the KV of tokens [start, end) of a sequence with blocks `block_ids` into `out`, a flat uint8 tensor; `out`.

    Order [layer][k|v][head][token][dim], bytes of the cache's dtype; it does not depend on the block size. The range
    need not be aligned to blocks. Some of the heads: a view `cache[:, :, :, first:last]`. ValueError when the range or
    the size of `out` does not fit.
    """
    for held, flat in _pairs(cache_NL2KBD, out, block_ids, start, end):
        flat.copy_(held)
    return out


def scatter_kv(cache_NL2KBD: Tensor, block_ids: Sequence[int], start: int, end: int, data: Tensor) -> Tensor:
    """Copy `data` (as `gather_kv` wrote it, possibly from a cache of another block size) into tokens [start, end) of
    the cache, or of the heads in a view of it; the cache."""
    for held, flat in _pairs(cache_NL2KBD, data, block_ids, start, end):
        held.copy_(flat)
    return cache_NL2KBD


_LOW = (1 << 32) - 1
_GOLDEN = 0x9E3779B97F4A7C15
"""Increment of SplitMix64, from `proto/splitmix.py` like the factors in `_mix`."""


def digest_sums(words: Tensor, seed: int) -> Tensor:
    """Two keyed sums of int64 words, int64 [2], modulo 2^64: NH (J. Black et al.: UMAC, CRYPTO 1999), twice.

    With k the outputs of SplitMix64 of state `seed` (64 bits, signed), the first is the sum over i of the product of
    the 32-bit halves of words[i], each plus that of k[i] modulo 2^32; the second has k[i + 1] in place of k[i]. For
    random keys any two payloads of one length have both sums in common with probability 2^-64 at most.
    """
    sums = torch.zeros(2, dtype=torch.int64, device=words.device)
    for start in range(0, len(words), 1 << 18):
        part = words[start : start + (1 << 18)]
        indices = torch.arange(start + 1, start + len(part) + 2, dtype=torch.int64, device=words.device)
        keys = _mix(indices * _signed(_GOLDEN) + seed)
        sums += torch.stack([_products(part, keys[:-1]).sum(), _products(part, keys[1:]).sum()])
    return sums


def _products(words: Tensor, keys: Tensor) -> Tensor:
    low = ((words & _LOW) + (keys & _LOW)) & _LOW
    high = (_shifted(words, 32) + _shifted(keys, 32)) & _LOW
    return low * high


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Shift to the right, filling with zeros."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
