"""Embedding rows, norms, activations, sums, functions of a number and arg-max against the oracle; C++ against the
reference."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from disagg.kernels import reference
from disagg.kernels.cpu.ops import NativeOps
from disagg.kernels.ops import Pointwise
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
@pytest.mark.parametrize("size", SIZES)
def test_norms_by_one_more_than_the_weight(ops: Any, size: int, dtype: torch.dtype) -> None:
    x, residual, weight = rows(3, size, dtype), rows(4, size, dtype)[1:], rows(1, size, dtype)[0]
    found = ops.rms_norm(x, weight, EPS, True)
    oracle.assert_close(found, torch.stack([oracle.rms_norm(row, weight, EPS, plus_one=True) for row in x]))
    normed, total = ops.add_rms_norm(x, residual, weight, EPS, True)
    assert torch.equal(total, (x.double() + residual.double()).to(dtype))
    oracle.assert_close(normed, torch.stack([oracle.rms_norm(row, weight, EPS, plus_one=True) for row in total]))


def test_a_norm_by_one_more_than_the_weight_rounds_once_as_gemma_does(ops: Any) -> None:
    x = torch.tensor([[1.0, 3.0]], dtype=torch.bfloat16)
    weight = torch.tensor([2.0**-8, 2.0**-8], dtype=torch.bfloat16)
    # 1 + 2^-8 is 1 in bf16. 1.0039 / sqrt(5) = 0.44896 -> 0.44921875 (0.447265625 by a weight of one); 1.34688
    assert ops.rms_norm(x, weight, 0.0, True).tolist() == [[0.44921875, 1.34375]]


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
@pytest.mark.parametrize("size", SIZES)
def test_silu_mul(ops: Any, size: int, dtype: torch.dtype) -> None:
    gate_up = rows(3, 2 * size, dtype)
    expected = [[oracle.silu(float(r[i])) * float(r[size + i]) for i in range(size)] for r in gate_up]
    oracle.assert_close(ops.silu_mul(gate_up), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_gelu_tanh_mul(ops: Any, size: int, dtype: torch.dtype) -> None:
    gate_up = 2 * rows(3, 2 * size, dtype)
    expected = [[oracle.gelu_tanh(float(r[i])) * float(r[size + i]) for i in range(size)] for r in gate_up]
    oracle.assert_close(ops.gelu_tanh_mul(gate_up), torch.tensor(expected, dtype=torch.float64))


def test_gelu_tanh_mul_of_extreme_gates(ops: Any) -> None:
    gate = [-1e30, -200.0, -6.0, 0.0, 90.0, 1e30]
    found = ops.gelu_tanh_mul(torch.tensor([[*gate, *[1.0] * 6]]))
    expected = torch.tensor([[0.0, 0.0, 0.0, 0.0, 90.0, 1e30]])
    assert torch.allclose(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_add(ops: Any, size: int, dtype: torch.dtype) -> None:
    x, y = rows(3, size, dtype), rows(4, size, dtype)[1:]
    assert torch.equal(ops.add(x, y), (x.double() + y.double()).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_functions_of_a_number(ops: Any, size: int, dtype: torch.dtype) -> None:
    x = 4 * rows(3, size, dtype)
    oracle.assert_close(ops.pointwise(x, "multiply", 1.3), x.double() * 1.3)
    oracle.assert_close(ops.pointwise(x, "divide", 6.0), x.double() / 6.0)
    oracle.assert_close(ops.pointwise(x, "soft_cap", 5.0), torch.tanh(x.double() / 5.0) * 5.0)


def test_a_soft_cap_holds_at_its_ends(ops: Any) -> None:
    x = torch.tensor([[-1e30, -1e-4, 0.0, 1e-4, 1e30, float("nan")]])
    found = ops.pointwise(x, "soft_cap", 30.0)[0]
    assert torch.allclose(found[:5], torch.tensor([-30.0, -1e-4, 0.0, 1e-4, 30.0]), rtol=1e-5, atol=1e-9)
    assert found[5].isnan()


def test_silu_mul_of_extreme_gates(ops: Any) -> None:
    gate = [-1e30, -200.0, -90.0, 0.0, 90.0, 1e30]
    found = ops.silu_mul(torch.tensor([[*gate, *[1.0] * 6]]))
    expected = torch.tensor([[0.0, 0.0, 0.0, 0.0, 90.0, 1e30]])
    assert torch.allclose(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_cpp_agrees_with_the_reference(native: NativeOps, dtype: torch.dtype) -> None:
    x, residual, weight = rows(33, 576, dtype), rows(34, 576, dtype)[1:], rows(1, 576, dtype)[0]
    found_sum = native.add_rms_norm(x, residual, weight, EPS)
    assert found_sum is not None
    pairs = [
        (native.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS)),
        (native.silu_mul(4 * x), reference.silu_mul(4 * x)),
        (native.gelu_tanh_mul(4 * x), reference.gelu_tanh_mul(4 * x)),
        (native.rms_norm(x, weight, EPS, True), reference.rms_norm(x, weight, EPS, True)),
        *(
            (native.pointwise(x, function, 7.0), reference.pointwise(x, function, 7.0))
            for function in get_args(Pointwise)
        ),
        *zip(found_sum, reference.add_rms_norm(x, residual, weight, EPS), strict=True),
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
    assert native.gelu_tanh_mul(x.t()) is None
    assert native.add(x, x.bfloat16()) is None
    assert native.pointwise(x.half(), "multiply", 2.0) is None
    assert native.head_squares(x.half(), 1, 16) is None
    assert native.embed(torch.tensor([0], dtype=torch.int32), x) is None
    assert native.embed(torch.tensor([0]), x.half()) is None
    assert native.argmax_rows(x.half(), 64) is None
    assert native.argmax_rows(x.t(), 2) is None
    assert native.argmax_rows(x, 65) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_rows(ops: Any, dtype: torch.dtype) -> None:
    x, weight = torch.empty(0, 64, dtype=dtype), torch.ones(64, dtype=dtype)
    assert ops.rms_norm(x, weight, EPS).shape == (0, 64)
    assert ops.silu_mul(x).shape == (0, 32)
    assert ops.gelu_tanh_mul(x).shape == (0, 32)
    assert ops.add(x, x).shape == ops.pointwise(x, "divide", 2.0).shape == (0, 64)
    assert [t.shape for t in ops.add_rms_norm(x, x, weight, EPS)] == [(0, 64), (0, 64)]
    assert ops.embed(torch.empty(0, dtype=torch.int64), torch.ones(2, 64, dtype=dtype)).shape == (0, 64)
    assert ops.argmax_rows(x, 64).shape == (0,)


# ---------------------------------------------------------------- the two ends of a step


@pytest.mark.parametrize("dtype", DTYPES)
def test_embed(ops: Any, dtype: torch.dtype) -> None:
    table = rows(7, 40, dtype)[:, 3:36]
    assert torch.equal(ops.embed(torch.tensor([6, 0, 6, 3]), table), table[[6, 0, 6, 3]])


@pytest.mark.parametrize("token_id", [-1, 7])
def test_cpp_embed_refuses_ids_outside_the_vocabulary(native: NativeOps, token_id: int) -> None:
    with pytest.raises(IndexError, match=r"^token 1: its id is not in the vocabulary$"):
        native.embed(torch.tensor([6, token_id]), torch.ones(7, 32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1, 15, 64, 65, 200, 333])
def test_argmax_rows(ops: Any, vocab_size: int, dtype: torch.dtype) -> None:
    logits = rows(9, vocab_size + 5, dtype)
    logits[:, vocab_size:] = 100.0  # padding of the vocabulary
    expected = [max(range(vocab_size), key=lambda i: (float(row[i]), -i)) for row in logits]
    found = ops.argmax_rows(logits, vocab_size)
    assert found.dtype == torch.int64
    assert found.tolist() == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_argmax_rows_takes_the_first_of_equals(ops: Any, dtype: torch.dtype) -> None:
    logits = torch.full((150, 150), -1.0, dtype=dtype)
    for row in range(150):
        logits[row, row:] = 2.0
    logits[7, 7], logits[7, 8:] = -0.0, 0.0
    assert ops.argmax_rows(logits, 150).tolist() == list(range(150))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", [0, 63, 64, 129])
def test_argmax_rows_of_what_nothing_can_be_chosen_from(ops: Any, place: int, dtype: torch.dtype) -> None:
    logits = rows(6, 130, dtype)
    logits[1, place] = float("nan")
    logits[2, place] = float("inf")
    logits[3] = float("-inf")
    logits[4] = float("-inf")
    logits[4, place] = -3.0
    found = ops.argmax_rows(logits, 130).tolist()
    assert (found[1], found[2], found[3], found[4]) == (-1, -1, -1, place)
    assert min(found[0], found[5]) >= 0
