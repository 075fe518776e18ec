"""The kernels' own threads: any number of them gives the same bits as one."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from disagg.kernels import dispatch
from disagg.kernels.cpu.linear import NativeLinear
from disagg.kernels.cpu.ops import NativeOps
from disagg.kernels.ops import AttentionForm, RopeWrite
from tests.support.paged import prompts

BLOCK, KV_HEADS, HEADS, DIM = 16, 3, 9, 64
FORM = AttentionForm(0.125)


@pytest.fixture(autouse=True)
def one_thread_again(native: NativeOps) -> Iterator[None]:
    yield
    native.set_num_threads(1)


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def caches(num_blocks: int) -> tuple[Tensor, Tensor]:
    shape = (num_blocks, KV_HEADS, BLOCK, DIM)
    return numbers(1, *shape), numbers(2, *shape)


def decode(native: NativeOps) -> Tensor:
    lengths = [1, 700, 16, 0, 33, 633]
    tables = torch.randperm(60, generator=torch.Generator().manual_seed(3)).repeat(6, 1)[:, :44].to(torch.int32)
    found = native.paged_decode_attention(
        numbers(4, 6, HEADS, DIM), *caches(60), tables.contiguous(), torch.tensor(lengths, dtype=torch.int32), FORM
    )
    assert found is not None
    return found


def prefill(native: NativeOps) -> Tensor:
    table = torch.arange(40, dtype=torch.int32)
    q_TND = numbers(5, 301, HEADS, DIM)
    prefills = prompts((table, 77, 301))
    found = native.paged_prefill_attention(q_TND, *caches(40), prefills, FORM, torch.empty_like(q_TND))
    assert found is not None
    return found


@pytest.mark.parametrize("num_threads", [2, 3, 7])
@pytest.mark.parametrize("attention", [decode, prefill])
def test_attention_has_the_same_bits(native: NativeOps, attention: object, num_threads: int) -> None:
    assert callable(attention)
    native.set_num_threads(1)
    alone = attention(native)
    native.set_num_threads(num_threads)
    for _ in range(20):
        assert torch.equal(attention(native), alone)


@pytest.mark.parametrize("num_threads", [2, 5])
@pytest.mark.parametrize(
    ("num_rows", "num_columns", "depth"), [(1, 576, 576), (13, 33, 31), (40, 1536, 96), (2, 1, 2), (12, 576, 2048)]
)
def test_products_have_the_same_bits(
    native: NativeOps, products: NativeLinear, num_threads: int, num_rows: int, num_columns: int, depth: int
) -> None:
    x, bias = numbers(6, num_rows, depth), numbers(7, num_columns)
    packed = products.pack(numbers(8, num_columns, depth))
    assert packed is not None
    native.set_num_threads(1)
    alone = packed.gemm(x, bias)
    native.set_num_threads(num_threads)
    for _ in range(20):
        assert torch.equal(packed.gemm(x, bias), alone)


def small_ops(native: NativeOps) -> list[Tensor]:
    x, weight = numbers(9, 33, 15 * DIM), numbers(10, 15 * DIM)
    (keys, values), table = caches(4), numbers(11, 40, DIM)
    found = native.add_rms_norm(x, x.flip(0), weight, 1e-5)
    assert found is not None
    q = native.qkv_rope_write(
        x, torch.arange(33), torch.arange(33), RopeWrite(None, None, 0.0, table, table, keys, values)
    )
    outs = [*found, native.rms_norm(x, weight, 1e-5), native.silu_mul(x), native.argmax_rows(x, 900), q, keys, values]
    return [out for out in outs if out is not None]


@pytest.mark.parametrize("num_threads", [2, 5])
def test_small_ops_have_the_same_bits(native: NativeOps, num_threads: int) -> None:
    alone = small_ops(native)
    native.set_num_threads(num_threads)
    assert [torch.equal(a, b) for a, b in zip(small_ops(native), alone, strict=True)] == [True] * 8


def test_several_callers_share_the_team(native: NativeOps) -> None:
    """One of them has it; the others compute alone. All are right."""
    native.set_num_threads(1)
    alone = prefill(native)
    native.set_num_threads(2)
    found: list[bool] = []
    callers = [threading.Thread(target=lambda: found.append(torch.equal(prefill(native), alone))) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert found == [True] * 4


def test_a_sleeping_team_wakes_up_and_a_smaller_one_works_on(native: NativeOps) -> None:
    native.set_num_threads(4)
    expected = decode(native)
    for num_threads in (4, 2, 3, 1, 4):
        torch.randn(1 << 18)  # takes longer than members look for work
        native.set_num_threads(num_threads)
        assert torch.equal(decode(native), expected)


def test_a_child_of_fork_computes_alone(native: NativeOps) -> None:
    native.set_num_threads(3)
    expected = decode(native)
    pid = os.fork()
    if pid == 0:  # no other thread exists here, so nothing of torch's pool may be used
        os._exit(0 if torch.equal(decode(native), expected) else 1)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.usefixtures("fresh_choice")
def test_dispatch_sets_both_kinds_of_threads() -> None:
    dispatch.set_num_threads(2)
    assert torch.get_num_threads() == 2
    dispatch.set_num_threads(1)
    assert torch.get_num_threads() == 1
    with pytest.raises(ValueError, match=r"^num_threads: must be at least 1, not 0$"):
        dispatch.set_num_threads(0)
