"""Linear layers in 8-bit floats: the rounding, the product on a CPU, and the Triton kernel by its interpreter."""

from __future__ import annotations

import pytest
import torch

from disagg.kernels import quantize
from disagg.kernels.triton.fp8_rows import quantize_rows as by_triton
from tests.support.triton_compile import Case, compile_kernels

pytest.importorskip("triton")


def weight_and_input(rows: int, inputs: int, outputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(outputs, inputs, generator=generator), torch.randn(rows, inputs, generator=generator) * 3


def test_a_weight_is_rounded_row_by_row() -> None:
    weight = torch.tensor([[448.0, -224.0, 1.0] + [0.0] * 13, [0.0] * 16, [2.0, 0.1] + [0.0] * 14] + [[1.0] * 16] * 13)
    packed = quantize.pack_fp8(weight)
    assert isinstance(packed, quantize.Fp8Weight)
    assert packed.scale_O[:3].tolist() == [1.0, 1.0, pytest.approx(2 / 448)]
    assert packed.quantized_OI[0, :3].tolist() == [448.0, -224.0, 1.0]
    assert packed.quantized_OI[1].float().abs().sum() == 0
    assert packed.dequantized(torch.float32)[2, 1] == pytest.approx(0.1, rel=1 / 16)
    assert torch.equal(packed.dequantized(torch.float32)[3], torch.ones(16))


def test_a_product_is_off_by_the_rounding_alone() -> None:
    weight, x = weight_and_input(5, 64, 48)
    bias = torch.randn(48)
    packed = quantize.pack_fp8(weight)
    assert isinstance(packed, quantize.Fp8Weight)
    found, exact = packed.gemm(x, bias), x @ weight.T + bias
    x8, scale = quantize.quantize_rows(x)
    rounded = (x8.float() * scale[:, None]) @ packed.dequantized(torch.float32).T + bias
    torch.testing.assert_close(found, rounded, atol=1e-4, rtol=1e-5)
    error = (found - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert 0.005 < error < 0.06
    assert packed.gemm(x[:0], None).shape == (0, 48)


def test_sizes_that_the_product_does_not_take_stay_plain() -> None:
    weight = torch.ones(16, 17)
    assert quantize.pack_fp8(weight) is weight


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_refused(bad: float) -> None:
    weight = torch.ones(16, 16)
    weight[3, 5] = bad
    with pytest.raises(ValueError, match="row 3 of a weight is not finite"):
        quantize.pack_fp8(weight)


@pytest.mark.parametrize(("rows", "features"), [(1, 16), (3, 100), (5, 1040)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_kernel_rounds_as_the_reference(rows: int, features: int, dtype: torch.dtype) -> None:
    x = weight_and_input(rows, 2 * features, 1)[1].to(dtype)[:, :features]
    x[rows - 1] = 0.0
    expected_values, expected_scales = quantize.quantize_rows(x)
    values, scales = by_triton(x)
    assert torch.equal(scales, expected_scales)
    # The interpreter loses the carry where rounding reaches the next power of two, and rounds ties and the smallest
    # numbers its own way; a GPU's test compares all.
    mantissa, _ = torch.frexp(expected_values.float().abs())
    no_carry = mantissa != 0.5
    assert no_carry.float().mean() > 0.7
    found, expected = values.float()[no_carry], expected_values.float()[no_carry]
    assert (found == expected).float().mean() > 0.99
    torch.testing.assert_close(found, expected, rtol=1 / 8, atol=2**-8)


def test_the_kernel_compiles_for_hopper_without_spills() -> None:
    types = {
        "x_ptr": "*bf16",
        "out_ptr": "*fp8e4nv",
        "scale_ptr": "*fp32",
        "row_stride": "i32:16",
        "features": "i32:16",
    }
    cases = [
        Case(
            module="disagg.kernels.triton.fp8_rows",
            kernel="_quantize_rows_kernel",
            types=types,
            constants={"BLOCK": block},
            num_warps=min(16, block // 1024),
        )
        for block in (4096, 16384)
    ]
    assert [usage.spilled_bytes for usage in compile_kernels(cases)] == [0, 0]
