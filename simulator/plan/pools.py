"""The pools that serve a load within its limits at the least cost: how many workers of which width, disaggregated or
colocated.

    Planner.shortlist()      every shape with as few workers as the estimate (queueing.py) takes to be enough
    Planner.best(judge)      the cheapest that a judge confirms, and what else it judged

A judge is the simulator (judge.py), or the estimate itself. It is asked for a few dozen candidates: first the
estimate's best of each kind; then, from those that serve the load, ones with a worker less, until none does; from
those that do not, ones with a worker more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from disagg.autoscaler import queueing
from disagg.autoscaler.queueing import Estimate, WorkerModel
from disagg.engine.cache_groups import PoolLimits
from disagg.proto.errors import ConfigError
from disagg.simulator.durations.devices import Device
from disagg.simulator.durations.model_shapes import ModelShape
from disagg.simulator.plan.load import Load
from disagg.simulator.plan.memory import BF16, Precision, check_fits, worker_memory
from disagg.step_times.interface import LinkTimes, StepTimes, decode_s, prefill_s

MAX_JUDGED = 40
NUM_FIRST = 6
"""Least number of kinds of pools that are judged."""
MAX_SEQS = 256
MARGIN_P = 2
"""Number of prefill workers, beyond the least that serve, that are tried with fewer decode workers."""


class Pool(NamedTuple):
    """A pool of identical workers."""

    num_workers: int
    tp: int
    token_budget: int
    """Token budget of one step."""

    @property
    def num_devices(self) -> int:
        """Number of devices of all workers."""
        return self.num_workers * self.tp


class Candidate(NamedTuple):
    """Pools for a load. Without a prefill pool the workers of `decode` are colocated: they prefill and decode."""

    prefill: Pool | None
    decode: Pool

    @property
    def is_disaggregated(self) -> bool:
        """Whether there are two pools."""
        return self.prefill is not None

    @property
    def num_devices(self) -> int:
        """Number of devices of both pools."""
        return self.decode.num_devices + (self.prefill.num_devices if self.prefill else 0)

    @property
    def kind(self) -> tuple[int, int, int, int]:
        """Widths and token budgets of the pools, without the numbers of workers."""
        prefill = self.prefill or Pool(0, 0, 0)
        return prefill.tp, prefill.token_budget, self.decode.tp, self.decode.token_budget

    def __str__(self) -> str:
        decode = self.decode
        if self.prefill is None:
            return f"{decode.num_workers}x{decode.tp} colocated, {decode.token_budget}-token steps"
        return f"{self.prefill.num_workers}x{self.prefill.tp} prefill + {decode.num_workers}x{decode.tp} decode"


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What a candidate attains under the load, as a judge determined it."""

    attainment: float
    ttft_attainment: float
    tpot_attainment: float
    mean_ttft_s: float
    mean_tpot_s: float
    utilization: float = math.nan
    """Utilization of the busier pool; NaN where the judge does not know it."""


Judge = Callable[[Candidate], Judgement]


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A candidate with the estimate and the judgement of it."""

    candidate: Candidate
    estimate: Estimate
    judgement: Judgement
    price_per_hour: float


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The result of a search. `best` does not meet the limits where `is_met` is false: then none does within
    `max_devices`."""

    best: Judged
    is_met: bool
    judged: tuple[Judged, ...]
    """All other judged candidates, best first."""

    @property
    def best_other(self) -> Judged | None:
        """The best candidate of the other mode (disaggregated or colocated); None without one."""
        others = [
            each for each in self.judged if each.candidate.is_disaggregated != self.best.candidate.is_disaggregated
        ]
        return others[0] if others else None


