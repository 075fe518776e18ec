"""Products of the rows of each head with the head's own weight, in all implementations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from disagg.kernels import dispatch, reference
from disagg.kernels.cpu.calls import ProgramCapturer
from disagg.kernels.cpu.linear import NativeLinear
from disagg.kernels.cpu.ops import NativeOps
from tests.unit.kernels.conftest import LEVELS, compiled_or_skip

DTYPES = [torch.float32, torch.bfloat16]
SIZES = [(4, 70, 41), (3, 33, 24), (20, 32, 12), (1, 1, 1)]
"""Heads, outputs and inputs: few heads and many, and sizes that no panel and no vector divides."""
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8}

Run = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture(params=[None, *LEVELS], ids=lambda level: f"cpu-c++-{level.name}" if level else "reference")
def run(request: pytest.FixtureRequest) -> Run:
    """An implementation, which packs where it takes packed weights."""
    if request.param is None:
        return reference.linear_by_head
    native, products = compiled_or_skip(request.param)

    def packed(x_TNI: Tensor, weight_NOI: Tensor) -> Tensor:
        weight = products.pack_experts(weight_NOI)
        assert weight is not None
        found = native.linear_by_head(x_TNI, weight)
        assert found is not None
        return found

    return packed


def rows(T: int, N: int, I: int, dtype: torch.dtype) -> Tensor:  # noqa: E741 - the shape letters
    """Slices of wider rows, as queries are."""
    wide = torch.randn(T, N, I + 5, generator=torch.Generator().manual_seed(T)).to(dtype)
    return wide[..., 2 : 2 + I]


def weights(N: int, O: int, I: int, dtype: torch.dtype) -> Tensor:  # noqa: E741
    found: Tensor = (torch.randn(N, O, I, generator=torch.Generator().manual_seed(O)) / I**0.5).to(dtype)
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_each_head_is_multiplied_by_its_own_weight(run: Run, size: tuple[int, int, int], dtype: torch.dtype) -> None:
    N, O, I = size  # noqa: E741
    weight = weights(*size, dtype)
    for T in (0, 1, 2, 13):
        x = rows(T, N, I, dtype)
        found = run(x, weight)
        assert (found.shape, found.dtype, found.is_contiguous()) == ((T, N, O), dtype, True)
        wanted = torch.einsum("tni,noi->tno", x.double(), weight.double())
        assert (found.double() - wanted).abs().amax() <= TOLERANCE[dtype] * 4 if T else True


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_bits_are_those_of_the_linear_layer_of_each_head(
    native: NativeOps, products: NativeLinear, size: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Also where rows are more than are laid out at a time, and whatever the number of threads; so a row does not
    depend on those beside it."""
    N, _, I = size  # noqa: E741
    x, weight = rows(497, N, I, dtype), weights(*size, dtype)
    packed = products.pack_experts(weight)
    assert packed is not None
    for num_threads in (1, 3):
        native.set_num_threads(num_threads)
        try:
            whole, alone = native.linear_by_head(x, packed), native.linear_by_head(x[480:481], packed)
        finally:
            native.set_num_threads(1)
        assert whole is not None
        assert alone is not None
        assert torch.equal(whole[480:481], alone)
        for head in range(N):
            layer = products.pack(weight[head])
            assert layer is not None
            assert torch.equal(whole[:, head], layer.gemm(x[:, head], None))


def test_a_captured_call_reads_what_its_rows_hold_then(native: NativeOps, products: NativeLinear) -> None:
    x, weight = rows(3, 4, 24, torch.bfloat16), products.pack_experts(weights(4, 20, 24, torch.bfloat16))
    assert weight is not None
    first, program = ProgramCapturer(native.library).capture(lambda: native.linear_by_head(x, weight))
    assert first is not None
    before = first.clone()
    x.neg_()
    found = program.replay()
    assert found is not None
    assert torch.equal(found, -before)


@pytest.mark.usefixtures("fresh_choice")
def test_dispatch_takes_what_it_packed() -> None:
    x, weight = rows(5, 4, 24, torch.float32), weights(4, 20, 24, torch.float32)
    found = dispatch.linear_by_head(x, dispatch.pack_experts(weight))
    torch.testing.assert_close(found, reference.linear_by_head(x, weight), rtol=1e-5, atol=1e-5)


def test_what_the_kernel_does_not_read_is_declined(native: NativeOps, products: NativeLinear) -> None:
    x, plain = rows(3, 4, 24, torch.bfloat16), weights(4, 20, 24, torch.bfloat16)
    weight = products.pack_experts(plain)
    assert weight is not None
    assert native.linear_by_head(x.float(), weight) is None
    assert native.linear_by_head(x[:, :3], weight) is None
    assert native.linear_by_head(x[..., :23], weight) is None
    assert native.linear_by_head(x.transpose(1, 2).contiguous().transpose(1, 2), weight) is None
    assert native.linear_by_head(x, plain) is None
    rounded = products.pack_experts(plain, "int8")
    assert rounded is not None
    assert native.linear_by_head(x, rounded) is None
