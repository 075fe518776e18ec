"""The sequences of a fast worker, and which blocks each gets: `engine/blocks/kv_cache_manager.py` on counts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from operator import sub
from typing import Protocol

from disagg.engine.cache_groups import PoolLimits
from disagg.engine.config import WorkerConfig
from disagg.proto.block_hash import HASH_BLOCK_TOKENS, chain_hashes, max_cached_tokens
from disagg.proto.ids import AttemptKey, BlockHash
from disagg.proto.messages import KvEvent, SequenceSpec, WorkerInfo
from disagg.proto.token_ids import TOKEN_ID_BYTES, PackedTokenIds, num_token_ids, pack_token_ids
from disagg.simulator.fast.block_set import BlockSet, PieceKey
from disagg.simulator.fast.fast_windows import FastWindows
from disagg.simulator.world.prompts import HashRuns
from disagg.simulator.world.surroundings import Answers


class PairedWorker(Protocol):
    """A worker, as the other one of its pair uses it; see `FastWorker`."""

    is_dead: bool

    def on_reserved(self, key: AttemptKey, cached_tokens: int) -> None:
        """P: the decode worker has reserved blocks."""
        ...

    def on_refused(self, key: AttemptKey, reason: str) -> None:
        """P: the decode worker has no room for the attempt."""
        ...

    def on_ack(self, key: AttemptKey) -> None:
        """P: the decode worker owns the sequence."""
        ...

    def on_kv(self, sent: FastSequence) -> None:
        """D: all KV of a sequence of P has arrived."""
        ...

    def on_abort(self, key: AttemptKey) -> None:
        """The other worker gives up the attempt."""
        ...


class FastSequence:
    """One attempt on one worker."""

    __slots__ = (
        "alloc_wait_s",
        "arrival",
        "attends",
        "cached_tokens",
        "cannot_meet_ttft",
        "computed",
        "deadline",
        "end_at",
        "ends",
        "first_at",
        "gateway_id",
        "holds",
        "joined_at",
        "key",
        "keys",
        "kv_bytes",
        "locked",
        "next_kv_token",
        "num_given",
        "num_known",
        "num_preemptions",
        "order",
        "other",
        "own",
        "peer_cached",
        "phase",
        "promised",
        "queue_s",
        "reported_at",
        "resume_at",
        "sent",
        "sizes",
        "spec",
        "swapped",
        "transfer_began",
        "window_blocks",
    )

    def __init__(self, spec: SequenceSpec, now: float, *, holds: bool) -> None:
        self.spec = spec
        self.key = spec.key
        self.gateway_id = spec.gateway_id
        self.keys: Sequence[PieceKey] = ()
        """Keys of the full blocks of the given tokens; one key may stand for several blocks."""
        self.ends: Sequence[int] = ()
        """For each key: the number of 16-token units up to its end."""
        self.sizes: Sequence[int] = ()
        """For each key: the number of its units."""
        self.note_hashes(spec.block_hashes)
        self.num_given = self.num_known = spec.num_known_tokens
        """`num_given`: tokens known at the beginning. `num_known`: those to compute before the next token is
        sampled."""
        self.holds = holds
        """Whether the prompt is computed for another worker."""
        self.phase = "waiting"
        """One of waiting, prefill, passing (the last part of the prompt is in the stages behind the first one), held,
        offered, reserved, resumed, decode, over."""
        self.other: PairedWorker | None = None
        """The other worker of its pair."""
        self.arrival = now
        """When the engine's current task for the sequence arrived: the dispatch, the offer, or the reservation."""
        self.deadline = None if spec.timeout_s is None else now + spec.timeout_s
        """When the request times out; only scheduling `slack` uses it."""
        streamed_s = None if spec.targets is None else spec.targets.streamed_s
        self.first_at = None if streamed_s is None else now - streamed_s
        """When the request's first token was sampled or received; only set for scheduling `slack`."""
        self.cannot_meet_ttft = False
        self.alloc_wait_s = 0.0
        self.computed = 0
        self.cached_tokens = 0
        self.locked = 0
        """Number of leading `keys` that it holds."""
        self.own = 0
        """Number of units that it holds besides these."""
        self.promised = 0
        self.window_blocks = 0
        """The number of blocks for which it is promised its windows; 0 without."""
        self.resume_at: tuple[int, ...] = ()
        """The numbers of units at which a resume point will be kept."""
        self.num_preemptions = 0
        self.swapped = 0
        """Number of tokens whose KV is in host memory."""
        self.sent = len(spec.emitted_token_ids)
        """Number of output tokens that the gateway has or gets from another worker."""
        self.joined_at = 0
        """The worker's count of decode steps when it began to decode."""
        self.reported_at = 0
        """The count of decode steps whose tokens were sent."""
        self.attends = 0
        """Number of tokens that its first decode step attends to."""
        self.end_at = 0
        """The count of decode steps at which its answer ends."""
        self.peer_cached = 0
        """P: leading tokens that D has."""
        self.next_kv_token = 0
        """P: the first token whose KV is neither on D nor on its way."""
        self.kv_bytes = 0
        self.transfer_began: float | None = None
        self.queue_s: float | None = None
        self.order: tuple[float, ...] = ()

    def note_hashes(self, hashes: tuple[BlockHash, ...]) -> None:
        """Set the keys to the hashes of the sequence's full blocks."""
        self.keys = tuple(hashes)
        if isinstance(hashes, HashRuns):
            self.ends = hashes.ends
            self.sizes = list(map(sub, self.ends, (0, *self.ends)))
        else:
            self.ends = range(1, len(hashes) + 1)
            self.sizes = (1,) * len(hashes)

    @property
    def num_given_tokens(self) -> int:
        """Number of tokens that were known at the beginning."""
        return self.num_given

    @property
    def is_copy(self) -> bool:
        """Whether the KV comes from another worker, which keeps its own."""
        return self.other is not None and not self.holds

    @property
    def num_locked(self) -> int:
        """Number of units in the `keys` that it holds."""
        return self.ends[self.locked - 1] if self.locked else 0


