"""How much of a trace's prompts is reused with KV in tiers and fetched from other workers, and how soon answers begin.

The cluster and the step times of `trace.py`, with the exact engine, which has the tiers and fetches that serve. Host
memory of each worker that computes prompts is `HOST_OVER_DEVICE` times its device cache.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from benchmarks.simulator.trace import BLOCK_SIZE, KV_BYTES_PER_TOKEN, NUM_BLOCKS, figures, read_outline, spec
from disagg.engine.config import TierOptions
from disagg.loadtests.workload.workload import Outline
from disagg.simulator.cluster import SimulatedCluster
from disagg.simulator.durations.tier_times import TierTimes
from disagg.simulator.world.settings import ClusterSpec
from disagg.simulator.world.users import UserRequest

Row = dict[str, Any]
Variant = Literal["none", "fetch", "host", "all"]
VARIANTS: tuple[Variant, ...] = get_args(Variant)
HOST_OVER_DEVICE = 2
HOST_BYTES_PER_S = 25e9
"""Rate of copies to host memory and back: about half of what PCIe 5.0 x16 has."""
WRITE_MB_PER_S = 10_000.0
"""Two fifths of that rate: 200 MB/s, the default, are 1,500 tokens a second of this model."""


def spec_of(variant: Variant) -> ClusterSpec:
    """The cluster of `trace.py` with the policy `joint`."""
    base = spec("exact", "joint")
    host_bytes = HOST_OVER_DEVICE * NUM_BLOCKS * BLOCK_SIZE * KV_BYTES_PER_TOKEN
    tiers = TierOptions(host_bytes=host_bytes, write_mb_per_s=WRITE_MB_PER_S) if variant in ("host", "all") else None
    pools = [
        replace(
            pool,
            worker=msgspec.structs.replace(
                pool.worker,
                tiers=tiers if "prefill" in pool.worker.roles else None,
                fetch=variant in ("fetch", "all"),
            ),
        )
        for pool in base.pools
    ]
    return replace(base, pools=pools, tier_times=TierTimes(host_bytes_per_s=HOST_BYTES_PER_S))


def measure_variant(variant: Variant, requests: Outline) -> Row:
    """One run. Besides what its users saw, shares of all prompt tokens: loaded from a tier, fetched from a worker."""
    cluster = SimulatedCluster(spec_of(variant), [UserRequest(each) for each in requests.requests])
    gc.collect()
    gc.disable()
    began = time.process_time()
    result = cluster.run()
    cpu_s = time.process_time() - began
    gc.enable()
    assert not result.problems, result.problems
    num_tokens = sum(record.num_prompt_tokens for record in result.records)
    return {
        "variant": variant,
        "loaded": result.loaded_tokens / num_tokens,
        "fetched": result.fetched_tokens / num_tokens,
        **figures(result, requests, cpu_s),
    }


def reuse_trace(path: Path) -> float:
    """Share of the prompt tokens of a trace in Mooncake's format that are reused with host memory and fetches."""
    share: float = measure_variant("all", read_outline(path, None))["reuse"]
    return share


def summary(rows: Sequence[Row]) -> Row:
    """The figures that matter; null where nothing was measured."""
    found = {row["variant"]: row for row in rows if "variant" in row}
    none, every = found.get("none"), found.get("all")
    ratio = None if none is None or every is None else every["ttft_mean_ms"] / none["ttft_mean_ms"]
    return {"tiers_reuse": None if every is None else every["reuse"], "tiers_ttft_mean_over_none": ratio}


def reuse(requests: Outline, variants: Sequence[Variant] = VARIANTS) -> list[Row]:
    """One row for each variant."""
    return [measure_variant(variant, requests) for variant in variants]
