"""Copies the KV of suspended sequences between the cache and host memory, with the runner's gather and scatter.

Owner: the engine core, which carries the copies out between two steps, in the order in which they were decided.
"""

from __future__ import annotations

from disagg.engine.blocks.swap import Piece, SwapIn, SwapOut, SwapPool, slot_tokens_for
from disagg.engine.plan import Buffer, ModelRunner
from disagg.engine.sharding.routes import plan_pair


def swap_pool(runner: ModelRunner, swap_bytes: int) -> SwapPool:
    """As many slots as fit into `swap_bytes`."""
    slot_tokens = slot_tokens_for(runner.block_size)
    slot_bytes = slot_tokens * _token_bytes(runner)
    return SwapPool(swap_bytes // slot_bytes, slot_tokens, slot_bytes)


def _token_bytes(runner: ModelRunner) -> int:
    """What all ranks keep of a token: KV heads that several ranks have are kept by each."""
    return plan_pair(runner.layout, runner.tp, runner.tp).bytes_per_token


class Swapper:
    """The memory behind the slots of a `SwapPool`, each of `slot_tokens` tokens."""

    def __init__(self, runner: ModelRunner, slot_tokens: int) -> None:
        self._runner = runner
        self._payload_bytes = slot_tokens * _token_bytes(runner)
        self._buffers: dict[int, Buffer] = {}

    def swap_out(self, swap: SwapOut) -> int:
        """Blocks that were copied. Raises whatever the runner raises; the slots then hold nothing of use."""
        for piece in swap.pieces:
            buffer = self._buffer(piece.slot)
            self._runner.gather(swap.block_table, piece.start, piece.end, buffer, self._runner.tp)
        return self._num_blocks(swap.pieces)

    def swap_in(self, swap: SwapIn) -> int:
        """Blocks that were copied. Raises whatever the runner raises; the blocks then hold nothing of use."""
        for piece in swap.pieces:
            buffer = self._buffer(piece.slot)
            self._runner.scatter(swap.sequence.block_table, piece.start, piece.end, buffer, self._runner.tp)
        return self._num_blocks(swap.pieces)

    def _num_blocks(self, pieces: tuple[Piece, ...]) -> int:
        return sum(-(-(piece.end - piece.start) // self._runner.block_size) for piece in pieces)

    def _buffer(self, slot: int) -> Buffer:
        """The memory of a slot, allocated at its first use."""
        if slot not in self._buffers:
            self._buffers[slot] = self._runner.new_staging(self._payload_bytes)
        return self._buffers[slot]
