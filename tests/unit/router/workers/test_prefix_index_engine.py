"""The index behind a real engine core: whatever sequences start, end, fork, are preempted or evicted, what the core
announces is prefix-closed, and the index's numbers are those of a loop over the announced blocks."""

from __future__ import annotations

import functools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from disagg.engine.blocks.window_group import resumable_end
from disagg.engine.commands import Add, Command, Reserve
from disagg.engine.fake_runner import fake_generate
from disagg.proto.block_hash import HASH_BLOCK_TOKENS, chain_hashes
from disagg.proto.ids import BlockHash, Incarnation, WorkerId
from disagg.proto.token_ids import PackedTokenIds, pack_token_ids, unpack_token_ids
from disagg.router.workers.prefix_index import PrefixIndex
from tests.support.engine import ROOT, VOCAB_SIZE
from tests.support.router import reported_blocks, worker_report
from tests.unit.engine.core.test_engine_core_stateful import CoreMachine, Start

WORKER = WorkerId("worker")


class ReportingMachine(CoreMachine):
    """A core, and an index that gets all its reports; its first one with a snapshot."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.num_reports = 0
        self.chains: set[tuple[BlockHash, ...]] = set()

    def handle(self, command: Command) -> None:
        if isinstance(command, Add | Reserve):
            self.chains.add(chain_of(command.spec.prompt_token_ids, command.spec.sampling.max_tokens, self.windows))
        super().handle(command)

    @rule(
        family=st.integers(0, 1),
        num_prompt_tokens=st.sampled_from([33, 48, 64]),
        max_tokens=st.tuples(st.sampled_from([1, 17]), st.sampled_from([1, 50])),
        num_steps=st.integers(1, 4),
    )
    def twins_then_a_stranger(
        self, family: int, num_prompt_tokens: int, max_tokens: tuple[int, int], num_steps: int
    ) -> None:
        """Two compute the same blocks side by side; when one of them has ended, somebody else wants room."""
        self.start([start(family, num_prompt_tokens, number) for number in max_tokens])
        self.step(num_steps)
        self.start([start(2, 33, 1)])

    @invariant()
    def reports_are_closed_and_matches_exact(self) -> None:
        snapshot = self.core.prefix_snapshot()
        events = self.core.drain_kv_events()
        if self.num_reports == 0:
            self.index.add_worker(WORKER, Incarnation("1"), has_windows=bool(self.windows))
            events = (snapshot, *events)
        assert self.index.apply(worker_report(WORKER, self.num_reports, *events))
        self.num_reports += 1
        announced = set(snapshot.hashes)
        assert reported_blocks(self.index, WORKER) == announced
        reachable: set[BlockHash] = set()
        for chain in self.chains:
            length = next((i for i, block_hash in enumerate(chain) if block_hash not in announced), len(chain))
            reachable.update(chain[:length])
            if self.windows:
                length = max((i for i in range(1, length + 1) if chain[i - 1] in snapshot.resume), default=0)
                assert self.is_resumable(chain, length)
            assert self.index.match(chain) == ({WORKER: length} if length else {})
        assert announced == reachable

    def is_resumable(self, chain: tuple[BlockHash, ...], num_units: int) -> bool:
        """Whether each window has all blocks that a prefix of so many units of 16 tokens needs."""
        per_block = self.core._blocks.block_size // HASH_BLOCK_TOKENS
        keys = chain[per_block - 1 :: per_block]
        windows, num_blocks = self.core._scheduler.kv_cache.windows, num_units // per_block
        return resumable_end(windows, keys, num_blocks) == num_blocks


def start(family: int, num_prompt_tokens: int, max_tokens: int) -> Start:
    return Start("run", num_prompt_tokens, family, max_tokens, priority=0, timeout_s=None, num_emitted=0, cached=True)


@functools.cache
def chain_of(prompt: PackedTokenIds, num_output_tokens: int, windows: tuple[int, ...]) -> tuple[BlockHash, ...]:
    """The blocks of a sequence to its very end: what the fake model answers is known beforehand."""
    ids = unpack_token_ids(prompt)
    output = fake_generate(ids, num_output_tokens, VOCAB_SIZE, windows=windows)
    return tuple(chain_hashes(ROOT, pack_token_ids(ids + output)))


TestReports = ReportingMachine.TestCase
TestReports.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
