"""Rows of a KV cache in 8 bits: the integers of a token's head, and their scale behind them.

A row of D numbers x takes D + 2 bytes: D integers from -127 to 127, then the scale as fp16. The scale is the smallest
fp16 number s with 127 s >= max |x|, and an integer is x times the fp32 number nearest to 1 / s, in fp32, rounded half
to even. So nothing is clamped, a row of zeros has the scale zero, and every implementation writes the same bytes. A row
that is not finite, or of which no scale is large enough, has the scale NaN, so that what reads it is not finite either.

A cache of dtype int8 has such rows: `[num_blocks, K, B, D + 2]`. What is computed with them: the product of a query
and the integers of a key, times the key's scale; a token's weight, times its value's scale, times the integers of the
value.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 2
"""Bytes of the scale of a row."""
MOST = 127
"""Largest integer."""
_LARGEST_HALF = 0x7BFF
"""Bits of the largest finite fp16 number."""
_NAN_HALF = 0x7E00


def width(cache_NKBD: Tensor) -> int:
    """How many numbers a row of a cache has."""
    return cache_NKBD.shape[-1] - SCALE_BYTES if cache_NKBD.dtype == torch.int8 else cache_NKBD.shape[-1]


def quantized_rows(x_TKD: Tensor) -> Tensor:
    """Rows of 8 bits, int8 [..., D + 2], of rows of floats."""
    x = x_TKD.float()
    most = x.abs().amax(-1, keepdim=True)
    # Below the largest fp16 number that is not above the quotient, and up from there.
    bits = ((most / MOST).clamp(max=65504.0).half().view(torch.int16) - 2).clamp(min=0)
    for _ in range(4):
        bits = torch.where((bits < _LARGEST_HALF) & (_floats(bits) * MOST < most), bits + 1, bits)
    fits = _floats(bits) * MOST >= most  # not for NaN
    scale = _floats(bits)
    inverse = torch.where(fits & (scale > 0), 1.0 / scale, 0.0)
    integers = torch.where(fits, (torch.where(fits, x, 0.0) * inverse).round(), 0.0).to(torch.int8)
    bits = torch.where(fits, bits, _NAN_HALF).to(torch.int16)
    return torch.cat((integers, bits.contiguous().view(torch.int8)), dim=-1)


def integers_of(rows: Tensor) -> Tensor:
    """The integers of rows of 8 bits, fp32 [..., D]."""
    return rows[..., :-SCALE_BYTES].float()


def scales_of(rows: Tensor) -> Tensor:
    """The scales of rows of 8 bits, fp32 [..., 1]."""
    return rows[..., -SCALE_BYTES:].contiguous().view(torch.float16).float()


def dequantized_rows(rows: Tensor) -> Tensor:
    """What rows of 8 bits stand for, fp32 [..., D]."""
    return integers_of(rows) * scales_of(rows)


def _floats(bits: Tensor) -> Tensor:
    return bits.view(torch.float16).float()
