"""Weights of tokens as integers: the same numbers on every device, in any order of summation.

The weight of a token is about 2^42 * exp(value - largest value), where a value is a logit over the temperature. With
d the fp32 product of (largest - value) and 2^20 * log2(e), cut off to an integer and to at most 43 * 2^20:

    weight = (power(d mod 2^20) << 12) >> (d div 2^20)          power(f) = 2^30 * 2^(-f / 2^20)

`power` is a polynomial in integers, each product cut off to 2^30ths: within 1e-7 of the true power, and never rising.
One subtraction and one product are all that is rounded, and IEEE 754 says how. The weight of the largest is 2^42, and
of a token that is less than 2^-43 as likely 0. So sums of up to 2^20 weights fit into int64.

The draw of a row without filters is the first token, by id, whose running sum passes `goal`: the uniform number times
the sum as fp64, cut off. `disagg_draw` (`cpu/elementwise.cpp`) and `triton/sampling.py` do the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

COEFFICIENTS = (1073741824, 744257238, 257890130, 59371512, 9880746, 1013080)
"""Coefficients of a polynomial for 2^-x on [0, 1), times 2^30, with alternating signs: a least-squares fit of the
relative error."""
STEPS = 1512775.375
"""Steps for a difference of one: 2^20 * log2(e) in fp32."""
MOST_STEPS = float(43 << 20)
MAX_TOKENS = 1 << 20


def weights(values_RV: Tensor, tops_R1: Tensor) -> Tensor:
    """Integer weights, int64 [R, V], of finite fp32 values or -inf; `tops` are the largest of each row, finite."""
    steps_RV = ((tops_R1 - values_RV) * STEPS).clamp_(max=MOST_STEPS).long()
    fractions_RV = steps_RV & 0xFFFFF
    power_RV = torch.full_like(steps_RV, COEFFICIENTS[-1])
    for coefficient in reversed(COEFFICIENTS[:-1]):
        power_RV = coefficient - (power_RV * fractions_RV >> 20)
    return power_RV << 12 >> (steps_RV >> 20)


def draw_unfiltered(logits_RV: Tensor, vocab_size: int, temperatures_R: Tensor, uniform_R: Tensor) -> Tensor:
    """Draw a token for each row from the first `vocab_size` columns, int64 [R]; -1 where a row over its temperature
    (fp32) holds NaN, +inf, or nothing finite. Uniform numbers are fp64, in [0, 1)."""
    values_RV = logits_RV[:, :vocab_size].float() / temperatures_R[:, None]
    tops_R1 = values_RV.amax(dim=-1, keepdim=True)
    is_good_R1 = tops_R1.isfinite()
    values_RV = torch.where(is_good_R1, values_RV, 0.0)
    sums_RV = weights(values_RV, torch.where(is_good_R1, tops_R1, 0.0)).cumsum(dim=-1)
    totals_R = sums_RV[:, -1]
    goals_R = torch.minimum((uniform_R * totals_R.double()).long(), totals_R - 1)
    tokens_R = torch.searchsorted(sums_RV, goals_R[:, None], right=True)[:, 0]
    return torch.where(is_good_R1[:, 0], tokens_R, -1)
