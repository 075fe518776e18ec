"""Linear layers with plain and packed weights."""

from __future__ import annotations

import pytest
import torch

from disagg.kernels import linear as linear_module
from disagg.kernels.linear import PackedWeight, linear, pack_weight
from tests.unit.kernels import oracle


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("T", "in_features", "out_features"), [(1, 576, 192), (7, 33, 17), (40, 64, 48), (0, 8, 4)])
def test_linear(T: int, in_features: int, out_features: int, dtype: torch.dtype, with_bias: bool, packed: bool) -> None:
    torch.manual_seed(T + in_features)
    x = torch.randn(T, in_features).to(dtype)
    weight = (torch.randn(out_features, in_features) / in_features**0.5).to(dtype)
    bias = torch.randn(out_features).to(dtype) if with_bias else None
    expected = x.double() @ weight.double().t() + (0.0 if bias is None else bias.double())
    found = linear(x, pack_weight(weight) if packed else weight, bias)
    assert found.shape == (T, out_features)
    assert found.dtype == dtype
    if T:
        oracle.assert_close(found, expected)


def test_one_packed_weight_serves_any_number_of_rows_and_strided_rows() -> None:
    torch.manual_seed(0)
    weight = torch.randn(96, 64) / 8
    packed = pack_weight(weight)
    for rows in (1, 3, 64, 300):
        x = torch.randn(rows, 128)[:, :64]
        oracle.assert_close(linear(x, packed, None), x.double() @ weight.double().t())


def test_bf16_is_the_same_to_the_bit() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(192, 576).bfloat16(), torch.randn(5, 576).bfloat16()
    assert torch.equal(linear(x, pack_weight(weight), None), linear(x, weight, None))


def test_a_packed_weight_does_not_follow_the_plain_one() -> None:
    weight = torch.ones(8, 8)
    packed = pack_weight(weight)
    weight.zero_()
    assert torch.equal(linear(torch.ones(1, 8), packed, None), torch.full((1, 8), 8.0))


def test_where_packing_does_not_work_the_plain_weight_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(weight: torch.Tensor) -> PackedWeight:
        raise RuntimeError("no such op")

    weight = torch.ones(8, 8)
    monkeypatch.setattr(linear_module, "_pack", broken)
    linear_module._packing_works.cache_clear()
    try:
        assert pack_weight(weight) is weight
    finally:
        linear_module._packing_works.cache_clear()
    half = weight.half()
    assert pack_weight(half) is half
