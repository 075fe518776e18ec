"""Norms, rotary embedding and silu(gate) * up against the oracle; C++ against the reference, bit for bit in bf16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from disagg.kernels import reference
from disagg.kernels.cpu.ops import NativeOps
from tests.unit.kernels import oracle

DTYPES = [torch.float32, torch.bfloat16]
SIZES = [1, 15, 16, 17, 64, 576]
EPS = 1e-5


def rows(count: int, size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(1000 * count + size)).to(dtype)


def assert_within_one_ulp(found: Tensor, expected: Tensor) -> None:
    """bf16: at most neighbours; fp32: 1e-5."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    tolerance = 2.0**-7 if found.dtype == torch.bfloat16 else 1e-5
    assert torch.allclose(found.float(), expected.float(), rtol=tolerance, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_rms_norm(ops: Any, size: int, dtype: torch.dtype) -> None:
    x, weight = rows(3, size, dtype), rows(1, size, dtype)[0]
    found = ops.rms_norm(x, weight, EPS)
    oracle.assert_close(found, torch.stack([oracle.rms_norm(row, weight, EPS) for row in x]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_heads_inside_wider_rows(ops: Any, dtype: torch.dtype) -> None:
    x = rows(6, 80, dtype).view(2, 3, 80)[:, 1:, 16:]
    weight = rows(1, 64, dtype)[0]
    found = ops.rms_norm(x, weight, EPS)
    oracle.assert_close(found, torch.stack([torch.stack([oracle.rms_norm(h, weight, EPS) for h in t]) for t in x]))


def test_rms_norm_of_zeros_is_zero(ops: Any) -> None:
    assert torch.equal(ops.rms_norm(torch.zeros(2, 32), torch.ones(32), EPS), torch.zeros(2, 32))


def test_rms_norm_rounds_before_the_weight_as_llama_does(ops: Any) -> None:
    x = torch.tensor([[1.0, 3.0]], dtype=torch.bfloat16)
    weight = torch.tensor([3.0, 3.0], dtype=torch.bfloat16)
    # 1 / sqrt(5) = 0.4472 -> 0.447265625 in bf16, times 3 = 1.341796875 -> 1.34375; 3 / sqrt(5) -> 1.34375, 4.03125
    assert ops.rms_norm(x, weight, 0.0).tolist() == [[1.34375, 4.03125]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_add_rms_norm(ops: Any, size: int, dtype: torch.dtype) -> None:
    x, residual, weight = rows(3, size, dtype), rows(4, size, dtype)[1:], rows(1, size, dtype)[0]
    before = x.clone(), residual.clone()
    normed, total = ops.add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, (x.double() + residual.double()).to(dtype))
    oracle.assert_close(normed, torch.stack([oracle.rms_norm(row, weight, EPS) for row in total]))
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [2, 16, 64, 80, 128])
def test_rope(ops: Any, dim: int, dtype: torch.dtype) -> None:
    T, N, K = 3, 4, 2
    q, k, _ = torch.split(rows(T, (N + 2 * K) * dim, dtype).view(T, -1, dim), [N, K, K], dim=1)
    angles = torch.arange(T)[:, None] * torch.linspace(0.1, 1.0, dim // 2)[None]
    cos, sin = (torch.cat((f(angles), f(angles)), -1).to(dtype) for f in (torch.cos, torch.sin))
    for found, x in zip(ops.apply_rope(q, k, cos, sin), (q, k), strict=True):
        expected = [torch.stack([oracle.rope(h, cos[t], sin[t]) for h in heads]) for t, heads in enumerate(x)]
        oracle.assert_close(found, torch.stack(expected))
        assert torch.equal(found[0], x[0])  # position 0 turns by nothing


def test_rope_of_a_quarter_turn_swaps_the_halves(ops: Any) -> None:
    q = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    found, _ = ops.apply_rope(q, q, torch.zeros(1, 4), torch.ones(1, 4))
    assert found.tolist() == [[[-3.0, -4.0, 1.0, 2.0]]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_silu_mul(ops: Any, size: int, dtype: torch.dtype) -> None:
    gate_up = rows(3, 2 * size, dtype)
    expected = [[oracle.silu(float(r[i])) * float(r[size + i]) for i in range(size)] for r in gate_up]
    oracle.assert_close(ops.silu_mul(gate_up), torch.tensor(expected, dtype=torch.float64))


def test_silu_mul_of_extreme_gates(ops: Any) -> None:
    gate = [-1e30, -200.0, -90.0, 0.0, 90.0, 1e30]
    found = ops.silu_mul(torch.tensor([[*gate, *[1.0] * 6]]))
    expected = torch.tensor([[0.0, 0.0, 0.0, 0.0, 90.0, 1e30]])
    assert torch.allclose(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_cpp_agrees_with_the_reference(native: NativeOps, dtype: torch.dtype) -> None:
    x, residual, weight = rows(33, 576, dtype), rows(34, 576, dtype)[1:], rows(1, 576, dtype)[0]
    q, k, cos, sin = x.view(33, 9, 64), x.view(33, 9, 64)[:, :3], residual[:, :64], residual[:, 64:128]
    found_sum, found_rope = native.add_rms_norm(x, residual, weight, EPS), native.apply_rope(q, k, cos, sin)
    assert found_sum is not None
    assert found_rope is not None
    pairs = [
        (native.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS)),
        (native.silu_mul(4 * x), reference.silu_mul(4 * x)),
        *zip(found_sum, reference.add_rms_norm(x, residual, weight, EPS), strict=True),
        *zip(found_rope, reference.apply_rope(q, k, cos, sin), strict=True),
    ]
    for found, expected in pairs:
        assert found is not None
        assert_within_one_ulp(found, expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_goes_through(ops: Any, value: float, dtype: torch.dtype) -> None:
    x = rows(2, 64, dtype)
    x[1, 5] = value
    assert ops.rms_norm(x, torch.ones(64, dtype=dtype), EPS).isfinite().all(-1).tolist() == [True, False]
    assert ops.silu_mul(x).isfinite().all(-1).tolist() == [True, False]


def test_cpp_declines_what_it_does_not_read(native: NativeOps) -> None:
    x, weight = torch.randn(2, 64), torch.ones(64)
    assert native.rms_norm(x.half(), weight.half(), EPS) is None
    assert native.rms_norm(x.t(), torch.ones(2), EPS) is None
    assert native.rms_norm(x, torch.ones(32), EPS) is None
    assert native.add_rms_norm(x, x.bfloat16(), weight, EPS) is None
    assert native.silu_mul(x.half()) is None
    assert native.apply_rope(x[None], x[None], x[:1].bfloat16(), x[:1]) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_rows(ops: Any, dtype: torch.dtype) -> None:
    x, weight = torch.empty(0, 64, dtype=dtype), torch.ones(64, dtype=dtype)
    assert ops.rms_norm(x, weight, EPS).shape == (0, 64)
    assert ops.silu_mul(x).shape == (0, 32)
    assert [t.shape for t in ops.add_rms_norm(x, x, weight, EPS)] == [(0, 64), (0, 64)]
