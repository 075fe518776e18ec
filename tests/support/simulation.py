"""Small simulated clusters whose times can be worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from disagg.engine.config import WorkerConfig
from disagg.loadtests.verdict.goodput import Slo
from disagg.loadtests.workload.arrivals import ArrivalConfig
from disagg.loadtests.workload.workload import OutlinedRequest, PromptPart, WorkloadConfig, outline
from disagg.proto.ids import WorkerId
from disagg.proto.messages import KvLayout, RoleName
from disagg.router.config import RouterConfig
from disagg.simulator.cluster import Result, SimulatedCluster
from disagg.simulator.durations.overheads import Overheads, Sharing
from disagg.simulator.world.settings import ClusterSpec, EngineKind, Fault, PoolSpec
from disagg.simulator.world.users import LOAD_TEST, Habits, UserRequest
from disagg.step_times.interface import LinkTimes, StepWork

MAX_MODEL_LEN = 4096
BYTES_PER_TOKEN = 1000
NO_LOCAL = RouterConfig(local_prefill="never")


@dataclass(frozen=True, kw_only=True)
class LinearTimes:
    """Seconds: `base_s`, and for each prompt token and each decode."""

    base_s: float = 0.010
    token_s: float = 0.001
    decode_s: float = 0.002
    context_s: float = 0.0

    def step_s(self, work: StepWork) -> float:
        return (
            self.base_s
            + self.token_s * work.prefill_tokens
            + self.decode_s * work.num_decodes
            + self.context_s * work.decode_context
        )


def cluster_spec(
    *,
    prefill: int = 0,
    decode: int = 0,
    colocated: int = 0,
    workers: int = 0,
    engine: EngineKind = "exact",
    num_blocks: int = 1000,
    times: LinearTimes | None = None,
    router: RouterConfig | None = None,
    bandwidth_bytes_per_s: float = 1e8,
    latency_s: float = 0.0,
    overheads: Overheads | None = None,
    sharing: Sharing | None = None,
    faults: Sequence[Fault] = (),
    jump_s: float = 1.0,
    cold_start_s: float = 0.0,
    **worker: Any,
) -> ClusterSpec:
    pools: list[tuple[str, int, tuple[RoleName, ...]]] = [
        ("prefill", prefill, ("prefill",)),
        ("decode", decode, ("decode",)),
        ("colocated", colocated, ("prefill", "decode")),
        ("workers", workers, ("prefill", "decode")),
    ]
    settings = {"swap_bytes": 0, "token_budget": 512, **worker}
    return ClusterSpec(
        pools=[
            PoolSpec(
                name=name,
                size=size,
                worker=WorkerConfig(
                    worker_id="", roles=roles, is_elastic=name == "workers", model_path="fake", **settings
                ),
                num_blocks=num_blocks,
                times=times or LinearTimes(),
                cold_start_s=cold_start_s,
            )
            for name, size, roles in pools
            if size
        ],
        kv_layout=KvLayout.dense(
            num_layers=1, num_kv_heads=1, head_dim=1, dtype="fake", bytes_per_token=BYTES_PER_TOKEN
        ),
        max_model_len=MAX_MODEL_LEN,
        router=router or RouterConfig(),
        link=LinkTimes(bandwidth_bytes_per_s=bandwidth_bytes_per_s, latency_s=latency_s),
        overheads=overheads or Overheads(),
        sharing=sharing,
        gateway_neighbour=WorkerId(f"{next(name for name, size, _ in pools if size)}-0"),
        engine=engine,
        faults=faults,
        jump_s=jump_s,
    )


def asked(*requests: tuple[float, int, int], same: bool = False) -> list[UserRequest]:
    """(due, prompt tokens, output tokens) each; with `same` all prompts begin alike."""
    return [
        UserRequest(
            OutlinedRequest(
                index=index,
                due_s=due_s,
                parts=(PromptPart(num_tokens, ("prompt", 0 if same else index)),),
                max_tokens=max_tokens,
            )
        )
        for index, (due_s, num_tokens, max_tokens) in enumerate(requests)
    ]


def planned(
    workload: WorkloadConfig, *, rate_per_s: float, num_requests: int, targets: Slo | None = None
) -> list[UserRequest]:
    arrivals = ArrivalConfig(rate_per_s=rate_per_s, num_requests=num_requests)
    found = outline(workload, arrivals, max_model_len=MAX_MODEL_LEN)
    return [UserRequest(request, targets or Slo()) for request in found.requests]


def simulated(spec: ClusterSpec, requests: Sequence[UserRequest], habits: Habits = LOAD_TEST) -> Result:
    """A run of which nothing may be left."""
    result = SimulatedCluster(spec, requests, habits).run()
    assert result.problems == []
    assert [record.index for record in result.records] == list(range(len(requests)))
    return result
