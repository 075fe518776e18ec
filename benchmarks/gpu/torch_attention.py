"""Torch's own attention beside ours in the same run: by cuDNN and by its flash kernels.

Their KV lies in a row for each sequence, [sequences, KV heads, tokens, head dim], without blocks and tables, which is
easier. A share is their time over ours: 1 is equal, more is better.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.report import RowFile
from benchmarks.gpu.timing import in_turns, kernel_ms
from disagg.engine.plan import is_fatal

if TYPE_CHECKING:
    from benchmarks.gpu.attention import TensorSizes

PEERS: Mapping[str, SDPBackend] = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "torch's flash kernel": SDPBackend.FLASH_ATTENTION,
}
PREFILL_TARGET = 0.75
"""Share of cuDNN's time for the longest prompt."""
LONG_PROMPT = 8192


def measure_torch_decode(
    rows: RowFile, shape: TensorSizes, device: torch.device, batch: int, context_len: int, our_us: float, num_turns: int
) -> None:
    """One query row of each of `batch` sequences; calls take turns on so many pieces of KV."""
    q_SN1D = _random(shape, device, batch, shape.num_heads, 1)
    pieces = [_random(shape, device, 2, batch, shape.num_kv_heads, context_len) for _ in range(num_turns)]
    runs = [_attention(q_SN1D, piece) for piece in pieces]
    for name in PEERS:
        _measure(rows, f"decode by {name}, batch {batch}, context {context_len}", name, runs, device, our_us, None)


def measure_torch_prefill(
    rows: RowFile, shape: TensorSizes, device: torch.device, num_tokens: int, start: int, our_us: float, num_turns: int
) -> None:
    """A causal chunk behind `start` tokens."""
    q_1NTD = _random(shape, device, 1, shape.num_heads, num_tokens)
    pieces = [_random(shape, device, 2, 1, shape.num_kv_heads, start + num_tokens) for _ in range(num_turns)]
    causal: dict[str, Any] = {"is_causal": True}
    if start:
        causal = {"attn_mask": causal_lower_right(num_tokens, start + num_tokens)}
    runs = [_attention(q_1NTD, piece, **causal) for piece in pieces]
    target = PREFILL_TARGET if (num_tokens, start) == (LONG_PROMPT, 0) else None
    for name in PEERS:
        label = f"prefill by {name}, {num_tokens} tokens behind {start}"
        _measure(rows, label, name, runs, device, our_us, target if name == "cuDNN" else None)


def _attention(q: Tensor, keys_values: Tensor, **options: Any) -> Callable[[], Tensor]:
    keys, values = keys_values
    return functools.partial(scaled_dot_product_attention, q, keys, values, enable_gqa=True, **options)


def _random(shape: TensorSizes, device: torch.device, *size: int) -> Tensor:
    return torch.randn(*size, shape.head_dim, dtype=shape.dtype, device=device)


def _measure(
    rows: RowFile,
    label: str,
    peer: str,
    runs: list[Callable[[], Tensor]],
    device: torch.device,
    our_us: float,
    target: float | None,
) -> None:
    """A peer that does not take this shape is a row that says so."""
    try:
        with sdpa_kernel(PEERS[peer]):
            us = kernel_ms(in_turns(runs), device, calls=max(3, len(runs))) * 1e3
    except RuntimeError as error:
        if is_fatal(error):
            raise
        rows.add(label, None, "", detail=f"not for this shape: {str(error).splitlines()[0]}")
        return
    rows.add(label, us, "us", share=us / our_us, target=target, detail=f"ours {our_us:.1f} us")
