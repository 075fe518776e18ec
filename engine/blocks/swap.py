"""KV of preempted sequences in host memory: which slots hold what (`SwapPool`), and the copies (`Swapper`). Pure.

    preempted ──keep──> slots taken, `SwapOut` ──(copied)──> suspended ──admitted──> `SwapIn` ──(copied)──> free_slots
                  └── no slots left: computed again, on this worker or on another one

A slot holds `slot_tokens` tokens of the first cache group, or as many whole blocks of another group as fit into the
same bytes; of a window only what is left of it is kept. Its memory is allocated at its first use and then reused, so
that a worker never has more of it than its slots. The engine core makes the copies between two steps, in the order in
which they were decided, with the runner's gather and scatter.
"""

from __future__ import annotations

from dataclasses import dataclass

from disagg.engine.plan import Buffer, ModelRunner
from disagg.engine.request import Sequence
from disagg.engine.sharding.kv_routes import plan_pair
from disagg.proto.ids import AttemptKey

_SLOT_TOKENS = 128
"""Large enough that a copy costs more than its call, small enough that a sequence wastes little in its last slot."""


def slot_tokens_for(block_size: int) -> int:
    """Tokens of a slot: whole blocks."""
    return max(1, _SLOT_TOKENS // block_size) * block_size


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens [start, end) of a sequence in one cache group, and the slot that they are kept in."""

    slot: int
    start: int
    end: int
    group: int = 0


@dataclass(frozen=True, slots=True)
class SwapOut:
    """Copy the KV of a sequence that was just suspended to host memory. Its blocks have new owners: the copy must be
    made before the next step runs."""

    sequence: Sequence
    block_tables: tuple[tuple[int, ...], ...]
    """Block table of each cache group."""
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class SwapIn:
    """Copy what the cache lacks of a suspended sequence's KV back, into the blocks of its table."""

    sequence: Sequence
    pieces: tuple[Piece, ...]
    """Pieces to copy; empty where the cache has all of it."""


class SwapPool:
    """The slots. Owner: the scheduler.

    Args:
        num_slots: 0 where nothing can be kept.
        slot_tokens: tokens of the first cache group in a slot; a multiple of the block size.
        slot_bytes: what they take.
        window_tokens: the same of each other group.
    """

    def __init__(
        self,
        num_slots: int = 0,
        slot_tokens: int = _SLOT_TOKENS,
        slot_bytes: int = 0,
        window_tokens: tuple[int, ...] = (),
    ) -> None:
        self.num_slots = num_slots
        self.slot_tokens = slot_tokens
        self.slot_bytes = slot_bytes
        self._group_tokens = (slot_tokens, *window_tokens)
        self._num_made = 0
        """Slots 0 .. `_num_made` - 1 were used at some time."""
        self._free: list[int] = []
        """Slots below `_num_made` that are free; the last one is used next."""
        self._kept: dict[AttemptKey, tuple[Piece, ...]] = {}

    @property
    def num_kept(self) -> int:
        """Sequences whose KV is kept."""
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        """Memory that they take."""
        return self.slot_bytes * sum(map(len, self._kept.values()))

    def keep(self, key: AttemptKey, num_tokens: int, firsts: tuple[int, ...] = ()) -> tuple[Piece, ...]:
        """Take slots for the first `num_tokens` tokens of a sequence that has none; of each group with a window, for
        those from `firsts` on. Empty if there are too few."""
        assert key not in self._kept, f"{key} is kept already"
        if not self.num_slots:
            return ()
        starts = [
            (group, start, min(start + size, num_tokens))
            for group, (first, size) in enumerate(zip((0, *firsts), self._group_tokens, strict=True))
            for start in range(first, num_tokens, size)
        ]
        num_free = len(self._free) + self.num_slots - self._num_made
        if len(starts) > num_free:
            return ()
        pieces = tuple(Piece(self._take(), start, end, group) for group, start, end in starts)
        if pieces:
            self._kept[key] = pieces
        return pieces

    def pieces(self, key: AttemptKey, start: int) -> tuple[Piece, ...]:
        """Where tokens from `start`, the first one of a piece, are kept, and all of the windows."""
        return tuple(piece for piece in self._kept[key] if piece.group or piece.start >= start)

    def free_slots(self, key: AttemptKey) -> None:
        """The sequence needs its slots no more. Idempotent."""
        self._free += [piece.slot for piece in reversed(self._kept.pop(key, ()))]

    def check_integrity(self, suspended: dict[AttemptKey, int]) -> list[str]:
        """Findings; empty when sound. `suspended` has each suspended sequence and how many of its tokens are kept."""
        kept = {key: pieces[-1].end for key, pieces in self._kept.items()}
        problems = [] if kept == suspended else ["host memory is kept for other sequences than the suspended ones"]
        slots = sorted(self._free + [piece.slot for pieces in self._kept.values() for piece in pieces])
        if slots != list(range(self._num_made)):
            problems.append(f"of {self._num_made} slots of host memory some are lost or used twice")
        if self._num_made > self.num_slots:
            problems.append(f"{self._num_made} slots of host memory were made, {self.num_slots} are allowed")
        return problems

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        self._num_made += 1
        return self._num_made - 1


def swap_pool(runner: ModelRunner, swap_bytes: int) -> SwapPool:
    """A pool with as many slots as fit into `swap_bytes`."""
    # Heads on several ranks are kept by each.
    first, *others = plan_pair(runner.layout, runner.shape, runner.shape).groups
    size = runner.block_size
    slot_tokens = slot_tokens_for(size)
    slot_bytes = max([slot_tokens * first.token_bytes, *(size * other.token_bytes for other in others)])
    window_tokens = tuple(slot_bytes // (size * other.token_bytes) * size for other in others)
    return SwapPool(swap_bytes // slot_bytes, slot_tokens, slot_bytes, window_tokens)


class Swapper:
    """The memory behind the slots of a `SwapPool`, each of `slot_bytes` bytes."""

    def __init__(self, runner: ModelRunner, slot_bytes: int) -> None:
        self._runner = runner
        self._payload_bytes = slot_bytes
        self._buffers: dict[int, Buffer] = {}

    def swap_out(self, swap: SwapOut) -> int:
        """Blocks that were copied. Raises whatever the runner raises; the slots then hold nothing of use."""
        for piece in swap.pieces:
            buffer = self._buffer(piece.slot)
            table = swap.block_tables[piece.group]
            self._runner.gather(table, piece.start, piece.end, buffer, self._runner.shape, group=piece.group)
        return self._num_blocks(swap.pieces)

    def swap_in(self, swap: SwapIn) -> int:
        """Blocks that were copied. Raises whatever the runner raises; the blocks then hold nothing of use."""
        for piece in swap.pieces:
            buffer = self._buffer(piece.slot)
            table = swap.sequence.table_of(piece.group)
            self._runner.scatter(table, piece.start, piece.end, buffer, self._runner.shape, group=piece.group)
        return self._num_blocks(swap.pieces)

    def _num_blocks(self, pieces: tuple[Piece, ...]) -> int:
        return sum(-(-(piece.end - piece.start) // self._runner.block_size) for piece in pieces)

    def _buffer(self, slot: int) -> Buffer:
        """The memory of a slot, allocated at its first use."""
        if slot not in self._buffers:
            self._buffers[slot] = self._runner.new_staging(self._payload_bytes)
        return self._buffers[slot]
