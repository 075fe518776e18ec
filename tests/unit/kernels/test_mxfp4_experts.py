"""Experts in MXFP4: what codes stand for, how they are packed, and that a layer has the bits of its bf16 weights."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from disagg.kernels import dispatch, reference
from disagg.kernels.cpu.linear import NativeExpertWeight, NativeLinear
from disagg.kernels.cpu.ops import NativeOps
from disagg.kernels.experts import Experts, ExpertWeight, Router
from disagg.kernels.groups import GROUP
from disagg.kernels.mxfp4 import Mxfp4Weight
from disagg.kernels.routing import GatedActivation, Routing
from tests.support.experts import ROUTINGS, Layer, layer

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
USUAL = (112, 125)
"""Exponents of weights as models have them."""
ALL = (0, 255)


def weight_of(seed: int, experts: int, outputs: int, inputs: int, exponents: tuple[int, int] = USUAL) -> Mxfp4Weight:
    """Random codes, and exponents from the first to before the last."""
    random = torch.Generator().manual_seed(seed)
    code = torch.randint(0, 256, (experts, outputs, inputs // 2), generator=random).byte()
    return Mxfp4Weight(code, torch.randint(*exponents, (experts, outputs, inputs // GROUP), generator=random).byte())


def values_of(weight: Mxfp4Weight) -> Tensor:
    """Number by number, in float64."""
    L, O, I = weight.shape  # noqa: E741 - the shape letters of the name
    values = torch.empty(L, O, I, dtype=torch.float64)
    for at in range(values.numel()):
        code = int(weight.code_LOB.flatten()[at // 2]) >> 4 * (at % 2) & 15
        exponent = int(weight.exponent_LOG.flatten()[at // GROUP])
        values.view(-1)[at] = MAGNITUDES[code & 7] * 2.0 ** (exponent - 127) * (-1.0 if code & 8 else 1.0)
    return values


def layers_of(
    products: NativeLinear,
    hidden: int,
    inner: int,
    rows: int,
    exponents: tuple[int, int] = USUAL,
    kind: str = "clamped_swiglu",
) -> tuple[Layer, Layer, Layer]:
    """gpt-oss's layer with biases: of codes, of the packed bf16 numbers of these, and of the plain ones."""
    activation = GatedActivation(kind=kind, limit=0.75)  # type: ignore[arg-type]
    made = layer(
        ROUTINGS["gpt-oss"],
        rows=rows,
        hidden=hidden,
        inner=inner,
        dtype=torch.bfloat16,
        activation=activation,
        biases=True,
    )
    gate_up, down = weight_of(1, 8, 2 * inner, hidden, exponents), weight_of(2, 8, hidden, inner, exponents)
    router = products.pack(made.router.weight_EH)  # type: ignore[arg-type]
    assert router is not None

    def with_weights(gate_up: ExpertWeight | None, down: ExpertWeight | None) -> Layer:
        assert gate_up is not None
        assert down is not None
        is_plain = isinstance(gate_up, Tensor)
        experts = dataclasses.replace(made.experts, gate_up_L2IH=gate_up, down_LHI=down)
        weight_EH = made.router.weight_EH if is_plain else router
        return dataclasses.replace(made, experts=experts, router=dataclasses.replace(made.router, weight_EH=weight_EH))

    plain = gate_up.dequantized(), down.dequantized()
    return (
        with_weights(products.pack_mxfp4(gate_up), products.pack_mxfp4(down)),
        with_weights(*(products.pack_experts(each) for each in plain)),
        with_weights(*plain),
    )


def computed(native: NativeOps, case: Layer) -> Tensor:
    found = native.moe_ffn(case.x_TH, case.router, case.experts, case.shared)
    assert found is not None
    return found


def bits(numbers: Tensor) -> Tensor:
    return numbers.view(torch.int16)


def test_a_weight_is_its_float_times_the_power_of_two_of_its_group() -> None:
    weight = weight_of(3, 2, 3, 64, (2, 253))
    assert weight.shape == (2, 3, 64)
    assert torch.equal(weight.dequantized().double(), values_of(weight))


