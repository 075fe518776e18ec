"""Integer weights, and the draw of rows without filters in every implementation: the same tokens from all."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from disagg.kernels import dispatch, reference
from disagg.kernels.cpu.ops import NativeOps
from disagg.kernels.weights import weights

LARGEST = 1.0 - 2.0**-53


def uniform(rows: int, seed: int = 3) -> torch.Tensor:
    found = torch.rand(rows, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found[0], found[-1] = 0.0, LARGEST
    return found


def test_weights_are_exponentials_to_seven_digits() -> None:
    values = torch.linspace(-29.5, 0.0, 100_001)
    found = weights(values[None], torch.zeros(1, 1))[0]
    exact = torch.exp(values.double()) * 2.0**42
    assert ((found - exact).abs() <= exact * 3e-6 + 1.0).all()  # the distance is rounded to 24 bits
    near = values > -1.0
    assert ((found - exact).abs()[near] / exact[near]).max() < 8e-7  # steps of 2^-20
    assert (found.diff() >= 0).all()
    assert found[-1].item() == 1 << 42


def test_what_is_hopeless_has_no_weight() -> None:
    values = torch.tensor([[-29.9, -1000.0, -math.inf, 0.0]])
    assert weights(values, torch.zeros(1, 1)).tolist() == [[0, 0, 0, 1 << 42]]
    assert weights(torch.zeros(1, 1 << 20), torch.zeros(1, 1)).sum().item() == 1 << 62


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1, 7, 1023, 1024, 5000, 49_152])
def test_all_draw_the_same_tokens(native: NativeOps, vocab_size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    spread = torch.tensor([0.0, 0.3, 3.0, 40.0]).repeat(4)[:, None]
    logits_RV = (torch.randn((16, vocab_size + 3), generator=generator) * spread).to(dtype)
    logits_RV[3, : vocab_size - 1] = -math.inf
    args = (logits_RV, vocab_size, torch.rand(16, generator=generator) * 2 + 0.05, uniform(16))
    found = native.draw_unfiltered(*args)
    assert found is not None
    assert found.tolist() == reference.draw_unfiltered(*args).tolist()
    assert 0 <= found.min() <= found.max() < vocab_size


def test_threads_draw_the_same_tokens(native: NativeOps) -> None:
    logits_RV = torch.randn((9, 30_000), generator=torch.Generator().manual_seed(1))
    args = (logits_RV, 30_000, torch.ones(9), uniform(9))
    native.set_num_threads(3)
    try:
        found = native.draw_unfiltered(*args)
    finally:
        native.set_num_threads(1)
    assert found is not None
    assert found.tolist() == reference.draw_unfiltered(*args).tolist()


def test_a_draw_has_the_odds_of_the_softmax(ops: Any) -> None:
    logits = torch.tensor([0.0, 2.0, 1.0, -3.0])
    drawn = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    rows = logits.repeat(20_000, 1)
    found = ops.draw_unfiltered(rows, 4, torch.full((20_000,), 2.0), drawn)
    counts = torch.bincount(found, minlength=4) / 20_000
    torch.testing.assert_close(counts, torch.softmax(logits / 2.0, 0), rtol=0, atol=1e-4)
    assert (found.diff() >= 0).all()


def test_rows_that_nothing_can_be_drawn_from(ops: Any) -> None:
    rows = torch.randn(6, 90)
    rows[0, 3], rows[1, 80], rows[2], rows[3, 7] = math.nan, math.inf, -math.inf, 1e38
    rows[4, :89] = -math.inf
    temperatures = torch.tensor([1.0, 1.0, 1.0, 0.01, 1.0, 1.0])
    found = ops.draw_unfiltered(rows, 90, temperatures, torch.full((6,), 0.5, dtype=torch.float64)).tolist()
    assert found[:5] == [-1, -1, -1, -1, 89]
    assert found[5] >= 0


def test_what_the_kernel_does_not_take_is_drawn_by_the_reference(native: NativeOps) -> None:
    logits_RV = torch.randn(2, 50).half()
    args = (logits_RV, 50, torch.ones(2), uniform(2))
    assert native.draw_unfiltered(*args) is None
    assert native.draw_unfiltered(logits_RV.float(), 50, torch.ones(2).double(), uniform(2)) is None
    assert dispatch.draw_unfiltered(*args).tolist() == reference.draw_unfiltered(*args).tolist()
