"""What a decision costs: the settings of a cluster of two workers, compared on recent arrivals by the fast engine.

Twelve settings on 110 requests, then the best three on 220 requests at the rate seen and at 1.15 times that: 2,640
requests, all settings under the same ones. Step times are those of a small model on one core.
"""

from __future__ import annotations

import gc
import time
from typing import Any

from disagg.cli.planning.simulate import cluster_spec
from disagg.cluster.config.cluster_config import ClusterConfig, override
from disagg.loadtests.campaign.shapes import parse_shape
from disagg.loadtests.verdict.goodput import Slo, evaluate
from disagg.loadtests.workload.arrivals import ArrivalConfig
from disagg.loadtests.workload.workload import RandomWorkload, outline
from disagg.proto.messages import KvLayout
from disagg.simulator.cluster import SimulatedCluster
from disagg.simulator.durations.overheads import Overheads, Sharing
from disagg.simulator.world.settings import DEFAULT_LINK, ClusterSpec
from disagg.simulator.world.timing import LinearSteps, Timing
from disagg.simulator.world.users import UserRequest

SLO = Slo(ttft_s=2.0, tpot_s=0.020)
RATE_PER_S, FASTER = 1.5, 1.15
NUM_FIRST, NUM_SECOND, NUM_BEST = 110, 220, 3
COLOCATED = [f"2x1-chunked:{tokens}" for tokens in (32, 64, 128, 256, 512)]
TIMING = Timing(
    LinearSteps(base_ms=6.5, prefill_token_ms=0.46, attended_ms=1e-4, decode_ms=0.6, context_ms=1e-3),
    {},
    KvLayout.sized(23_040),
    DEFAULT_LINK,
    Overheads(message_s=0.001, step_s=0.00025),
    0.0,
    Sharing(prefill_by_prefill=0.08, prefill_by_decode=0.06, decode_by_prefill=0.05, decode_by_decode=0.2),
)


def settings() -> dict[str, ClusterSpec]:
    """Twelve of them."""
    base = ClusterConfig()
    shapes = {name: parse_shape(name, base).config for name in ("1p1d", *COLOCATED, "2x1-prefill-first")}
    for policy in ("prefix", "least_loaded"):
        shapes[f"1p1d, {policy}"] = override(shapes["1p1d"], {"placement.policy": policy})
    shapes["1p1d, pairs alone"] = override(shapes["1p1d"], {"placement.local_prefill": "never"})
    for budget in (128, 256):
        shapes[f"1p1d, decode worker {budget}"] = override(shapes["1p1d"], {"pools.decode.token_budget": budget})
    return {name: cluster_spec(config, TIMING, "fast") for name, config in shapes.items()}


def decide() -> dict[str, Any]:
    """Processor time of one decision, and what it was."""
    specs = settings()
    first = _requests(RATE_PER_S, NUM_FIRST)
    second = {rate: _requests(rate, NUM_SECOND) for rate in (RATE_PER_S, RATE_PER_S * FASTER)}
    gc.collect()
    gc.disable()
    began = time.process_time()
    attained = {name: _attained(spec, first) for name, spec in specs.items()}
    best = sorted(attained, key=lambda name: -attained[name])[:NUM_BEST]
    final = {name: sum(_attained(specs[name], requests) for requests in second.values()) for name in best}
    cpu_s = time.process_time() - began
    gc.enable()
    num_requests = len(specs) * NUM_FIRST + NUM_BEST * sum(map(len, second.values()))
    return {
        "settings": len(specs),
        "requests": num_requests,
        "cpu_s": cpu_s,
        "requests_per_s": num_requests / cpu_s,
        "chosen": max(final, key=final.__getitem__),
    }


def _requests(rate_per_s: float, number: int) -> list[UserRequest]:
    workload = RandomWorkload(isl=(64, 960), osl=(8, 120))
    arrivals = ArrivalConfig(kind="poisson", rate_per_s=rate_per_s, num_requests=number)
    return [UserRequest(each) for each in outline(workload, arrivals, max_model_len=4096).requests]


def _attained(spec: ClusterSpec, requests: list[UserRequest]) -> float:
    result = SimulatedCluster(spec, requests).run()
    assert not result.problems, result.problems
    return evaluate(result.records, SLO, 1.0).attainment
