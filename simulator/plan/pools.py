"""The pools that serve a load within its limits at the least cost: how many workers of which stages and widths,
disaggregated or colocated.

    Planner.shortlist()      every shape with as few workers as the estimate (queueing.py) takes to be enough
    Planner.best(judge)      the cheapest that a judge confirms, and what else it judged

A judge is the simulator (judge.py), or the estimate itself. It is asked for a few dozen candidates: first the
estimate's best of each kind; then, from those that serve the load, ones with a worker less, until none does; from
those that do not, ones with a worker more. Kinds with more stages than memory needs come last, with a number of their
own (`STAGED_SHARE`), so that the answer is never worse than without them.

Workers that decode have as few stages as the model's memory needs: a token passes all stages, one after the other.
Prefill workers are tried with more stages (`NUM_STAGED`), each with the token budget that suits it best. Whether the
ranks of a width have whole experts is what is quicker for the load's prompts, or for its tokens.
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
from disagg.simulator.durations.parallelism import Parallelism
from disagg.simulator.plan.load import Load
from disagg.simulator.plan.memory import BF16, MAX_NODES, Precision, check_fits, expert_choices, worker_memory
from disagg.step_times.interface import LinkTimes, StepTimes, decode_s

MAX_JUDGED = 40
NUM_STAGED = 2
"""Kinds of prefill workers with more stages than memory needs that are tried with each kind of decode workers."""
USUAL_BATCH = 32
"""Sequences of the decode step by which it is decided whether ranks have whole experts."""
NUM_FIRST = 6
"""Least number of kinds of pools that are judged."""
STAGED_SHARE = 0.4
"""Most candidates with more stages than memory needs that are judged, as a share of the others."""
LEAST_STAGED = 2
"""So many where the others are few."""
MAX_SEQS = 256
MARGIN_P = 2
"""Number of prefill workers, beyond the least that serve, that are tried with fewer decode workers."""


class Pool(NamedTuple):
    """A pool of identical workers."""

    num_workers: int
    tp: int
    token_budget: int
    """Token budget of one step."""
    pp: int = 1
    ep: bool = False

    @property
    def parallelism(self) -> Parallelism:
        """The stages and ranks of each worker."""
        return Parallelism(self.tp, self.pp, self.ep)

    @property
    def num_devices(self) -> int:
        """Number of devices of all workers."""
        return self.num_workers * self.tp * self.pp

    def __str__(self) -> str:
        each = f"{self.tp}" if self.pp == 1 and not self.ep else f"({self.parallelism})"
        return f"{self.num_workers}x{each}"


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
    def kind(self) -> tuple[Pool | None, Pool]:
        """The pools, with no workers."""
        prefill = None if self.prefill is None else self.prefill._replace(num_workers=0)
        return prefill, self.decode._replace(num_workers=0)

    @property
    def num_stages(self) -> int:
        """Stages of the worker with most of them."""
        return max(self.decode.pp, 0 if self.prefill is None else self.prefill.pp)

    def __str__(self) -> str:
        decode = self.decode
        if self.prefill is None:
            return f"{decode} colocated, {decode.token_budget}-token steps"
        return f"{self.prefill} prefill + {decode} decode"


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


TimesOf = Callable[[Parallelism], StepTimes]
"""The step times of a worker, by its stages and ranks."""


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
    """Token budgets of colocated workers, and of prefill workers of several stages; other prefill workers have the
    largest."""
    price_per_hour: float
    """Price of one device per hour."""
    max_devices: int
    pps: tuple[int, ...] = (1,)
    """Numbers of stages that may be used."""
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
        self._budget = max(site.token_budgets)
        self._workers: dict[tuple[Parallelism, int], WorkerModel] = {}
        self._estimates: dict[Candidate, Estimate] = {}
        self._fitting = self._choices_that_fit()
        self._fewest_stages = min(each.pp for each in self._fitting)
        fewest = [each for each in self._fitting if each.pp == self._fewest_stages]
        self.decoders = self._one_of_each(fewest, self._token_s)
        """The stages and ranks of workers that decode, or do both."""
        self.prefillers = self._prefill_workers()
        """One prefill worker of each kind that is tried."""
        self._check_limits()

    # ------------------------------------------------------------ stages and ranks

    def _choices_that_fit(self) -> list[Parallelism]:
        site = self.site
        most = max(site.device.max_tp * MAX_NODES, *site.tps) if site.tps else 0
        choices = [
            Parallelism(tp, pp, ep)
            for pp in site.pps
            for tp in site.tps
            for ep in expert_choices(site.model, tp)
            if pp == min(site.pps) or tp * pp <= most
        ]
        limits = site.limits(self._budget)
        return check_fits(site.model, site.device, choices, self.load.longest, site.precision, limits)

    def _one_of_each(
        self, choices: Sequence[Parallelism], seconds: Callable[[Parallelism], float]
    ) -> list[Parallelism]:
        """Of choices that differ only in whether ranks have whole experts the one that takes fewer seconds."""
        best: dict[tuple[int, int], Parallelism] = {}
        for each in choices:
            other = best.get((each.tp, each.pp))
            if other is None or seconds(each) < seconds(other):
                best[each.tp, each.pp] = each
        return list(best.values())

    def _token_s(self, parallelism: Parallelism) -> float:
        times = self.worker(parallelism, self._budget).times
        return decode_s(times, USUAL_BATCH, queueing.decode_context(self.load.kinds))

    def _prompts_s(self, parallelism: Parallelism) -> float:
        worker = self.worker(parallelism, self._budget)
        return sum(worker.busy_s(kind) for kind in self.load.kinds)

    def _prefill_workers(self) -> list[Pool]:
        """Those with the fewest stages, and the best of those with more: those that serve the load with the fewest
        devices and compute its prompts the soonest."""
        found, ranked = [], []
        for each in self._one_of_each(self._fitting, self._prompts_s):
            if each.pp == self._fewest_stages:
                found.append(Pool(1, each.tp, self._budget, each.pp, each.ep))
            if each.pp == self._fewest_stages or True not in self.site.modes:
                continue
            for budget in self.site.token_budgets:
                pool = Pool(1, each.tp, budget, each.pp, each.ep)
                if (most := self.site.max_devices // each.num_devices) >= 1:
                    ranked.append((*self._prefill_rank(pool._replace(num_workers=most)), pool))
        best: dict[Parallelism, Pool] = {}
        for *_, pool in sorted(ranked):
            best.setdefault(pool.parallelism, pool)
        return [*found, *list(best.values())[:NUM_STAGED]]

    def _prefill_rank(self, most: Pool) -> tuple[bool, float, float]:
        """Whether the largest such pool is too small; devices of the smallest one that is not, or the share of requests
        that the largest one misses; mean TTFT in seconds."""
        worker = self.worker(most.parallelism, most.token_budget)
        number = self._least_prefill(most)
        computed = queueing.prefill_estimate(self.load, worker, number)
        if computed is None:
            return True, 1.0, sum(worker.busy_s(kind) for kind in self.load.kinds)
        within, mean_ttft_s, _ = computed
        serves = within >= self.load.min_attainment
        return not serves, float(number * most.parallelism.num_devices) if serves else 1.0 - within, mean_ttft_s

    # ------------------------------------------------------------ estimates

    def worker(self, parallelism: Parallelism, token_budget: int) -> WorkerModel:
        """The model of one worker."""
        key = (parallelism, token_budget)
        if key not in self._workers:
            site = self.site
            limits = site.limits(token_budget)
            tp, pp, ep = parallelism
            memory = worker_memory(site.model, site.device, tp, site.precision, limits, pp=pp, ep=ep)
            self._workers[key] = WorkerModel(
                times=site.times_of(parallelism),
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
        decoder = self.worker(decode.parallelism, decode.token_budget)
        if candidate.prefill is None:
            return queueing.colocated(self.load, decoder, decode.num_workers)
        prefill = candidate.prefill
        return queueing.disaggregated(
            self.load,
            self.worker(prefill.parallelism, prefill.token_budget),
            prefill.num_workers,
            decoder,
            decode.num_workers,
            site.model.kv_layout(site.precision.kv_dtype).bytes_of,
            site.link,
        )

    def has_more_stages(self, candidate: Candidate) -> bool:
        """Whether the prefill workers have more stages than memory needs."""
        return candidate.prefill is not None and candidate.prefill.pp > self._fewest_stages

    def most_staged(self, num_others: int) -> int:
        """The number of candidates with more stages than memory needs that are judged at most, beside these others."""
        has_some = any(each.pp > self._fewest_stages for each in self.prefillers)
        return max(LEAST_STAGED, int(STAGED_SHARE * num_others)) if has_some else 0

    def price(self, candidate: Candidate) -> float:
        """Price of a candidate's devices per hour."""
        return candidate.num_devices * self.site.price_per_hour

    def _check_limits(self) -> None:
        site, slo = self.site, self.load.slo
        shortest = min(self.load.kinds, key=lambda kind: kind.computed)
        context = queueing.decode_context(self.load.kinds)
        ttfts = [
            (self.worker(pool.parallelism, pool.token_budget).prompt_s(shortest), pool.parallelism)
            for pool in self.prefillers
        ]
        tpots = [(decode_s(self.worker(each, self._budget).times, 1, context), each) for each in self.decoders]
        (ttft_s, prefiller), (tpot_s, decoder) = min(ttfts), min(tpots)
        if slo.ttft_s is not None and ttft_s > slo.ttft_s:
            raise ConfigError(
                f"--ttft-ms: {slo.ttft_s * 1e3:g} ms cannot be met: a prompt of {shortest.computed} tokens takes "
                f"{ttft_s * 1e3:.0f} ms on an idle worker of {prefiller.num_devices} x {site.device.name}"
            )
        if slo.tpot_s is not None and tpot_s > slo.tpot_s:
            raise ConfigError(
                f"--tpot-ms: {slo.tpot_s * 1e3:g} ms cannot be met: a token of a single sequence takes "
                f"{tpot_s * 1e3:.1f} ms on an idle worker of {decoder.num_devices} x {site.device.name}"
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
        for each in self.decoders:
            for budget in self.site.token_budgets:
                most = self.site.max_devices // each.num_devices
                if most:
                    yield self._with_workers(None, Pool(most, each.tp, budget, each.pp, each.ep))

    def _disaggregated(self) -> Iterator[Candidate]:
        if True not in self.site.modes:
            return
        most = self.site.max_devices
        for prefiller in self.prefillers:
            num_prefill = prefiller.num_devices
            if most > num_prefill:
                least = self._least_prefill(prefiller._replace(num_workers=most // num_prefill))
            for each in self.decoders:
                most_prefill = (most - each.num_devices) // num_prefill
                if most_prefill < 1:
                    continue
                pairs = []
                for number in range(min(least, most_prefill), min(most_prefill, least + MARGIN_P) + 1):
                    prefill = prefiller._replace(num_workers=number)
                    left = (most - prefill.num_devices) // each.num_devices
                    pairs.append(self._with_workers(prefill, Pool(left, each.tp, self._budget, each.pp, each.ep)))
                yield min(pairs, key=self._order)

    def _least_prefill(self, most: Pool) -> int:
        worker, target = self.worker(most.parallelism, most.token_budget), self.load.min_attainment

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
                f"--max-gpus: {self.site.max_devices} devices are too few for one worker of "
                f"{min(each.num_devices for each in self.decoders)}"
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

    def rank(self, judged: Judged) -> tuple[bool, float, float, bool, int, float]:
        """The sort key, best first: candidates that meet the limits by price, then the others by attainment. Where
        these are equal (attainment to a percent), colocated workers and those with fewer stages come first: they are
        simpler to run."""
        met, attainment = self.is_met(judged.judgement), judged.judgement.attainment
        share = -round(attainment, 2)
        candidate, first = judged.candidate, judged.price_per_hour if met else share
        return not met, first, share, candidate.is_disaggregated, candidate.num_stages, -attainment

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
        """Search from the best candidates of the shortlist: first those without more stages than memory needs, then
        those with."""
        plain = [each for each in shortlist if not self.planner.has_more_stages(each)]
        staged = [each for each in shortlist if self.planner.has_more_stages(each)] if plain else []
        first = (plain or shortlist)[:NUM_FIRST]
        for mode in (True, False):  # at least one of each mode, so that they can be compared
            if not any(each.is_disaggregated == mode for each in first):
                first = [*first, *[each for each in plain if each.is_disaggregated == mode][:1]]
        for candidate in first:
            self._ask(candidate)
        while not self._is_full:
            todo = self._next()
            if todo is None:
                break
            self._ask(todo)
        for _ in range(self.planner.most_staged(len(self._found))):
            todo = self._next_staged(staged)
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

    def _next_staged(self, staged: Sequence[Candidate]) -> Candidate | None:
        """The most promising candidate with more stages that was not judged yet and may be better than the best: of the
        shortlist, or near one that was judged."""
        best = min(self._found.values(), key=self.planner.rank)
        found = [each for each in staged if self._may_beat(each, best)]
        for judged in self._found.values():
            if self.planner.has_more_stages(judged.candidate):
                found.extend(self._around(judged, best))
        new = [each for each in found if each not in self._found]
        return min(new, key=self.planner._order) if new else None

    def _may_beat(self, candidate: Candidate, best: Judged) -> bool:
        """Whether a candidate can be better than the best: at the same price only by its attainment, to a percent."""
        price = self.planner.price(candidate)
        if not self.planner.is_met(best.judgement) or price < best.price_per_hour:
            return True
        return price == best.price_per_hour and round(best.judgement.attainment, 2) < 1.0

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
