"""The router core under a stream of requests, on one core and without any I/O: how long each event takes it.

    workers with chains of blocks -> RouterCore -> requests that live through all their stages, many at a time -> times

A request here is a `Submit`, which places it; P's first token with the end of its prefill; D's hand-over; the
other tokens, one update each; the end; and one report of P and one of D, each with the blocks that it stored and those
that it evicted for them. A request that is placed on one worker alone skips the hand-over and has one report.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from disagg.cluster.system.process_tools import freeze_start
from disagg.proto.ids import BlockHash, GatewayId, Incarnation, RequestId, WorkerId
from disagg.proto.messages import (
    HASHES_PER_EXTENT,
    BlocksRemoved,
    BlocksSnapshot,
    BlocksStored,
    End,
    HandedOver,
    KvLayout,
    Load,
    PrefillDone,
    RoleName,
    Sampling,
    StepSample,
    StepUpdate,
    TierCounts,
    TierName,
    TokenOut,
    WorkerInfo,
    WorkerMetrics,
    WorkerReport,
)
from disagg.proto.token_ids import pack_token_ids, slice_token_ids
from disagg.router.api import RoutedRequest
from disagg.router.config import PolicyName, RouterConfig
from disagg.router.requests import events
from disagg.router.requests.router_core import RouterCore
from tests.support.reports import percentile

BLOCK_TOKENS = 16
NUM_PROMPTS = 16
"""System prompts. Every worker has all of them."""
PROMPT_BLOCKS = 64
SESSION_BLOCKS = (64, 192)
"""Shortest and longest session that a pair of workers has, system prompt included."""
TURN_BLOCKS = 4
"""Blocks that a returning session adds."""
NEW_BLOCKS = 16
"""Blocks of a new session beside its system prompt."""
OUTPUT_TOKENS = 4
REQUEST_INTERVAL_S = 1e-4
"""Time goes by as if the aim, 10,000 requests per second, were met."""
IN_FLIGHT_PER_WORKER = 2
CACHED_TURNS = 8
"""Sessions beside the first ones that a worker keeps."""

_TIER_TIMES = (TierCounts(name="host", extent_ms=0.1), TierCounts(name="disk", extent_ms=1.0))
_INCARNATION = Incarnation("1")
_ROOT = BlockHash(b"root")
_LAYOUT = KvLayout.dense(num_layers=2, num_kv_heads=2, head_dim=4, dtype="fake", bytes_per_token=1024)
_STEP = StepSample(14.0, 512, 512 * 600, 8, 8 * 1200)
_CALIBRATION = tuple(
    StepSample(
        3.0 + 0.02 * prefill + 2e-6 * attended + 0.2 * decodes + 1e-4 * context, prefill, attended, decodes, context
    )
    for prefill, attended, decodes, context in [
        (64, 64 * 32, 0, 0),
        (512, 512 * 256, 0, 0),
        (512, 512 * 1280, 0, 0),
        (0, 0, 1, 512),
        (0, 0, 16, 16 * 512),
        (0, 0, 16, 16 * 2048),
        (256, 256 * 512, 8, 8 * 512),
    ]
)


class Holdings:
    """What the workers of one cluster have: the system prompts, first sessions that stay, and the latest turns. With
    `tiers` each first session is also in the host memory of one prefill worker, and on the disk of another."""

    def __init__(self, num_workers: int, num_blocks: int, seed: int, *, tiers: bool = False) -> None:
        self.rng = random.Random(seed)
        self.prefills = [WorkerId(f"p{number}") for number in range(num_workers // 2)]
        self.decodes = [WorkerId(f"d{number}") for number in range(num_workers - num_workers // 2)]
        self.prompts = [self.blocks(PROMPT_BLOCKS) for _ in range(NUM_PROMPTS)]
        self.sessions: list[tuple[BlockHash, ...]] = []
        self.first_of: dict[WorkerId, set[int]] = {worker_id: set() for worker_id in self.prefills + self.decodes}
        """The sessions that a worker has from the beginning."""
        self.latest_of: dict[WorkerId, OrderedDict[int, list[tuple[BlockHash, ...]]]] = defaultdict(OrderedDict)
        self.tiers_of: dict[TierName, defaultdict[WorkerId, list[BlockHash]]] = {}
        """The extents that the tiers of a worker have."""
        if tiers:
            self.tiers_of = {"host": defaultdict(list), "disk": defaultdict(list)}
        num_made = NUM_PROMPTS * PROMPT_BLOCKS
        while num_made < num_blocks:
            own = self.blocks(self.rng.randint(*SESSION_BLOCKS) - PROMPT_BLOCKS + 1)
            for workers in (self.prefills, self.decodes):
                self.first_of[self.rng.choice(workers)].add(len(self.sessions))
            self.sessions.append(self.rng.choice(self.prompts) + own)
            for extents_of in self.tiers_of.values():
                extents_of[self.rng.choice(self.prefills)] += _extents(self.sessions[-1])
            num_made += len(own)
        self.num_blocks = num_made

    def blocks(self, count: int) -> tuple[BlockHash, ...]:
        """New ones."""
        return tuple(BlockHash(self.rng.randbytes(16)) for _ in range(count))

    def snapshot(self, worker_id: WorkerId) -> BlocksSnapshot:
        """The blocks that a worker holds at first."""
        chains = [*self.prompts, *(self.sessions[number][PROMPT_BLOCKS:] for number in self.first_of[worker_id])]
        tiers = {tier: tuple(dict.fromkeys(extents_of[worker_id])) for tier, extents_of in self.tiers_of.items()}
        return BlocksSnapshot(hashes=tuple(block for chain in chains for block in chain), tiers=tiers)

    def store(
        self, worker_id: WorkerId, session: int, hashes: tuple[BlockHash, ...], num_old: int
    ) -> tuple[int, BlocksStored, BlocksRemoved]:
        """A worker computed or got the chain `hashes`, whose first `num_old` blocks were those of the session: how many
        it had, what it stored, and what it evicted: the oldest sessions, last block first."""
        latest = self.latest_of[worker_id]
        has_session = session in latest or session in self.first_of[worker_id]
        num_cached = num_old if has_session else PROMPT_BLOCKS
        latest.setdefault(session, []).append(hashes[num_cached:])
        latest.move_to_end(session)
        evicted: list[BlockHash] = []
        if len(latest) > CACHED_TURNS:
            _, pieces = latest.popitem(last=False)
            for piece in reversed(pieces):
                evicted += reversed(piece)
        return num_cached, BlocksStored(hashes=hashes[num_cached:]), BlocksRemoved(hashes=tuple(evicted))


def _extents(chain: Sequence[BlockHash]) -> Sequence[BlockHash]:
    return chain[HASHES_PER_EXTENT - 1 :: HASHES_PER_EXTENT]


class Running(msgspec.Struct, eq=False, gc=False):
    """One request on its way. Like the times that are kept it is nothing that the garbage collector walks through: its
    pauses are to be the router's."""

    request: RoutedRequest
    session: int
    num_old: int
    first: WorkerId | None = None
    """Computes the prompt."""
    decode: WorkerId | None = None
    """Takes over; None where `first` does all."""
    attempt: int = 0


