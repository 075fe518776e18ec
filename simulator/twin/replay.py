"""A replay of the latest requests on the simulator under one setting.

The workers are those that the cluster has, with the step times that its router fitted, and with their tiers of KV,
which take as long as the slowest worker's; a replay begins with empty caches and tiers. Every message between
processes takes a millisecond. Answers have the lengths that they turned out to have, which router and workers do not
know: a stop token ends them. An answer that is not complete has the mean length of the complete ones, or its present
length if that is more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

from disagg.engine.config import DiskTier, Scheduling, TierOptions, WorkerConfig
from disagg.loadtests.verdict.goodput import Slo, meets
from disagg.loadtests.workload.workload import OutlinedRequest, PromptPart
from disagg.proto.block_hash import HASH_BLOCK_TOKENS
from disagg.proto.messages import EXTENT_TOKENS, TierName
from disagg.router.config import Decodes, RouterConfig
from disagg.router.telemetry.prefix_marks import PLACES
from disagg.router.telemetry.recent_load import Arrival, Capacity, Load
from disagg.simulator.cluster import SimulatedCluster
from disagg.simulator.durations.overheads import Overheads
from disagg.simulator.durations.tier_times import DEFAULT_TIER_TIMES, TierTimes
from disagg.simulator.world.settings import ClusterSpec, EngineKind, PoolSpec
from disagg.simulator.world.timing import LinearSteps
from disagg.simulator.world.users import UserRequest
from disagg.step_times.interface import LinkTimes

ENGINE: EngineKind = "exact"
"""The exact engine has the scheduler's own rules: an approximation would not distinguish two similar settings."""
OVERHEADS = Overheads(message_s=0.001, step_s=0.00025)
_LEAST_BYTE_S = 1e-13
_MOST_QUEUED = 1 << 20
_USUAL_TTFT_S, _USUAL_TPOT_S = 60.0, 1.0
"""Targets in seconds that determine the length of a replay for requests without targets."""


def replay(
    load: Load, arrivals: Sequence[Arrival], num_lead: int, decodes: Decodes, rate: float
) -> list[tuple[int, bool]]:
    """Replay the requests at `rate` times their pace: (index, whether the request meets its targets) for all with
    targets from index `num_lead` on. The requests before are replayed so that these meet a busy cluster, and not
    counted. A request that has not ended when the last one is late has missed its targets."""
    asked = requests_of(arrivals, load.workers, rate)
    cluster = SimulatedCluster(spec_of(load, decodes), asked)
    cluster.advance(_last_s(asked))
    ended = {record.index: record for record in cluster.users.records}
    return [
        (index, index in ended and meets(ended[index], asked[index].targets))
        for index in range(num_lead, len(arrivals))
        if arrivals[index].has_targets
    ]


def spec_of(load: Load, decodes: Decodes) -> ClusterSpec:
    """The cluster with this setting. Each worker is a pool of its own, because it has its own step times."""
    workers = load.workers
    return ClusterSpec(
        pools=[_pool(number, worker) for number, worker in enumerate(workers)],
        kv_layout=max(workers, key=lambda worker: worker.bytes_per_token).kv_layout,
        max_model_len=longest_of(workers),
        router=RouterConfig(policy="elastic", decodes=decodes, admission=load.admission, max_queued=_MOST_QUEUED),
        link=LinkTimes(bandwidth_bytes_per_s=1.0 / max(_LEAST_BYTE_S, load.link_byte_s), latency_s=load.link_latency_s),
        overheads=OVERHEADS,
        tier_times=_tier_times(workers),
        engine=ENGINE,
        sample_s=60.0,
    )


def _tier_times(workers: Sequence[Capacity]) -> TierTimes:
    """Rates at which loads of the slowest worker take the time that it reported."""
    rates: dict[TierName, float] = {}
    for worker in workers:
        for tier in worker.tiers:
            rate = EXTENT_TOKENS * worker.bytes_per_token / (tier.extent_ms / 1e3)
            rates[tier.name] = min(rate, rates.get(tier.name, math.inf))
    return TierTimes(
        host_bytes_per_s=rates.get("host", DEFAULT_TIER_TIMES.host_bytes_per_s),
        disk_bytes_per_s=rates.get("disk", DEFAULT_TIER_TIMES.disk_bytes_per_s),
        disk_latency_s=0.0,
    )


