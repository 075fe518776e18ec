"""The search of a plan, by the estimate or with a judge.

A judge is asked for a few dozen candidates: first the estimate's best of each kind; then, from those that serve the
load, ones with a worker less, until none does; from those that do not, ones with a worker more. Kinds with more stages
than memory needs come last, with a number of their own (`Planner.most_staged`), so that the answer is never worse than
without them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from disagg.proto.errors import ConfigError
from disagg.proto.wording import counted
from disagg.simulator.plan.candidates import Answer, Candidate, Judge, Judged
from disagg.simulator.plan.pools import Planner

MAX_JUDGED = 40
NUM_FIRST = 6
"""Least number of kinds of pools that are judged."""


def best_pools(planner: Planner, judge: Judge | None = None, max_judged: int = MAX_JUDGED) -> Answer:
    """Find the cheapest pools that meet the limits by the judge, or by the estimate without one."""
    shortlist = planner.shortlist()
    if not shortlist:
        most = planner.site.max_devices
        are = "is" if most == 1 else "are"
        raise ConfigError(
            f"--max-gpus: {counted(most, 'device')} {are} too few for one worker of "
            f"{min(each.num_devices for each in planner.decoders)}"
        )
    if judge is None:
        answers = [planner.judged(candidate, planner.as_judgement(candidate)) for candidate in shortlist]
        return planner.answer(answers)
    return _Search(planner, judge, max_judged).run(shortlist)


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
        return self.planner.answer(list(self._found.values()))

    @property
    def _is_full(self) -> bool:
        return len(self._found) >= self._max_judged

    def _ask(self, candidate: Candidate) -> Judged:
        if candidate not in self._found:
            self._found[candidate] = self.planner.judged(candidate, self._judge(candidate))
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
                return min(new, key=self.planner.order)
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
        return min(new, key=self.planner.order) if new else None

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
