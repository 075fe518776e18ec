"""The list of work of a step's prompts: items, order, cuts."""

from __future__ import annotations

import numpy as np
import pytest

from disagg.kernels.prefill_work import WHOLE, ChunkPlace, PrefillWork, prefill_work

HOPPER = 264
"""Programs at once: two on each of 132 multiprocessors."""


def work_of(*chunks: tuple[int, int], tokens: int = 32, num_heads: int = 8) -> PrefillWork:
    """(start, number of tokens) of chunks whose tables have 1000 entries; tiles of 64."""
    places, row = [], 5
    for at, (start, num_tokens) in enumerate(chunks):
        places.append(ChunkPlace(row, num_tokens, start, 1000 * at))
        row += num_tokens
    return prefill_work(places, tokens, 64, num_heads, HOPPER)


def test_items_of_all_chunks_in_one_list_the_longest_first() -> None:
    work = work_of((0, 70), (100, 3), (63, 1), (64, 1))
    assert work.items.tolist() == [
        [69, 6, 64, 0, 0, 2, WHOLE, 0],
        [75, 3, 100, 1000, 0, 2, WHOLE, 0],
        [79, 1, 64, 3000, 0, 2, WHOLE, 0],
        [37, 32, 32, 0, 0, 1, WHOLE, 0],
        [5, 32, 0, 0, 0, 1, WHOLE, 0],
        [78, 1, 63, 2000, 0, 1, WHOLE, 0],
    ]
    assert (work.num_items, work.num_joins, work.num_pieces, work.longest) == (6, 0, 0, 70)
    assert work.joins.shape == (0, 4)


def test_an_item_begins_with_the_window_of_its_first_token() -> None:
    work = prefill_work([ChunkPlace(5, 70, 0, 0), ChunkPlace(75, 3, 300, 100)], 32, 64, 8, HOPPER, window=40)
    assert work.items.tolist() == [
        [69, 6, 64, 0, 0, 2, WHOLE, 0],
        [37, 32, 32, 0, 0, 1, WHOLE, 0],
        [5, 32, 0, 0, 0, 1, WHOLE, 0],
        [75, 3, 300, 100, 4, 5, WHOLE, 0],
    ]


def test_the_tiles_of_a_window_are_shared_out() -> None:
    """32 tokens behind 32k that see 16k: 257 tiles."""
    work = prefill_work([ChunkPlace(5, 32, 32768, 0)], 32, 64, 8, HOPPER, window=1 << 14)
    items = work.items[np.argsort(work.items[:, 6])]
    assert items[:, 4].tolist() == [256 + 257 * piece // 32 for piece in range(32)]
    assert items[:, 5].tolist() == [*items[1:, 4].tolist(), 513]
    assert work.joins.tolist() == [[5, 32, 0, 32]]


def test_a_suffix_behind_a_long_prefix_fills_the_device() -> None:
    """32 tokens behind 32k: 513 tiles for each of 8 heads, 16 tiles a program."""
    work = work_of((32768, 32))
    assert work.joins.tolist() == [[5, 32, 0, 33]]
    assert work.num_items * 8 == HOPPER
    items = work.items[np.argsort(work.items[:, 6])]
    assert items[:, 4].tolist() == [513 * piece // 33 for piece in range(33)]
    assert items[:, 5].tolist() == [*items[1:, 4].tolist(), 513]
    assert {tuple(item) for item in items[:, :4].tolist()} == {(5, 32, 32768, 0)}


def test_no_piece_is_shorter_than_512_tokens() -> None:
    work = work_of((1000, 32))
    assert work.items[:, 4:6].tolist() == [[8, 17], [0, 8]]


def test_a_long_item_is_cut_beside_a_prompt_that_fills_the_device() -> None:
    work = work_of((0, 4064), (32768, 32))
    share = -(-(sum(-(-32 * item // 64) for item in range(1, 128)) + 513) * 8 // HOPPER)
    assert work.joins.tolist() == [[5 + 4064, 32, 0, -(-513 // share)]]
    assert (work.items[:, 6] == WHOLE).sum() == 127
    assert work.items[:, 5].max() - work.items[:, 4].min() <= 513
    lengths = work.items[:, 5] - work.items[:, 4]
    assert (np.diff(lengths) <= 0).all()
    assert lengths[0] <= share


@pytest.mark.parametrize("chunk", [(0, 4096), (0, 1024), (28672, 4096), (0, 512), (992, 32)])
def test_contexts_that_fill_the_device_or_are_short_stay_whole(chunk: tuple[int, int]) -> None:
    assert work_of(chunk).num_joins == 0


@pytest.mark.parametrize("tokens", [1, 32, 128])
@pytest.mark.parametrize("chunk", [(5000, 1), (5055, 40), (5056, 300), (20000, 129), (0, 2000)])
def test_pieces_are_the_item_and_start_where_all_rows_see_a_token(chunk: tuple[int, int], tokens: int) -> None:
    work = work_of(chunk, (0, 1), tokens=tokens, num_heads=1)
    by_item: dict[int, list[list[int]]] = {}
    for item in work.items.tolist():
        by_item.setdefault(item[0], []).append(item)
    for parts in by_item.values():
        parts.sort(key=lambda part: part[4])
        _, count, position, *_ = parts[0]
        ends = [part[5] for part in parts]
        assert [part[4] for part in parts] == [0, *ends[:-1]]
        assert ends[-1] == -(-(position + count) // 64)
        assert all(part[4] * 64 <= position for part in parts)
        assert all(part[4] < part[5] for part in parts)
    joined = {row: (first, num) for row, _, first, num in work.joins.tolist()}
    assert joined == {row: (parts[0][6], len(parts)) for row, parts in by_item.items() if len(parts) > 1}
    assert sorted(item[6] for item in work.items.tolist() if item[6] != WHOLE) == list(range(work.num_pieces))
