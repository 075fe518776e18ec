"""What Dynamo's own replay gives for the trace, sizes and step times of `command.py`: its KV router and round robin.

    python -m venv dynamo-venv
    dynamo-venv/bin/pip install --no-deps ai-dynamo-runtime==1.6.1
    dynamo-venv/bin/python -m benchmarks.simulator.dynamo_replay --trace conversation_trace.jsonl [--paces 1 4 8]

Optional: the package is no dependency, so this file imports nothing of ours and runs in an environment of its own. The
replay is in `ai-dynamo-runtime` alone, a compiled module (offline: no etcd, no NATS, no model); `ai-dynamo` itself
needs a package (`aisimulate`) that only the vendor's index has. Runs with version 1.6.1, whose step times are the
polynomials by default.

Its scheduler is another one: a decode worker gives the first token, so a TTFT there has the transfer in it; with ours
the prefill worker gives it, and the transfer is between the first token and the second.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
from pathlib import Path
from typing import Any

NUM_WORKERS = 8
"""Number of workers of each pool, as in `command.py`."""
NUM_BLOCKS, BLOCK_SIZE, TOKEN_BUDGET, MAX_NUM_SEQS = 20_000, 64, 8192, 256
KV_BYTES_PER_TOKEN = 131_072
LINK_GB_PER_S = 50.0
TRACE_BLOCK_TOKENS = 512
ROUTERS = ("kv_router", "round_robin")
FIGURES = {
    "reuse": "prefix_cache_reused_ratio",
    "ttft_mean_ms": "mean_ttft_ms",
    "ttft_p99_ms": "p99_ttft_ms",
    "tpot_mean_ms": "mean_tpot_ms",
    "tpot_p99_ms": "p99_tpot_ms",
}
"""Our names of its figures."""


def engine_arguments(core: Any, role: str) -> Any:
    """The configuration of the workers of one pool."""
    engine = {
        "worker_type": role,
        "num_gpu_blocks": NUM_BLOCKS,
        "block_size": BLOCK_SIZE,
        "max_num_batched_tokens": TOKEN_BUDGET,
        "max_num_seqs": MAX_NUM_SEQS,
        "kv_transfer_bytes_per_token": KV_BYTES_PER_TOKEN,
        "kv_transfer_bandwidth": LINK_GB_PER_S,
    }
    return core._normalize_mocker_config({"engine": engine})


def replay(core: Any, trace: Path, router: str, pace: float) -> dict[str, Any]:
    """One run, in virtual time."""
    result = core.run_mocker_trace_replay(
        [str(trace)],
        prefill_engine_args=engine_arguments(core, "prefill"),
        decode_engine_args=engine_arguments(core, "decode"),
        num_prefill_workers=NUM_WORKERS,
        num_decode_workers=NUM_WORKERS,
        router_mode=router,
        router_config=core.KvRouterConfig() if router == "kv_router" else None,
        trace_block_size=TRACE_BLOCK_TOKENS,
        arrival_speedup_ratio=pace,
    )
    found = result.summary
    if found["completed_requests"] != found["num_requests"]:
        raise RuntimeError(f"{router}: {found['completed_requests']} of {found['num_requests']} requests were answered")
    figures = {name: found[key] for name, key in FIGURES.items()}
    return {"router": router, "pace": pace, "requests": found["num_requests"], **figures}


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, help="in Mooncake's format")
    parser.add_argument("--paces", type=float, nargs="+", default=[1.0], help="times the pace of the trace")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("DYN_LOG", "error")  # else it writes a line for each placement
    core = importlib.import_module("dynamo._core")
    rows = [replay(core, options.trace, router, pace) for pace in options.paces for router in ROUTERS]
    for row in rows:
        print(
            "  ".join(f"{name} {value:.4g}" if isinstance(value, float) else str(value) for name, value in row.items())
        )
    if options.json is not None:
        version = importlib.metadata.version("ai-dynamo-runtime")
        options.json.write_text(json.dumps({"version": version, "rows": rows}, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