TimesOf = Callable[[int], StepTimes]
"""The step times of a worker, by its number of devices."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """The model, the devices and the limits of a search."""

    model: ModelShape
    device: Device
    times_of: TimesOf
    link: LinkTimes
    """The link between workers."""
    tps: tuple[int, ...]
    """Tensor-parallel widths that may be used."""
    token_budgets: tuple[int, ...]
    """Token budgets of colocated workers; prefill workers have the largest."""
    price_per_hour: float
    """Price of one device per hour."""
    max_devices: int
    precision: Precision = BF16
    max_num_seqs: int = MAX_SEQS
    modes: tuple[bool, ...] = (True, False)
    """Which of disaggregated (True) and colocated (False) are considered."""

    def limits(self, token_budget: int) -> PoolLimits:
        """The largest batch and step of a worker."""
        return PoolLimits(min(self.max_num_seqs, token_budget), token_budget)


class Planner:
    """Searches the pools of one site for one load.

    Raises:
        ConfigError: the model fits no width, or the limits cannot be met even by an idle worker; names the flag.
    """

    def __init__(self, site: Site, load: Load) -> None:
        self.site, self.load = site, load
        if load.longest > site.model.max_positions:
            raise ConfigError(
                f"--prompt-tokens, --output-tokens: {load.longest} tokens are more than the {site.model.max_positions} "
                f"positions of {site.model.name}"
            )
        limits = site.limits(max(site.token_budgets))
        self.tps = check_fits(site.model, site.device, list(site.tps), load.longest, site.precision, limits)
        self._workers: dict[tuple[int, int], WorkerModel] = {}
        self._estimates: dict[Candidate, Estimate] = {}
        self._check_limits()

    # ------------------------------------------------------------ estimates

    def worker(self, tp: int, token_budget: int) -> WorkerModel:
        """The model of one worker of this width."""
        key = (tp, token_budget)
        if key not in self._workers:
            site = self.site
            limits = site.limits(token_budget)
            memory = worker_memory(site.model, site.device, tp, site.precision, limits)
            self._workers[key] = WorkerModel(
                times=site.times_of(tp),
                token_budget=token_budget,
                max_num_seqs=limits.max_num_seqs,
                kv_tokens=memory.kv_tokens,
                most_sequences=memory.sequences if memory.groups else None,
            )
        return self._workers[key]

    def estimate(self, candidate: Candidate) -> Estimate:
        """The estimate for a candidate by queueing theory."""
        if candidate not in self._estimates:
            self._estimates[candidate] = self._estimate(candidate)
        return self._estimates[candidate]

    def _estimate(self, candidate: Candidate) -> Estimate:
        site, decode = self.site, candidate.decode
        decoder = self.worker(decode.tp, decode.token_budget)
        if candidate.prefill is None:
            return queueing.colocated(self.load, decoder, decode.num_workers)
        prefill = candidate.prefill
        return queueing.disaggregated(
            self.load,
            self.worker(prefill.tp, prefill.token_budget),
            prefill.num_workers,
            decoder,
            decode.num_workers,
            site.model.kv_layout(site.precision.kv_dtype).bytes_of,
            site.link,
        )

    def price(self, candidate: Candidate) -> float:
        """Price of a candidate's devices per hour."""
        return candidate.num_devices * self.site.price_per_hour

    def _check_limits(self) -> None:
        site, slo = self.site, self.load.slo
        ttfts, tpots = [], []
        budget = max(site.token_budgets)
        shortest = min(self.load.kinds, key=lambda kind: kind.computed)
        for tp in self.tps:
            times = self.worker(tp, budget).times
            ttfts.append((prefill_s(times, shortest.computed, budget, shortest.cached), tp))
            tpots.append((decode_s(times, 1, queueing.decode_context(self.load.kinds)), tp))
        (ttft_s, ttft_tp), (tpot_s, tpot_tp) = min(ttfts), min(tpots)
        if slo.ttft_s is not None and ttft_s > slo.ttft_s:
            raise ConfigError(
                f"--ttft-ms: {slo.ttft_s * 1e3:g} ms cannot be met: a prompt of {shortest.computed} tokens takes "
                f"{ttft_s * 1e3:.0f} ms on an idle worker of {ttft_tp} x {site.device.name}"
            )
        if slo.tpot_s is not None and tpot_s > slo.tpot_s:
            raise ConfigError(
                f"--tpot-ms: {slo.tpot_s * 1e3:g} ms cannot be met: a token of a single sequence takes "
                f"{tpot_s * 1e3:.1f} ms on an idle worker of {tpot_tp} x {site.device.name}"
            )

    # ------------------------------------------------------------ candidates

    def shortlist(self) -> list[Candidate]:
        """The best candidate of each kind of pools by the estimate: first those that meet the limits, cheapest first;
        then the others, by attainment."""
        found = [*self._colocated(), *self._disaggregated()]
        return sorted(found, key=self._order)

    def _order(self, candidate: Candidate) -> tuple[bool, float, float]:
        attainment = self.estimate(candidate).attainment
        missed = attainment < self.load.min_attainment
        return missed, -attainment if missed else self.price(candidate), -attainment

    def _serves(self, candidate: Candidate) -> bool:
        return self.estimate(candidate).attainment >= self.load.min_attainment

    def _colocated(self) -> Iterator[Candidate]:
        if False not in self.site.modes:
            return
        for tp in self.tps:
            for budget in self.site.token_budgets:
                most = self.site.max_devices // tp
                if most:
                    yield self._with_workers(None, Pool(most, tp, budget))

    def _disaggregated(self) -> Iterator[Candidate]:
        if True not in self.site.modes:
            return
        budget, most = max(self.site.token_budgets), self.site.max_devices
        for prefill_tp in self.tps:
            for decode_tp in self.tps:
                most_prefill = (most - decode_tp) // prefill_tp
                if most_prefill < 1:
                    continue
                least = self._least_prefill(Pool(most_prefill, prefill_tp, budget))
                pairs = []
                for number in range(least, min(most_prefill, least + MARGIN_P) + 1):
                    prefill = Pool(number, prefill_tp, budget)
                    left = (most - prefill.num_devices) // decode_tp
                    pairs.append(self._with_workers(prefill, Pool(left, decode_tp, budget)))
                yield min(pairs, key=self._order)

    def _least_prefill(self, most: Pool) -> int:
        worker, target = self.worker(most.tp, most.token_budget), self.load.min_attainment

        def serves(number: int) -> bool:
            computed = queueing.prefill_estimate(self.load, worker, number)
            return computed is not None and computed[0] >= target

        return _least(most.num_workers, serves)

    def _with_workers(self, prefill: Pool | None, most: Pool) -> Candidate:
        """The candidate with the fewest workers that serve the load beside these prefill workers; `most` where fewer do
        not."""

        def candidate(number: int) -> Candidate:
            return Candidate(prefill, most._replace(num_workers=number))

        return candidate(_least(most.num_workers, lambda number: self._serves(candidate(number))))

    # ------------------------------------------------------------ search

    def best(self, judge: Judge | None = None, max_judged: int = MAX_JUDGED) -> Answer:
        """Find the cheapest pools that meet the limits by the judge, or by the estimate without one."""
        shortlist = self.shortlist()
        if not shortlist:
            raise ConfigError(
                f"--max-gpus: {self.site.max_devices} devices are too few for one worker of {min(self.tps)}"
            )
        if judge is None:
            answers = [self._judged(candidate, self._as_judgement(candidate)) for candidate in shortlist]
            return self._answer(answers)
        return _Search(self, judge, max_judged).run(shortlist)

    def _as_judgement(self, candidate: Candidate) -> Judgement:
        estimate = self.estimate(candidate)
        return Judgement(
            attainment=estimate.attainment,
            ttft_attainment=estimate.ttft_attainment,
            tpot_attainment=estimate.tpot_attainment,
            mean_ttft_s=estimate.mean_ttft_s,
            mean_tpot_s=estimate.mean_tpot_s,
            utilization=estimate.utilization,
        )

    def _judged(self, candidate: Candidate, judgement: Judgement) -> Judged:
        return Judged(
            candidate=candidate,
            estimate=self.estimate(candidate),
            judgement=judgement,
            price_per_hour=self.price(candidate),
        )

    def is_met(self, judgement: Judgement) -> bool:
        """Whether as many requests as the load demands meet their limits."""
        return judgement.attainment >= self.load.min_attainment

    def rank(self, judged: Judged) -> tuple[bool, float, float, bool, float]:
        """The sort key, best first: candidates that meet the limits by price, then the others by attainment. Where
        these are equal (attainment to a percent), colocated workers come first: they are simpler to run."""
        met, attainment = self.is_met(judged.judgement), judged.judgement.attainment
        share = -round(attainment, 2)
        return not met, judged.price_per_hour if met else share, share, judged.candidate.is_disaggregated, -attainment

    def _answer(self, judged: Sequence[Judged]) -> Answer:
        ordered = sorted(judged, key=self.rank)
        return Answer(best=ordered[0], is_met=self.is_met(ordered[0].judgement), judged=tuple(ordered[1:]))


