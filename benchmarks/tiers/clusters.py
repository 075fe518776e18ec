"""The clusters of the benchmark: 2 prefill and 2 decode workers with small device caches, by where else KV is kept."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.tiers.conversations import Workload
from disagg.v1 import inference_pb2 as pb
from disagg.v1.inference_pb2_grpc import AdminServiceStub

NONE, HOST, DISK, PEER, ALL = "none", "host", "disk", "peer", "all"
MODES = (NONE, HOST, DISK, PEER, ALL)
TIER_BYTES = 1 << 30
"""Size of each tier of each worker: more than all conversations need."""
MIN_TOKENS = 128
BACK_S = 120.0
_COUNTER = re.compile(r"^disagg_(kv_tier_\w+_total|engine_\w*(?:loaded|fetch)\w*_total)(?:{(.*)})? (\S+)$", re.M)
_KIND = re.compile(r'(?:tier|outcome)="(\w+)"')


def config(model: str, mode: str, workload: Workload, folder: Path) -> dict[str, Any]:
    """The cluster of a mode. `folder`: of its disk tiers."""
    tiers: dict[str, Any] = {"min_tokens": MIN_TOKENS}
    if mode in (HOST, ALL):
        tiers["host_bytes"] = TIER_BYTES
    if mode in (DISK, ALL):
        tiers["disk"] = {"path": str(folder), "bytes": TIER_BYTES}
    kv_cache: dict[str, Any] = {"tiers": tiers} if len(tiers) > 1 else {}
    if mode in (PEER, ALL):
        kv_cache["fetch"] = True
    return {
        "model": {"name": model, "max_model_len": -(-workload.longest // 128) * 128},
        "kv_cache": kv_cache,
        "placement": {"local_prefill": workload.local_prefill},
        "pools": {
            "prefill": {"size": 2, "num_blocks": workload.prefill_blocks},
            "decode": {"size": 2, "num_blocks": workload.decode_blocks},
        },
    }


async def counters_of(admin: AdminServiceStub) -> dict[str, float]:
    """Sums over all workers of what a gateway's `/metrics` counts of tiers and fetches."""
    address = (await admin.GetClusterState(pb.GetClusterStateRequest())).http_address
    text = await asyncio.to_thread(_get, f"http://{address}/metrics")
    found: dict[str, float] = {}
    for name, labels, value in _COUNTER.findall(text):
        key = name + "".join(f"_{label}" for label in _KIND.findall(labels))
        found[key] = found.get(key, 0.0) + float(value)
    return found


def _get(url: str) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=10.0) as answer:
        return bytes(answer.read()).decode()


async def restart_workers(admin: AdminServiceStub) -> None:
    """Kill every worker, and wait until all are back and have read their folders.

    Raises:
        TimeoutError: that takes too long.
    """
    before: dict[str, int] = {}
    for worker in (await admin.GetClusterState(pb.GetClusterStateRequest())).workers:
        before[worker.worker_id] = worker.pid
        os.kill(worker.pid, signal.SIGKILL)
    deadline = time.monotonic() + BACK_S
    while True:
        await asyncio.sleep(0.25)
        state = await admin.GetClusterState(pb.GetClusterStateRequest())
        back = {worker.worker_id for worker in state.workers if worker.phase == "ready"}
        back -= {worker.worker_id for worker in state.workers if worker.pid == before.get(worker.worker_id)}
        if back == {*before} and not any("tier of KV" in note for note in state.notes):
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"of {sorted(before)} only {sorted(back)} came back; {list(state.notes)}")
