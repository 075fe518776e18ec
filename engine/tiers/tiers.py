"""The tiers of a worker, as its engine core uses them: what is written to them when, and who loads from them. Pure.

    a sequence ends ──released──> its extents that are admitted (`admission.py`) wait to be written (`write_queue.py`)
    a prompt comes ──loads──> state LOADING (`loading.py`), or it is queued like any other
    another worker fetches a prefix ──loads──> the same, before it is pinned
    before each step ──turn──> loads go on; if nobody waits, one extent is written
    the thread of the files answers ──handle──> what it wrote, read, found

A worker without tiers has no object of this class.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from disagg.engine.commands import (
    TierAnswer,
    TierFailed,
    TierForgotten,
    TierFull,
    TierRead,
    TierScanned,
    TierWritten,
)
from disagg.engine.config import TierOptions, WorkerConfig
from disagg.engine.core.scheduler import Scheduler
from disagg.engine.plan import ModelRunner
from disagg.engine.request import Sequence, SequenceState
from disagg.engine.tiers.admission import Admission
from disagg.engine.tiers.extents import chain_of, extent_keys
from disagg.engine.tiers.loading import Loading
from disagg.engine.tiers.sizes import extent_bytes, tier_bytes_needed, tier_sizes
from disagg.engine.tiers.store import TierParts, TierStore
from disagg.engine.tiers.write_queue import WriteQueue
from disagg.proto.errors import ConfigError
from disagg.proto.ids import AttemptKey, BlockHash
from disagg.proto.messages import EXTENT_TOKENS, KvEvent, TierCounts, TierName

_SEEN_PER_EXTENT = 4
"""Extents that are remembered as used, for each that the device cache holds."""


def check_tiers(options: TierOptions, runner: ModelRunner, max_model_len: int, path: str = "kv_cache.tiers") -> None:
    """Refuse what a worker's tiers cannot do. `path` leads to the section in the user's file.

    Raises:
        ConfigError: a model with windows; blocks that do not divide an extent; files of several ranks; a tier that does
            not hold the longest sequence.
    """
    if len(runner.layout.groups) > 1:
        raise ConfigError(f"{path}: models with windows have none; it has {len(runner.layout.groups)} cache groups")
    if EXTENT_TOKENS % runner.block_size:
        raise ConfigError(f"{path}: need a block_size that divides {EXTENT_TOKENS}, not {runner.block_size}")
    if options.disk is not None and runner.shape.num_ranks > 1:
        raise ConfigError(f"{path}.disk: is for workers of one rank, not of {runner.shape.num_ranks}")
    needed = tier_bytes_needed(runner.layout, runner.shape.tp, max_model_len)
    for name, size in tier_sizes(options):
        if 0 < size < needed:
            raise ConfigError(f"{path}.{name}: {size} is less than the KV of max_model_len {max_model_len}, {needed}")


class Tiers:
    """Owner: the engine core.

    Args:
        config: of the worker; it has `tiers`.
        runner: makes the copies.
        scheduler: the sequences and their blocks.
        compute_ms: predicted milliseconds to compute prompt tokens [start, end).
        begin: takes each sequence that loads no more.
        parts: what the shell gives.

    Raises:
        ConfigError: see `check_tiers`.
    """

    def __init__(
        self,
        config: WorkerConfig,
        runner: ModelRunner,
        scheduler: Scheduler,
        compute_ms: Callable[[int, int], float],
        begin: Callable[[Sequence], None],
        parts: TierParts,
    ) -> None:
        options = config.tiers
        assert options is not None, "a worker without tiers"
        check_tiers(options, runner, scheduler.max_model_len)
        self._scheduler = scheduler
        self._extent_bytes = extent_bytes(runner.layout, runner.shape.tp)
        self._store = TierStore(
            runner,
            extent_bytes=self._extent_bytes,
            host_bytes=options.host_bytes,
            disk_bytes=0 if options.disk is None else options.disk.bytes,
            parts=parts,
            is_shared=options.disk is not None and options.disk.shared,
            share=config.cached_share,
            keep_s=config.cached_keep_s,
        )
        self._clock = parts.clock
        self._now = 0.0
        """Time of the last turn."""
        num_extents = runner.num_blocks * runner.block_size // EXTENT_TOKENS
        num_extents += self._store.host.num_slots + self._store.disk.num_slots
        self._admission = Admission(options.min_tokens, _SEEN_PER_EXTENT * max(1, num_extents))
        self._queue = WriteQueue(options.write_mb_per_s * 1e6)
        self._loading = Loading(self._store, scheduler, compute_ms, begin, options.max_loading)
        scheduler.on_drop = self.released

    # ------------------------------------------------------------ sequences

    def loads(self, sequence: Sequence, now: float) -> bool:
        """Whether a new sequence is loaded first; then it is in state LOADING."""
        self._store.note_time(now)
        if not self._loading.wants(sequence, now):
            return False
        self._scheduler.load(sequence)
        self._loading.add(sequence)
        return True

    def num_held(self, hashes: Seq[BlockHash], num_tokens: int) -> int:
        """How many of the first `num_tokens` tokens of a chain a tier has."""
        return max(self._store.num_held(extent_keys(hashes, num_tokens))) * EXTENT_TOKENS

    def released(self, sequence: Sequence, has_answered: bool) -> None:
        """A sequence ends and is about to give back its blocks; `has_answered`: with its whole answer."""
        if not sequence.spec.root_hash or sequence.state is SequenceState.LOADING:
            return
        num_tokens, blocks = sequence.num_computed_tokens, self._scheduler.blocks
        chain = chain_of(
            sequence.block_hashes, num_tokens, blocks.block_size, sequence.spec.tenant_tag, is_copy=sequence.is_copy
        )
        if not chain.keys:
            return
        self._store.touch(chain)
        num_admitted = self._admission.num_admitted(
            chain.keys,
            num_tokens=num_tokens,
            cached_tokens=sequence.cached_tokens,
            in_conversation=has_answered or sequence.spec.in_session,
        )
        for index in range(num_admitted):
            if self._store.lacks(chain.keys[index]):
                self._queue.add(chain, index)

    def forget(self, key: AttemptKey) -> None:
        """A sequence is over."""
        self._loading.forget(key)

    # ------------------------------------------------------------ turns

    @property
    def can_go_on(self) -> bool:
        """Whether `turn` would go on with a load, or with what was found in the folder."""
        return self._loading.can_go_on or self._store.can_go_on

    @property
    def due_at(self) -> float:
        """When `turn` must be called, also where there is no step to compute; infinite for never."""
        due = min(self._loading.due_at, self._store.due_at)
        if self._may_write():
            due = min(due, self._queue.due_at(is_decoding=False))
        return due

    def turn(self, now: float) -> bool:
        """Go on with what is under way; whether sequences began."""
        self._now = now
        self._store.note_time(now)
        self._loading.note_turn(now)
        self._store.look_again(now)
        if self._store.can_go_on:
            self._store.go_on(is_running=bool(self._scheduler.running))
        num_begun = self._loading.advance(now) if len(self._loading) else 0
        if self._may_write() and now >= self._queue.due_at(is_decoding=bool(self._scheduler.running)):
            self._write(now)
        return num_begun > 0

    def handle(self, answer: TierAnswer, now: float) -> None:
        """An answer of the thread of the files."""
        self._store.note_time(now)
        match answer:
            case TierWritten(number, ok, ms, cpu_ms):
                self._store.written(number, ok=ok, ms=ms)
                self._queue.took(cpu_ms, now)
            case TierRead(number, ok, ms):
                self._store.answered(number, ok=ok, ms=ms, now=now)
            case TierScanned(extents, gone):
                self._store.scanned(extents, gone, now)
            case TierFailed(reason, of_scan):
                self._store.folder_failed(reason, now, of_scan=of_scan)
            case TierFull(reason):
                self._store.folder_full(reason, now)
            case TierForgotten(tag, ok):
                self._store.forgotten(tag, ok=ok)

    def forget_tenant(self, tag: bytes, now: float) -> None:
        """Drop what there is of a tenant, and delete its files."""
        self._store.note_time(now)
        self._queue.forget(tag)
        self._store.forget(tag)

    # ------------------------------------------------------------ reports

    def counts(self) -> tuple[TierCounts, ...]:
        """What was done with each tier, and what it holds."""
        loading = self._loading
        return self._store.counts(self._now, copy_ms=loading.copy_ms, queue_ms=loading.queue_ms(self._now))

    @property
    def names(self) -> tuple[TierName, ...]:
        """The tiers that there are."""
        return self._store.names

    def drain_events(self) -> tuple[KvEvent, ...]:
        """What can be loaded, or no more, since the last call."""
        return self._store.drain_events()

    def snapshot(self) -> dict[TierName, tuple[BlockHash, ...]]:
        """All extents of each tier."""
        return self._store.snapshot()

    @property
    def num_loading(self) -> int:
        """Sequences in state LOADING."""
        return len(self._loading)

    @property
    def num_loaded_tokens(self) -> int:
        """Tokens that were loaded since the start."""
        return self._loading.num_loaded_tokens

    @property
    def num_dropped(self) -> int:
        """Extents that were to be written and were not: their blocks were needed first, or there was no place."""
        return self._queue.num_dropped

    def check_integrity(self, loading: set[AttemptKey]) -> list[str]:
        """Findings, given the sequences that are loaded from tiers; empty when sound."""
        return self._store.check_integrity(is_loading=bool(loading)) + self._loading.check_integrity(loading)

    # ------------------------------------------------------------ inside

    def _may_write(self) -> bool:
        """Whether nobody waits for the time of a write."""
        scheduler = self._scheduler
        if not len(self._queue) or len(scheduler.waiting) or len(self._loading) or not self._store.can_write:
            return False
        return not any(sequence.has_prompt_left for sequence in scheduler.running.values())

    def _write(self, now: float) -> None:
        """Write the first extent of the queue that needs it."""
        prefix = self._scheduler.blocks.prefix
        while len(self._queue) and self._store.can_write:
            chain, index = self._queue.take()
            found = [prefix.block_of(key) for key in chain.blocks_of(index)]
            blocks = [block for block in found if block is not None]
            began = self._clock()
            result = self._store.write(chain, index, blocks if len(blocks) == len(found) else None)
            if result == "written":
                self._queue.wrote(self._extent_bytes, (self._clock() - began) * 1e3, now)
                return
            self._queue.num_dropped += result != "present"
