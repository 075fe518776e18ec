"""Which blocks a sequence gets: its cached prefix, a reservation for the rest, and blocks out of it. Pure.

    admit ──> prefix locked, the rest reserved ──extend──> blocks in the table ──publish──> found as a prefix by others
      └── too few free blocks                                                      free: all of it is released

A sequence is admitted with blocks reserved for all its known tokens and for some output (`decode_reserve_tokens`), and
the watermark stays free. One that is alone is admitted whenever its known tokens fit, with whatever reserve is left:
no other sequence would ever free blocks for it.

A model with windows has a pool of blocks for each of its cache groups (`window_group.py`), and a sequence is admitted,
and extended, in all of them or not at all. Its cached prefix is then the longest one that all groups can resume
(`resume_points.py`):

    computed from p on      the first group has blocks of [0, p), the others have those of the window before p
    the rest of it arrives  from another worker, or from host memory: of a window only what its end needs
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

from disagg.engine.blocks.block_manager import BlockManager
from disagg.engine.blocks.resume_points import GroupBlock, ResumePoints
from disagg.engine.blocks.window_group import WindowGroup, resumable_end
from disagg.engine.request import Sequence, SequenceState
from disagg.proto.block_hash import HASH_BLOCK_TOKENS, child_hash, max_cached_tokens
from disagg.proto.ids import BlockHash
from disagg.proto.token_ids import pack_token_ids


class _Match(NamedTuple):
    """What the cache has of a sequence that is to be admitted."""

    blocks: list[int]
    """Blocks of the first group."""
    num_found: int
    """Blocks that the first group has, whether the other groups can resume behind them or not."""
    firsts: tuple[int, ...] = ()
    """First token whose KV the sequence needs of each other group."""


class KVCacheManager:
    """Allocates the blocks of a worker to sequences and frees them. Owner: the scheduler.

    Args:
        blocks: the blocks.
        max_model_len: prompt plus output of any sequence.
        decode_reserve_tokens: output tokens whose blocks are reserved at admission.
        windows: the cache groups beside the first one.
    """

    def __init__(
        self, blocks: BlockManager, *, max_model_len: int, decode_reserve_tokens: int, windows: Seq[WindowGroup] = ()
    ) -> None:
        self.blocks = blocks
        self.windows = tuple(windows)
        caches = [blocks.prefix, *(window.blocks.prefix for window in self.windows)]
        self.points = ResumePoints(caches if self.windows else ())
        self.max_model_len = max_model_len
        self.decode_reserve_tokens = decode_reserve_tokens

    def can_admit(self, sequence: Sequence, piece_tokens: int, *, alone: bool) -> bool:
        """Whether `admit` would admit the sequence."""
        if self._num_to_reserve(sequence, self._match(sequence, piece_tokens).blocks, alone=alone) is None:
            return False
        return not self.windows or self._short_window(sequence, alone=alone) is None

    def admit(self, sequence: Sequence, piece_tokens: int, *, alone: bool) -> bool:
        """Lock the cached prefix of a sequence without blocks and reserve the rest, if that fits in all groups. One
        whose KV is in host memory, in pieces of `piece_tokens` tokens, gets blocks for all of that; what is cached need
        not be copied back."""
        match = self._match(sequence, piece_tokens)
        num_to_reserve = self._num_to_reserve(sequence, match.blocks, alone=alone)
        if num_to_reserve is None or (self.windows and self._short_window(sequence, alone=alone) is not None):
            return False
        self.blocks.lock(match.blocks)
        self.blocks.reserve(num_to_reserve)
        sequence.block_table = match.blocks
        sequence.reserved_blocks = num_to_reserve
        sequence.num_computed_tokens = len(match.blocks) * self.blocks.block_size
        if self.windows:
            self._admit_windows(sequence, match)
        self.extend(sequence, sequence.swapped_tokens)
        return True

    def most_cached(self, sequence: Sequence) -> int:
        """How many of its leading tokens a new sequence may take from the prefix cache, at most."""
        pooling = sequence.spec.pooling
        if pooling is not None and pooling.is_whole:
            return 0
        cap = max_cached_tokens(sequence.num_tokens) if sequence.spec.root_hash else 0
        return min(cap, len(sequence.prompt_logprobs)) if sequence.gathers_prompt else cap

    def admit_loading(self, sequence: Sequence, num_cached: int, num_tokens: int) -> bool:
        """Lock what is cached of the first `num_cached` tokens of a sequence that is loaded from a tier, or fetched,
        and reserve blocks for its tokens up to `num_tokens`, if there are any. For a model without windows."""
        blocks = self.blocks
        matched = blocks.match_prefix(sequence.block_hashes, num_cached)
        num_to_reserve = blocks.blocks_for(num_tokens) - len(matched)
        if num_to_reserve > blocks.available_after_lock(matched):
            return False
        blocks.lock(matched)
        blocks.reserve(num_to_reserve)
        sequence.block_table, sequence.reserved_blocks = matched, num_to_reserve
        sequence.num_computed_tokens = len(matched) * blocks.block_size
        return True

    def lacking(self, sequence: Sequence) -> str:
        """What a sequence lacks that was not admitted."""
        window = self._short_window(sequence)
        return "" if window is None else f" of the window of {window.group.window} tokens"

    @property
    def num_reserved(self) -> int:
        """Blocks of the first group that are not written and cannot be given to others: those that are reserved. Where
        a larger share is promised of a window's pool, as many as make that share of the first group."""
        blocks = self.blocks
        num_reserved = blocks.num_reserved
        for window in self.windows:
            num_reserved = max(num_reserved, window.share_of(blocks.num_blocks) - blocks.num_active)
        return num_reserved

    def can_extend(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether tokens [0, num_tokens) have blocks in all groups, or the last one can get them."""
        if len(sequence.block_table) * self.blocks.block_size >= num_tokens:
            return True
        if not (sequence.reserved_blocks > 0 or self.blocks.num_available > 0):
            return False
        return not self.windows or self._windows_have_room(sequence, num_tokens)

    def has_room(self, sequence: Sequence, num_tokens: int, *, num_left: int = 0) -> bool:
        """Whether `extend` would find the blocks for tokens [0, num_tokens), in its reservation or so that `num_left`
        stay available."""
        num_missing = self.blocks.blocks_for(num_tokens) - len(sequence.block_table) - sequence.reserved_blocks
        if num_missing > max(0, self.blocks.num_available - num_left):
            return False
        return not self.windows or self._windows_have_room(sequence, num_tokens, num_left)

    def extend(self, sequence: Sequence, num_tokens: int) -> None:
        """Allocate the blocks for tokens [0, num_tokens) in all groups: out of the reservation or the promise, and
        beyond it out of what is available."""
        for window, held in zip(self.windows, sequence.windows, strict=True):
            window.extend(held, num_tokens)
        self._extend_first(sequence, num_tokens)

    def extend_group(self, sequence: Sequence, group: int, num_tokens: int) -> None:
        """`extend` of one group only, whose KV has arrived."""
        if group:
            self.windows[group - 1].extend(sequence.windows[group - 1], num_tokens)
        else:
            self._extend_first(sequence, num_tokens)

    def outgrown(self, sequence: Sequence) -> None:
        """More tokens of a sequence that arrives are known: of its windows others are due now, behind those that
        were."""
        for window, held in zip(self.windows, sequence.windows, strict=True):
            window.skip(held, window.group.kept_from(sequence.num_tokens))
        if self.windows:
            self._choose_points(sequence, parts_at=0)

    def _extend_first(self, sequence: Sequence, num_tokens: int) -> None:
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
        if fills_none:
            return
        if not sequence.spec.root_hash:
            self._leave_windows(sequence)
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
        if self.windows:
            self._pass(sequence, start)

    def free(self, sequence: Sequence) -> None:
        """Release all blocks of a sequence and its reservation. A model with windows can be resumed where it ended."""
        if sequence.windows:
            self._note_point(sequence, sequence.num_computed_tokens)
            for window, held in zip(self.windows, sequence.windows, strict=True):
                window.free(held)
            sequence.windows, sequence.resume_at = [], ()
        self.blocks.release(sequence.block_table, is_copy=sequence.is_copy)
        self.blocks.unreserve(sequence.reserved_blocks)
        sequence.block_table = []
        sequence.reserved_blocks = 0
        sequence.num_computed_tokens = 0

    # ------------------------------------------------------------ inside

    def _match(self, sequence: Sequence, piece_tokens: int) -> _Match:
        """What is cached. A piece of a suspended sequence is copied as a whole, so its prefix ends with one, unless it
        reaches as far as the copy."""
        cap = self.most_cached(sequence)
        if self.windows and sequence.swapped_tokens:
            cap = min(cap, sequence.swapped_tokens)
        matched, block_size = self.blocks.match_prefix(sequence.block_hashes, cap), self.blocks.block_size
        if len(matched) * block_size < sequence.swapped_tokens:
            pieces = len(matched) * block_size // piece_tokens
            del matched[pieces * piece_tokens // block_size :]
        return self._match_windows(sequence, matched) if self.windows else _Match(matched, len(matched))

    def _match_windows(self, sequence: Sequence, matched: list[int]) -> _Match:
        """The longest prefix of `matched` that the other groups can resume."""
        num_found = end = len(matched)
        if sequence.swapped_tokens:  # All that is kept of a window is copied back.
            return _Match(matched, num_found, sequence.swapped_windows)
        keys = self._keys(sequence, end)
        if sequence.state is SequenceState.RESERVED:
            firsts = tuple(window.group.kept_from(sequence.num_tokens) for window in self.windows)
            for window, first in zip(self.windows, firsts, strict=True):
                if end > first // window.size:
                    end = window.first_gap(keys, first // window.size, end)
            del matched[end:]
            return _Match(matched, num_found, firsts)
        end = resumable_end(self.windows, keys, end)
        del matched[end:]
        return _Match(
            matched, num_found, tuple(window.kept_from(end * window.size) * window.size for window in self.windows)
        )

    def _keys(self, sequence: Sequence, num_blocks: int) -> Seq[BlockHash]:
        """The hashes by which the first blocks of a sequence are found."""
        per_block = self.blocks.block_size // HASH_BLOCK_TOKENS
        return sequence.block_hashes[per_block - 1 : num_blocks * per_block : per_block]

    def _short_window(self, sequence: Sequence, *, alone: bool = False) -> WindowGroup | None:
        """A window whose pool is too full to admit the sequence. One that is alone finds all of it available."""
        num_tokens = self._num_tokens_to_reserve(sequence)
        for window in self.windows:
            num_left = 0 if alone else window.blocks.num_watermark_blocks
            if window.most_for(num_tokens) > window.num_available - num_left:
                return window
        return None

    def _windows_have_room(self, sequence: Sequence, num_tokens: int, num_left: int = 0) -> bool:
        pairs = zip(self.windows, sequence.windows, strict=True)
        return all(window.has_room(held, num_tokens, num_left) for window, held in pairs)

    def _admit_windows(self, sequence: Sequence, match: _Match) -> None:
        end, num_tokens = len(match.blocks), self._num_tokens_to_reserve(sequence)
        keys = self._keys(sequence, end)
        for window, first_token in zip(self.windows, match.firsts, strict=True):
            last = 0 if sequence.swapped_tokens else end
            sequence.windows.append(window.admit(keys, first_token, last, window.most_for(num_tokens)))
        size = self.blocks.block_size
        self._choose_points(sequence, parts_at=match.num_found * size if match.num_found > end else 0)
        if end and not sequence.swapped_tokens:
            self._go_on(sequence, end * size)

    def _choose_points(self, sequence: Sequence, *, parts_at: int) -> None:
        """Where the sequence is to be resumable once it has passed there: at the end of its prompt, and where that
        parts from another one. All that a sequence has when its KV has arrived is its prompt."""
        size, num_tokens = self.blocks.block_size, sequence.num_tokens
        if sequence.state is not SequenceState.RESERVED:
            num_tokens = max_cached_tokens(num_tokens)
        sequence.resume_at = (num_tokens // size * size, parts_at)

    def _pass(self, sequence: Sequence, start: int) -> None:
        """Tokens [start, num_computed_tokens) were computed or have arrived: publish the blocks of the windows, and let
        go of what has left them."""
        num_computed, spec = sequence.num_computed_tokens, sequence.spec
        for window, held in zip(self.windows, sequence.windows, strict=True):
            window.publish(held, sequence.block_hashes, num_computed, spec.tenant_tag)
        for point in sorted(set(sequence.resume_at)):
            if start < point <= num_computed:
                self._go_on(sequence, point)
        self._leave_windows(sequence)

    def _leave_windows(self, sequence: Sequence) -> None:
        for window, held in zip(self.windows, sequence.windows, strict=True):
            window.leave(held, window.kept_from(sequence.num_computed_tokens))

    def _go_on(self, sequence: Sequence, num_tokens: int) -> None:
        """A place to resume the sequence, which goes on from there."""
        self._note_point(sequence, num_tokens)
        self.points.follow(sequence.block_hashes[num_tokens // HASH_BLOCK_TOKENS - 1])

    def _note_point(self, sequence: Sequence, num_tokens: int) -> None:
        """The sequence can be resumed behind the last whole block of `num_tokens` tokens, if it has what that needs."""
        block_size = self.blocks.block_size
        end = num_tokens // block_size
        if not end or not sequence.spec.root_hash:
            return
        needed = [GroupBlock(0, sequence.block_table[end - 1])]
        for window, held in zip(self.windows, sequence.windows, strict=True):
            first = max(0, end - window.num_window_blocks)
            blocks = held.block_table[first:end]
            if first < held.first or len(blocks) < end - first:
                return
            if not all(map(window.blocks.prefix.is_published, blocks)):
                return
            needed += [GroupBlock(window.number, block) for block in blocks]
        self.points.note(sequence.block_hashes[: end * block_size // HASH_BLOCK_TOKENS], tuple(needed))

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