class _Search:
    """One search with a judge."""

    def __init__(self, planner: Planner, judge: Judge, max_judged: int) -> None:
        self.planner = planner
        self._judge, self._max_judged = judge, max_judged
        self._found: dict[Candidate, Judged] = {}

    def run(self, shortlist: Sequence[Candidate]) -> Answer:
        """Search from the best candidates of the shortlist."""
        first = shortlist[:NUM_FIRST]
        for mode in (True, False):  # at least one of each mode, so that they can be compared
            if not any(each.is_disaggregated == mode for each in first):
                first = [*first, *[each for each in shortlist if each.is_disaggregated == mode][:1]]
        for candidate in first:
            self._ask(candidate)
        while not self._is_full:
            todo = self._next()
            if todo is None:
                break
            self._ask(todo)
        return self.planner._answer(list(self._found.values()))

    @property
    def _is_full(self) -> bool:
        return len(self._found) >= self._max_judged

    def _ask(self, candidate: Candidate) -> Judged:
        if candidate not in self._found:
            self._found[candidate] = self.planner._judged(candidate, self._judge(candidate))
        return self._found[candidate]

    def _next(self) -> Candidate | None:
        """The most promising candidate that was not judged yet: near the best one, then near the best one of the other
        mode."""
        ordered = sorted(self._found.values(), key=self.planner.rank)
        best = ordered[0]
        others = [each for each in ordered if each.candidate.is_disaggregated != best.candidate.is_disaggregated]
        near = [best, *others[:1], *ordered[1:3]] if self.planner.is_met(best.judgement) else ordered
        for judged in near:
            new = [each for each in self._around(judged, best) if each not in self._found]
            if new:
                return min(new, key=self.planner._order)
        return None

    def _around(self, judged: Judged, best: Judged) -> Iterator[Candidate]:
        """Candidates that may be better than the best: with one worker less where the limits are met, else with one
        more; and with one worker moved between the pools."""
        met = self.planner.is_met(judged.judgement)
        best_price = best.price_per_hour if self.planner.is_met(best.judgement) else math.inf
        for candidate in _neighbours(judged.candidate, fewer=met):
            if candidate.num_devices > self.planner.site.max_devices:
                continue
            price = self.planner.price(candidate)
            if price < best_price or (price == best_price and judged is best):
                yield candidate


def _neighbours(candidate: Candidate, *, fewer: bool) -> Iterator[Candidate]:
    change = -1 if fewer else 1
    prefill, decode = candidate.prefill, candidate.decode
    if decode.num_workers + change >= 1:
        yield Candidate(prefill, decode._replace(num_workers=decode.num_workers + change))
    if prefill is None:
        return
    if prefill.num_workers + change >= 1:
        yield Candidate(prefill._replace(num_workers=prefill.num_workers + change), decode)
    for moved in (-1, 1):
        more, less = prefill.num_workers + moved, decode.num_workers - moved
        if more >= 1 and less >= 1:
            yield Candidate(prefill._replace(num_workers=more), decode._replace(num_workers=less))


def _least(most: int, serves: Callable[[int], bool]) -> int:
    """The least number from 1 to `most` for which `serves` holds, if it holds for all larger ones; `most` where it
    holds for none."""
    low, high = 0, 1
    while high < most and not serves(high):
        low, high = high, min(most, 2 * high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if serves(middle) else (middle, high)
    return high
