"""A module that plays FlashInfer in tests: the wrapper for paged prompts, by our reference. `install(folder)` makes an
importable `flashinfer` of it. The parameters are those of flashinfer-python 0.7.2; `tests/gpu_stub/test_flashinfer.py`
compares them with the real ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from disagg.kernels import reference
from disagg.kernels.ops import AttentionForm, PrefillChunk, Prefills


class BatchPrefillWithPagedKVCacheWrapper:
    """Strict about what it is given: dtypes, where tensors are, sizes that belong together."""

    wrong_by = 0.0
    """Added to each result."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        assert (float_workspace_buffer.dtype, kv_layout) == (torch.uint8, "HND")
        self._device = float_workspace_buffer.device
        self._planned: dict[str, Any] = {}

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        causal: bool = False,
        sm_scale: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        """What `run` computes from then on."""
        on_host = (qo_indptr, paged_kv_indptr, paged_kv_last_page_len)
        assert all(tensor.is_cpu for tensor in on_host)
        assert all(tensor.dtype == torch.int32 for tensor in (*on_host, paged_kv_indices))
        assert paged_kv_indices.device == self._device
        assert len(paged_kv_indices) == paged_kv_indptr[-1]
        assert causal
        assert sm_scale is not None
        lens = (paged_kv_indptr.diff() - 1) * page_size + paged_kv_last_page_len
        assert (lens >= qo_indptr.diff()).all()
        self._planned = {
            "rows": qo_indptr.tolist(),
            "tables": paged_kv_indices.tensor_split(paged_kv_indptr[1:-1].long()),
            "lens": lens.tolist(),
            "heads": (num_qo_heads, num_kv_heads, head_dim_qk, page_size),
            "form": AttentionForm(sm_scale),
            "dtypes": (q_data_type, kv_data_type or q_data_type),
        }

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor | None = None) -> Tensor:
        """The attention of the planned rows."""
        keys, values = paged_kv_cache
        planned = self._planned
        assert (q.shape[1], keys.shape[1], q.shape[2], keys.shape[2]) == planned["heads"]
        assert (q.dtype, keys.dtype) == planned["dtypes"]
        assert out is not None
        assert out.is_contiguous()
        assert len(q) == len(out) == planned["rows"][-1]
        rows = zip(planned["rows"], planned["rows"][1:], planned["tables"], planned["lens"], strict=False)
        for first, last, table, length in rows:
            chunk = PrefillChunk(slice(first, last), length - (last - first), table)
            reference.paged_prefill_attention(q, keys, values, Prefills((chunk,)), planned["form"], out)
        out += self.wrong_by
        return out


def install(folder: Path, more: str = "") -> None:
    """Put `flashinfer.py` into `folder`, for processes that have it on their path; `more` are further lines of it."""
    name = BatchPrefillWithPagedKVCacheWrapper.__name__
    text = f"from tests.support.flashinfer_played import {name}\n{more}\n"
    (folder / "flashinfer.py").write_text(text, encoding="utf-8")
