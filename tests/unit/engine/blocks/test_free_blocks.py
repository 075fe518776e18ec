from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.engine.blocks.free_blocks import FreeBlocks


def test_the_first_whole_extent_goes_first_and_then_what_was_broken_first() -> None:
    free = FreeBlocks(7, 3)
    assert [free.take() for _ in range(3)] == [0, 3, 6]
    assert (len(free), free.has_whole) == (4, False)
    assert [free.take() for _ in range(4)] == [1, 2, 4, 5]
    for block in (4, 6, 2):
        free.free(block)
    assert (len(free), free.has_whole) == (3, True)  # the last extent has but one block
    assert [free.take() for _ in range(3)] == [6, 4, 2]


def test_the_block_behind_another_is_of_its_extent() -> None:
    free = FreeBlocks(7, 3)
    assert free.take() == 0
    assert [free.take_after(block) for block in (0, 1, 2)] == [1, 2, None]
    assert [free.take(), free.take(), free.take_after(6)] == [3, 6, None]
    assert free.take() == 4
    assert free.take_after(3) is None


class Naive:
    """What `FreeBlocks` says of itself, with a set and no counts."""

    def __init__(self, num_blocks: int, extent_blocks: int) -> None:
        blocks = range(num_blocks)
        self.extents = [set(blocks[first : first + extent_blocks]) for first in range(0, num_blocks, extent_blocks)]
        self.free = set(blocks)

    def extent(self, block: int) -> set[int]:
        return next(extent for extent in self.extents if block in extent)

    def whole(self) -> list[set[int]]:
        return [extent for extent in self.extents if extent <= self.free]


@settings(deadline=None, max_examples=200, derandomize=True)
@given(st.integers(1, 20), st.integers(1, 6), st.lists(st.integers(0, 1 << 16), max_size=120))
def test_whatever_is_taken_and_given_a_set_says_the_same(num_blocks: int, extent_blocks: int, moves: list[int]) -> None:
    free, naive, held = FreeBlocks(num_blocks, extent_blocks), Naive(num_blocks, extent_blocks), list[int]()
    for move in moves:
        kind, choice = move % 3, move // 3
        if kind == 0 and held:
            block = held.pop(choice % len(held))
            free.free(block)
            naive.free.add(block)
        elif kind == 1 and held:
            near = held[choice % len(held)]
            wanted = near + 1 in naive.free and near + 1 in naive.extent(near)
            found = free.take_after(near)
            assert found == (near + 1 if wanted else None)
            if found is not None:
                held.append(found)
                naive.free.remove(found)
        elif naive.free:
            whole = naive.whole()
            found = free.take()
            assert found in naive.free
            if whole:
                assert found == min(whole[0])
            held.append(found)
            naive.free.remove(found)
        assert len(free) == len(naive.free)
        assert free.has_whole == bool(naive.whole())
        assert free.num_fragmented == len(naive.free) - sum(map(len, naive.whole()))
        assert [block in free for block in range(num_blocks)] == [block in naive.free for block in range(num_blocks)]
