"""Where a model with windows can be resumed: which points stay, which blocks go first because of them, what is said of
them."""

from __future__ import annotations

import pytest

from disagg.engine.blocks.prefix_cache import PrefixCache
from disagg.engine.blocks.resume_points import MOST_ON_PATH, GroupBlock, Point, ResumePoints, surplus
from disagg.proto.ids import BlockHash
from disagg.proto.messages import ResumeRemoved, ResumeStored

A, B, C, D, E, F, G = (BlockHash(name.encode()) for name in "abcdefg")
CHAIN = (A, B, C, D, E, F, G)


def caches(num_blocks: int = 7) -> list[PrefixCache]:
    """Of a first group and of a window: block n has the hash of number n in either."""
    found = [PrefixCache(), PrefixCache(announces=False)]
    for block, block_hash in enumerate(CHAIN[:num_blocks]):
        found[0].publish(block, [block_hash])
        found[1].publish(block, [block_hash], is_copy=True)
    return found


def points_of(*ends: int) -> tuple[list[PrefixCache], ResumePoints]:
    """Points behind so many blocks of the chain, each with the last two blocks of the window."""
    made = caches()
    points = ResumePoints(made)
    for end in ends:
        note(points, end)
    return made, points


def note(points: ResumePoints, end: int) -> None:
    window = [GroupBlock(1, block) for block in range(max(0, end - 2), end)]
    points.note(CHAIN[:end], (GroupBlock(0, end - 1), *window))


def order_of_eviction(cache: PrefixCache) -> list[int]:
    for block in list(cache.published):
        cache.add_evictable(block)
    return [cache.evict() for _ in range(cache.num_evictable)]


class TestSurplus:
    """Points by their latest use, the deepest one first."""

    @pytest.mark.parametrize(
        ("used", "gone"),
        [
            ([9], []),
            ([9, 1, 2, 3], []),
            ([9, 4, 3, 2, 1], [1]),
            ([9, 1, 4, 2, 3], [1]),
            ([9, 4, 1, 5, 2, 3], [1, 2]),
            ([1, 2, 3, 4, 5], [2]),  # the deepest one is new, whatever its use
        ],
    )
    def test_the_four_that_were_used_last_stay(self, used: list[int], gone: list[int]) -> None:
        points = [Point(BlockHash(bytes([number])), (), number) for number in used]
        assert [point.used for point in surplus(points)] == gone

    @pytest.mark.parametrize(("num_followers", "gone"), [(0, [1]), (1, [1]), (2, [])])
    def test_a_path_begins_behind_a_branch(self, num_followers: int, gone: list[int]) -> None:
        used = [9, 4, 3, 2, 1]
        points = [Point(BlockHash(bytes([number])), (), number) for number in used]
        points[3].num_followers = num_followers
        assert [point.used for point in surplus(points)] == gone


def test_a_fifth_point_on_a_path_ends_the_one_that_was_used_least() -> None:
    _, points = points_of(1, 2, 3, 4)
    points.follow(A)
    points.drain_events()
    note(points, 6)
    assert points.drain_events() == (ResumeStored(hashes=(F,)), ResumeRemoved(hashes=(B,)))
    assert set(points.snapshot()) == {A, C, D, F}
    assert points.check_integrity() == []


def test_a_point_that_is_noted_again_counts_as_used() -> None:
    _, points = points_of(1, 2, 3, 4, 1, 5)
    assert set(points.snapshot()) == {A, C, D, E}


def test_behind_a_branch_there_are_four_more() -> None:
    _, points = points_of(1)
    for _ in range(2):
        points.follow(A)
    for end in range(2, 8):
        note(points, end)
    assert set(points.snapshot()) == {A, *CHAIN[7 - MOST_ON_PATH :]}


def test_blocks_of_points_go_last_however_they_came() -> None:
    (_, window), points = points_of(4)
    assert order_of_eviction(window) == [0, 1, 4, 5, 6, 2, 3]
    assert len(points) == 0


def test_blocks_of_a_point_that_ended_go_first_again() -> None:
    """Those that no other point needs; also where they have no holder already."""
    (_, window), points = points_of(1, 3, 4, 5, 7)  # the first one is too many
    for block in (0, 1, 6):
        window.add_evictable(block)
    assert points.check_integrity() == []
    assert window.copies == {0}
    assert [window.evict(), window.evict()] == [0, 1]
    assert D not in points.snapshot() or B not in points.snapshot()
    assert set(points.snapshot()) == {D, E, G}
    assert window.copies == set()


def test_blocks_that_nobody_holds_go_first_once_their_point_ends() -> None:
    (full, window), points = points_of(2, 4)
    for block in range(4):
        window.add_evictable(block)
    full.add_evictable(3)
    full.evict()
    assert [window.evict() for _ in range(4)] == [2, 3, 0, 1]
    assert points.check_integrity() == []


def test_a_point_ends_with_its_last_full_block() -> None:
    (full, window), points = points_of(2, 4)
    full.add_evictable(3)
    points.drain_events()
    assert full.evict() == 3
    assert points.drain_events() == (ResumeRemoved(hashes=(D,)),)
    assert window.copies == {2, 3, 4, 5, 6}
    assert points.check_integrity() == []
