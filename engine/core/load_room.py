"""How many blocks a prefix may take that is loaded from a tier, or fetched from another worker. Pure.

What is loaded holds blocks before its sequence is admitted, so it must not keep others out: all loads and fetches
together take at most half of the blocks that could be had. Where no other prompt waits and nothing else is loaded, the
prefix may have all that the sequences that run do not need soon: its own sequence needs these blocks next.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from disagg.engine.core.scheduler import Scheduler
from disagg.engine.request import Sequence, SequenceState

GROWTH_BLOCKS = 8
"""Blocks that each sequence that runs, or for which there is a reservation, may need while a prefix is loaded."""


def load_room(scheduler: Scheduler, sequence: Sequence, matched: Seq[int], num_taken: int = 0) -> int:
    """Blocks that a prefix of `sequence` may take beside `matched`, which are cached. `num_taken`: blocks that other
    loads were given."""
    blocks = scheduler.blocks
    num_free = max(0, blocks.available_after_lock(matched))
    half = max(0, (num_free + num_taken) // 2 - num_taken)
    others = [each for each in scheduler.sequences.values() if each is not sequence]
    if len(scheduler.waiting) or any(each.state is SequenceState.LOADING and each.loading_tokens for each in others):
        return half
    num_growing = len(scheduler.running) + sum(each.state is SequenceState.RESERVED for each in others)
    return max(half, num_free - blocks.num_watermark_blocks - GROWTH_BLOCKS * num_growing)
