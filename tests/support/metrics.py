"""A cluster state in which every metric has a value; and a reader of what `/metrics` exports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from disagg.proto.ids import WorkerId
from disagg.proto.messages import (
    STEP_SECONDS_BOUNDS,
    BufferSize,
    Load,
    StartPhase,
    TierCounts,
    TransferCount,
    WorkerMetrics,
)
from disagg.router.api import ClusterView, PlacementView, WorkerView
from disagg.router.statistics import RouterStats, TenantUsage
from tests.support.router import worker_info
from tests.support.waiting import eventually

Samples = dict[str, dict[frozenset[tuple[str, str]], float]]


def busy_view() -> ClusterView:
    """One prefill and one decode worker at work, a decode worker that is away."""
    stats = RouterStats()
    stats.num_output_tokens = 70
    stats.cached_tokens = 16
    stats.outcomes.update({"stop": 2, "length": 1, "cancelled": 4, "timeout": 5})
    stats.slos.update({("ttft", True): 2, ("ttft", False): 1, ("both", True): 2, ("both", False): 1})
    stats.decisions.update({"pair": 3, "local_fallback": 1})
    for prompt_tokens in (10, 20, 70):
        stats.prompt_tokens.observe(prompt_tokens)
        stats.output_tokens.observe(20)
        stats.e2e.observe(0.5)
        stats.queue_time.observe(0.25)
        stats.prefill_time.observe(0.125)
        stats.decode_time.observe(0.0625)
    stats.ttft["pd"].observe(0.25)
    stats.ttft["pd"].observe(0.05)
    stats.ttft["local"].observe(0.5)
    stats.itl.observe(0.01, 57)
    stats.stages["prefill"].observe(0.125)
    stats.prediction_ratio["ttft"].observe(1.5)
    stats.num_decodes_changes = 3
    stats.tenants["a"] = TenantUsage(Counter(stop=2, cancelled=4), 90, 60, Counter(queued=3))
    stats.tenants["b"] = TenantUsage(Counter(length=1), 10, 10)
    p0 = WorkerView(
        msgspec.structs.replace(
            worker_info("p0"),
            start_phases=(StartPhase("model", 0.5),),
            buffers=(BufferSize("kv", 4096), BufferSize("kv_window_512", 1024), BufferSize("experts", 77)),
        ),
        Load(num_running=1, blocks_total=100, blocks_active=10),
        False,
        0.5,
        False,
        ("prefill", "transfer"),
    )
    d0 = WorkerView(
        worker_info("d0"),
        Load(
            num_running=2,
            num_waiting=1,
            num_suspended=2,
            blocks_total=200,
            blocks_active=50,
            blocks_cached=60,
            blocks_reserved=30,
            tokens_per_step=1.75,
            rows_per_step=3.5,
        ),
        is_draining=True,
    )
    steps = (3, *(0 for _ in STEP_SECONDS_BOUNDS[1:]), 1)
    moved = TransferCount(
        decode_worker=WorkerId("d0"), transport="gloo", num_transfers=3, num_bytes=4096, failures={"stuck": 2}
    )
    return ClusterView(
        workers=(d0, p0),
        num_queued=1,
        num_running=6,
        unreachable=(worker_info("d1"),),
        stages={"queued": 1, "prefill": 1, "transfer": 2, "decode": 3},
        stats=stats,
        counters={
            WorkerId("p0"): WorkerMetrics(
                step_seconds=steps,
                step_seconds_sum=9.0,
                prompt_tokens=84,
                cached_tokens=16,
                output_tokens=3,
                preemptions=1,
                swapped_out_blocks=9,
                swapped_in_blocks=8,
                transfers=(moved,),
                loaded_tokens=12,
                fetched_tokens=384,
                fetches={"done": 3, "refused": 1},
                served_fetches=2,
                dropped_extents=3,
                tiers=(
                    TierCounts(name="host", capacity_bytes=4096, held_bytes=1024, written_extents=5, loaded_extents=4),
                    TierCounts(name="disk", evicted_extents=2, failed_extents=1, off_reason="No space left on device"),
                ),
            ),
            WorkerId("d0"): WorkerMetrics(
                draft_steps=9,
                drafted_tokens=40,
                accepted_tokens=12,
                draft_runs=(5, 2, 0, 1, *[0] * 10, 0, 1),
                expert_imbalance=(1.25, 2.0),
            ),
        },
        restarts={WorkerId("p0"): 2},
        exported_traces={"sent": 4, "not_sampled": 5},
        events={"refused": 7},
        tenants={"a": (1, 4), "b": (0, 2)},
        placement=PlacementView("elastic", "gather"),
    )


def read_samples(exposition: bytes) -> Samples:
    """Sample name -> labels -> value. Fails on what is no exposition, and on a sample that comes twice."""
    found: Samples = {}
    for family in text_string_to_metric_families(exposition.decode()):
        for sample in family.samples:
            by_labels = found.setdefault(sample.name, {})
            labels = frozenset(sample.labels.items())
            assert labels not in by_labels, f"{sample.name} {sample.labels} comes twice"
            by_labels[labels] = sample.value
    return found


def value(samples: Samples, name: str, labels: Mapping[str, str] | None = None, **more: str) -> float:
    """The value of one sample; raises `KeyError` where it is not there."""
    return samples[name][frozenset({**(labels or {}), **more}.items())]


async def scrape(http: httpx.AsyncClient, done: Callable[[Samples], bool]) -> Samples:
    """The metrics of a gateway, once `done` is true of them: counters of workers come with their next report."""
    found: Samples = {}

    async def is_done() -> bool:
        nonlocal found
        response = await http.get("/metrics")
        assert response.status_code == 200
        found = read_samples(response.content)
        return done(found)

    await eventually(is_done, "the metrics did not reach the expected values", every_s=0.02)
    return found
