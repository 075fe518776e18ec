"""The workers that a plan's pools may have: stages, ranks, and whether these have whole experts.

Workers that decode have as few stages as the model's memory needs: a token passes all stages, one after the other.
Prefill workers are tried with more stages (`NUM_STAGED`), each with the token budget that suits it best. Whether the
ranks of a width have whole experts is what is quicker for the load's prompts, or for its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from disagg.autoscaler import queueing
from disagg.autoscaler.queueing import WorkerModel
from disagg.engine.cache_groups import PoolLimits
from disagg.proto.errors import ConfigError
from disagg.simulator.durations.devices import Device
from disagg.simulator.durations.model_shapes import ModelShape
from disagg.simulator.durations.parallelism import Parallelism
from disagg.simulator.plan.candidates import Pool
from disagg.simulator.plan.load import Load
from disagg.simulator.plan.memory import BF16, MAX_NODES, Precision, check_fits, expert_choices, worker_memory
from disagg.step_times.interface import LinkTimes, StepTimes, decode_s

NUM_STAGED = 2
"""Kinds of prefill workers with more stages than memory needs that are tried with each kind of decode workers."""
USUAL_BATCH = 32
"""Sequences of the decode step by which it is decided whether ranks have whole experts."""
MAX_SEQS = 256

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


class Workers:
    """The workers of one site for one load.

    Raises:
        ConfigError: the model fits no width, or the limits cannot be met even by an idle worker; names the flag.
    """

    def __init__(self, site: Site, load: Load) -> None:
        self.site, self.load = site, load
        self._budget = max(site.token_budgets)
        self._models: dict[tuple[Parallelism, int], WorkerModel] = {}
        self._fitting = self._choices_that_fit()
        self.fewest_stages = min(each.pp for each in self._fitting)
        """As many as the model's memory needs."""
        fewest = [each for each in self._fitting if each.pp == self.fewest_stages]
        self.decoders = self._one_of_each(fewest, self._token_s)
        """The stages and ranks of workers that decode, or do both."""
        self.prefillers = self._prefill_workers()
        """One prefill worker of each kind that is tried."""
        self._check_limits()

    def worker(self, parallelism: Parallelism, token_budget: int) -> WorkerModel:
        """The model of one worker."""
        key = (parallelism, token_budget)
        if key not in self._models:
            site = self.site
            limits = site.limits(token_budget)
            tp, pp, ep = parallelism
            memory = worker_memory(site.model, site.device, tp, site.precision, limits, pp=pp, ep=ep)
            self._models[key] = WorkerModel(
                times=site.times_of(parallelism),
                token_budget=token_budget,
                max_num_seqs=limits.max_num_seqs,
                kv_tokens=memory.kv_tokens,
                most_sequences=memory.sequences if memory.groups else None,
            )
        return self._models[key]

    def least_prefill(self, most: Pool) -> int:
        """The number of such prefill workers, of at most these, that the load's prompts need."""
        worker, target = self.worker(most.parallelism, most.token_budget), self.load.min_attainment

        def serves(number: int) -> bool:
            computed = queueing.prefill_estimate(self.load, worker, number)
            return computed is not None and computed[0] >= target

        return least(most.num_workers, serves)

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
            if each.pp == self.fewest_stages:
                found.append(Pool(1, each.tp, self._budget, each.pp, each.ep))
            if each.pp == self.fewest_stages or True not in self.site.modes:
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
        number = self.least_prefill(most)
        computed = queueing.prefill_estimate(self.load, worker, number)
        if computed is None:
            return True, 1.0, sum(worker.busy_s(kind) for kind in self.load.kinds)
        within, mean_ttft_s, _ = computed
        serves = within >= self.load.min_attainment
        return not serves, float(number * most.parallelism.num_devices) if serves else 1.0 - within, mean_ttft_s


def least(most: int, serves: Callable[[int], bool]) -> int:
    """The least number from 1 to `most` for which `serves` holds, if it holds for all larger ones; `most` where it
    holds for none."""
    low, high = 0, 1
    while high < most and not serves(high):
        low, high = high, min(most, 2 * high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if serves(middle) else (middle, high)
    return high
