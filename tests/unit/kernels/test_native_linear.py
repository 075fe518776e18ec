"""The C++ product of linear layers in bf16 and fp32: against float64, with what follows it, and where it is chosen."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from disagg.kernels import dispatch, reference
from disagg.kernels.cpu import build
from disagg.kernels.cpu.linear import NativeLinear, NativeWeight
from disagg.kernels.cpu.ops import NativeOps
from tests.unit.kernels import oracle

EPS = 1e-5
SHAPES = [(1, 1), (33, 100), (64, 32), (65, 31), (576, 192), (1536, 70)]


DTYPES = [torch.bfloat16, torch.float32]


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def packed(products: NativeLinear, weight: Tensor) -> NativeWeight:
    found = products.pack(weight)
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_any_number_of_rows(
    products: NativeLinear, in_features: int, out_features: int, with_bias: bool, dtype: torch.dtype
) -> None:
    weight = (numbers(1, out_features, in_features).double() / in_features**0.5).to(dtype)
    bias = numbers(2, out_features, dtype=dtype) if with_bias else None
    native = packed(products, weight)
    for rows in (*range(26), 40, 100):
        x = numbers(rows + 3, rows, in_features, dtype=dtype)
        expected = x.double() @ weight.double().t() + (0.0 if bias is None else bias.double())
        found = native.gemm(x, bias)
        assert found.dtype == dtype
        assert found.shape == (rows, out_features)
        if rows:
            oracle.assert_close(found, expected)


def test_sums_are_exact_in_small_integers(products: NativeLinear) -> None:
    weight = torch.arange(-70, 70, dtype=torch.bfloat16).view(20, 7)
    x = torch.arange(-21, 21, dtype=torch.bfloat16).view(6, 7) / 4
    expected = (x.double() @ weight.double().t()).bfloat16()
    assert torch.equal(packed(products, weight).gemm(x, None), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_rows_beside_it(products: NativeLinear, dtype: torch.dtype) -> None:
    native, x = packed(products, numbers(1, 100, 577, dtype=dtype)), numbers(2, 60, 577, dtype=dtype)
    alone = torch.cat([native.gemm(row[None], None) for row in x])
    for rows in (2, 7, 12, 13, 25, 32, 60):
        assert torch.equal(native.gemm(x[:rows], None), alone[:rows])


def test_rows_inside_wider_rows(products: NativeLinear) -> None:
    native, x = packed(products, numbers(1, 40, 64)), numbers(2, 5, 200)
    assert torch.equal(native.gemm(x[:, 31:95], None), native.gemm(x[:, 31:95].contiguous(), None))


@pytest.mark.parametrize("in_features", [2048, 2047, 4096])
def test_rows_that_would_crowd_the_cache_give_the_same_bits(products: NativeLinear, in_features: int) -> None:
    native = packed(products, numbers(1, 70, in_features))
    for rows in (7, 8, 9, 13, 25, 8, 500):
        crowded = numbers(rows, rows, 2048 if in_features < 2048 else in_features)[:, :in_features]
        apart = numbers(0, rows, in_features + 100)[:, :in_features]
        apart.copy_(crowded)
        assert torch.equal(native.gemm(crowded, None), native.gemm(apart, None))


def test_rows_that_overlap(products: NativeLinear) -> None:
    native, x = packed(products, numbers(1, 40, 4096)), numbers(2, 1, 4096 + 8 * 2048)
    same, shifted = x[:, :4096].expand(9, 4096), x.as_strided((9, 4096), (2048, 1))
    assert torch.equal(native.gemm(same, None), native.gemm(same[:1], None).expand(9, 40))
    assert torch.equal(native.gemm(shifted, None), native.gemm(shifted.contiguous(), None))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_in_its_row_and_goes_through(
    products: NativeLinear, value: float, dtype: torch.dtype
) -> None:
    weight, x = numbers(1, 33, 17, dtype=dtype), numbers(2, 3, 17, dtype=dtype)
    x[1, 16] = value
    found, expected = packed(products, weight).gemm(x, None), torch.nn.functional.linear(x, weight)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found[1].isinf(), expected[1].isinf())
    assert found[[0, 2]].isfinite().all()
    if value == value:
        assert torch.equal(found[1].sign(), expected[1].sign())


def test_a_weight_that_is_not_finite_spoils_its_column_only(products: NativeLinear) -> None:
    weight = numbers(1, 33, 17)
    weight[32, 3] = float("nan")
    found = packed(products, weight).gemm(numbers(2, 2, 17), None)
    assert found.isnan().any(0).tolist() == [False] * 32 + [True]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 13])
def test_with_silu_mul_it_is_the_two_ops_to_the_bit(
    products: NativeLinear, native: NativeOps, rows: int, dtype: torch.dtype
) -> None:
    weight = packed(products, numbers(1, 70, 40, dtype=dtype))
    bias, x = numbers(2, 70, dtype=dtype), numbers(3, rows, 40, dtype=dtype)
    expected = native.silu_mul(weight.gemm(x, bias))
    assert expected is not None
    assert torch.equal(weight.gemm_silu_mul(x, bias), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 13])
def test_with_residual_and_norm_it_is_the_two_ops_to_the_bit(
    products: NativeLinear, native: NativeOps, rows: int, dtype: torch.dtype
) -> None:
    weight = packed(products, numbers(1, 70, 40, dtype=dtype))
    bias, x = numbers(2, 70, dtype=dtype), numbers(3, rows, 40, dtype=dtype)
    residual, norm = numbers(4, rows, 90, dtype=dtype)[:, 7:77], numbers(5, 70, dtype=dtype)
    before = residual.clone()
    expected = native.add_rms_norm(weight.gemm(x, bias), residual, norm, EPS)
    assert expected is not None
    normed, total = weight.gemm_add_rms_norm(x, bias, residual, norm, EPS)
    assert torch.equal(normed, expected[0])
    assert torch.equal(total, expected[1])
    assert torch.equal(residual, before)


def test_it_does_not_follow_the_plain_weight(products: NativeLinear) -> None:
    weight = torch.ones(32, 8, dtype=torch.bfloat16)
    native = packed(products, weight)
    weight.zero_()
    assert torch.equal(native.gemm(torch.ones(1, 8).bfloat16(), None), torch.full((1, 32), 8.0).bfloat16())


def test_what_does_not_fit_is_refused(products: NativeLinear) -> None:
    native, x = packed(products, numbers(1, 33, 16)), numbers(2, 2, 16)
    for wrong in (x.float(), x[:, :8], x[0], numbers(3, 16, 2).t(), numbers(3, 2, 32)[:, ::2]):
        with pytest.raises(ValueError, match="the weight takes bf16 rows of 16"):
            native.gemm(wrong, None)
    for wrong in (torch.ones(33), numbers(3, 32), numbers(3, 66)[::2]):
        with pytest.raises(ValueError, match=r"bias is .*, not 33 bf16 numbers"):
            native.gemm(x, wrong)
        with pytest.raises(ValueError, match=r"norm is .*, not 33 bf16 numbers"):
            native.gemm_add_rms_norm(x, None, numbers(4, 2, 33), wrong, EPS)
    for wrong in (torch.ones(2, 33), numbers(3, 1, 33), numbers(3, 33, 2).t()):
        with pytest.raises(ValueError, match=r"residual is .*, not bf16 rows \[2, 33\]"):
            native.gemm_add_rms_norm(x, None, wrong, numbers(4, 33), EPS)
    with pytest.raises(ValueError, match="33 columns are not gate and up"):
        native.gemm_silu_mul(x, None)
    with pytest.raises(ValueError, match=r"x is torch.bfloat16 \[2, 16\]; the weight takes fp32 rows of 16"):
        packed(products, numbers(1, 33, 16, dtype=torch.float32)).gemm(x, None)
    assert products.pack(numbers(1, 33, 16).half()) is None


# ---------------------------------------------------------------- where it is chosen


@pytest.mark.usefixtures("fresh_choice")
def test_bf16_and_fp32_are_packed_for_it(
    products: NativeLinear, level: build.Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    if level is build.NATIVE:
        monkeypatch.delenv(build.LEVEL, raising=False)
    else:
        monkeypatch.setenv(build.LEVEL, level.name)
    weight = numbers(1, 64, 32)
    for one in (weight, weight.float()):
        found = dispatch.pack_weight(one)
        assert isinstance(found, NativeWeight)
        assert found.functions.packing == products.packing
    for other in (weight.half(), weight[0]):
        assert not isinstance(dispatch.pack_weight(other), NativeWeight)
    monkeypatch.setenv("DISAGG_KERNELS", "reference")
    dispatch._choice.cache_clear()
    assert not isinstance(dispatch.pack_weight(weight), NativeWeight)


@pytest.mark.usefixtures("fresh_choice")
@pytest.mark.parametrize("mode", ["auto", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_ops_agree_with_the_reference(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, mode: str) -> None:
    monkeypatch.setenv("DISAGG_KERNELS", mode)
    x, weight, bias = numbers(1, 5, 48).to(dtype), (numbers(2, 64, 48) / 8).to(dtype), numbers(3, 64).to(dtype)
    residual, norm = numbers(4, 5, 64).to(dtype), numbers(5, 64).to(dtype)
    plain = reference.linear(x, weight, bias)
    for form in (weight, dispatch.pack_weight(weight)):
        activated = dispatch.linear_silu_mul(x, form, bias)
        normed, total = dispatch.linear_add_rms_norm(x, form, bias, residual, norm, EPS)
        expected = (reference.silu_mul(plain), *reference.add_rms_norm(plain, residual, norm, EPS))
        tolerance = 2.0**-6 if dtype == torch.bfloat16 else 1e-5  # the product's rounding, carried on
        for found, wanted in zip((activated, normed, total), expected, strict=True):
            assert torch.allclose(found, wanted, rtol=tolerance, atol=tolerance)
