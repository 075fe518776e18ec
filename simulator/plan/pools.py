"""The pools that serve a load within its limits at the least cost: how many workers of which stages and widths,
disaggregated or colocated.

    Planner.shortlist()            every shape with as few workers as the estimate (queueing.py) takes to be enough
    best_pools(planner, judge)     the cheapest that a judge confirms, and what else it judged (search.py)

A judge is the simulator (judge.py), or the estimate itself. `candidates.py` has what is compared, `workers.py` which
stages and ranks a worker may have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from disagg.autoscaler import queueing
from disagg.autoscaler.queueing import Estimate, WorkerModel
from disagg.proto.errors import ConfigError
from disagg.simulator.durations.parallelism import Parallelism
from disagg.simulator.plan.candidates import Answer, Candidate, Judged, Judgement, Pool
from disagg.simulator.plan.load import Load
from disagg.simulator.plan.workers import Site, Workers, least

STAGED_SHARE = 0.4
"""Most candidates with more stages than memory needs that are judged, as a share of the others."""
LEAST_STAGED = 2
"""So many where the others are few."""
MARGIN_P = 2
"""Number of prefill workers, beyond the least that serve, that are tried with fewer decode workers."""


class Planner:
    """The pools that one site may have for one load.

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
        self._estimates: dict[Candidate, Estimate] = {}
        self._workers = Workers(site, load)
        self.decoders = self._workers.decoders
        """The stages and ranks of workers that decode, or do both."""
        self.prefillers = self._workers.prefillers
        """One prefill worker of each kind that is tried."""

    # ------------------------------------------------------------ estimates

    def worker(self, parallelism: Parallelism, token_budget: int) -> WorkerModel:
        """The model of one worker."""
        return self._workers.worker(parallelism, token_budget)

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
        return candidate.prefill is not None and candidate.prefill.pp > self._workers.fewest_stages

    def most_staged(self, num_others: int) -> int:
        """The number of candidates with more stages than memory needs that are judged at most, beside these others."""
        has_some = any(each.pp > self._workers.fewest_stages for each in self.prefillers)
        return max(LEAST_STAGED, int(STAGED_SHARE * num_others)) if has_some else 0

    def price(self, candidate: Candidate) -> float:
        """Price of a candidate's devices per hour."""
        return candidate.num_devices * self.site.price_per_hour

    # ------------------------------------------------------------ candidates

    def shortlist(self) -> list[Candidate]:
        """The best candidate of each kind of pools by the estimate: first those that meet the limits, cheapest first;
        then the others, by attainment."""
        found = [*self._colocated(), *self._disaggregated()]
        return sorted(found, key=self.order)

    def order(self, candidate: Candidate) -> tuple[bool, float, float]:
        """The sort key by the estimate, best first."""
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
                fewest = self._workers.least_prefill(prefiller._replace(num_workers=most // num_prefill))
            for each in self.decoders:
                most_prefill = (most - each.num_devices) // num_prefill
                if most_prefill < 1:
                    continue
                pairs = []
                for number in range(min(fewest, most_prefill), min(most_prefill, fewest + MARGIN_P) + 1):
                    prefill = prefiller._replace(num_workers=number)
                    left = (most - prefill.num_devices) // each.num_devices
                    pairs.append(self._with_workers(prefill, Pool(left, each.tp, self._budget, each.pp, each.ep)))
                yield min(pairs, key=self.order)

    def _with_workers(self, prefill: Pool | None, most: Pool) -> Candidate:
        """The candidate with the fewest workers that serve the load beside these prefill workers; `most` where fewer do
        not."""

        def candidate(number: int) -> Candidate:
            return Candidate(prefill, most._replace(num_workers=number))

        return candidate(least(most.num_workers, lambda number: self._serves(candidate(number))))

    # ------------------------------------------------------------ judgements

    def as_judgement(self, candidate: Candidate) -> Judgement:
        """The estimate in place of what a judge says."""
        estimate = self.estimate(candidate)
        return Judgement(
            attainment=estimate.attainment,
            ttft_attainment=estimate.ttft_attainment,
            tpot_attainment=estimate.tpot_attainment,
            mean_ttft_s=estimate.mean_ttft_s,
            mean_tpot_s=estimate.mean_tpot_s,
            utilization=estimate.utilization,
        )

    def judged(self, candidate: Candidate, judgement: Judgement) -> Judged:
        """A judged candidate, with its estimate and price."""
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

    def answer(self, judged: Sequence[Judged]) -> Answer:
        """The result of a search that judged these candidates, at least one."""
        ordered = sorted(judged, key=self.rank)
        return Answer(best=ordered[0], is_met=self.is_met(ordered[0].judgement), judged=tuple(ordered[1:]))
