"""How many workers a load needs: the least pools whose estimated attainment is high enough.

    Service(step times of warm workers) ──┐
    kinds of requests ────────────────────┼──> Sizing.attained(rate, sizes) ──> Sizing.grown, Sizing.shrunk
    limits of the pools ──────────────────┘

`queueing.py` has the estimates: with waits, not only with throughput. Pools of more than `LARGEST` workers are
estimated as one of that many with as much less load, which is a little less than they attain: large pools wait less.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from disagg.autoscaler import queueing
from disagg.autoscaler.policy import PoolLimits, pool_of
from disagg.autoscaler.queueing import Decoding, Estimate, Lengths, WorkerModel
from disagg.autoscaler.transfer import KvBytes
from disagg.proto.autoscaling import LoadReport, WorkerSample
from disagg.proto.ids import Incarnation, WorkerId
from disagg.proto.messages import StepCoefficients
from disagg.step_times.interface import LinkTimes, StepWork
from disagg.step_times.step_model import LEAST_MS

LARGEST = 32
RATE_STEP = 1.02
"""Rates are rounded up to powers of this factor, so that estimates can be reused."""
MOST_KEPT = 20_000
"""Number of kept estimates above which all are dropped."""
_SLACK = 0.99
"""Share of the attainment of the largest pools that is enough where even those do not attain the goal."""
_REFERENCE = StepWork(256, 256 * 128, 16, 16 * 512, 1)
"""Work by whose predicted time the workers of a pool are ordered by speed."""


@dataclass(frozen=True)
class CoefficientTimes:
    """Step times of a router's fit."""

    steps: StepCoefficients

    def step_s(self, work: StepWork) -> float:
        """Seconds of one engine step."""
        return max(LEAST_MS, self.steps.ms_of(*work[:4])) * 1e-3


@dataclass(frozen=True)
class Limits:
    """Limits of a load whose requests all have their own."""

    ttft_s: float | None = None
    tpot_s: float | None = None


@dataclass(frozen=True)
class Offered:
    """A load of `rate_per_s` requests per second; see `queueing.Load`."""

    rate_per_s: float
    kinds: tuple[Lengths, ...]
    slo: Limits = Limits()


# ---------------------------------------------------------------- what workers can do


