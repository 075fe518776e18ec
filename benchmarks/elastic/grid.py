"""Cells: the goodput of the automatic shape within a pair of limits, over that of the best static shape.

Goodput is the highest rate at which 90 % of the requests meet both limits, found by bisection over rates 3 % apart and
interpolated between two of them. All shapes get the same requests at the same times, stretched to the rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from benchmarks.elastic.day import DAY, day_requests
from benchmarks.elastic.runs import LAST, TWIN, Brings, Point, Runs, Seen, first_come, hopeless_last
from benchmarks.elastic.workloads import lengths
from disagg.loadtests.verdict.goodput import Slo
from disagg.proto.messages import StepCoefficients
from disagg.router.config import num_split
from disagg.router.telemetry.recent_load import Arrival
from disagg.simulator.twin.settings import settings_of
from tests.support.reports import percentile

TTFT_S = (0.5, 0.75, 1.0, 2.0, 4.0)
TPOT_S = (0.012, 0.015, 0.020, 0.030, 0.050)
ATTAINMENT = 0.9
STEP = 1.03
LEAST_RATE = 0.05
"""For each worker; where less is served by any static shape, the cell is left out."""
NUM_RATES = 190
TWIN_REQUESTS, TWIN_FASTER, TWIN_SEED = 220, 1.15, 1000
TWIN_STEPS = 4
"""A twin chooses at every so many rates, for those up to the next."""
QUARTERS = 4

Row = dict[str, Any]
AUTOMATIC = "automatic"
"""As a shape's name: what is chosen of the automatic ones."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a grid is measured."""

    automatic: tuple[str, ...] = ("{n}x1-elastic:1024", "{n}x1-gather:1024", "{n}x1-split{k}:1024")
    """The shape that is compared, for n workers, and for k of the splits that a twin would compare; of several the one
    that it chooses at about each rate: whose requests meet their limits more often in `TWIN_REQUESTS` others at that
    rate and at `TWIN_FASTER` times that."""
    num_requests: int = 400
    """Of each run, for two workers; as many more for more workers."""
    num_seeds: int = 2

    @property
    def seeds(self) -> range:
        """Seeds of the runs at each rate."""
        return range(1, self.num_seeds + 1)

    def number(self, workers: int) -> int:
        """Requests of a run."""
        return self.num_requests * max(1, workers // 2)


class Found(NamedTuple):
    """A goodput."""

    rate_per_s: float
    shape: str


def rate_at(index: int, workers: int) -> float:
    """The rates that are tried."""
    return LEAST_RATE * workers * STEP**index


class Column:
    """All cells of one workload, number of workers and TTFT limit."""

    def __init__(self, runs: Runs, settings: Settings, workers: int, workload: str) -> None:
        self._runs = runs
        self._settings = settings
        self._workers = workers
        self._workload = workload
        self._names = settings.automatic
        self._automatic: tuple[str, ...] = ()
        """Those that are compared within the limits of now."""

    def seen(self, shape: str, index: int, slo: Slo) -> list[Seen]:
        """What the requests of each seed saw at one rate."""
        settings, rate_per_s = self._settings, rate_at(index, self._workers)
        number, seeds = settings.number(self._workers), self._settings.seeds
        if shape != AUTOMATIC:
            return [self._run(shape, rate_per_s, seed, number, slo) for seed in seeds]
        return [self._run(self._chosen(index, seed, slo), rate_per_s, seed, number, slo) for seed in seeds]

    def _run(self, shape: str, rate_per_s: float, seed: int, number: int, slo: Slo) -> Seen:
        is_static = shape not in self._automatic
        brings = brought(shape, is_static=is_static)
        part = {"nothing": Slo(), "ttft": Slo(ttft_s=slo.ttft_s), "both": slo}[brings]
        point = Point(shape, self._workload, rate_per_s, seed, number, brings, part)
        return self._runs.run(point, is_static=is_static)

    def _chosen(self, index: int, seed: int, slo: Slo) -> str:
        """Of the automatic shapes the one that a twin has set by then."""
        if len(self._automatic) == 1:
            return self._automatic[0]
        rate_per_s = rate_at(index - index % TWIN_STEPS, self._workers)
        number = TWIN_REQUESTS * max(1, self._workers // 2)

        def num_good(shape: str) -> int:
            rates = (rate_per_s, TWIN_FASTER * rate_per_s)
            return sum(sum(good_of(self._run(shape, rate, TWIN_SEED + seed, number, slo), slo)) for rate in rates)

        return max(self._automatic, key=num_good)

    def _choices(self, rate_per_s: float, slo: Slo) -> list[str]:
        """The choices of each seed at this rate; none without a rate."""
        if not rate_per_s:
            return []
        index = max(0, math.floor(self._index(rate_per_s)))
        return [self._chosen(index, seed, slo) for seed in self._settings.seeds]

    def goodput(self, shape: str, slo: Slo, *, above: float = 0.0, guess: float = 0.0) -> float:
        """The goodput of one shape; `above` if it is not more than that."""

        def attainment(index: int) -> float:
            good = [one for seen in self.seen(shape, index, slo) for one in good_of(seen, slo)]
            return sum(good) / len(good)

        at_least = max(0, math.floor(self._index(above))) if above > 0.0 else 0
        start = max(0, math.floor(self._index(guess))) if guess > above == 0.0 else at_least
        crossing = crossed(attainment, start, at_least)
        return max(above, 0.0 if crossing is None else rate_at(0, self._workers) * STEP**crossing)

    def _index(self, rate_per_s: float) -> float:
        return math.log(rate_per_s / rate_at(0, self._workers)) / math.log(STEP)

    def best(self, shapes: Sequence[str], slo: Slo, guess: Found) -> Found:
        """The shape that serves most; those that cannot be it are not measured further."""
        found = Found(0.0, "")
        for shape in sorted(shapes, key=lambda name: name != guess.shape):
            rate = self.goodput(shape, slo, above=found.rate_per_s, guess=guess.rate_per_s)
            if rate > found.rate_per_s:
                found = Found(rate, shape)
        return found

    def rows(self, ttft_s: float, tpots_s: Sequence[float]) -> list[Row]:
        """A row for each TPOT limit."""
        rows = []
        first, last = Found(0.0, ""), Found(0.0, "")
        for tpot_s in tpots_s:
            slo = Slo(ttft_s=ttft_s, tpot_s=tpot_s)
            self._automatic = automatic_shapes(self._names, self._workers, self._workload, tpot_s, self._runs.steps)
            first = self.best(first_come(self._workers), slo, first)
            last = self.best(hopeless_last(self._workers), slo, max(last, first))
            rows.append(self._row(slo, first, last))
        return rows

    def _row(self, slo: Slo, first: Found, last: Found) -> Row:
        row: Row = {
            "workers": self._workers,
            "workload": self._workload,
            "ttft_s": slo.ttft_s,
            "tpot_s": slo.tpot_s,
            "automatic": None,
            "best": None,
            "best_shape": first.shape,
            "over_best": None,
            "best_last": None,
            "best_last_shape": last.shape,
            "over_last": None,
        }
        if not first.rate_per_s:
            return row
        automatic = self.goodput(AUTOMATIC, slo, guess=first.rate_per_s)
        most = max(first.rate_per_s, last.rate_per_s)
        row |= {
            "automatic": automatic,
            "best": first.rate_per_s,
            "over_best": automatic / first.rate_per_s,
            "best_last": last.rate_per_s,
            "over_last": automatic / most,
            "chosen": self._choices(automatic, slo),
        }
        index = math.floor(self._index(first.rate_per_s))
        static = self._parts(self.seen(first.shape, index, slo), slo)
        own = self._parts(self.seen(AUTOMATIC, index, slo), slo)
        row |= {f"best_{name}": value for name, value in static.items()}
        row |= own
        pairs = zip(own["attained_by_length"], static["attained_by_length"], strict=True)
        return row | {"worst_quarter": min(mine - theirs for mine, theirs in pairs)}

    def _parts(self, seen: Sequence[Seen], slo: Slo) -> Row:
        """Pauses and first tokens of one rate, by quarters of prompt lengths."""
        number = self._settings.number(self._workers)
        counted: list[tuple[int, float, bool]] = []
        for seed, each in enumerate(seen, start=1):
            asked = lengths(self._workload, seed, number)[number // 10 :]
            tokens = [request.num_prompt_tokens for request in asked]
            counted += zip(tokens, each.ttfts_s, good_of(each, slo), strict=True)
        counted.sort(key=lambda item: item[0])
        num_parts = QUARTERS if counted[0][0] != counted[-1][0] else 1
        bounds = [len(counted) * part // num_parts for part in range(num_parts + 1)]
        parts = [counted[start:end] for start, end in pairwise(bounds)]
        pauses = [pause for each in seen for pause in each.pauses_s]
        return {
            "pause_p99_s": _p99(pauses),
            "pause_max_s": max(pauses) if max(pauses) < math.inf else None,
            "ttft_p99_s_by_length": [_p99([ttft for _, ttft, _ in part]) for part in parts],
            "attained_by_length": [sum(good for _, _, good in part) / len(part) for part in parts],
        }


def automatic_shapes(
    names: Sequence[str], workers: int, workload: str, tpot_s: float, steps: StepCoefficients
) -> tuple[str, ...]:
    """The automatic shapes of so many workers; of the splits those that a twin would compare."""
    arrivals = [
        Arrival(
            at_s=0.0,
            prompt_tokens=each.num_prompt_tokens,
            output_tokens=each.output_tokens,
            most_output_tokens=each.output_tokens,
            tpot_s=tpot_s,
        )
        for each in lengths(workload, TWIN_SEED, TWIN_REQUESTS)
    ]
    splits = [num_split(setting) for setting in settings_of(arrivals, [steps] * workers, "spread")]
    found = [name.format(n=workers, k=number) for name in names for number in splits if number or "{k}" not in name]
    return tuple(dict.fromkeys(found))


def brought(shape: str, *, is_static: bool) -> Brings:
    """What requests bring of their limits: both for the automatic shape, as far as they are used for static ones."""
    return "both" if not is_static else "ttft" if shape.endswith(LAST) else "nothing"


def good_of(seen: Seen, slo: Slo) -> list[bool]:
    """Which requests are within both limits."""
    assert slo.ttft_s is not None
    assert slo.tpot_s is not None
    return seen.good(slo.ttft_s, slo.tpot_s)


def crossed(attainment: Callable[[int], float], start: int, at_least: int) -> float | None:
    """The index at which attainment falls below `ATTAINMENT`, between two whole ones; None where it is below
    `at_least`. Looks from `start` on, further away each time, and then between."""
    low: int | None = None
    high: int | None = None
    at, stride = start, 1
    while True:
        if attainment(at) >= ATTAINMENT:
            low = at
        else:
            high = at
        if low is None:
            assert high is not None
            if high == at_least:
                return None
            at, stride = max(at_least, high - stride), 2 * stride
        elif high is None:
            if low == NUM_RATES:
                return float(low)
            at, stride = min(NUM_RATES, low + stride), 2 * stride
        elif high - low == 1:
            break
        else:
            at = (low + high) // 2
    above, below = attainment(low), attainment(high)
    return low + (above - ATTAINMENT) / (above - below)


def _p99(values: Sequence[float]) -> float | None:
    """None where that is a request without an answer."""
    found = percentile(values, 99)
    return found if found < math.inf else None


# ---------------------------------------------------------------- the day

DAY_STEP = 1.03
DAY_LEAST = 0.2
"""Multiples that are tried are this times powers of the step."""


def day_row(runs: Runs, settings: Settings, workers: int) -> Row:
    """The largest multiples of the day that the automatic shape and the best single static ones serve. Of several
    automatic shapes: the first one with a twin, and each alone beside it."""
    automatic = [name.format(n=workers, k=1) for name in settings.automatic]
    if len(automatic) > 1:
        automatic.append(automatic[0] + TWIN)

    def index_of(times: float) -> int:
        return max(0, math.floor(math.log(times / DAY_LEAST) / math.log(DAY_STEP)))

    def multiple(shape: str, above: float = 0.0, guess: float = 0.7) -> float:
        def attainment(index: int) -> float:
            times = DAY_LEAST * DAY_STEP**index
            good: list[bool] = []
            for seed in settings.seeds:
                limits = day_requests(times, seed)[1]
                is_static = shape not in automatic
                point = Point(shape, DAY, times, seed, 0, brought(shape, is_static=is_static), Slo())
                seen = runs.run(point, is_static=is_static)
                good += map(meets, seen.ttfts_s, seen.tpots_s, limits)
            return sum(good) / len(good)

        at_least = index_of(above) if above else 0
        crossing = crossed(attainment, at_least or index_of(guess), at_least)
        return max(above, 0.0 if crossing is None else DAY_LEAST * DAY_STEP**crossing)

    def best(shapes: Sequence[str]) -> Found:
        found = Found(0.0, "")
        for shape in shapes:
            if (times := multiple(shape, found.rate_per_s)) > found.rate_per_s:
                found = Found(times, shape)
        return found

    first, last = best(first_come(workers)), best(hopeless_last(workers))
    by_shape: dict[str, float] = {}
    for shape in automatic:
        by_shape[shape] = multiple(shape, guess=max([first.rate_per_s or 0.7, *by_shape.values()]))
    own = by_shape[automatic[-1]]
    return {
        "workers": workers,
        "workload": DAY,
        "automatic": own,
        "by_shape": by_shape,
        "best": first.rate_per_s,
        "best_shape": first.shape,
        "over_best": own / first.rate_per_s,
        "best_last": last.rate_per_s,
        "best_last_shape": last.shape,
        "over_last": own / max(first.rate_per_s, last.rate_per_s),
    }


def meets(ttft_s: float, tpot_s: float, limit: Slo) -> bool:
    """Whether a request is within its limits."""
    assert limit.ttft_s is not None
    assert limit.tpot_s is not None
    return ttft_s <= limit.ttft_s and tpot_s <= limit.tpot_s
