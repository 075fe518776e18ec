"""Naive kernels in float64, one row at a time, that share no code with the real ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}
"""Largest difference, relative to max(1, |expected|): a rounding of inputs of size 1 to 4, and one of the result."""


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Within the tolerance of `found`'s dtype; `expected` is float64."""
    assert found.shape == expected.shape
    error = (found.double() - expected).abs() / expected.abs().clamp(min=1.0)
    assert error.max().item() <= TOLERANCE[found.dtype]


def new_cache(num_blocks: int, layers: int, K: int, block_size: int, D: int, dtype: torch.dtype) -> Tensor:
    """A whole cache [num_blocks, layers, 2, K, B, D] of NaN, in the order in memory that `KvCache` has: what is read
    without being written shows."""
    return torch.full((layers, 2, num_blocks, K, block_size, D), math.nan, dtype=dtype).permute(2, 0, 1, 3, 4, 5)


def write(cache_NKBD: Tensor, table: Sequence[int], rows_CKD: Tensor) -> None:
    """Put row i at position i of a sequence with these blocks."""
    block_size = cache_NKBD.shape[2]
    for start in range(0, len(rows_CKD), block_size):
        rows_BKD = rows_CKD[start : start + block_size]
        cache_NKBD[table[start // block_size], :, : len(rows_BKD)] = rows_BKD.transpose(0, 1)


def attend(
    q_D: Tensor,
    keys_CD: Tensor,
    values_CD: Tensor,
    scale: float,
    soft_cap: float | None = None,
    sink: float = -math.inf,
) -> Tensor:
    """softmax(q . k * scale) @ v for one query row, float64; the sink is a further score without a value."""
    scores_C = keys_CD.double() @ q_D.double() * scale
    if soft_cap is not None:
        scores_C = soft_cap * (scores_C / soft_cap).tanh()
    top = max(float(scores_C.max()), sink)
    weights_C = (scores_C - top).exp()
    return weights_C @ values_CD.double() / (weights_C.sum() + math.exp(sink - top))


def rms_norm(x_D: Tensor, weight_D: Tensor, eps: float, plus_one: bool = False) -> Tensor:
    """One row, float64; `plus_one` adds one to the weight."""
    mean = math.fsum(float(x) ** 2 for x in x_D) / len(x_D)
    return torch.tensor(
        [float(x) / math.sqrt(mean + eps) * (float(w) + plus_one) for x, w in zip(x_D, weight_D, strict=True)],
        dtype=torch.float64,
    )


def rope(x_D: Tensor, cos_D: Tensor, sin_D: Tensor) -> Tensor:
    """One head of one token, float64: rotate the pairs (i, i + R/2) of the first R dims, for which there are angles."""
    half = len(cos_D) // 2
    x, cos, sin = x_D.double(), cos_D.double(), sin_D.double()
    out = x.clone()
    for i in range(half):
        out[i] = x[i] * cos[i] - x[i + half] * sin[i]
        out[i + half] = x[i + half] * cos[i + half] + x[i] * sin[i + half]
    return out


def gelu_tanh(x: float) -> float:
    """gelu by its approximation with tanh."""
    return 0.5 * x * (1.0 + math.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def silu(x: float) -> float:
    """x * sigmoid(x)."""
    return x / (1.0 + math.exp(-x))