class Traffic:
    """A core and the requests in it. Owner of the clock that both see. `fetches`: whether workers fetch from each
    other, as by default those with `tiers` do."""

    def __init__(
        self,
        num_workers: int,
        num_blocks: int,
        policy: PolicyName,
        clock_ns: Callable[[], int],
        seed: int = 0,
        *,
        tiers: bool = False,
        fetches: bool | None = None,
    ) -> None:
        self.holdings = Holdings(num_workers, num_blocks, seed, tiers=tiers)
        self.core = RouterCore(RouterConfig(policy=policy, num_traces=1000), GatewayId("g0"))
        self.now = 0.0
        self.times_ns = no_times()
        """What `handle` took, by kind of event."""
        self._clock_ns = clock_ns
        self.num_finished = 0
        self.num_placed_alone = self.num_fetches = 0
        self._tiers, self._fetches = tiers, tiers if fetches is None else fetches
        self._num_requests = 0
        self._sequences: defaultdict[WorkerId, int] = defaultdict(int)
        self._running: dict[RequestId, Running] = {}
        self._under_way: deque[Iterator[None]] = deque()
        self._in_flight = IN_FLIGHT_PER_WORKER * num_workers
        self._tokens = pack_token_ids(range(BLOCK_TOKENS * (SESSION_BLOCKS[1] + TURN_BLOCKS + NEW_BLOCKS + 2)))
        for worker_id in self.holdings.prefills:
            self._start_worker(worker_id, "prefill", 4 * num_blocks // num_workers)
        for worker_id in self.holdings.decodes:
            self._start_worker(worker_id, "decode", 4 * num_blocks // num_workers)

    def run(self, num_requests: int) -> None:
        """Send so many requests, one after the other. Every request that is under way takes its next step as often as
        it takes for `IN_FLIGHT_PER_WORKER` requests a worker to be in flight."""
        for _ in range(num_requests):
            self.now += REQUEST_INTERVAL_S
            self._submit()
            while len(self._running) > self._in_flight and self._under_way:
                self._advance()

    def finish(self) -> None:
        """Let all end.

        Raises:
            RuntimeError: if something is left, or a request failed.
        """
        while self._under_way:
            self._advance()
        if self.num_finished != self._num_requests or any(self.core.holdings().values()):
            raise RuntimeError(f"{self.num_finished} of {self._num_requests} finished: {self.core.counters}")

    def _advance(self) -> None:
        """One step of the request whose turn it is."""
        steps = self._under_way.popleft()
        for _ in steps:
            self._under_way.append(steps)
            return

    # ------------------------------------------------------------ events

    def _handle(self, kind: str, event: events.Event) -> None:
        started = self._clock_ns()
        commands = self.core.handle(event, self.now)
        self.times_ns[kind].append(self._clock_ns() - started)
        for command in commands:
            if isinstance(command, events.Dispatch):
                spec, peer = command.message.spec, command.message.decode_peer
                running = self._running[spec.request_id]
                running.first, running.attempt = command.worker_id, spec.attempt
                running.decode = None if peer is None else peer.worker_id
                self.num_placed_alone += peer is None
                self.num_fetches += command.message.fetch is not None
                self._under_way.append(self._steps(running))
            elif isinstance(command, events.Finish):
                del self._running[command.request_id]
                self.num_finished += 1
            elif isinstance(command, events.Fail):
                raise RuntimeError(f"{command.request_id} failed: {command.error}")

    def _start_worker(self, worker_id: WorkerId, role: RoleName, num_cache_blocks: int) -> None:
        info = WorkerInfo(
            worker_id=worker_id,
            incarnation=_INCARNATION,
            roles=(role,),
            address=f"{worker_id}:1",
            pid=1,
            fingerprint="model",
            kv_layout=_LAYOUT,
            num_blocks=num_cache_blocks + 16384,
            block_size=BLOCK_TOKENS,
            max_num_seqs=256,
            token_budget=2048,
            max_model_len=16384,
            calibration=_CALIBRATION,
            tiers=("host", "disk") if self._tiers and role == "prefill" else (),
            fetches=self._fetches,
        )
        self._handle("up", events.WorkerUp(info))
        self._report("snapshot", worker_id, self.holdings.snapshot(worker_id))

    def _submit(self) -> None:
        holdings, rng = self.holdings, self.holdings.rng
        number = self._num_requests
        if holdings.sessions and rng.random() < 0.5:
            session = rng.randrange(len(holdings.sessions))
            old, own = holdings.sessions[session], holdings.blocks(TURN_BLOCKS)
        else:
            session = len(holdings.sessions) + number
            old, own = rng.choice(holdings.prompts), holdings.blocks(NEW_BLOCKS)
        hashes = old + own
        request = RoutedRequest(
            request_id=RequestId(f"r{number}"),
            prompt_token_ids=slice_token_ids(self._tokens, 0, BLOCK_TOKENS * len(hashes) + BLOCK_TOKENS // 2),
            block_hashes=hashes,
            root_hash=_ROOT,
            sampling=Sampling(max_tokens=OUTPUT_TOKENS),
        )
        self._num_requests += 1
        self._running[request.request_id] = Running(request, session, len(old))
        self._handle("submit", events.Submit(request, self.now))

    def _steps(self, running: Running) -> Iterator[None]:
        """The events of a request from its dispatch on, one or two at a time."""
        request_id, attempt, first = running.request.request_id, running.attempt, running.first
        assert first is not None
        yield
        cached = self._store(first, running)
        token = (TokenOut(request_id, attempt, 0, (7,)),)
        done = PrefillDone(request_id=request_id, attempt=attempt, cached_tokens=cached)
        self._update("prefilled", first, StepUpdate(tokens=token, prefilled=(done,)))
        yield
        last = first
        if running.decode is not None:
            last = running.decode
            moved = HandedOver(
                request_id=request_id, attempt=attempt, kv_bytes=1 << 20, cached_tokens=0, transport="fake"
            )
            self._update("handed_over", last, StepUpdate(tokens=token, handed_over=(moved,)))
            self._store(last, running)
            yield
        for index in range(1, OUTPUT_TOKENS):
            ends = (End(request_id=request_id, attempt=attempt, reason="length"),) if index == OUTPUT_TOKENS - 1 else ()
            token = (TokenOut(request_id, attempt, index, (7,)),)
            self._update("end" if ends else "token", last, StepUpdate(tokens=token, ends=ends))
            yield

    def _store(self, worker_id: WorkerId, running: Running) -> int:
        """A worker reports the blocks of a prompt. Returns how many of its tokens it had."""
        cached, stored, removed = self.holdings.store(
            worker_id, running.session, running.request.block_hashes, running.num_old
        )
        self._report("report", worker_id, stored, removed)
        return cached * BLOCK_TOKENS

    def _update(self, kind: str, worker_id: WorkerId, update: StepUpdate) -> None:
        self._handle(kind, events.FromWorker(worker_id, _INCARNATION, update))

    def _report(
        self, kind: str, worker_id: WorkerId, *kv_events: BlocksSnapshot | BlocksStored | BlocksRemoved
    ) -> None:
        report = WorkerReport(
            worker_id=worker_id,
            incarnation=_INCARNATION,
            sequence=self._sequences[worker_id],
            load=Load(num_running=4, steps=self._sequences[worker_id]),
            kv_events=kv_events,
            steps=(_STEP,),
            metrics=WorkerMetrics(tiers=_TIER_TIMES) if self._tiers and kind == "snapshot" else None,
        )
        self._sequences[worker_id] += 1
        self._handle(kind, events.WorkerReported(report))


CLOCKS: dict[str, Callable[[], int]] = {"wall": time.perf_counter_ns, "cpu": time.thread_time_ns}
"""`cpu` leaves out what other processes take from this core; reading it costs more."""


def measure_placements(
    num_workers: int,
    num_blocks: int,
    num_requests: int,
    repeats: int,
    policy: PolicyName,
    clock: str,
    *,
    tiers: bool = False,
) -> dict[str, Any]:
    """One row: rates over whole requests (median of `repeats` runs of `num_requests`), and what one event of each kind
    takes. The first run is not counted."""
    before_mib = _resident_mib()
    started = time.perf_counter()
    traffic = Traffic(num_workers, num_blocks, policy, CLOCKS[clock], tiers=tiers)
    setup_s, resident_mib = time.perf_counter() - started, _resident_mib() - before_mib
    freeze_start()  # as a gateway does when its workers have greeted
    traffic.run(num_requests)
    lives, placements = [], []
    all_times = no_times()
    for _ in range(repeats):
        traffic.times_ns.clear()
        num_before = traffic.num_finished
        traffic.run(num_requests)
        lives.append((traffic.num_finished - num_before) / (sum(map(sum, traffic.times_ns.values())) / 1e9))
        placements.append(len(traffic.times_ns["submit"]) / (sum(traffic.times_ns["submit"]) / 1e9))
        for kind, times in traffic.times_ns.items():
            all_times[kind] += times
    traffic.finish()
    gc.unfreeze()
    submit_us = [ns / 1e3 for ns in all_times["submit"]]
    return {
        "part": "placements",
        "policy": policy,
        "clock": clock,
        "tiers": tiers,
        "workers": num_workers,
        "indexed_blocks": traffic.holdings.num_blocks,
        "requests": num_requests * repeats,
        "placements_per_s": round(statistics.median(placements)),
        "lives_per_s": round(statistics.median(lives)),
        "least_lives_per_s": round(min(lives)),
        "submit_p50_us": round(percentile(submit_us, 50), 1),
        "submit_p99_us": round(percentile(submit_us, 99), 1),
        "longest_event_ms": round(max(map(max, all_times.values())) / 1e6, 1),
        "fetches": round(traffic.num_fetches / traffic.num_finished, 3),
        "placed_alone": round(traffic.num_placed_alone / traffic.num_finished, 3),
        "resident_mib": round(resident_mib),
        "setup_s": round(setup_s, 1),
        "us_per_request": us_per_request(all_times, num_requests * repeats),
    }


def no_times() -> defaultdict[str, array[int]]:
    """Nanoseconds by kind of event, none yet."""
    return defaultdict(lambda: array("q"))


def us_per_request(times_ns: Mapping[str, Sequence[int]], num_requests: int) -> dict[str, float]:
    """Where a request's time goes, in microseconds by kind of event."""
    return {kind: round(sum(times) / num_requests / 1e3, 1) for kind, times in sorted(times_ns.items())}


def _resident_mib() -> float:
    """Memory of this process, what the requests' own prompts take included; 0 where the system does not report it."""
    status = Path("/proc/self/status")
    lines: Sequence[str] = status.read_text(encoding="utf-8").splitlines() if status.exists() else []
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:")), 0.0)