def test_the_ends_of_bf16_are_exact_or_infinite() -> None:
    code = torch.arange(16).repeat(2)[0::2] | torch.arange(16).repeat(2)[1::2] << 4
    for exponent in (0, 1, 2, 252, 253, 254):
        weight = Mxfp4Weight(code.byte().view(1, 1, 16), torch.tensor([[[exponent]]], dtype=torch.uint8))
        wanted = values_of(weight)
        wanted[wanted.abs() >= 2.0**128] *= torch.inf
        assert torch.equal(weight.dequantized().double(), wanted)
        assert torch.equal(weight.dequantized().signbit(), wanted.signbit())


@pytest.mark.parametrize("rows", [1, 2, 3, 6, 7, 13, 64])
@pytest.mark.parametrize(("hidden", "inner"), [(32, 32), (96, 160), (288, 64)])
def test_a_layer_has_the_bits_of_its_bf16_weights(
    native: NativeOps, products: NativeLinear, hidden: int, inner: int, rows: int
) -> None:
    """An expert has from none to all of the rows; panels have one to nine groups."""
    codes, packed, _ = layers_of(products, hidden, inner, rows)
    assert torch.equal(bits(computed(native, codes)), bits(computed(native, packed)))
    assert computed(native, codes).isfinite().all()


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_other_activations_have_them_too(native: NativeOps, products: NativeLinear, kind: str) -> None:
    codes, packed, _ = layers_of(products, 64, 96, 9, kind=kind)
    assert torch.equal(bits(computed(native, codes)), bits(computed(native, packed)))


def test_a_layer_is_that_of_the_reference(native: NativeOps, products: NativeLinear) -> None:
    codes, _, plain = layers_of(products, 96, 160, 13)
    found = computed(native, codes).float()
    wanted = reference.moe_ffn(plain.x_TH, plain.router, plain.experts, None).float()
    assert (found - wanted).abs().max() < 2.0**-6 * wanted.abs().max()


@pytest.mark.parametrize("exponents", [ALL, (0, 4), (250, 255)])
@pytest.mark.parametrize("rows", [1, 20])
def test_exponents_beyond_those_of_bf16_change_no_bits(
    native: NativeOps, products: NativeLinear, exponents: tuple[int, int], rows: int
) -> None:
    """Numbers below its normal ones, and infinity where it has none."""
    found, wanted = (computed(native, case) for case in layers_of(products, 64, 64, rows, exponents)[:2])
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(bits(found.nan_to_num(7.0)), bits(wanted.nan_to_num(7.0)))


@pytest.mark.parametrize("exponents", [(100, 140), (0, 4)])
def test_every_code_is_exact_at_every_place(
    native: NativeOps, products: NativeLinear, exponents: tuple[int, int]
) -> None:
    """One expert with a unit matrix as gate and zeros as up, whose activation is 1 or 0: each row picks an input of
    down. Products of pairs take bf16's subnormal numbers for zeros, whatever form weights have."""
    unit = torch.zeros(1, 128, 64, dtype=torch.uint8)
    unit[0, range(64), range(64)] = 7  # 6 of E2M1
    gate_up = Mxfp4Weight(unit[..., 0::2] | unit[..., 1::2] << 4, torch.full((1, 128, 2), 127, dtype=torch.uint8))
    down = weight_of(5, 1, 64, 64, exponents)
    activation = GatedActivation(kind="clamped_swiglu", alpha=1000.0, limit=1.0)
    experts = Experts(activation, products.pack_mxfp4(gate_up), products.pack_mxfp4(down))
    weight_EH = products.pack(torch.zeros(1, 64))
    assert weight_EH is not None
    router = Router(Routing(num_experts=1, top_k=1, score="softmax_of_top"), weight_EH)
    rows, plain = torch.eye(64).bfloat16(), (products.pack_experts(each.dequantized()) for each in (gate_up, down))
    found = computed(native, Layer(rows, router, experts))
    wanted = computed(native, Layer(rows, router, Experts(activation, *plain)))  # type: ignore[arg-type]
    assert torch.equal(bits(found), bits(wanted))
    if exponents[0] or products.arithmetic(torch.bfloat16) in ("fma", "multiply-add"):
        assert torch.equal(bits(found), bits(down.dequantized()[0].t() + 0.0))


