"""Products by sums of codes: the bits of the reference, for any number of rows."""

from __future__ import annotations

import pytest
import torch

from disagg.kernels.code_sums import linear_by_sums
from disagg.kernels.cpu.linear import NativeLinear, NativeWeight
from disagg.kernels.cpu.ops import NativeOps
from disagg.kernels.groups import CodedWeight, Groups, Offset
from tests.unit.kernels.test_codes import OFFSETS, coded, numbers

PAIRS = ("avx512-bf16", "amx")
ROWS = (1, 2, 3, 4, 5, 6, 7, 12, 13, 25, 33)


def packed(products: NativeLinear, weight: CodedWeight) -> NativeWeight:
    codes = products.pack_codes(weight, by_sums=True)
    assert codes is not None
    assert codes.are_codes
    return codes


def arithmetic(products: NativeLinear) -> str:
    return products.arithmetic(torch.bfloat16)


def test_a_product_is_scaled_by_group() -> None:
    code_OI = torch.tensor([[1, 2] + [0] * 30 + [3] + [0] * 31]).byte()
    scale, minimum = torch.tensor([[0.5, 2.0]]).half(), torch.tensor([[1.0, -1.0]]).half()
    weight = CodedWeight(code_OI, Groups(scale, minimum, "minimum"))
    x = torch.zeros(1, 64).bfloat16()
    x[0, 0], x[0, 1], x[0, 31], x[0, 32] = 3.0, 4.0, 5.0, 7.0
    expected = 0.5 * (3 + 8) + 1.0 * (3 + 4 + 5) + 2.0 * (3 * 7) - 1.0 * 7
    assert linear_by_sums(x, weight, is_fused=True).tolist() == [[expected]]


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize(("in_features", "out_features"), [(32, 1), (96, 70), (224, 100)])
def test_products_have_the_bits_of_the_reference(
    products: NativeLinear, offset: Offset, in_features: int, out_features: int
) -> None:
    weight = coded(offset, out_features, in_features)
    codes, x = packed(products, weight), numbers(5, 33, in_features).bfloat16()
    bias = numbers(3, out_features).bfloat16()
    exact = linear_by_sums(x, weight, is_fused=arithmetic(products) != "multiply-add")
    for rows in (0, *ROWS):
        found = codes.gemm(x[:rows], None)
        if arithmetic(products) in PAIRS:
            torch.testing.assert_close(found, exact[:rows].bfloat16(), rtol=1e-2, atol=1e-2)
        else:
            assert torch.equal(found, exact[:rows].bfloat16())
            assert torch.equal(codes.gemm(x[:rows], bias), (exact[:rows] + bias.float()).bfloat16())


@pytest.mark.parametrize("offset", OFFSETS)
def test_all_codes_are_right_at_all_places(products: NativeLinear, offset: Offset) -> None:
    """Each row of x picks one input: the results are the weights."""
    weight = coded(offset, 64, 64)
    found, expected = packed(products, weight).gemm(torch.eye(64).bfloat16(), None), weight.dequantized().t()
    if arithmetic(products) in (*PAIRS, "multiply-add"):
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-4)
    else:
        assert torch.equal(found, expected)


@pytest.mark.parametrize("offset", OFFSETS)
def test_a_row_depends_neither_on_the_rows_beside_it_nor_on_threads(
    native: NativeOps, products: NativeLinear, offset: Offset
) -> None:
    weight, x = packed(products, coded(offset, 100, 576)), numbers(2, 60, 576).bfloat16()
    native.set_num_threads(1)
    alone = torch.cat([weight.gemm(row[None], None) for row in x])
    for num_threads in (1, 2, 3):
        native.set_num_threads(num_threads)
        for rows in (2, 7, 12, 13, 25, 60):
            assert torch.equal(weight.gemm(x[:rows], None), alone[:rows])
            assert torch.equal(weight.gemm(x[60 - rows :], None), alone[60 - rows :])
    native.set_num_threads(1)


@pytest.mark.parametrize("offset", OFFSETS)
def test_the_parts_of_a_packed_weight_make_it_again(products: NativeLinear, offset: Offset) -> None:
    codes = packed(products, coded(offset, 70, 96))
    again, x = products.restored(codes.packed, None, 70, 96), numbers(3, 5, 96).bfloat16()
    assert again.kind == codes.kind
    assert torch.equal(again.gemm(x, None), codes.gemm(x, None))
    with pytest.raises(ValueError, match="packed codes are"):
        products.restored(codes.packed, None, 97, 96)


def test_numbers_that_are_not_finite_go_through(products: NativeLinear) -> None:
    codes, x = packed(products, coded("minimum", 40, 96)), numbers(3, 8, 96).bfloat16()
    clean = codes.gemm(x, None)
    x[2, 5], x[4, 40] = float("nan"), float("inf")
    found = codes.gemm(x, None)
    assert not found[2].isfinite().any()
    assert not found[4].isfinite().any()
    assert torch.equal(found[[0, 1, 3, 5, 6, 7]], clean[[0, 1, 3, 5, 6, 7]])
