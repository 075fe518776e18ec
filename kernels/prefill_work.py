"""The work of each program of the prefill kernel: a list that the host makes once a step, for all layers.

An item is up to `tokens` query tokens of one chunk, which attend to all tiles of the context up to the last of them, or
from the first on that the window of the first of them leaves. All chunks of a step are in one list, the items with the
most tiles first. An item that has more than twice an equal share of all tiles is cut into pieces of about that share
("split KV": Dao et al. 2023, "Flash-Decoding"), or the step would take as long as its longest item: 32 tokens behind
32k are one item for each KV head. A second kernel joins the pieces.

Pure: numpy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

ITEM_FIELDS = 8
"""Fields of an item: row of the batch of its first token, number of tokens, position of its first token, first entry of
its block table, first tile, end tile, number of the piece or -1, 0."""
JOIN_FIELDS = 4
"""Fields of a join: row of the batch of the first token, number of tokens, first piece, number of pieces."""
WHOLE = -1
MIN_PIECE_TOKENS = 512
"""Least number of context tokens of a piece: a shorter one costs more to join than it saves."""


@dataclass(frozen=True, slots=True, eq=False)
class ChunkPlace:
    """A chunk of a prompt, described for the host."""

    row: int
    """Row of its first token in the batch."""
    num_tokens: int
    start: int
    """Position of its first token."""
    table: int
    """First entry of its block table, in the tables of all chunks one behind the other."""


@dataclass(frozen=True, slots=True, eq=False)
class PrefillWork:
    """The work list of a step."""

    numbers: NDArray[np.int32]
    """W items of `ITEM_FIELDS`, then J joins of `JOIN_FIELDS` for the items that are cut."""
    num_items: int
    """W: the number of items, with each piece counted as one."""
    num_joins: int
    num_pieces: int
    """Number of pieces; multiplied by the KV heads at most one and a half times the number of programs."""
    longest: int
    """Query tokens of the longest chunk, for which the launch shape is chosen."""

    @property
    def items(self) -> NDArray[np.int32]:
        """The items as an array [W, ITEM_FIELDS]."""
        return self.numbers[: self.num_items * ITEM_FIELDS].reshape(-1, ITEM_FIELDS)

    @property
    def joins(self) -> NDArray[np.int32]:
        """The joins as an array [J, JOIN_FIELDS]."""
        return self.numbers[self.num_items * ITEM_FIELDS :].reshape(-1, JOIN_FIELDS)


def prefill_work(
    chunks: Sequence[ChunkPlace], tokens: int, tile: int, num_heads: int, num_programs: int, window: int | None = None
) -> PrefillWork:
    """Make the work list for at least one chunk, programs of `tokens` query tokens, and tiles of `tile` context tokens;
    each item is computed for each of `num_heads` KV heads, `num_programs` programs at a time. A query token sees the
    last `window` tokens up to its own, or all."""
    items = np.concatenate([_items_of(chunk, tokens, tile, window) for chunk in chunks])
    tiles = items[:, 5] - items[:, 4]
    least = -(-MIN_PIECE_TOKENS // tile)
    share = max(-(-int(tiles.sum()) * num_heads // num_programs), least)
    joins: list[tuple[int, ...]] = []
    pieces: list[tuple[int, ...]] = []
    for at in np.flatnonzero(tiles > 2 * share).tolist():
        row, count, position, table, begin, end, _, _ = items[at].tolist()
        # A piece starts where all its rows see a token but for their windows, so that the tiles at the diagonal are all
        # in the last one.
        length = end - begin
        wanted = min(-(-length // share), length // least)
        cuts = [*sorted({min(begin + length * piece // wanted, position // tile) for piece in range(wanted)}), end]
        joins.append((row, count, len(pieces), len(cuts) - 1))
        for first, last in pairwise(cuts):
            pieces.append((row, count, position, table, first, last, len(pieces), 0))
    found = np.concatenate((items[tiles <= 2 * share], np.array(pieces, dtype=np.int64).reshape(-1, ITEM_FIELDS)))
    order = np.argsort(found[:, 4] - found[:, 5], kind="stable")
    numbers = np.concatenate((found[order].reshape(-1), np.array(joins, dtype=np.int64).reshape(-1)))
    return PrefillWork(
        numbers=numbers.astype(np.int32),
        num_items=len(found),
        num_joins=len(joins),
        num_pieces=len(pieces),
        longest=max(chunk.num_tokens for chunk in chunks),
    )


def _items_of(chunk: ChunkPlace, tokens: int, tile: int, window: int | None) -> NDArray[np.int64]:
    """The whole items of a chunk, from its last token on, because those have the most tiles."""
    first = np.arange(0, chunk.num_tokens, tokens, dtype=np.int64)[::-1]
    items = np.zeros((len(first), ITEM_FIELDS), dtype=np.int64)
    items[:, 0] = chunk.row + first
    items[:, 1] = np.minimum(tokens, chunk.num_tokens - first)
    items[:, 2] = chunk.start + first
    items[:, 3] = chunk.table
    if window is not None:
        items[:, 4] = np.maximum(items[:, 2] + 1 - window, 0) // tile
    items[:, 5] = -(-(items[:, 2] + items[:, 1]) // tile)
    items[:, 6] = WHOLE
    return items
