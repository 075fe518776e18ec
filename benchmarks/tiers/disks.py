"""Is a prefix loaded from a slow disk where that is quicker, and computed where it is not?

A real engine core with its tiers in simulated time: one worker, whose disk is slowed down so that loading and computing
cross at about 1,024 tokens. The first file of a load takes half of the time in which so many tokens are computed, as
latency, and all files together the other half, by their rate. All prefixes are computed, written to the disk, evicted
from the device cache by another prompt, and asked for again: computed by a worker without tiers, loaded by one that
takes computing for endless, or as the worker decides after it has made some loads; at once, or after a pause. The
counterpart with real files is `choice.py`; nothing here depends on the machine.

    chosen / better of computed and loaded, by the length of the prefix
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from benchmarks.tiers.choice import CHOSEN, COMPUTED, CROSSING, LOADED
from benchmarks.tiers.figures import CHOICE_OF_DISK
from benchmarks.tiers.links import TIMES, first_tokens, longest_of
from disagg.engine.config import DiskTier, TierOptions
from disagg.engine.plan import Buffer
from disagg.engine.tiers import loading
from disagg.engine.tiers.extents import Extent
from disagg.engine.tiers.load_times import Loadable, LoadPlan, plan_load
from disagg.proto.messages import EXTENT_TOKENS
from disagg.simulator.durations.tier_times import TierTimes
from disagg.simulator.exact import exact_engine
from disagg.simulator.exact.tier_folder import TierFolder
from disagg.simulator.world.settings import ClusterSpec
from tests.support.simulation import BYTES_PER_TOKEN, cluster_spec

LATENCY_S = CROSSING * TIMES.token_s / 2
FILE_S = CROSSING * TIMES.token_s / 2 / (CROSSING // EXTENT_TOKENS)
_TIERS = TierOptions(disk=DiskTier(path="simulated", bytes=1 << 40), min_tokens=1, write_mb_per_s=1e5)


class SlowStart(TierFolder):
    """A folder of which a read takes longer that begins while no other one is under way."""

    def read(self, number: int, extent: Extent, payload: Buffer) -> None:
        """Read a file, `LATENCY_S` later where it is the first one of a load."""
        times, is_first = self._times, not (self._is_busy or self._reads)
        self._times = (
            times
            if not is_first
            else TierTimes(disk_bytes_per_s=times.disk_bytes_per_s, disk_latency_s=times.disk_latency_s + LATENCY_S)
        )
        super().read(number, extent, payload)
        self._times = times


def eager_plan(has: Loadable, compute_ms: Callable[[int, int], float]) -> LoadPlan | None:
    """The load of a worker that takes computing for endless."""
    return plan_load(has, lambda start, end: 1e6 * (end - start))


def slow_disk(lengths: Sequence[int], *, has_tiers: bool) -> ClusterSpec:
    """One worker, whose device cache holds the longest prompt."""
    longest = longest_of(lengths)
    spec = cluster_spec(colocated=1, num_blocks=-(-longest // 16) + 1, times=TIMES, tiers=_TIERS if has_tiers else None)
    rate = EXTENT_TOKENS * BYTES_PER_TOKEN / FILE_S
    return replace(spec, max_model_len=longest, tier_times=TierTimes(disk_bytes_per_s=rate, disk_latency_s=0.0))


def rows(lengths: Sequence[int], pause_s: float = 0.0) -> Iterator[dict[str, Any]]:
    """One for each length and way. `pause_s`: seconds without a request before each of the lengths."""
    with patch.object(exact_engine, "TierFolder", SlowStart):
        for way, plan in ((COMPUTED, plan_load), (LOADED, eager_plan), (CHOSEN, plan_load)):
            with patch.object(loading, "plan_load", plan):
                spec = slow_disk(lengths, has_tiers=way != COMPUTED)
                yield from first_tokens(spec, lengths, pause_s, CHOICE_OF_DISK, way)