class Service:
    """The model of one worker of each pool: the one of median speed, among those that have run for a while.

    The first steps of a process are slower than all later ones: memory is touched for the first time, kernels are
    compiled and captured. Where all workers are new, the model of before is kept, or theirs taken for want of another.
    """

    def __init__(self, warm_after_s: float) -> None:
        self._warm_after_s = warm_after_s
        self._since_s: dict[tuple[WorkerId, Incarnation], float] = {}
        self.models: dict[str, WorkerModel] = {}
        self.link = LinkTimes(bandwidth_bytes_per_s=1e10, latency_s=1e-4)
        self.kv_bytes: KvBytes = lambda num_tokens: 0
        self._chosen: dict[str, tuple[object, ...]] = {}
        self._is_warm: dict[str, bool] = {}

    def take(self, reports: Mapping[str, LoadReport], now: float) -> bool:
        """Take the workers of the gateways' reports. Returns whether the model of a pool has changed."""
        samples = [worker for report in reports.values() for worker in report.workers]
        present = {(sample.worker_id, sample.incarnation) for sample in samples}
        self._since_s = {key: self._since_s.get(key, now) for key in present}
        by_pool: dict[str, list[WorkerSample]] = {}
        for sample in samples:
            if sample.steps is not None:
                by_pool.setdefault(pool_of(sample.worker_id), []).append(sample)
        changed = [self._take_pool(pool, workers, now) for pool, workers in by_pool.items()]
        if samples:
            self.kv_bytes = samples[0].kv_layout.bytes_of
            report = next(iter(reports.values()))
            self.link = LinkTimes(
                bandwidth_bytes_per_s=1.0 / max(1e-15, report.link_byte_s), latency_s=max(0.0, report.link_latency_s)
            )
        return any(changed)

    def _take_pool(self, pool: str, workers: list[WorkerSample], now: float) -> bool:
        warm = [worker for worker in workers if self._age_s(worker, now) >= self._warm_after_s]
        if not warm and self._is_warm.get(pool, False):
            return False
        self._is_warm[pool] = bool(warm)
        ordered = sorted(warm or workers, key=_speed)
        sample = ordered[len(ordered) // 2]
        assert sample.steps is not None
        # To two digits: coefficients change a little with every fit.
        rounded = StepCoefficients(*(float(f"{value:.2g}") for value in sample.steps))
        chosen = (rounded, sample.num_blocks, sample.block_size, sample.max_num_seqs, sample.token_budget)
        if self._chosen.get(pool) == chosen:
            return False
        self._chosen[pool] = chosen
        self.models[pool] = WorkerModel(
            times=CoefficientTimes(rounded),
            token_budget=sample.token_budget,
            max_num_seqs=sample.max_num_seqs,
            kv_tokens=sample.num_blocks * sample.block_size,
        )
        return True

    def _age_s(self, worker: WorkerSample, now: float) -> float:
        return now - self._since_s[worker.worker_id, worker.incarnation]


def _speed(worker: WorkerSample) -> tuple[float, str]:
    assert worker.steps is not None
    return CoefficientTimes(worker.steps).step_s(_REFERENCE), worker.worker_id


# ---------------------------------------------------------------- what pools attain


@dataclass(frozen=True, kw_only=True)
class Attained:
    """What pools of certain sizes attain."""

    share: float
    """Share of requests that meet their targets."""
    utilization: float
    """Utilization of the busiest pool."""
    blamed: str
    """The pool that one more worker helps most."""


class Sizing:
    """Estimates for one kind of load on workers of one speed; keeps them.

    Args:
        service: the models of the workers of all pools.
        kinds: the kinds of requests.
        limits: the limits of the pools.
        goal: share of requests that are to meet their targets.
        max_utilization: the largest utilization of each pool.
    """

    def __init__(
        self,
        service: Service,
        kinds: tuple[Lengths, ...],
        limits: Mapping[str, PoolLimits],
        goal: float,
        max_utilization: float,
    ) -> None:
        self._models = dict(service.models)
        self._link, self._kv_bytes = service.link, service.kv_bytes
        self._kinds = kinds
        self._limits = limits
        self._goal = goal
        self._max_utilization = max_utilization
        self._prefill: dict[tuple[int, int], tuple[float, float]] = {}
        self._decode: dict[tuple[int, int], Decoding | None] = {}
        self._both: dict[tuple[int, int], Estimate] = {}

    def attained(self, rate_per_s: float, sizes: Mapping[str, int]) -> Attained:
        """What pools of these sizes (each at least 1) attain at `rate_per_s` requests per second."""
        if len(self._decode) + len(self._both) + len(self._prefill) > MOST_KEPT:
            self._prefill, self._decode, self._both = {}, {}, {}
        return self._attained(_level(rate_per_s), sizes)

    def grown(self, rate_per_s: float, sizes: Mapping[str, int]) -> dict[str, int]:
        """The sizes that are enough, none of them below `sizes`; the largest sizes where nothing is enough."""
        level, grown = _level(rate_per_s), {pool: max(1, size) for pool, size in sizes.items()}
        if self._is_enough(level, grown):
            return grown
        largest = self._largest()
        while not self._is_enough(level, grown):
            blamed = self._attained(level, grown).blamed
            if grown[blamed] >= largest[blamed]:
                blamed = next((pool for pool in grown if grown[pool] < largest[pool]), "")
            if not blamed:
                return largest
            # A step of an eighth overshoots, and is taken back below.
            grown[blamed] = min(largest[blamed], grown[blamed] + max(1, grown[blamed] // 8))
        return self._reduced(level, grown, sizes)

    def shrunk(self, rate_per_s: float, sizes: Mapping[str, int]) -> dict[str, int]:
        """The least sizes that are enough, none of them above `sizes`; `sizes` themselves where they are not enough."""
        level = _level(rate_per_s)
        if any(size < 1 for size in sizes.values()) or not self._is_enough(level, sizes):
            return dict(sizes)
        return self._reduced(level, sizes, {pool: self._limits[pool].min_size for pool in sizes})

    # ------------------------------------------------------------ inside

    def _largest(self) -> dict[str, int]:
        return {pool: max(1, limits.max_size) for pool, limits in self._limits.items()}

    def _is_enough(self, level: int, sizes: Mapping[str, int]) -> bool:
        found = self._attained(level, sizes)
        if found.utilization > self._max_utilization:
            return False
        return found.share >= self._goal or found.share >= _SLACK * self._attained(level, self._largest()).share

    def _reduced(self, level: int, sizes: Mapping[str, int], least: Mapping[str, int]) -> dict[str, int]:
        """Reduce sizes that are enough as far as they stay enough: pool by pool, the one with the costliest workers
        first."""
        reduced = dict(sizes)
        for pool in sorted(reduced, key=lambda name: -self._limits[name].weight):
            low, high = max(1, least[pool]) - 1, reduced[pool]  # `high` is enough
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if self._is_enough(level, {**reduced, pool: middle}) else (middle, high)
            reduced[pool] = high
        return reduced

    def _attained(self, level: int, sizes: Mapping[str, int]) -> Attained:
        if "decode" in sizes:
            return self._disaggregated(level, sizes["prefill"], sizes["decode"])
        (pool,) = sizes
        return self._elastic(level, sizes[pool]) if pool == "workers" else self._colocated(level, pool, sizes[pool])

    def _disaggregated(self, level: int, num_prefill: int, num_decode: int) -> Attained:
        ttft_share, prompts = self._prefill_share(level, num_prefill, "prefill")
        decoding = self._decoding(level, num_decode, "prefill", "decode")
        if decoding is None:
            return Attained(share=0.0, utilization=max(1.0, prompts), blamed="decode" if prompts < 1.0 else "prefill")
        on_decode = decoding.tpot_share * (1.0 - decoding.full)
        is_prefill = ttft_share < on_decode or (prompts > self._max_utilization and ttft_share <= on_decode)
        return Attained(
            share=ttft_share * on_decode,
            utilization=max(prompts, decoding.utilization),
            blamed="prefill" if is_prefill else "decode",
        )

    def _colocated(self, level: int, pool: str, size: int) -> Attained:
        key = (level, size)
        if key not in self._both:
            count, rate = _within(size, _rate(level))
            self._both[key] = queueing.colocated(Offered(rate, self._kinds), self._models[pool], count)
        found = self._both[key]
        return Attained(share=found.attainment, utilization=found.utilization, blamed=pool)

    def _elastic(self, level: int, size: int) -> Attained:
        """The better of two settings of `placement.decodes`: all workers do both, or some compute only prompts."""
        found = [self._colocated(level, "workers", size)]
        for num_prefill in _splits(size):
            ttft_share, prompts = self._prefill_share(level, num_prefill, "workers")
            decoding = self._decoding(level, size - num_prefill, "workers", "workers")
            if decoding is not None:
                share = ttft_share * decoding.tpot_share * (1.0 - decoding.full)
                found.append(Attained(share=share, utilization=max(prompts, decoding.utilization), blamed="workers"))
        fit = [each for each in found if each.utilization <= self._max_utilization]
        return max(fit or found, key=lambda each: each.share)

    def _prefill_share(self, level: int, size: int, pool: str) -> tuple[float, float]:
        """The share of requests within the TTFT limit, and the utilization."""
        key = (level, size)
        if key not in self._prefill:
            count, rate = _within(size, _rate(level))
            found = queueing.prefill_estimate(Offered(rate, self._kinds), self._models[pool], count)
            self._prefill[key] = (0.0, 1.0) if found is None else (found[0], found[2])
        return self._prefill[key]

    def _decoding(self, level: int, size: int, prefill: str, decode: str) -> Decoding | None:
        key = (level, size)
        if key not in self._decode:
            count, rate = _within(size, _rate(level))
            self._decode[key] = queueing.decode_estimate(
                Offered(rate, self._kinds),
                self._models[prefill],
                self._models[decode],
                count,
                self._kv_bytes,
                self._link,
            )
        return self._decode[key]


def _level(rate_per_s: float) -> int:
    return math.ceil(math.log(max(1e-6, rate_per_s)) / math.log(RATE_STEP))


def _rate(level: int) -> float:
    return float(RATE_STEP**level)


def _within(size: int, rate_per_s: float) -> tuple[int, float]:
    """The pool size and the rate to estimate: both reduced by one factor where the pool is too large."""
    return (size, rate_per_s) if size <= LARGEST else (LARGEST, rate_per_s * LARGEST / size)


def _splits(size: int) -> list[int]:
    """The numbers of workers that may compute only prompts, of `size` workers: all numbers in a small pool, eight in a
    large one."""
    if size <= 9:
        return list(range(1, size))
    return sorted({max(1, round(size * part / 9)) for part in range(1, 9)})