def longest_of(workers: Sequence[Capacity]) -> int:
    """Number of tokens of the longest request that every worker can hold."""
    return min(min(worker.max_model_len, worker.num_blocks * worker.block_size) for worker in workers)


def requests_of(arrivals: Sequence[Arrival], workers: Sequence[Capacity], rate: float) -> list[UserRequest]:
    """The requests to replay; the first one is due at 0. Prompts and answers are cut to what every worker can hold."""
    mean, longest = mean_output(arrivals), longest_of(workers)
    return [
        _request(index, (each.at_s - arrivals[0].at_s) / rate, each, mean, longest)
        for index, each in enumerate(arrivals)
    ]


def mean_output(arrivals: Sequence[Arrival]) -> float:
    """The mean length of complete answers; 1 without any."""
    whole = [arrival.output_tokens for arrival in arrivals if arrival.is_complete]
    return sum(whole) / len(whole) if whole else 1.0


def _request(index: int, due_s: float, arrival: Arrival, mean: float, longest: int) -> UserRequest:
    num_prompt = max(1, min(arrival.prompt_tokens, longest - 1))
    most = max(1, min(arrival.most_output_tokens, longest - num_prompt))
    output = arrival.output_tokens if arrival.is_complete else max(arrival.output_tokens, round(mean))
    outlined = OutlinedRequest(
        index=index,
        due_s=due_s,
        parts=parts_of(arrival.marks, num_prompt, index),
        max_tokens=max(1, min(output, most)),
    )
    return UserRequest(outlined, Slo(ttft_s=arrival.ttft_s, tpot_s=arrival.tpot_s), most)


def parts_of(marks: Sequence[int], num_tokens: int, index: int) -> tuple[PromptPart, ...]:
    """The parts of a prompt with these marks. Prompts with equal marks share parts; the rest is a part of its own."""
    parts, end = [], 0
    for place, mark in zip(PLACES, marks, strict=False):
        start, end = end, place * HASH_BLOCK_TOKENS
        if end > num_tokens:
            end = start
            break
        parts.append(PromptPart(end - start, ("mark", mark)))
    if end < num_tokens:
        parts.append(PromptPart(num_tokens - end, ("own", index)))
    return tuple(parts)


def _pool(number: int, worker: Capacity) -> PoolSpec:
    return PoolSpec(
        name=f"worker{number}",
        size=1,
        worker=WorkerConfig(
            worker_id="",
            roles=("prefill", "decode"),
            is_elastic=True,
            model_path="fake",
            block_size=worker.block_size,
            max_num_seqs=worker.max_num_seqs,
            token_budget=worker.token_budget,
            scheduling=cast("Scheduling", worker.scheduling),
            max_itl_ms=worker.max_itl_ms,
            decode_reserve_tokens=worker.decode_reserve_tokens,
            watermark=min(0.99, (worker.watermark_blocks + 0.5) / worker.num_blocks),
            tiers=_tiers(worker),
            fetch=worker.fetches,
        ),
        num_blocks=worker.num_blocks,
        times=LinearSteps(**worker.steps._asdict()),
        expert_share=worker.steps.expert_share,
    )


def _tiers(worker: Capacity) -> TierOptions | None:
    """Its tiers. What is written when is not reported: as by default."""
    sizes = {tier.name: tier.num_bytes for tier in worker.tiers}
    if not sizes:
        return None
    disk = DiskTier(path="simulated", bytes=sizes["disk"]) if "disk" in sizes else None
    return TierOptions(host_bytes=sizes.get("host", 0), disk=disk)


def _last_s(asked: Sequence[UserRequest]) -> float:
    """When the last request misses its targets."""
    return max(
        each.outlined.due_s
        + (each.targets.ttft_s or _USUAL_TTFT_S)
        + each.outlined.max_tokens * (each.targets.tpot_s or _USUAL_TPOT_S)
        for each in asked
    )
