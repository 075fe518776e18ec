"""Triton's elementwise kernels, and the copies of KV, in the interpreter against the torch reference.

What the real compiler makes of the kernels: test_ops_compile.py; bf16, which the interpreter rounds wrongly:
tests/gpu/test_ops.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from disagg.kernels import reference
from disagg.kernels.lora import allocate_lora
from disagg.kernels.ops import HeadSquares, Pointwise, RopeWrite
from disagg.kernels.triton import rope_write
from disagg.kernels.triton.ops import TritonOps

torch.set_num_threads(1)

TOLERANCE = {torch.float32: 4e-7, torch.float16: 2.0**-9}
"""Relative to max(1, |expected|): a few roundings in fp32; one of the result in fp16, where sums differ by so little
that nearly all results are equal."""


@pytest.fixture
def ops() -> TritonOps:
    return TritonOps()


def assert_close(found: Tensor | None, expected: Tensor) -> None:
    assert found is not None
    assert found.dtype == expected.dtype
    assert found.is_contiguous()
    assert found.shape == expected.shape
    error = (found.double() - expected.double()).abs() / expected.double().abs().clamp(min=1.0)
    assert error.max().item() <= TOLERANCE[found.dtype]


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])


@DTYPES
def test_norms_of_rows_and_of_heads_with_strides(ops: TritonOps, dtype: torch.dtype) -> None:
    x, residual, weight = (random(*shape, dtype=dtype) for shape in ((5, 2 * 576), (5, 576), (576,)))
    assert_close(ops.rms_norm(x[:, 576:], weight, 1e-5), reference.rms_norm(x[:, 576:], weight, 1e-5))
    found = ops.add_rms_norm(x[:, :576], residual, weight, 1e-5)
    assert found is not None
    for got, wanted in zip(found, reference.add_rms_norm(x[:, :576], residual, weight, 1e-5), strict=True):
        assert_close(got, wanted)
    heads, weight_D = random(3, 7, 20, dtype=dtype)[:, 2:5], random(20, dtype=dtype)
    assert_close(ops.rms_norm(heads, weight_D, 1e-5), reference.rms_norm(heads, weight_D, 1e-5))


@DTYPES
def test_norms_by_one_more_than_the_weight(ops: TritonOps, dtype: torch.dtype) -> None:
    x, residual, weight = (random(*shape, dtype=dtype) for shape in ((5, 576), (5, 576), (576,)))
    assert_close(ops.rms_norm(x, weight, 1e-5, True), reference.rms_norm(x, weight, 1e-5, True))
    found = ops.add_rms_norm(x, residual, weight, 1e-5, True)
    assert found is not None
    assert_close(found[0], reference.add_rms_norm(x, residual, weight, 1e-5, True)[0])


@DTYPES
def test_gelu_sums_and_functions_of_a_number(ops: TritonOps, dtype: torch.dtype) -> None:
    gate_up = random(2, 2 * 1030, dtype=dtype) * 2
    gate_up[0, 0], gate_up[0, 1] = -6.0, 6.0
    assert_close(ops.gelu_tanh_mul(gate_up), reference.gelu_tanh_mul(gate_up))
    x, y = gate_up[:, :1030], gate_up[:, 1030:]
    assert_close(ops.add(x, y), reference.add(x, y))
    for function in get_args(Pointwise):
        assert_close(ops.pointwise(x, function, 1.7), reference.pointwise(x, function, 1.7))


@DTYPES
def test_silu_mul(ops: TritonOps, dtype: torch.dtype) -> None:
    gate_up = random(2, 2 * 1030, dtype=dtype) * 8
    gate_up[0, 0], gate_up[0, 1] = -80.0, 80.0
    assert_close(ops.silu_mul(gate_up), reference.silu_mul(gate_up))


@DTYPES
def test_rows_get_what_their_own_adapter_adds(ops: TritonOps, dtype: torch.dtype) -> None:
    lora = allocate_lora(2, 16, 150, (130, 40, 30), dtype, torch.device("cpu"))
    lora.a_SPRI.copy_(random(*lora.a_SPRI.shape, dtype=dtype) / 40)
    lora.b_SRO.copy_(random(*lora.b_SRO.shape, dtype=dtype) / 10)
    lora.ranks_SP.copy_(torch.tensor([[3, 16, 9], [0, 5, 0]]))
    lora.scales_SP.copy_(torch.tensor([[0.5, 2.0, 1.0], [1.0, 3.0, 1.0]]))
    x, y, slots = random(4, 150, dtype=dtype), random(4, 200, dtype=dtype), torch.tensor([0, -1, 1, 0]).int()
    assert_close(ops.lora_add(x, y.clone(), lora, slots), reference.lora_add(x, y.clone(), lora, slots))


def test_embed_takes_ids_outside_the_table_as_zeros(ops: TritonOps) -> None:
    table = random(11, 70, dtype=torch.float16)
    found = ops.embed(torch.tensor([10, 0, -1, 11, 3]), table)
    assert found is not None
    assert torch.equal(found[[0, 1, 4]], table[[10, 0, 3]])
    assert not found[2:4].any()


def test_argmax_of_rows(ops: TritonOps) -> None:
    """Over two chunks of columns: ties go to the first, and rows that nothing can be chosen from say so."""
    logits = random(7, 4500, dtype=torch.float16)
    logits[0, 70] = logits[0, 4200] = 50.0
    logits[1, 4200] = math.nan
    logits[2, 4200] = math.inf
    logits[3] = -math.inf
    logits[4, :4300] = -math.inf
    logits[5] = logits[5].abs().neg()
    logits[5, 4099] = -0.0
    logits[6, 4400] = 99.0
    found = ops.argmax_rows(logits, 4400)
    assert found is not None
    assert torch.equal(found, reference.argmax_rows(logits, 4400))
    assert found[:4].tolist() == [70, -1, -1, -1]
    assert found[5] == 4099


class RopeCase:
    """Five tokens, one of them padding, and a cache of NaN."""

    def __init__(self, heads: tuple[int, int], dim: int, block_size: int, dtype: torch.dtype) -> None:
        N, K = heads
        self.qkv_TQ = random(5, (N + 2 * K) * dim, dtype=dtype)
        self.cos_PD = random(9, dim // 2, dtype=dtype).repeat(1, 2)
        self.sin_PD = self.cos_PD.flip(0) * 0.5
        self.positions_T = torch.tensor([8, 0, 3, 0, 7])
        self.slots_T = torch.tensor([2 * block_size, 4 * block_size - 1, -1, 1, 0])
        self.cache = torch.full((4, 3, 2, K, block_size, dim), math.nan, dtype=dtype)
        self.norms = random(dim, dtype=dtype), random(dim, dtype=dtype) * 2

    def arguments(
        self, cache: Tensor, q_norm: Tensor | None, k_norm: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, RopeWrite]:
        layer = RopeWrite(q_norm, k_norm, 1e-6, self.cos_PD, self.sin_PD, cache[:, 1, 0], cache[:, 1, 1])
        return self.qkv_TQ, self.positions_T, self.slots_T, layer


@pytest.mark.parametrize(
    ("heads", "dim", "block_size", "dtype", "normed"),
    [
        ((9, 3), 64, 16, torch.float32, (False, False)),
        ((4, 2), 80, 3, torch.float16, (True, True)),
        ((20, 10), 16, 16, torch.float32, (False, True)),
    ],
)
def test_qkv_rope_write(
    ops: TritonOps, heads: tuple[int, int], dim: int, block_size: int, dtype: torch.dtype, normed: tuple[bool, bool]
) -> None:
    case = RopeCase(heads, dim, block_size, dtype)
    q_norm, k_norm = (weight if used else None for weight, used in zip(case.norms, normed, strict=True))
    expected_cache = case.cache.clone()
    expected_q = reference.qkv_rope_write(*case.arguments(expected_cache, q_norm, k_norm))
    assert_close(ops.qkv_rope_write(*case.arguments(case.cache, q_norm, k_norm)), expected_q)
    assert torch.equal(case.cache.isnan(), expected_cache.isnan())
    assert_close(case.cache.nan_to_num(), expected_cache.nan_to_num())
    assert torch.equal(case.cache[:, :, 1].nan_to_num(), expected_cache[:, :, 1].nan_to_num())


@pytest.mark.parametrize("rotary_dim", [0, 12, 32])
@pytest.mark.parametrize("normed", [False, True])
def test_only_the_first_dims_of_a_head_are_rotated(ops: TritonOps, rotary_dim: int, normed: bool) -> None:
    case = RopeCase((4, 2), 32, 16, torch.float32)
    case.cos_PD, case.sin_PD = (table[:, : rotary_dim // 2].repeat(1, 2) for table in (case.cos_PD, case.sin_PD))
    q_norm, k_norm = case.norms if normed else (None, None)
    assert_same_rows(ops, case, q_norm, k_norm, plus_one=True)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("rotary_dim", [20, 32])
def test_norms_of_all_heads_and_a_scale_of_q(ops: TritonOps, rotary_dim: int, given: bool) -> None:
    case = RopeCase((4, 2), 32, 16, torch.float32)
    case.cos_PD, case.sin_PD = (table[:, : rotary_dim // 2].repeat(1, 2) for table in (case.cos_PD, case.sin_PD))
    sums = ops.head_squares(case.qkv_TQ, 2, 32)
    assert_close(sums, reference.head_squares(case.qkv_TQ, 2, 32))
    assert sums is not None
    squares = HeadSquares(2 * sums, 2 * 4 * 32, 3 * 2 * 32) if given else None
    q_norm, k_norm = random(4 * 32, dtype=torch.float32), random(2 * 32, dtype=torch.float32)
    assert_same_rows(ops, case, q_norm, k_norm, squares, query_scale_P=torch.linspace(0.25, 1.0, 9), is_whole=True)


def assert_same_rows(
    ops: TritonOps,
    case: RopeCase,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    squares: HeadSquares | None = None,
    **changes: Any,
) -> None:
    expected_cache = case.cache.clone()
    rows = (case.qkv_TQ, case.positions_T, case.slots_T)
    layers = [replace(case.arguments(cache, q_norm, k_norm)[3], **changes) for cache in (expected_cache, case.cache)]
    expected_q = reference.qkv_rope_write(*rows, layers[0], squares)
    assert_close(ops.qkv_rope_write(*rows, layers[1], squares), expected_q)
    assert torch.equal(case.cache.isnan(), expected_cache.isnan())
    assert_close(case.cache.nan_to_num(), expected_cache.nan_to_num())


def test_fp8_cache_holds_values_over_the_scale_and_clamps() -> None:
    """With numbers that e4m3 holds: the interpreter loses the carry when it rounds."""
    case = RopeCase((2, 1), 32, 16, torch.float32)
    case.qkv_TQ = (case.qkv_TQ * 4).round().clamp(-8.0, 8.0)
    case.cos_PD, case.sin_PD = torch.ones(9, 32), torch.zeros(9, 32)
    expected_cache = case.cache.clone()
    reference.qkv_rope_write(*case.arguments(expected_cache, None, None))
    cache = torch.zeros(case.cache.shape, dtype=torch.float8_e4m3fn)
    rope_write.qkv_rope_write(*case.arguments(cache, None, None), key_scale=0.5, value_scale=2.0**-6)
    expected_keys, expected_values = expected_cache.nan_to_num()[:, 1].unbind(1)
    assert torch.equal(cache[:, 1, 0].float(), expected_keys * 2)
    assert torch.equal(cache[:, 1, 1].float(), (expected_values * 64).clamp(-448.0, 448.0))
    assert expected_values.abs().max() == 8.0
    assert not cache[:, [0, 2]].float().any()


@pytest.mark.parametrize(
    ("dtype", "dim", "heads", "block_size", "chosen"),
    [
        (torch.float16, 64, 3, 16, slice(0, 3)),
        (torch.float32, 5, 3, 3, slice(1, 3)),
        (torch.uint8, 3, 2, 4, slice(1, 2)),
    ],
)
def test_gather_and_scatter(
    ops: TritonOps, dtype: torch.dtype, dim: int, heads: int, block_size: int, chosen: slice
) -> None:
    """Words of 8, 4 and 1 bytes; ranges that begin and end inside blocks; some of the heads; the order of `KvCache`."""
    shape = (2, 2, 9, heads, block_size, dim)
    cache = (random(*shape, dtype=torch.float32) * 50).to(dtype).permute(2, 0, 1, 3, 4, 5)
    start, end, blocks = 1, 2 * block_size + 2, [7, 2, 5]
    view = cache[:, :, :, chosen]
    expected = torch.zeros((end - start) * view[0, :, :, :, 0].numel() * dtype.itemsize, dtype=torch.uint8)
    found = expected.clone()
    reference.gather_kv(view, blocks, start, end, expected)
    assert ops.gather_kv(view, blocks, start, end, found) is found
    assert torch.equal(found, expected)

    expected_cache, found_cache = torch.zeros_like(cache), torch.zeros_like(cache)
    reference.scatter_kv(expected_cache[:, :, :, chosen], blocks, start, end, expected)
    assert ops.scatter_kv(found_cache[:, :, :, chosen], blocks, start, end, expected) is not None
    assert torch.equal(found_cache, expected_cache)


def test_copies_check_the_range_and_the_buffer(ops: TritonOps) -> None:
    cache = torch.zeros((2, 1, 2, 1, 4, 2))
    buffer = torch.zeros(2 * 2 * 8 * 4, dtype=torch.uint8)
    assert ops.gather_kv(cache, [1, 0], 3, 3, buffer[:0]) is not None
    with pytest.raises(ValueError, match=r"tokens \[1, 9\) are not within 2 blocks of 4"):
        ops.gather_kv(cache, [1, 0], 1, 9, buffer)
    with pytest.raises(ValueError, match=r"tokens \[0, 7\) take 112 bytes; the buffer is torch.uint8 of shape \[128\]"):
        ops.scatter_kv(cache, [1, 0], 0, 7, buffer)


def test_nothing_of_no_rows(ops: TritonOps) -> None:
    empty, weight = torch.empty((0, 64)), torch.ones(64)
    assert_shape(ops.rms_norm(empty, weight, 1e-5), (0, 64))
    assert_shape(ops.silu_mul(empty), (0, 32))
    assert_shape(ops.argmax_rows(empty, 64), (0,))
    assert_shape(ops.embed(torch.empty(0, dtype=torch.int64), torch.ones(3, 64)), (0, 64))


def assert_shape(found: Tensor | None, shape: tuple[int, ...]) -> None:
    assert found is not None
    assert tuple(found.shape) == shape


def test_declines_what_the_kernels_do_not_read(ops: TritonOps) -> None:
    x, weight = torch.ones(4, 8), torch.ones(4)
    assert ops.rms_norm(x.t(), weight, 1e-5) is None
    assert ops.rms_norm(x.double(), torch.ones(8).double(), 1e-5) is None
    assert ops.add_rms_norm(x, x, torch.ones(8).half(), 1e-5) is None
    assert ops.silu_mul(x.t()) is None
    assert ops.argmax_rows(x.long(), 8) is None
    assert ops.embed(torch.zeros(2), x) is None
    case = RopeCase((2, 1), 32, 16, torch.float32)
    assert ops.qkv_rope_write(*case.arguments(case.cache.half(), None, None)) is None
    assert ops.gather_kv(torch.zeros(2, 1, 2, 1, 4, 4)[..., ::2], [0], 0, 1, torch.zeros(16, dtype=torch.uint8)) is None
    assert ops.rms_norm(torch.empty(4, 8, device="meta"), torch.empty(8, device="meta"), 1e-5) is None
