"""The cluster, the step times and the trace of the benchmarks: 8P+8D, Mooncake's trace or one in its format.

Step times are the polynomials that Dynamo's mocker has by default (`lib/mocker`, Apache-2.0): a prompt's by its new
tokens, a decode's by the share of KV in use.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disagg.engine.config import TransferLimits, WorkerConfig
from disagg.loadtests.verdict.goodput import Slo, evaluate
from disagg.loadtests.workload.arrivals import ArrivalConfig
from disagg.loadtests.workload.randomness import Stream
from disagg.loadtests.workload.traces import BLOCK_TOKENS
from disagg.loadtests.workload.workload import Outline, TraceWorkload, outline
from disagg.proto.messages import KvLayout, RoleName
from disagg.router.config import PolicyName, RouterConfig
from disagg.simulator.cluster import Result
from disagg.simulator.durations.overheads import Overheads
from disagg.simulator.world.settings import ClusterSpec, EngineKind, PoolSpec
from disagg.step_times.interface import LinkTimes, StepWork
from tests.support.reports import percentile

Row = dict[str, Any]
NUM_WORKERS = 8
"""Number of workers of each pool."""
NUM_BLOCKS, BLOCK_SIZE = 20_000, 64
MAX_MODEL_LEN = 200_000
KV_BYTES_PER_TOKEN = 131_072
LINK = LinkTimes(bandwidth_bytes_per_s=50e9, latency_s=5e-5)
TOKEN_BUDGET = 8192
LIMITS = Slo(ttft_s=1.0, tpot_s=0.02)
"""Limits of the goodput."""


@dataclass(frozen=True)
class MockerTimes:
    """Dynamo's default polynomials; a step with both takes the sum."""

    total_tokens: int

    def step_s(self, work: StepWork) -> float:
        """Seconds of one engine step."""
        ms, tokens = 0.0, work.prefill_tokens
        if tokens:
            ms += 4.209989e-07 * tokens**2 + 1.518344e-02 * tokens + 16.50142
        if work.num_decodes:
            share = min(1.0, work.decode_context / self.total_tokens)
            ms += max(1.0, -25.74 * share**2 + 54.01 * share + 5.74)
        return ms / 1e3


def spec(engine: EngineKind, policy: PolicyName, num_workers: int = NUM_WORKERS) -> ClusterSpec:
    """As many prefill as decode workers."""
    times = MockerTimes(NUM_BLOCKS * BLOCK_SIZE)
    roles: tuple[RoleName, ...] = ("prefill", "decode")
    pools = [
        PoolSpec(
            name=role,
            size=num_workers,
            worker=WorkerConfig(
                worker_id="",
                roles=(role,),
                model_path="fake",
                block_size=BLOCK_SIZE,
                token_budget=TOKEN_BUDGET,
                max_num_seqs=256,
                swap_bytes=0,
                transport="nccl",
                transfer=TransferLimits(chunk_bytes=256 << 20, staging_bytes=4 << 30),
            ),
            num_blocks=NUM_BLOCKS,
            times=times,
        )
        for role in roles
    ]
    layout = KvLayout.dense(
        num_layers=1, num_kv_heads=1, head_dim=1, dtype="simulated", bytes_per_token=KV_BYTES_PER_TOKEN
    )
    return ClusterSpec(
        pools=pools,
        kv_layout=layout,
        max_model_len=MAX_MODEL_LEN,
        router=RouterConfig(policy=policy, local_prefill="auto" if policy == "joint" else "never"),
        link=LINK,
        overheads=Overheads(message_s=2e-4),
        engine=engine,
        sample_s=60.0,
    )


def read_outline(path: Path, num_requests: int | None, pace: float = 1.0) -> Outline:
    """The requests of a Mooncake trace at its own lengths and `pace` times its pace."""
    workload = TraceWorkload(path=str(path), format="mooncake", tokens_per_block=BLOCK_TOKENS, first_n=num_requests)
    found = outline(workload, ArrivalConfig(kind="trace"), max_model_len=MAX_MODEL_LEN)
    if pace == 1.0:
        return found
    rate_per_s = len(found.requests) / found.requests[-1].due_s * pace
    return outline(workload, ArrivalConfig(kind="trace", rate_per_s=rate_per_s), max_model_len=MAX_MODEL_LEN)


def write_trace(path: Path, num_requests: int) -> None:
    """A trace in Mooncake's format, where there is none: conversations that come 3.4 times a second, each turn some
    blocks longer than the one before."""
    draws = Stream("benchmark trace", 0)
    open_ends: list[list[int]] = []
    next_id, now = 0, 0.0
    with path.open("w", encoding="utf-8") as file:
        for _ in range(num_requests):
            now += draws.exponential() / 3.4
            goes_on = bool(open_ends) and draws.uniform() < 0.6
            before = open_ends.pop(draws.integer(0, len(open_ends) - 1)) if goes_on else []
            num_new = draws.integer(2, 40)
            blocks = [*before[:200], *range(next_id, next_id + num_new)]
            next_id += num_new
            open_ends.append(blocks)
            line = {
                "timestamp": round(now * 1000),
                "input_length": len(blocks) * BLOCK_TOKENS - draws.integer(0, BLOCK_TOKENS - 1),
                "output_length": 1 + round(draws.exponential() * 340),
                "hash_ids": blocks,
            }
            file.write(json.dumps(line) + "\n")


def figures(result: Result, requests: Outline, cpu_s: float) -> Row:
    """Flat figures of one run."""
    answered = [record for record in result.records if record.status == "ok"]
    ttfts = [record.ttft_s for record in answered if record.ttft_s is not None]
    tpots = [record.tpot_s for record in answered if record.tpot_s is not None]
    return {
        "requests": len(requests.requests),
        "answered": len(answered),
        "requests_per_s": len(requests.requests) / cpu_s,
        "events": result.num_events,
        "reuse": sum(r.cached_tokens for r in answered) / max(1, sum(r.num_prompt_tokens for r in answered)),
        "ttft_mean_ms": 1e3 * sum(ttfts) / max(1, len(ttfts)),
        "ttft_p99_ms": 1e3 * percentile(ttfts, 99) if ttfts else None,
        "tpot_mean_ms": 1e3 * sum(tpots) / max(1, len(tpots)),
        "tpot_p99_ms": 1e3 * percentile(tpots, 99) if tpots else None,
        "attainment": evaluate(result.records, LIMITS, requests.window_s).attainment,
    }
