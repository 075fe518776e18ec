"""A cluster in virtual time: loop, gateway, workers, links and users, put together; and the result of a run.

    spec + requests ──SimulatedCluster──> run ──> Result: records as of a load test, samples over time, counts

Everything is a function of its arguments: no clock, no randomness. The same spec and requests give the same records.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from typing_extensions import override

from disagg.engine.cache_groups import PoolLimits, window_pools
from disagg.engine.config import NO_SPECULATION, WorkerConfig
from disagg.loadtests.records import RequestRecord
from disagg.proto.ids import WorkerId
from disagg.proto.messages import PeerRef, StepSample, WorkerMetrics
from disagg.router.requests import events
from disagg.simulator.exact.exact_engine import register
from disagg.simulator.exact.exact_worker import ExactWorker
from disagg.simulator.exact.tier_folder import Files
from disagg.simulator.exact.timed_runner import TimedRunner
from disagg.simulator.fast.fast_worker import FastWorker
from disagg.simulator.world.clock import EventLoop
from disagg.simulator.world.gateway import Gateway
from disagg.simulator.world.machine import Machine
from disagg.simulator.world.network import Network
from disagg.simulator.world.prompts import run_for
from disagg.simulator.world.settings import ClusterSpec, Fault, PoolSpec
from disagg.simulator.world.slow_times import SlowedSteps, SlowTime, factor_at, factor_before
from disagg.simulator.world.surroundings import Answers, Surroundings
from disagg.simulator.world.users import LOAD_TEST, Habits, UserRequest, Users
from disagg.step_times.interface import BusyTimes, StepTimes


class Sample(NamedTuple):
    """The state of the cluster at one moment."""

    time_s: float
    num_queued: int
    """Requests that wait for a worker."""
    num_in_flight: int
    """Requests that were sent and have not ended."""
    kv_use: float
    """Share of all KV blocks that sequences hold or are promised."""
    kv_cached: float
    """Share of all KV blocks that hold reusable content only."""
    num_up: int
    """Number of workers that serve."""
    num_starting: int
    num_draining: int
    num_busy: int
    """Number of workers in a step, or with sequences that decode."""
    prompt_tokens: int
    """Prompt tokens of all requests that were answered since the start."""
    cached_tokens: int
    """Prompt tokens of these requests that the worker that computed the prompt had cached."""
    num_transfers: int
    """Number of KV transfers under way."""


SimulatedWorker = ExactWorker | FastWorker

TICK_S = 0.04
"""Seconds between two looks of the router at the steps of elastic workers while requests wait."""


@dataclass(slots=True)
class _Member:
    """One place in a pool, and the worker that has it now."""

    pool: PoolSpec
    worker: SimulatedWorker | None
    began_s: float = 0.0
    ended_s: float | None = None
    """When the removed worker had ended."""
    num_starts: int = 0
    is_draining: bool = False
    is_removed: bool = False

    def is_desired(self, pool_name: str) -> bool:
        """Whether it belongs to that pool and was not removed."""
        return self.pool.name == pool_name and not self.is_removed


@dataclass(frozen=True, kw_only=True)
class Result:
    """The outcome of a run."""

    records: list[RequestRecord]
    """One record for each request, in the order of their indices; empty where `on_record` took them."""
    samples: list[Sample]
    end_s: float
    """When the last request ended."""
    num_events: int
    kv_bytes_moved: int
    placements: dict[str, int]
    """Number of placements of each kind, see `Attempts.decisions`."""
    counters: dict[str, int]
    """Counts of what the router dropped or repeated, by name."""
    problems: list[str]
    """Resources still held after the last request, and inconsistencies; empty when there are none."""
    loaded_tokens: int = 0
    """Prompt tokens whose KV the present workers loaded from tiers."""
    fetched_tokens: int = 0
    """Prompt tokens whose KV the present workers got from others."""


class SimulatedCluster(Surroundings):
    """All parts on one event loop. A caller may step it by `advance`, look at it, and change it between two steps.

    Args:
        spec: the cluster.
        requests: the requests, in the order of their due times.
        habits: the habits of the users.
        on_record: called for each record when its request ends. Then none is kept: a million of them, with the time of
            each token, would be many gigabytes.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        requests: Sequence[UserRequest],
        habits: Habits = LOAD_TEST,
        on_record: Callable[[RequestRecord], None] | None = None,
    ) -> None:
        self.spec = spec
        self.loop = EventLoop()
        self.overheads = spec.overheads
        self.tier_times = spec.tier_times
        self.network = Network(self.loop, spec.link)
        self.answers = Answers()
        self.machine = None if spec.sharing is None else Machine(self.loop, spec.sharing, spec.gateway_neighbour)
        self.gateway = Gateway(
            self.loop,
            # Sequences of a worker that is a few numbers end where they are.
            spec.router if spec.engine == "exact" else msgspec.structs.replace(spec.router, migrations=0),
            spec.overheads,
            self._on_drained,
            self.machine if spec.engine == "exact" else None,
            self._before_submit,
        )
        self.samples: list[Sample] = []
        self._members: dict[WorkerId, _Member] = {}
        self._folders: dict[WorkerId | None, Files] = {}
        """The files of each worker's disk tier; of None those that several workers share."""
        self._calibrations: dict[str, tuple[StepSample, ...]] = {}
        """The calibration of each pool by its name, without slow times."""
        self._end_s = 0.0
        self._is_ticking = False
        for pool in spec.pools:
            for _ in range(pool.size):
                self._start(self._new_member(pool))
        self.users = Users(
            self.loop,
            self.gateway,
            self.answers,
            spec.overheads,
            requests,
            habits,
            # With windows each block counts: a prefix is resumed at few of them.
            run=1 if spec.engine == "exact" or spec.kv_layout.windows else run_for(_smallest_cache(spec)),
            take=on_record,
        )
        for fault in spec.faults:
            if WorkerId(fault.worker_id) not in self._members:
                raise ValueError(f"faults: there is no worker {fault.worker_id}; got {', '.join(self._members)}")
            self.loop.at(fault.at_s, self._fail, fault)
        for slow_time in spec.slow_times:
            if slow_time.what == "links":
                for when in (slow_time.begins_s, slow_time.ends_s):
                    if when < math.inf:
                        self.loop.at(when, self._set_link_paces)
        self.loop.at(0.0, self._sample)

    # ------------------------------------------------------------ running

    def run(self) -> Result:
        """Run until every request has ended and all resources are released."""
        self.advance(math.inf)
        for member in self._members.values():
            if member.worker is not None:
                member.worker.stop_reporting()
        self.loop.run()
        return Result(
            records=sorted(self.users.records, key=lambda record: record.index),
            samples=self.samples,
            end_s=self._end_s,
            num_events=self.loop.num_events,
            kv_bytes_moved=self.network.bytes_sent,
            placements=dict(self.gateway.core.view(self.loop.now).stats.decisions),
            counters=dict(self.gateway.core.counters),
            problems=self.problems(),
            loaded_tokens=sum(metrics.loaded_tokens for metrics in self._metrics()),
            fetched_tokens=sum(metrics.fetched_tokens for metrics in self._metrics()),
        )

    def _metrics(self) -> Iterator[WorkerMetrics]:
        for member in self._members.values():
            if isinstance(member.worker, ExactWorker):
                yield member.worker.metrics()

    def advance(self, until_s: float) -> bool:
        """Advance to `until_s`, or until every request has ended. Returns whether every request has ended."""
        if not self.users.is_done:
            self.loop.run(until_s)
            self._end_s = self.loop.now
        return self.users.is_done

    @property
    def num_preemptions(self) -> int:
        """Number of preemptions on the present workers."""
        return sum(member.worker.num_preemptions for member in self._members.values() if member.worker is not None)

    def problems(self) -> list[str]:
        """Held resources and inconsistencies of all parts."""
        found = [f"router: {count} {name}" for name, count in self.gateway.core.holdings().items() if count]
        found += self.gateway.core.check_integrity()
        for worker_id, member in self._members.items():
            if member.worker is not None:
                counts, problems = member.worker.audit()
                found += [f"{worker_id}: {count} {name}" for name, count in counts.items() if count]
                found += [f"{worker_id}: {problem}" for problem in problems]
        if self.network.num_under_way:
            found.append(f"network: {self.network.num_under_way} transfers")
        return found

    # ------------------------------------------------------------ what may be changed

    def add_worker(self, pool_name: str) -> WorkerId:
        """Start one more worker of a pool; it serves after the pool's cold start."""
        pool = next(pool for pool in self.spec.pools if pool.name == pool_name)
        worker_id = self._new_member(pool)
        self.loop.after(pool.cold_start_s, self._start, worker_id)
        return worker_id

    def remove_worker(self, worker_id: WorkerId) -> None:
        """Drain a worker; it ends when no sequence is left on it."""
        member = self._members[worker_id]
        member.is_removed = True
        if member.worker is None:
            member.ended_s = self.loop.now
        elif not member.is_draining:
            member.is_draining = True
            self.gateway.drain(member.worker)

    def resize(self, pool_name: str, size: int) -> None:
        """Add workers, or drain the latest ones."""
        desired = [worker_id for worker_id, member in self._members.items() if member.is_desired(pool_name)]
        for _ in range(size - len(desired)):
            self.add_worker(pool_name)
        for worker_id in desired[size:]:
            self.remove_worker(worker_id)

    def pool_size(self, pool_name: str) -> tuple[int, int]:
        """The number of workers that are not removed, and how many of them serve."""
        desired = [member for member in self._members.values() if member.is_desired(pool_name)]
        return len(desired), sum(member.worker is not None for member in desired)

    @property
    def worker_seconds(self) -> float:
        """Total seconds of all workers so far, each from its start to its end."""
        ends = ((member.began_s, member.ended_s) for member in self._members.values())
        return sum((self.loop.now if end is None else end) - began for began, end in ends)

    # ------------------------------------------------------------ `Surroundings`

    @override
    def to_gateway(self, event: events.Event) -> None:
        self.loop.after(self.overheads.message_s, self.gateway.handle, event)

    @override
    def gateway_now(self, event: events.Event) -> None:
        self.gateway.handle(event)

    @override
    def find_worker(self, peer: PeerRef) -> SimulatedWorker | None:
        member = self._members.get(peer.worker_id)
        worker = None if member is None else member.worker
        return worker if worker is not None and worker.info.incarnation == peer.incarnation else None

    # ------------------------------------------------------------ workers come and go

    def _new_member(self, pool: PoolSpec) -> WorkerId:
        number = sum(member.pool is pool for member in self._members.values())
        worker_id = WorkerId(f"{pool.name}-{number}")
        self._members[worker_id] = _Member(pool, None, self.loop.now)
        return worker_id

    def _start(self, worker_id: WorkerId) -> None:
        member = self._members[worker_id]
        if member.is_removed:
            return
        pool = member.pool
        member.num_starts += 1
        config = msgspec.structs.replace(
            pool.worker, worker_id=worker_id, num_blocks=pool.num_blocks, speculation=NO_SPECULATION
        )
        slow_times = self._slow_times(worker_id, "steps")
        times = SlowedSteps(pool.times, slow_times, self.loop) if slow_times else pool.times
        calibration = self._calibration(pool, config, factor_before(slow_times, self.loop.now))
        worker = self._make_worker(times, config, pool, calibration, f"{worker_id}.{member.num_starts}")
        member.worker = worker
        self.gateway.worker_up(worker)
        worker.start()

    def _calibration(self, pool: PoolSpec, config: WorkerConfig, factor: float) -> tuple[StepSample, ...]:
        """The steps that a worker measures at its start, where each takes `factor` times as long as usual."""
        known = self._calibrations.get(pool.name)
        if known is None:
            known = self._calibrations[pool.name] = self._runner(pool, config, BusyTimes(pool.times)).calibrated(config)
        return tuple(msgspec.structs.replace(each, ms=each.ms * factor) for each in known)

    def _runner(self, pool: PoolSpec, config: WorkerConfig, times: StepTimes) -> TimedRunner:
        return TimedRunner(
            times,
            self.answers,
            layout=self.spec.kv_layout,
            num_blocks=pool.num_blocks,
            block_size=config.block_size,
            max_model_len=self.spec.max_model_len,
            window_blocks=window_pools(
                self.spec.kv_layout,
                pool.num_blocks,
                config.block_size,
                PoolLimits(config.num_places, config.step_tokens),
            ),
            expert_share=pool.expert_share,
        )

    def _slow_times(self, worker_id: WorkerId, what: str) -> list[SlowTime]:
        return [each for each in self.spec.slow_times if each.concerns(worker_id, what)]

    def _set_link_paces(self) -> None:
        for worker_id in self._members:
            self.network.slow_down(worker_id, factor_at(self._slow_times(worker_id, "links"), self.loop.now))

    def _make_worker(
        self,
        times: StepTimes,
        config: WorkerConfig,
        pool: PoolSpec,
        calibration: tuple[StepSample, ...],
        incarnation: str,
    ) -> SimulatedWorker:
        runner = self._runner(pool, config, times)
        if self.spec.engine == "exact":
            is_shared = config.tiers is not None and config.tiers.disk is not None and config.tiers.disk.shared
            files = self._folders.setdefault(None if is_shared else WorkerId(config.worker_id), {})
            return ExactWorker(self, config, runner, calibration, incarnation, self.spec.jump_s, files)
        most = min(runner.max_model_len, config.max_model_len or runner.max_model_len)
        longest = min(most, runner.num_blocks * runner.block_size)
        return FastWorker(self, config, register(config, runner, longest, calibration, incarnation), times)

    def _fail(self, fault: Fault) -> None:
        member = self._members[WorkerId(fault.worker_id)]
        if member.worker is None:
            return
        worker, member.worker = member.worker, None
        self._bury(worker)
        if fault.back_after_s is not None:
            self.loop.after(fault.back_after_s, self._start, worker.info.worker_id)

    def _bury(self, worker: SimulatedWorker) -> None:
        """End a worker and tell all that are connected to it."""
        worker.die()
        info = worker.info
        self.network.drop(info.worker_id)
        peer = PeerRef(worker_id=info.worker_id, incarnation=info.incarnation, address=info.address)
        for member in self._members.values():
            if member.worker is not None:
                member.worker.forget_pair(peer)
        if isinstance(worker, ExactWorker):
            for pair in worker.pairs():
                pair.close()
            for member in self._members.values():
                if isinstance(member.worker, ExactWorker):
                    member.worker.fetches.source_is_gone(peer)
        self.gateway.worker_lost(worker)

    def _on_drained(self, worker_id: WorkerId) -> None:
        member = self._members[worker_id]
        if member.is_removed and member.worker is not None:
            worker, member.worker, member.is_draining = member.worker, None, False
            member.ended_s = self.loop.now
            self.loop.at(self.loop.now, self._bury, worker)

    def _before_submit(self) -> None:
        self._catch_up()
        if self.spec.router.policy == "elastic" and not self._is_ticking:
            self._is_ticking = True
            self.loop.after(TICK_S, self._tick)

    def _tick(self) -> None:
        """Let the router look at waiting requests. A real one looks after every step that it hears of."""
        if self.gateway.core.num_queued:
            self._catch_up()
            self.loop.after(TICK_S, self._tick)
        else:
            self._is_ticking = False

    def _catch_up(self) -> None:
        for member in self._members.values():
            worker = member.worker
            if isinstance(worker, ExactWorker) or (worker is not None and worker.config.is_elastic):
                worker.catch_up()

    # ------------------------------------------------------------ looking

    def _sample(self) -> None:
        loads = [(member, member.worker.load()) for member in self._members.values() if member.worker is not None]
        total = sum(load.blocks_total for _, load in loads) or 1
        self.samples.append(
            Sample(
                time_s=self.loop.now,
                num_queued=self.gateway.core.holdings()["queued"],
                num_in_flight=self.gateway.num_in_flight,
                kv_use=sum(load.blocks_active + load.blocks_reserved for _, load in loads) / total,
                kv_cached=sum(load.blocks_cached for _, load in loads) / total,
                num_up=sum(not member.is_draining for member, _ in loads),
                num_starting=sum(member.worker is None and not member.is_removed for member in self._members.values()),
                num_draining=sum(member.is_draining for member, _ in loads),
                num_busy=sum(load.num_running > 0 for _, load in loads),
                prompt_tokens=self.users.prompt_tokens,
                cached_tokens=self.users.cached_tokens,
                num_transfers=self.network.num_under_way,
            )
        )
        if not self.users.is_done:
            self.loop.after(self.spec.sample_s, self._sample)


def _smallest_cache(spec: ClusterSpec) -> int:
    """Number of tokens in the smallest KV cache of a worker."""
    return min(pool.num_blocks * pool.worker.block_size for pool in spec.pools)
