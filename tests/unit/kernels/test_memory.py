"""Where packed weights are kept."""

from __future__ import annotations

import gc
import os
import resource
import threading
import weakref

import pytest
import torch

from disagg.kernels.cpu import memory
from disagg.kernels.cpu.memory import ALIGNMENT, CHUNK_BYTES, PAGE_BYTES, HugePages, copy_pairs, populate


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


@pytest.mark.parametrize("num_pages_at_once", [1, 8])
def test_pages_are_there_before_they_are_used_and_contents_stay(
    num_pages_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "AT_ONCE_BYTES", num_pages_at_once * PAGE_BYTES)
    tensor = HugePages().new((8 * PAGE_BYTES - 5,), torch.uint8)
    tensor[3 * PAGE_BYTES] = 7
    rests: list[float] = []
    populate(tensor, sleep=rests.append)
    for thread in threading.enumerate():
        if thread.name == "populate":
            thread.join()
    assert len(rests) == 8 - num_pages_at_once
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    assert tensor.count_nonzero().item() == 1
    tensor.fill_(1)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 4


def test_a_system_that_cannot_populate_has_the_memory_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_MADV_POPULATE_WRITE", -1)
    tensor = HugePages().new((2 * PAGE_BYTES,), torch.uint8)
    populate(tensor)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensor.fill_(1)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 4


def test_memory_that_nobody_uses_any_more_is_given_back_unpopulated(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, dropped, pages, priorities = threading.Event(), threading.Event(), list[int](), set[int]()

    def slow(page: range, end: int) -> bool:
        pages.append(page.start)
        priorities.add(os.sched_getscheduler(0))
        begun.set()
        return len(pages) == 1 or dropped.wait(60.0)

    monkeypatch.setattr(memory, "AT_ONCE_BYTES", PAGE_BYTES)
    monkeypatch.setattr(memory, "_populate", slow)
    tensor = HugePages().new((8 * PAGE_BYTES,), torch.uint8)
    storage, rests = weakref.ref(tensor.untyped_storage()), list[float]()
    populate(tensor, sleep=rests.append)
    del tensor
    dropped.set()
    for thread in threading.enumerate():
        if thread.name == "populate":
            thread.join()
    gc.collect()
    assert storage() is None
    assert len(pages) < 4
    assert priorities == {os.SCHED_OTHER}  # a lower one would keep the locks that it holds from everybody


def test_nothing_is_populated_at_once() -> None:
    populate(HugePages().new((0,), torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.float32, torch.float64])
@pytest.mark.parametrize("is_split", [False, True])
def test_pairs_are_copied_as_they_are(dtype: torch.dtype, is_split: bool) -> None:
    source = torch.randn(3, 32, 6, 2).mul(100).to(dtype)
    source = source.permute(0, 2, 3, 1).transpose(-1, -2) if is_split else source.transpose(1, 2)
    target = HugePages().new(source.shape, dtype)
    assert copy_pairs(target, source) is target
    assert torch.equal(target, source)
