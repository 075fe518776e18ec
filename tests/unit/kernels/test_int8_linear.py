"""Weights of 8 bits: how they are rounded, and the C++ product against float64."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

from disagg.kernels import dispatch
from disagg.kernels.cpu.linear import NativeLinear, NativeWeight
from disagg.kernels.cpu.ops import NativeOps
from disagg.kernels.quantize import Int8Weight, quantize_int8
from tests.unit.kernels import oracle

EPS = 1e-5


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def packed(products: NativeLinear, weight: Int8Weight) -> NativeWeight:
    found = products.pack_int8(weight)
    assert found is not None
    return found


def test_rounding_is_to_nearest_with_one_scale_a_row() -> None:
    weight = torch.tensor(
        [[254.0, -3.0, 1.0, 5.0], [0.0, 0.0, 0.0, 0.0], [-0.5, 0.25, 0.5, 0.0], [1e-44, 0.0, 0.0, 0.0]]
    )
    found = quantize_int8(weight)
    assert found.quantized_OI.tolist() == [[127, -2, 0, 2], [0, 0, 0, 0], [-127, 64, 127, 0], [0, 0, 0, 0]]
    assert found.scale_O.tolist() == [2.0, 1.0, pytest.approx(0.5 / 127), 1.0]
    assert found.dequantized(torch.float32)[0].tolist() == [254.0, -4.0, 0.0, 4.0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_not_finite_is_refused(value: float) -> None:
    weight = torch.ones(5, 3)
    weight[3, 1] = value
    with pytest.raises(ValueError, match="row 3 of a weight is not finite"):
        quantize_int8(weight)


@pytest.mark.parametrize("input_index", [0, 1, 2])
def test_every_value_is_exact_at_every_place(products: NativeLinear, input_index: int) -> None:
    """One row of x picks one input: the result is the 8-bit number itself, of 40 columns and 255 values."""
    x = torch.zeros(1, 3, dtype=torch.bfloat16)
    x[0, input_index] = 1.0
    for first in range(-127, 128, 40):
        quantized = torch.full((40, 3), 99, dtype=torch.int8)
        quantized[:, input_index] = torch.arange(first, first + 40).clamp(max=127).to(torch.int8)
        weight = packed(products, Int8Weight(quantized, torch.ones(40)))
        assert torch.equal(weight.gemm(x, None)[0], quantized[:, input_index].bfloat16())


@pytest.mark.parametrize(("in_features", "out_features"), [(1, 1), (33, 100), (64, 32), (65, 31), (577, 70)])
def test_any_number_of_rows(products: NativeLinear, in_features: int, out_features: int) -> None:
    weight = quantize_int8(numbers(1, out_features, in_features).double() / in_features**0.5)
    bias, native = numbers(2, out_features), packed(products, weight)
    exact = weight.quantized_OI.double() * weight.scale_O.double()[:, None]
    for rows in (0, *range(1, 14), 24, 25, 33, 64):
        x = numbers(rows + 3, rows, in_features)
        for found, expected in ((native.gemm(x, bias), x.double() @ exact.t() + bias.double()),
                                (native.gemm(x, None), x.double() @ exact.t())):  # fmt: skip
            assert (found.dtype, found.shape) == (torch.bfloat16, (rows, out_features))
            if rows:
                oracle.assert_close(found, expected)


def test_a_row_depends_neither_on_the_rows_beside_it_nor_on_threads(native: NativeOps, products: NativeLinear) -> None:
    weight, x = packed(products, quantize_int8(numbers(1, 100, 577))), numbers(2, 60, 577)
    native.set_num_threads(1)
    alone = torch.cat([weight.gemm(row[None], None) for row in x])
    for num_threads in (1, 2, 3):
        native.set_num_threads(num_threads)
        for rows in (2, 7, 12, 13, 25, 60):
            assert torch.equal(weight.gemm(x[:rows], None), alone[:rows])
    native.set_num_threads(1)


@pytest.mark.parametrize("rows", [1, 13])
def test_what_follows_is_the_separate_ops_to_the_bit(native: NativeOps, products: NativeLinear, rows: int) -> None:
    weight, bias, x = packed(products, quantize_int8(numbers(1, 70, 40))), numbers(2, 70), numbers(3, rows, 40)
    residual, norm = numbers(4, rows, 70), numbers(5, 70)
    product = weight.gemm(x, bias)
    activated, added = native.silu_mul(product), native.add_rms_norm(product, residual, norm, EPS)
    assert activated is not None
    assert added is not None
    assert torch.equal(weight.gemm_silu_mul(x, bias), activated)
    normed, total = weight.gemm_add_rms_norm(x, bias, residual, norm, EPS)
    assert torch.equal(normed, added[0])
    assert torch.equal(total, added[1])


# ---------------------------------------------------------------- where it is chosen


@pytest.mark.usefixtures("fresh_choice")
def test_dispatch_packs_8_bits_for_it(products: NativeLinear) -> None:
    weight = dispatch.pack_weight(numbers(1, 64, 32), "int8")
    assert isinstance(weight, NativeWeight)
    assert weight.packed.dtype == torch.uint8


@pytest.mark.usefixtures("fresh_choice")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_elsewhere_the_rounded_weight_is_used_loudly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, dtype: torch.dtype
) -> None:
    monkeypatch.setenv("DISAGG_KERNELS", "reference")
    dispatch._warn_not_int8.cache_clear()
    weight, x = numbers(1, 64, 32).to(dtype), numbers(2, 5, 32).to(dtype)
    with caplog.at_level(logging.WARNING, logger="disagg.kernels.dispatch"):
        found = dispatch.linear(x, dispatch.pack_weight(weight, "int8"), None)
    oracle.assert_close(found, x.double() @ quantize_int8(weight).dequantized(dtype).double().t())
    assert [record.getMessage() for record in caplog.records if "int8" in record.getMessage()] == [
        "int8 weights: there is no C++ GEMM for them here; computing with their values in full size"
    ]
