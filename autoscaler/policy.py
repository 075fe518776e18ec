"""The interface of policies, and their input.

    Observation(reports of gateways, pools), now ──Policy.decide──> Decision: sizes, and why

A policy keeps the history that it needs. It has no clock: `now` is in seconds of a clock that never goes back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from disagg.proto.autoscaling import Decision, LoadReport


@dataclass(frozen=True, kw_only=True)
class PoolLimits:
    """The smallest and the largest size of a pool, and the cost of a worker."""

    min_size: int
    max_size: int
    weight: int = 1
    """Cost of one worker of the pool, in devices."""

    def clamp(self, size: int) -> int:
        """The nearest allowed size."""
        return max(self.min_size, min(self.max_size, size))


@dataclass(frozen=True, kw_only=True)
class PoolObservation:
    """The wanted and the actual size of a pool."""

    desired: int
    ready: int
    cold_start_s: float | None = None
    """Seconds that the latest measured start of a worker of the pool took; None if none was measured."""

    @property
    def is_settled(self) -> bool:
        """Whether all wanted workers are ready and no other ones are."""
        return self.ready == self.desired


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What a policy decides by: the reports of the gateways and the state of the pools."""

    reports: Mapping[str, LoadReport]
    """The latest report of each gateway, by its name."""
    pools: Mapping[str, PoolObservation]

    @property
    def num_queued(self) -> int:
        """Requests that wait for a worker."""
        return sum(report.num_queued for report in self.reports.values())

    @property
    def num_in_flight(self) -> int:
        """Requests that have not ended."""
        return sum(report.num_queued + report.num_running for report in self.reports.values())


class Policy(Protocol):
    """Decides the sizes of all pools."""

    def decide(self, observation: Observation, now: float) -> Decision:
        """Return the wanted sizes of the pools, within their limits."""
        ...


def pool_of(worker_id: str) -> str:
    """The pool of a worker `<pool>-<index>`."""
    return worker_id.rpartition("-")[0]
