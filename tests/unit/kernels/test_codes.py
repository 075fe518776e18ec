"""Weights of codes in groups: how they are found, and that a product has the bits of the bf16 weight's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from disagg.kernels.cpu.linear import NativeLinear, NativeWeight
from disagg.kernels.cpu.ops import NativeOps
from disagg.kernels.groups import GROUP, CodedWeight, Groups, Offset, find_codes

OFFSETS: tuple[Offset, ...] = ("minimum", "zero", "none")


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def coded(offset: Offset, out_features: int, in_features: int) -> CodedWeight:
    random = torch.Generator().manual_seed(7)
    low, high = (-128, 128) if offset == "none" else (0, 16)
    code_OI = torch.randint(low, high, (out_features, in_features), generator=random)
    scale_OG = (numbers(1, out_features, in_features // GROUP) / 50).half()
    scale_OG[0, 0] = 0
    scale_OG[-1, -1] = 2.0**-24  # the least of fp16
    offsets = {
        "none": None,
        "minimum": numbers(2, *scale_OG.shape).half() / 7,
        "zero": torch.randint(0, 17, scale_OG.shape, generator=random).half(),
    }
    groups = Groups(scale_OG, offsets[offset], offset)
    return CodedWeight(code_OI.to(torch.int8 if offset == "none" else torch.uint8), groups)


def packed(products: NativeLinear, weight: CodedWeight) -> tuple[NativeWeight, NativeWeight]:
    """The codes, and the bf16 weight that they stand for."""
    codes, plain = products.pack_codes(weight), products.pack(weight.dequantized())
    assert codes is not None
    assert plain is not None
    return codes, plain


def test_a_weight_is_its_code_times_the_scale_and_what_is_added() -> None:
    code_OI = torch.arange(32).view(1, 32)
    scale, offset = torch.tensor([[0.5]]).half(), torch.tensor([[3.0]]).half()
    added = CodedWeight((code_OI % 16).byte(), Groups(scale, offset, "minimum")).dequantized()
    assert added[0].tolist() == [0.5 * (i % 16) + 3.0 for i in range(32)]
    less = CodedWeight((code_OI % 16).byte(), Groups(scale, offset, "zero")).dequantized()
    assert less[0].tolist() == [0.5 * (i % 16 - 3) for i in range(32)]
    signed = CodedWeight((code_OI - 16).to(torch.int8), Groups(scale, None, "none")).dequantized()
    assert signed[0].tolist() == [0.5 * (i - 16) for i in range(32)]


@pytest.mark.parametrize("offset", OFFSETS)
def test_codes_are_found_in_what_was_dequantized(offset: Offset) -> None:
    weight = coded(offset, 40, 96)
    found = find_codes(weight.dequantized(), weight.groups)
    assert found is not None
    assert torch.equal(found.dequantized(), weight.dequantized())
    assert found.code_OI.dtype == weight.code_OI.dtype


@pytest.mark.parametrize("offset", OFFSETS)
def test_a_number_that_no_code_stands_for_is_no_weight_of_codes(offset: Offset) -> None:
    weight = coded(offset, 40, 96)
    between = weight.dequantized()[17, 50].item() + weight.groups.scale_OG[17, 1].item() / 2
    for value in (1000.0, -1000.0, float("nan"), between):
        other = weight.dequantized()
        other[17, 50] = value
        assert find_codes(other, weight.groups) is None
    assert find_codes(weight.dequantized().float(), weight.groups) is None
    assert find_codes(weight.dequantized()[:, :64], weight.groups) is None


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize(("in_features", "out_features"), [(32, 1), (96, 100), (576, 70)])
def test_products_have_the_bits_of_the_bf16_weight(
    products: NativeLinear, offset: Offset, in_features: int, out_features: int
) -> None:
    codes, plain = packed(products, coded(offset, out_features, in_features))
    assert codes.packed.nbytes < 0.6 * plain.packed.nbytes
    bias = numbers(3, out_features).bfloat16()
    for rows in (0, *range(1, 14), 24, 25, 33, 64):
        x = numbers(rows + 4, rows, in_features).bfloat16()
        assert torch.equal(codes.gemm(x, bias), plain.gemm(x, bias))
        assert torch.equal(codes.gemm(x, None), plain.gemm(x, None))


@pytest.mark.parametrize("offset", OFFSETS)
def test_all_codes_are_exact_at_all_places(products: NativeLinear, offset: Offset) -> None:
    """Each row of x picks one input: the results are the weights."""
    weight = coded(offset, 64, 64)
    codes, _ = packed(products, weight)
    assert torch.equal(codes.gemm(torch.eye(64).bfloat16(), None), weight.dequantized().t())


def test_a_row_depends_neither_on_the_rows_beside_it_nor_on_threads(native: NativeOps, products: NativeLinear) -> None:
    weight, x = packed(products, coded("minimum", 100, 576))[0], numbers(2, 60, 576).bfloat16()
    native.set_num_threads(1)
    alone = torch.cat([weight.gemm(row[None], None) for row in x])
    for num_threads in (1, 2, 3):
        native.set_num_threads(num_threads)
        for rows in (2, 7, 12, 13, 25, 60):
            assert torch.equal(weight.gemm(x[:rows], None), alone[:rows])
    native.set_num_threads(1)


@pytest.mark.parametrize("offset", OFFSETS)
def test_the_parts_of_a_packed_weight_make_it_again(products: NativeLinear, offset: Offset) -> None:
    codes, _ = packed(products, coded(offset, 70, 96))
    again, x = products.restored(codes.packed, None, 70, 96), numbers(3, 5, 96).bfloat16()
    assert torch.equal(again.gemm(x, None), codes.gemm(x, None))
    for out_features, in_features in ((70, 64), (97, 96), (70, 97)):
        with pytest.raises(ValueError, match="packed codes are"):
            products.restored(codes.packed, None, out_features, in_features)