@pytest.mark.parametrize("pairs", [False, True])
def test_codes_lie_where_the_kernels_read_them(
    products: NativeLinear, pairs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The places that `floats4.h` and `groups.h` state, of any level of processors."""
    monkeypatch.setattr(products, "_code_pairs", pairs)
    outputs, inputs = 40, 64
    weight = weight_of(4, 2, outputs, inputs)
    packed = products.pack_mxfp4(weight).packed
    assert packed.shape == (2, 2, 2, 544)
    for expert, column, k in ((0, 0, 0), (1, 39, 63), (1, 17, 45), (0, 8, 31), (1, 33, 10), (0, 31, 38)):
        code = int(weight.code_LOB[expert, column, k // 2]) >> 4 * (k % 2) & 15
        group, c, i = packed[expert, column // 32, k // 32], column % 32, k % 32
        if pairs:
            pair, p = divmod(i, 2)
            word = 16 * (c // 8) + 2 * (c % 8) + p
            at, bit = 256 * (pair // 8) + 4 * word + pair % 8 // 2, 4 * (pair % 2)
        else:
            at = 128 * (i // 8) + 16 * (c // 4) + 8 * (i // 2 % 2) + 2 * (c % 4) + i % 2
            bit = 4 * (i // 4 % 2)
        assert int(group[32 + at]) >> bit & 15 == code
        assert int(group[c]) == int(weight.exponent_LOG[expert, column, k // 32])


def test_packed_weights_take_seventeen_bytes_for_thirty_two(products: NativeLinear) -> None:
    weight = weight_of(6, 3, 64, 96)
    packed, plain = products.pack_mxfp4(weight), products.pack_experts(weight.dequantized())
    assert plain is not None
    assert packed.packed.nbytes == 3 * 64 * 96 * 17 // 32
    assert plain.packed.nbytes == 3 * 64 * 96 * 2
    assert packed.dtype == torch.bfloat16


def test_the_parts_of_packed_weights_make_them_again(native: NativeOps, products: NativeLinear) -> None:
    codes, _, _ = layers_of(products, 64, 32, 5)
    packed = codes.experts.gate_up_L2IH
    assert isinstance(packed, NativeExpertWeight)
    again = products.restored_experts(packed.packed, None, 8, 64, 64)
    experts = dataclasses.replace(codes.experts, gate_up_L2IH=again)
    assert torch.equal(computed(native, dataclasses.replace(codes, experts=experts)), computed(native, codes))
    for sizes in ((7, 64, 64), (8, 97, 64), (8, 64, 96), (8, 64, 65)):
        with pytest.raises(ValueError, match="packed codes are"):
            products.restored_experts(packed.packed, None, *sizes)


def test_both_products_have_one_form(native: NativeOps, products: NativeLinear) -> None:
    codes, packed, _ = layers_of(products, 64, 32, 5)
    experts = dataclasses.replace(codes.experts, down_LHI=packed.experts.down_LHI)
    with pytest.raises(ValueError, match="the two products of the experts are not of one form and number"):
        native.moe_ffn(codes.x_TH, codes.router, experts, None)


@pytest.mark.usefixtures("fresh_choice")
def test_without_compiled_kernels_they_are_their_bf16_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISAGG_KERNELS", "reference")
    dispatch._choice.cache_clear()
    weight = weight_of(7, 2, 40, 64)
    packed = dispatch.pack_experts(weight, "stored")
    assert isinstance(packed, Tensor)
    assert torch.equal(packed, weight.dequantized())