class FastRoom:
    """Assigns the blocks of one worker to its sequences. Owner: the fast worker."""

    def __init__(self, config: WorkerConfig, info: WorkerInfo, answers: Answers) -> None:
        self.blocks = BlockSet(info.num_blocks, info.block_size)
        self._answers = answers
        self._watermark = info.watermark_blocks * self.blocks.per_block
        self._max_model_len = info.max_model_len
        self._decode_reserve_tokens = config.decode_reserve_tokens
        self.windows: FastWindows | None = None
        """The windows of a model that has some."""
        if info.kv_layout.windows:
            limits = PoolLimits(info.max_num_seqs, config.step_tokens)
            self.windows = FastWindows(
                info.kv_layout, info.num_blocks, info.block_size, limits, config.watermark_blocks
            )
            self.blocks.on_evict = self.windows.evicted
        self._num_named = 0
        """Number of names given to parts of answers that no prompt can match."""

    def place(self, sequence: FastSequence, is_alone: Callable[[], bool]) -> bool:
        """Lock the cached prefix of a sequence and promise it the other blocks, if they fit, as `KVCacheManager.place`
        does. `is_alone` returns whether no other sequence holds anything."""
        blocks, known = self.blocks, _num_tokens(sequence)
        most = max_cached_tokens(known) // HASH_BLOCK_TOKENS if sequence.spec.root_hash else 0
        num_matched, num_cached = blocks.match(sequence.keys, sequence.ends, most)
        num_found = num_cached
        if self.windows is not None:
            num_promised = blocks.units_for(self._num_tokens_to_reserve(sequence)) // blocks.per_block
            if not self.windows.may_admit(num_promised, is_alone=is_alone()):
                return False
            num_matched = self._resumable(self.windows, sequence, num_matched)
            num_cached = min(sequence.ends[num_matched - 1], num_found) if num_matched else 0
        matched = sequence.keys[:num_matched]
        num_locked = sequence.ends[num_matched - 1] if num_matched else 0
        room = blocks.num_available - blocks.num_evictable(matched)
        wanted = max(0, blocks.units_for(self._num_tokens_to_reserve(sequence)) - num_locked)
        if wanted > room - self._watermark:
            if not is_alone() or blocks.units_for(known) - num_locked > room:
                return False
            wanted = min(wanted, room)
        blocks.lock(matched)
        blocks.num_reserved += wanted
        sequence.promised = wanted
        if self.windows is not None:
            sequence.window_blocks = num_promised
            self.windows.promise(0, num_promised)
            end = (known if sequence.phase == "offered" else max_cached_tokens(known)) // HASH_BLOCK_TOKENS
            sequence.resume_at = (end - end % blocks.per_block, num_found if num_found > num_cached else 0)
        sequence.locked, sequence.own = num_matched, 0
        sequence.computed = num_cached * HASH_BLOCK_TOKENS
        if sequence.num_preemptions == 0:
            sequence.cached_tokens = sequence.computed
        if sequence.swapped:
            self.extend(sequence, sequence.swapped)
        return True

    def _resumable(self, windows: FastWindows, sequence: FastSequence, num_matched: int) -> int:
        """The number of leading keys, of those that are cached, that all groups can use."""
        if sequence.swapped:  # all that is kept of a window is copied back
            return num_matched
        if sequence.phase != "offered":
            return windows.resumable(sequence.keys, num_matched)
        per_block = self.blocks.per_block
        num_blocks = sequence.num_known // HASH_BLOCK_TOKENS // per_block
        return windows.received_to(sequence.keys, num_matched, num_blocks, per_block)

    def _note_points(self, windows: FastWindows, sequence: FastSequence) -> None:
        """Note the resume points that the sequence has passed."""
        for end in sequence.resume_at:
            if 0 < end <= sequence.num_locked:
                self._note_point(windows, sequence, end)
        sequence.resume_at = tuple([end for end in sequence.resume_at if end > sequence.num_locked])

    def _note_point(self, windows: FastWindows, sequence: FastSequence, end: int) -> None:
        """Note that the first `end` units of a sequence can be resumed, if their windows are here."""
        per_block = self.blocks.per_block
        num_received = sequence.num_given // HASH_BLOCK_TOKENS // per_block if sequence.is_copy else 0
        if windows.has_window(end // per_block, num_received):
            windows.note_point(sequence.keys[end - 1])

    @property
    def num_reserved(self) -> int:
        """Number of units of the first group that are not written and cannot be given to others: as many as are
        promised, or as make the share of a window's pool that is promised."""
        blocks = self.blocks
        if self.windows is None:
            return blocks.num_reserved
        num_active = blocks.num_own + blocks.num_held
        return max(blocks.num_reserved, self.windows.share_of(blocks.num_blocks) * blocks.per_block - num_active)

    def drain_events(self) -> tuple[KvEvent, ...]:
        """What routers hear since the last call, in order."""
        events = self.blocks.drain_events()
        return events if self.windows is None else events + self.windows.drain_events()

    def _num_tokens_to_reserve(self, sequence: FastSequence) -> int:
        known = _num_tokens(sequence)
        if sequence.holds:
            return known
        num_left = sequence.spec.sampling.max_tokens - sequence.sent
        num_tokens = known + min(num_left - 1, self._decode_reserve_tokens)
        return min(num_tokens, max(self._max_model_len - 1, known))

    def extend(self, sequence: FastSequence, num_tokens: int) -> None:
        """Assign blocks for the tokens [0, num_tokens): promised ones first, then available ones."""
        blocks, num_units = self.blocks, self.blocks.units_for(num_tokens)
        num_missing = num_units - sequence.num_locked - sequence.own
        if num_missing <= 0:
            return
        if self.windows is not None and (num_blocks := num_units // blocks.per_block) > sequence.window_blocks:
            self.windows.promise(sequence.window_blocks, num_blocks)
            sequence.window_blocks = num_blocks
        num_promised = min(num_missing, sequence.promised)
        sequence.promised -= num_promised
        blocks.num_reserved -= num_promised
        sequence.own += num_missing
        blocks.num_own += num_missing
        blocks.make_room()

    def can_extend(self, sequence: FastSequence, num_tokens: int) -> bool:
        """Whether the last one of so many tokens can get a block in all groups."""
        blocks, num_units = self.blocks, self.blocks.units_for(num_tokens)
        has_block = num_units <= sequence.num_locked + sequence.own + sequence.promised
        if not has_block and blocks.num_available < blocks.per_block:
            return False
        return self.windows is None or self.windows.has_room(sequence.window_blocks, num_units // blocks.per_block)

    def publish(self, sequence: FastSequence) -> None:
        """Put the computed full blocks of the given tokens into the prefix cache."""
        ends, first = sequence.ends, sequence.locked
        last = bisect_right(ends, sequence.computed // HASH_BLOCK_TOKENS)
        if last <= first or not sequence.spec.root_hash:
            return
        before = sequence.num_locked
        self.blocks.publish(sequence.keys[first:last], sequence.sizes[first:last], is_copy=sequence.is_copy)
        sequence.own -= ends[last - 1] - before
        sequence.locked = last
        if self.windows is not None:
            self._note_points(self.windows, sequence)

    def keep_answer(self, sequence: FastSequence) -> None:
        """Keep the blocks that the answer filled in the prefix cache, because later prompts may match them."""
        if not sequence.spec.root_hash:
            return
        if self._answers.is_followed(sequence.key.request_id):
            sequence.note_hashes(answer_hashes(sequence.spec, sequence.computed, self._answers))
            self.publish(sequence)
        blocks = self.blocks
        num_computed = sequence.computed // HASH_BLOCK_TOKENS // blocks.per_block * blocks.per_block
        num_full = min(num_computed - sequence.num_locked, sequence.own)
        if num_full > 0:
            names = [AttemptKey(sequence.key.request_id, self._num_named)]
            self._num_named += 1
            blocks.publish(names, [num_full], is_copy=sequence.is_copy)
            blocks.release(names, [num_full], 0, is_copy=sequence.is_copy)
            sequence.own -= num_full

    def let_go(self, sequence: FastSequence) -> None:
        """Release all blocks that the sequence holds or was promised."""
        blocks = self.blocks
        if self.windows is not None:
            end = sequence.num_locked - sequence.num_locked % blocks.per_block
            if end and end == sequence.computed // HASH_BLOCK_TOKENS // blocks.per_block * blocks.per_block:
                self._note_point(self.windows, sequence, end)
            self.windows.promise(sequence.window_blocks, 0)
            sequence.window_blocks, sequence.resume_at = 0, ()
        num_locked, is_copy = sequence.locked, sequence.is_copy
        blocks.release(sequence.keys[:num_locked], sequence.sizes[:num_locked], sequence.own, is_copy=is_copy)
        blocks.num_reserved -= sequence.promised
        sequence.locked = sequence.own = sequence.promised = 0

    def safe_steps(self, sequence: FastSequence) -> int:
        """The count of decode steps up to which the sequence has blocks, or a promise of them."""
        num_units = sequence.num_locked + sequence.own + sequence.promised
        if self.windows is not None and not self.windows.is_enough(sequence.window_blocks):
            num_units = min(num_units, sequence.window_blocks * self.blocks.per_block)
        return sequence.joined_at + num_units * HASH_BLOCK_TOKENS - sequence.num_known


def _num_tokens(sequence: FastSequence) -> int:
    """Number of known tokens; the latest one of a suspended sequence has no KV."""
    return sequence.num_known + (sequence.swapped > 0)


def answer_hashes(spec: SequenceSpec, num_tokens: int, answers: Answers) -> tuple[BlockHash, ...]:
    """The hashes of all full blocks of the first `num_tokens` tokens of a sequence, its answer included."""
    emitted, hashes = spec.emitted_token_ids, spec.block_hashes
    known = spec.prompt_token_ids + pack_token_ids(emitted)
    num_answered = num_tokens - num_token_ids(PackedTokenIds(known))
    made = [answers.token(spec.request_id, len(emitted) + number) for number in range(num_answered)]
    rest = known[len(hashes) * HASH_BLOCK_TOKENS * TOKEN_ID_BYTES :] + pack_token_ids(made)
    return hashes + tuple(chain_hashes(hashes[-1] if hashes else spec.root_hash, PackedTokenIds(rest)))
