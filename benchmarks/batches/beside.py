"""Interactive requests with and without a batch beside them: which share meets its targets?

One cluster with the default model, one prefill and one decode worker. Interactive requests are an open loop: Poisson
arrivals, each sent when it is due on a stream of its own, its latency counted from then. Four stretches, without, with,
with, without a batch (A B B A); the same requests at the same times in each. A batch of more lines than can be answered
is started before its stretch and cancelled behind it; what it computes meanwhile is its share of the cluster.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from disagg.client import AsyncClient, Options
from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.hosts.processes import ProcessCluster
from disagg.proto.errors import DisaggError
from tests.support.reports import percentiles

TTFT_MS, TPOT_MS = 1000.0, 100.0
RATE_PER_S = 1.0
PROMPT_TOKENS = (50, 250)
OUTPUT_TOKENS = 32
NUM_LINES, LINE_PROMPT_TOKENS, LINE_TOKENS = 5000, 100, 64
ENDPOINT = "/v1/completions"
SETTLE_S = 3.0
"""Seconds before each stretch, while the batch begins."""
MAX_ID = 40_000
TIMEOUT_S = 60.0
Row = dict[str, Any]


@dataclass(frozen=True)
class Planned:
    """One interactive request."""

    due_s: float
    prompt: list[int]


@dataclass(frozen=True)
class Seen:
    """The outcome of a planned request; None for one that failed."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    error: str = ""

    @property
    def met(self) -> bool:
        """Whether it met both targets."""
        return self.ttft_ms is not None and self.ttft_ms <= TTFT_MS and (self.tpot_ms or 0.0) <= TPOT_MS


def plan(seconds: float, seed: int = 1) -> list[Planned]:
    """Arrivals and prompts of a stretch."""
    dice = random.Random(seed)
    planned, due_s = [], dice.expovariate(RATE_PER_S)
    while due_s < seconds:
        planned.append(Planned(due_s, _prompt(dice, dice.randint(*PROMPT_TOKENS))))
        due_s += dice.expovariate(RATE_PER_S)
    return planned


def beside(folder: Path, seconds: float) -> list[Row]:
    """One row for each stretch."""
    config = {
        "model": {"name": "smollm2-135m"},
        "gateway": {"port": 0, "http_port": 0, "batches": {"folder": str(folder)}},
        "slo": {"ttft_ms": TTFT_MS, "tpot_ms": TPOT_MS},
    }
    with ProcessCluster(parse_config(config)) as cluster:
        http = httpx.Client(base_url=f"http://{cluster.http_address}", timeout=TIMEOUT_S)
        asyncio.run(_stretch(cluster.address, plan(10.0, seed=2)))  # warm up
        rows = []
        for has_batch in (False, True, True, False):
            url = _begin(http) if has_batch else None
            time.sleep(SETTLE_S)
            before = _num_answered(http, url)
            seen = asyncio.run(_stretch(cluster.address, plan(seconds)))
            rows.append(_row(has_batch, seen, (_num_answered(http, url) - before) * LINE_TOKENS / seconds))
            if url is not None:
                _cancel(http, url)
        http.close()
    return rows


def ratios(rows: list[Row]) -> Row:
    """The figures of both kinds of stretches, each kind taken together."""
    shares = []
    for has_batch in (True, False):
        of_kind = [row for row in rows if row["batch"] is has_batch]
        shares.append(sum(row["met"] for row in of_kind) / sum(row["requests"] for row in of_kind))
    with_batch, without = shares
    batch_rates = [row["batch_tokens_per_s"] for row in rows if row["batch"]]
    return {
        "interactive_ratio": round(with_batch / without, 4) if without else 0.0,
        "attainment_with_batch": round(with_batch, 4),
        "attainment_without": round(without, 4),
        "batch_tokens_per_s": round(sum(batch_rates) / len(batch_rates), 1),
    }


def _row(has_batch: bool, seen: list[Seen], batch_tokens_per_s: float) -> Row:
    ttfts = [one.ttft_ms for one in seen if one.ttft_ms is not None]
    tpots = [one.tpot_ms for one in seen if one.tpot_ms is not None]
    return {
        "batch": has_batch,
        "requests": len(seen),
        "met": sum(one.met for one in seen),
        "failed": len(seen) - len(ttfts),
        "errors": " ".join(sorted({one.error for one in seen if one.error})),
        **{f"ttft_{name}_ms": round(value, 1) for name, value in percentiles(ttfts, (50, 95)).items()},
        **{f"tpot_{name}_ms": round(value, 1) for name, value in percentiles(tpots, (50, 95)).items()},
        "batch_tokens_per_s": round(batch_tokens_per_s, 1),
    }


async def _stretch(address: str, planned: list[Planned]) -> list[Seen]:
    async with AsyncClient(address) as client:
        began = time.monotonic()
        return await asyncio.gather(*(_one(client, one, began + one.due_s) for one in planned))


async def _one(client: AsyncClient, planned: Planned, due: float) -> Seen:
    await asyncio.sleep(max(0.0, due - time.monotonic()))
    first = last = None
    num_tokens = 0
    try:
        options: Options = {"max_tokens": OUTPUT_TOKENS, "temperature": 0.0, "ignore_eos": True}
        async for delta in client.stream(planned.prompt, timeout_s=TIMEOUT_S, **options):
            if delta.token_ids:
                last = time.monotonic()
                first = first or last
                num_tokens += len(delta.token_ids)
    except DisaggError as error:
        return Seen(error=error.code)
    assert first is not None
    assert last is not None
    return Seen((first - due) * 1000, (last - first) / max(1, num_tokens - 1) * 1000)


def _prompt(dice: random.Random, length: int) -> list[int]:
    return [dice.randrange(100, MAX_ID) for _ in range(length)]


def _begin(http: httpx.Client) -> str:
    """The URL of a new batch that has begun to run."""
    dice = random.Random(3)
    content = b"\n".join(_line(number, _prompt(dice, LINE_PROMPT_TOKENS)) for number in range(NUM_LINES))
    file = http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", content)}).json()
    given = {"input_file_id": file["id"], "endpoint": ENDPOINT, "completion_window": "24h"}
    url = f"/v1/batches/{http.post('/v1/batches', json=given).json()['id']}"
    _wait_for_status(http, url, "in_progress")
    return url


def _line(number: int, prompt: list[int]) -> bytes:
    body = {"model": "smollm2-135m", "prompt": prompt, "max_tokens": LINE_TOKENS, "temperature": 0, "ignore_eos": True}
    return json.dumps({"custom_id": str(number), "method": "POST", "url": ENDPOINT, "body": body}).encode()


def _num_answered(http: httpx.Client, url: str | None) -> int:
    return 0 if url is None else int(http.get(url).json()["request_counts"]["completed"])


def _cancel(http: httpx.Client, url: str) -> None:
    http.post(f"{url}/cancel")
    _wait_for_status(http, url, "cancelled")


def _wait_for_status(http: httpx.Client, url: str, status: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while http.get(url).json()["status"] != status:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the batch is not {status}")
        time.sleep(0.05)
