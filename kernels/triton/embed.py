"""Rows of the embedding table."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from disagg.kernels.triton.jit import jit

_BLOCK = 1024


@jit
def _embed_kernel(
    ids_ptr: tl.tensor,
    table_ptr: tl.tensor,
    out_ptr: tl.tensor,
    vocab_size: tl.tensor,
    row_stride: tl.tensor,
    hidden: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ids_ptr + row).to(tl.int64)
    known = (token >= 0) & (token < vocab_size)
    values = tl.load(table_ptr + token * row_stride + columns, mask=(columns < hidden) & known, other=0.0)
    tl.store(out_ptr + row * hidden + columns, values, mask=columns < hidden)


def embed(token_ids_T: Tensor, embedding_VH: Tensor) -> Tensor:
    """The op `reference.embed`; an id outside the table gives zeros, since a kernel cannot raise."""
    T, hidden = token_ids_T.shape[0], embedding_VH.shape[1]
    out_TH = torch.empty((T, hidden), dtype=embedding_VH.dtype, device=embedding_VH.device)
    if out_TH.numel():
        _embed_kernel[(T, triton.cdiv(hidden, _BLOCK))](
            token_ids_T,
            embedding_VH,
            out_TH,
            embedding_VH.shape[0],
            embedding_VH.stride(0),
            hidden,
            BLOCK=_BLOCK,
            num_warps=4,
        )
    return out_TH
