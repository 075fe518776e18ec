"""Linear layers in 8-bit floats on the device: the kernel that rounds rows, and the scaled product."""

from __future__ import annotations

import pytest
import torch

from disagg.kernels import quantize


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "features"), [(1, 4096), (7, 1040), (64, 14336)])
def test_rows_are_rounded_as_on_a_cpu(device: torch.device, rows: int, features: int) -> None:
    x = torch.randn(rows, features, device=device, dtype=torch.bfloat16) * 3
    values, scales = quantize.quantize_rows(x)
    expected_values, expected_scales = quantize.quantize_rows(x.cpu())
    torch.testing.assert_close(scales.cpu(), expected_scales, atol=0.0, rtol=1e-6)
    same = (values.cpu().float() == expected_values.float()).float().mean()
    assert same > 0.999, "a scale may differ in its last place"


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 33, 512])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_product_is_that_of_the_rounded_values(device: torch.device, rows: int, has_bias: bool) -> None:
    weight = torch.randn(6144, 4096, device=device, dtype=torch.bfloat16) / 64
    x = torch.randn(rows, 4096, device=device, dtype=torch.bfloat16)
    bias = torch.randn(6144, device=device, dtype=torch.bfloat16) if has_bias else None
    packed = quantize.pack_fp8(weight)
    assert isinstance(packed, quantize.Fp8Weight)
    values, scales = quantize.quantize_rows(x)
    expected = (values.float() * scales[:, None]) @ packed.dequantized(torch.float32).t()
    expected = expected if bias is None else expected + bias.float()
    error = packed.gemm(x, bias).float() - expected
    # Rounding to bf16 gives some 0.2 %; Hopper's tensor cores keep some 14 bits of a sum in fast accumulation.
    assert error.square().mean().sqrt() < 0.02 * expected.square().mean().sqrt()
