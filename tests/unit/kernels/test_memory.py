"""Where packed weights are kept."""

from __future__ import annotations

import gc
import weakref

import torch

from disagg.kernels.cpu.memory import ALIGNMENT, CHUNK_BYTES, PAGE_BYTES, HugePages


def test_tensors_lie_one_behind_the_other_on_their_boundaries() -> None:
    pages = HugePages()
    first, second, third = (
        pages.new((3, 5), torch.bfloat16), pages.new((129,), torch.int8), pages.new((1, 2), torch.float32)
    )  # fmt: skip
    assert first.data_ptr() % PAGE_BYTES == 0
    assert second.data_ptr() == first.data_ptr() + ALIGNMENT
    assert third.data_ptr() == second.data_ptr() + 3 * ALIGNMENT
    assert (first.shape, first.dtype, first.is_contiguous()) == ((3, 5), torch.bfloat16, True)
    first.fill_(1.0)
    third.fill_(2.0)
    assert (first.float().sum().item(), second.count_nonzero().item(), third.sum().item()) == (15.0, 0, 4.0)


def test_what_does_not_fit_begins_anew() -> None:
    pages = HugePages()
    pages.new((CHUNK_BYTES - ALIGNMENT,), torch.uint8)
    for nbytes in (2 * ALIGNMENT, CHUNK_BYTES + 1):
        tensor = pages.new((nbytes,), torch.uint8)
        assert tensor.data_ptr() % PAGE_BYTES == 0
        tensor[-1] = 1


def test_nothing_and_no_numbers() -> None:
    assert HugePages().new((0, 4), torch.float32).shape == (0, 4)


def test_a_tensor_keeps_its_memory_alone() -> None:
    pages = HugePages()
    kept = pages.new((8,), torch.int64)
    gone = weakref.ref(pages)
    del pages
    gc.collect()
    assert gone() is None
    assert kept.fill_(7).tolist() == [7] * 8


def test_what_was_dropped_is_not_handed_out() -> None:
    pages = HugePages()
    first = pages.new((8,), torch.uint8)
    chunk = weakref.ref(first.untyped_storage())
    pages.drop_rest()
    second = pages.new((8,), torch.uint8)
    assert second.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
    del first
    gc.collect()
    assert chunk() is None
