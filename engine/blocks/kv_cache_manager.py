"""Which blocks a sequence gets: its cached prefix, a reservation for the rest, and blocks out of it. Pure.

    admit ──> prefix locked, the rest reserved ──extend──> blocks in the table ──publish──> found as a prefix by others
      └── too few free blocks                                                      free: all of it is released

A sequence is admitted with blocks reserved for all its known tokens and for some output (`decode_reserve_tokens`), and
the watermark stays free. One that is alone is admitted whenever its known tokens fit, with whatever reserve is left:
no other sequence would ever free blocks for it.
"""

from __future__ import annotations

from disagg.engine.blocks.block_manager import BlockManager
from disagg.engine.request import Sequence
from disagg.proto.block_hash import HASH_BLOCK_TOKENS, child_hash, max_cached_tokens
from disagg.proto.token_ids import pack_token_ids


class KVCacheManager:
    """Allocates the blocks of a worker to sequences and frees them. Owner: the scheduler.

    Args:
        blocks: the blocks.
        max_model_len: prompt plus output of any sequence.
        decode_reserve_tokens: output tokens whose blocks are reserved at admission.
    """

    def __init__(self, blocks: BlockManager, *, max_model_len: int, decode_reserve_tokens: int) -> None:
        self.blocks = blocks
        self.max_model_len = max_model_len
        self.decode_reserve_tokens = decode_reserve_tokens

    def can_admit(self, sequence: Sequence, piece_tokens: int, *, alone: bool) -> bool:
        """Whether `admit` would admit the sequence."""
        return self._num_to_reserve(sequence, self._match(sequence, piece_tokens), alone=alone) is not None

    def admit(self, sequence: Sequence, piece_tokens: int, *, alone: bool) -> bool:
        """Lock the cached prefix of a sequence without blocks and reserve the rest, if that fits. One whose KV is in
        host memory, in pieces of `piece_tokens` tokens, gets blocks for all of that; what is cached need not be copied
        back."""
        matched = self._match(sequence, piece_tokens)
        num_to_reserve = self._num_to_reserve(sequence, matched, alone=alone)
        if num_to_reserve is None:
            return False
        self.blocks.lock(matched)
        self.blocks.reserve(num_to_reserve)
        sequence.block_table = matched
        sequence.reserved_blocks = num_to_reserve
        sequence.num_computed_tokens = len(matched) * self.blocks.block_size
        self.extend(sequence, sequence.swapped_tokens)
        return True

    def can_extend(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether tokens [0, num_tokens) have blocks, or the last one can get one."""
        if len(sequence.block_table) * self.blocks.block_size >= num_tokens:
            return True
        return sequence.reserved_blocks > 0 or self.blocks.num_available > 0

    def has_room(self, sequence: Sequence, num_tokens: int, *, num_left: int = 0) -> bool:
        """Whether `extend` would find the blocks for tokens [0, num_tokens), in its reservation or so that `num_left`
        stay available."""
        num_missing = self.blocks.blocks_for(num_tokens) - len(sequence.block_table) - sequence.reserved_blocks
        return num_missing <= max(0, self.blocks.num_available - num_left)

    def extend(self, sequence: Sequence, num_tokens: int) -> None:
        """Allocate the blocks for tokens [0, num_tokens): out of the reservation, and beyond it out of what is
        available."""
        num_missing = self.blocks.blocks_for(num_tokens) - len(sequence.block_table)
        if num_missing <= 0:
            return
        num_to_reserve = min(num_missing, sequence.reserved_blocks)
        sequence.reserved_blocks -= num_to_reserve
        for num_blocks, reserved in ((num_to_reserve, True), (num_missing - num_to_reserve, False)):
            table = sequence.block_table
            table += self.blocks.allocate(num_blocks, reserved=reserved, after=table[-1] if table else None)

    def publish(self, sequence: Sequence, start: int) -> None:
        """Put the blocks into the prefix cache that tokens [start, num_computed_tokens) have filled. A block whose
        content is published already is replaced by that one, so that the table leads to each published block by
        published ones."""
        fills_none = start // HASH_BLOCK_TOKENS == sequence.num_computed_tokens // HASH_BLOCK_TOKENS
        if fills_none or not sequence.spec.root_hash:
            return
        hashes, table, block_size = sequence.block_hashes, sequence.block_table, self.blocks.block_size
        while len(hashes) < sequence.num_computed_tokens // HASH_BLOCK_TOKENS:
            first = len(hashes) * HASH_BLOCK_TOKENS
            parent = hashes[-1] if hashes else sequence.spec.root_hash
            block = pack_token_ids(sequence.token_ids[first : first + HASH_BLOCK_TOKENS])
            hashes.append(child_hash(parent, block))
        hashes_per_block = block_size // HASH_BLOCK_TOKENS
        for index in range(start // block_size, sequence.num_computed_tokens // block_size):
            block_hashes = hashes[index * hashes_per_block : (index + 1) * hashes_per_block]
            after = table[index - 1] if index else None
            table[index] = self.blocks.publish(
                table[index], block_hashes, sequence.spec.tenant_tag, after, is_copy=sequence.is_copy
            )

    def free(self, sequence: Sequence) -> None:
        """Release all blocks of a sequence and its reservation."""
        self.blocks.release(sequence.block_table, is_copy=sequence.is_copy)
        self.blocks.unreserve(sequence.reserved_blocks)
        sequence.block_table = []
        sequence.reserved_blocks = 0
        sequence.num_computed_tokens = 0

    # ------------------------------------------------------------ inside

    def _match(self, sequence: Sequence, piece_tokens: int) -> list[int]:
        """The blocks of the cached prefix. A piece of a suspended sequence is copied as a whole, so its prefix ends
        with one, unless it reaches as far as the copy."""
        cap = max_cached_tokens(sequence.num_tokens) if sequence.spec.root_hash else 0
        if sequence.gathers_prompt:
            cap = min(cap, len(sequence.prompt_logprobs))
        matched, block_size = self.blocks.match_prefix(sequence.block_hashes, cap), self.blocks.block_size
        if len(matched) * block_size < sequence.swapped_tokens:
            pieces = len(matched) * block_size // piece_tokens
            del matched[pieces * piece_tokens // block_size :]
        return matched

    def _num_to_reserve(self, sequence: Sequence, matched: list[int], *, alone: bool) -> int | None:
        """Blocks to reserve beside the matched ones; None where too few are free."""
        blocks = self.blocks
        room = blocks.available_after_lock(matched)
        num_needed = blocks.blocks_for(sequence.num_tokens) - len(matched)
        num_wanted = blocks.blocks_for(self._num_tokens_to_reserve(sequence)) - len(matched)
        if num_wanted <= room - blocks.num_watermark_blocks:
            return num_wanted
        return min(num_wanted, room) if alone and num_needed <= room else None

    def _num_tokens_to_reserve(self, sequence: Sequence) -> int:
        """Known tokens and output to come whose KV is written here; that of the very last token never is."""
        if sequence.hold_after_prefill:
            return sequence.num_tokens
        num_remaining = sequence.spec.sampling.max_tokens - sequence.num_output_tokens
        num_tokens = sequence.num_tokens + min(num_remaining - 1, self.decode_reserve_tokens)
        return min(num_tokens, max(self.max_model_len - 1, sequence.num_tokens))
