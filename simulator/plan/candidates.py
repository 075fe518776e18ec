"""What a plan compares: pools of workers, and what a judge says of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from disagg.autoscaler.queueing import Estimate
from disagg.simulator.durations.parallelism import Parallelism


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
