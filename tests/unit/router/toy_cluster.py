"""A router core with toy workers on a made-up clock: prompts take the time that the cost model believes, caches are
LRU, reports come every 20 ms. Deterministic; nothing sleeps.

A prefill worker computes one prompt after the other; a decode worker too, for local prefill. Blocks of a chain leave a
cache from the end on, so that caches stay prefix-closed. `num_computed_tokens` is what all of them had to compute.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from disagg.proto.block_hash import HASH_BLOCK_TOKENS, max_cached_tokens
from disagg.proto.ids import BlockHash, GatewayId, Incarnation, WorkerId
from disagg.proto.messages import (
    BlocksRemoved,
    BlocksSnapshot,
    BlocksStored,
    Dispatch,
    KvEvent,
    Load,
    SequenceSpec,
    StepUpdate,
)
from disagg.router.api import RoutedRequest
from disagg.router.config import RouterConfig
from disagg.router.requests import events
from disagg.router.requests.router_core import RouterCore
from tests.support.placing import samples
from tests.support.router import (
    end_update,
    handed_over_update,
    prefilled_update,
    tokens_update,
    worker_info,
    worker_report,
)

STEP_MS, TOKEN_MS, DECODE_MS, TRANSFER_MS, REPORT_S = 5.0, 0.4, 0.5, 4.0, 0.02


@dataclass
class ToyWorker:
    name: str
    num_cache_blocks: int
    incarnation: int = 0
    cache: dict[BlockHash, None] = field(default_factory=dict)
    """Least recently used first."""
    prompts: deque[Dispatch] = field(default_factory=deque)
    """The first one is being computed."""
    num_decoding: int = 0
    pending: list[KvEvent] = field(default_factory=list)
    sequence: int = 0
    is_lost: bool = False

    def num_cached(self, spec: SequenceSpec) -> int:
        blocks = 0
        while blocks < len(spec.block_hashes) and spec.block_hashes[blocks] in self.cache:
            blocks += 1
        return min(blocks * HASH_BLOCK_TOKENS, max_cached_tokens(spec.num_known_tokens))

    def store(self, hashes: Sequence[BlockHash]) -> None:
        new = [block_hash for block_hash in hashes if block_hash not in self.cache]
        for block_hash in reversed(hashes):  # The end of a chain is the first to go.
            self.cache.pop(block_hash, None)
            self.cache[block_hash] = None
        gone = list(islice(self.cache, max(0, len(self.cache) - self.num_cache_blocks)))
        for block_hash in gone:
            del self.cache[block_hash]
        if new:
            self.pending.append(BlocksStored(hashes=tuple(new)))
        if gone:
            self.pending.append(BlocksRemoved(hashes=tuple(gone)))


class ToyCluster:
    """Workers named as in `worker_info`: p0, d0, ..."""

    def __init__(self, names: Iterable[str], config: RouterConfig, num_cache_blocks: int) -> None:
        self.core = RouterCore(config, GatewayId("g0"))
        self.now = 0.0
        self.workers = {name: ToyWorker(name, num_cache_blocks) for name in names}
        self.num_computed_tokens = 0
        self.ended: dict[str, str] = {}
        """Request -> `finished`, or the name of its error."""
        self.ttft_s: dict[str, float] = {}
        self.num_placed: Counter[str] = Counter()
        """Attempts by worker."""
        self._arrivals: dict[str, float] = {}
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._num_planned = 0
        for name in self.workers:
            self.come_up(name)

    # ---------------------------------------------------------------- driving

    def run(self, arrivals: Iterable[tuple[float, RoutedRequest]]) -> None:
        """All of them, until each has ended."""
        for when, request in arrivals:
            self._arrivals[request.request_id] = when
            self.at(when, partial(self._submit, request))
        while len(self.ended) < len(self._arrivals):
            self.now, _, what = heapq.heappop(self._agenda)
            what()

    def at(self, when: float, what: Callable[[], None]) -> None:
        self._num_planned += 1
        heapq.heappush(self._agenda, (when, self._num_planned, what))

    def come_up(self, name: str) -> None:
        worker = self.workers[name] = ToyWorker(
            name, self.workers[name].num_cache_blocks, self.workers[name].incarnation + 1
        )
        info = worker_info(
            name,
            incarnation=str(worker.incarnation),
            num_blocks=2048,
            token_budget=512,
            max_num_seqs=64,
            max_model_len=4096,
            calibration=samples(base_ms=STEP_MS, prefill_token_ms=TOKEN_MS, decode_ms=DECODE_MS),
        )
        self._handle(events.WorkerUp(info))
        worker.pending.append(BlocksSnapshot(hashes=()))
        self._report(worker)

    def lose(self, name: str) -> None:
        """Kill a worker; what it still wanted to do never happens."""
        worker = self.workers[name]
        worker.is_lost = True
        self._handle(events.WorkerLost(WorkerId(name), Incarnation(str(worker.incarnation))))

    # ---------------------------------------------------------------- the router

    def _submit(self, request: RoutedRequest) -> None:
        self._handle(events.Submit(request, self.now))

    def _handle(self, event: events.Event) -> None:
        for command in self.core.handle(event, self.now):
            match command:
                case events.Dispatch(worker_id=worker_id, message=message):
                    self._take(self.workers[worker_id], message)
                case events.Emit(request_id=request_id):
                    self.ttft_s.setdefault(request_id, self.now - self._arrivals[request_id])
                case events.Finish(request_id=request_id):
                    self.ended[request_id] = "finished"
                case events.Fail(request_id=request_id, error=error):
                    self.ended[request_id] = type(error).__name__
        wakeup = self.core.next_wakeup()
        if wakeup is not None:
            self.at(max(wakeup, self.now), self._tick)

    def _tick(self) -> None:
        wakeup = self.core.next_wakeup()
        if wakeup is not None and wakeup <= self.now:
            self._handle(events.Tick())

    def _say(self, worker: ToyWorker, *updates: StepUpdate) -> None:
        for update in updates:
            self._handle(events.FromWorker(WorkerId(worker.name), Incarnation(str(worker.incarnation)), update))

    # ---------------------------------------------------------------- the workers

    def _take(self, worker: ToyWorker, message: Dispatch) -> None:
        self.num_placed[worker.name] += 1
        if message.decode_peer is not None:
            self.num_placed[message.decode_peer.worker_id] += 1
        worker.prompts.append(message)
        if len(worker.prompts) == 1:
            self._begin(worker)

    def _begin(self, worker: ToyWorker) -> None:
        spec = worker.prompts[0].spec
        num_tokens = spec.num_known_tokens - worker.num_cached(spec)
        self.num_computed_tokens += num_tokens
        seconds = (STEP_MS + num_tokens * TOKEN_MS) / 1000
        self.at(self.now + seconds, partial(self._computed, worker))

    def _computed(self, worker: ToyWorker) -> None:
        if worker.is_lost:
            return
        message = worker.prompts.popleft()
        spec = message.spec
        worker.store(spec.block_hashes)
        if worker.prompts:
            self._begin(worker)
        key = spec.key
        self._say(worker, tokens_update(*key, len(spec.emitted_token_ids), 7), prefilled_update(*key))
        decode = self.workers[message.decode_peer.worker_id] if message.decode_peer else worker
        delay_s = TRANSFER_MS / 1000 if message.decode_peer else 0.0
        self.at(self.now + delay_s, partial(self._decode, worker, decode, message))

    def _decode(self, prefill: ToyWorker, worker: ToyWorker, message: Dispatch) -> None:
        if worker.is_lost:
            return
        spec = message.spec
        if message.decode_peer is not None:
            if prefill.is_lost:
                return
            worker.store(spec.block_hashes)
            self._say(worker, handed_over_update(*spec.key))
        worker.num_decoding += 1
        left = spec.sampling.max_tokens - len(spec.emitted_token_ids)
        seconds = left * (STEP_MS + worker.num_decoding * DECODE_MS) / 1000
        self.at(self.now + seconds, partial(self._end, worker, spec))

    def _end(self, worker: ToyWorker, spec: SequenceSpec) -> None:
        if worker.is_lost:
            return
        worker.num_decoding -= 1
        first = len(spec.emitted_token_ids)
        tokens = [7] * (spec.sampling.max_tokens - first)
        self._say(worker, tokens_update(*spec.key, first, *tokens), end_update(*spec.key, "length"))

    def _report(self, worker: ToyWorker) -> None:
        if not worker.is_lost:
            self.report_now(worker)
            self.at(self.now + REPORT_S, partial(self._report, worker))

    def report_now(self, worker: ToyWorker) -> None:
        """Send the router the latest report."""
        uncomputed = sum(m.spec.num_known_tokens - worker.num_cached(m.spec) for m in worker.prompts)
        load = Load(
            num_running=worker.num_decoding,
            uncomputed_prompt_tokens=uncomputed,
            blocks_total=worker.num_cache_blocks,
            blocks_cached=len(worker.cache),
        )
        pending, worker.pending = worker.pending, []
        report = worker_report(worker.name, worker.sequence, *pending, incarnation=str(worker.incarnation), load=load)
        worker.sequence += 1
        self._handle(events.WorkerReported(report))
