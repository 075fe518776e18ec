"""The last minutes of a cluster, for the charts of the page: a page that is opened or loaded again has their past at
once, and so does one whose gateway was away.

    once a second: view of the routers ──> Sample ──> History ──after(at)──> what a page does not have yet

Pure. Kept by the gateway and not by the browser, so that a page that is opened because of a fault shows what led to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from typing import Any, Final, NamedTuple

from disagg.router.api import ClusterView

LENGTH_S: Final = 300
"""Seconds of the charts, and number of samples that are kept."""
WORKERS_LENGTH_S: Final = 60
"""Seconds for which the KV in use of each worker is kept."""
MAX_WORKERS: Final = 256
"""Maximum number of workers in a sample."""


class Sample(NamedTuple):
    """A cluster in one second."""

    at: int
    """Seconds since the epoch."""
    requests_per_s: float
    output_tokens_per_s: float
    targets: Mapping[str, tuple[int, int]]
    """By target: the number of requests of the last minute that met it, and of those that had it."""
    kv: Mapping[str, int]
    """By worker: percent of its KV blocks that are in use."""


class History:
    """Owner of the samples, the oldest first; of one second there is at most one."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=LENGTH_S)

    def add(self, sample: Sample) -> None:
        """Keep a sample. One that is not later than the last one is dropped: the clock was set back."""
        if self._samples and sample.at <= self._samples[-1].at:
            if self._samples[-1].at - sample.at < LENGTH_S:
                return
            self._samples.clear()
        self._samples.append(sample)

    def after(self, at: float, workers: Collection[str]) -> list[dict[str, Any]]:
        """The samples later than `at`, in seconds since the epoch, as JSON; those of the last minute have the KV of
        `workers`."""
        if not self._samples:
            return []
        since = self._samples[-1].at - WORKERS_LENGTH_S
        return [_json(sample, workers if sample.at > since else ()) for sample in self._samples if sample.at > at]


def sample_of(view: ClusterView, now: float) -> Sample:
    """The sample of a view. `now` is in seconds since the epoch."""
    loads = ((worker.info.worker_id, worker.load) for worker in view.workers[:MAX_WORKERS])
    kv: dict[str, int] = {
        worker_id: round(100 * (load.blocks_active + load.blocks_reserved) / load.blocks_total)
        for worker_id, load in loads
        if load.blocks_total
    }
    return Sample(int(now), view.rates.requests_per_s, view.rates.output_tokens_per_s, dict(view.slos), kv)


def _json(sample: Sample, workers: Collection[str]) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "at": sample.at,
        "requests_per_s": round(sample.requests_per_s, 3),
        "output_tokens_per_s": round(sample.output_tokens_per_s, 1),
        "targets": {name: round(met / total, 4) for name, (met, total) in sample.targets.items() if total},
    }
    kv = {name: share for name, share in sample.kv.items() if name in workers}
    return {**shown, "kv": kv} if kv else shown
