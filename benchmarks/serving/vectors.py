"""Time to the first token of a chat beside a flood of embeddings, and embeddings in one call and one by one.

python -m benchmarks.serving.vectors --json FILE

Two models in one cluster: the default one answers, and the same weights as a model of vectors (last token) compute
embeddings on a worker of their own, on the cores that all share. Chats come one after the other, with a pause; rounds
with and without the flood take turns. The flood is a closed loop of calls with several texts each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.hosts.processes import ProcessCluster
from disagg.cluster.models.catalog import DEFAULT_MODEL, resolve_model
from tests.support.reports import percentile, positive, print_table, report, write_json

CHAT, VECTORS = "chat", "vectors"
VOCABULARY = 40000
WARM_UP_CALLS = 4


def make_embedder(source: Path, folder: Path) -> Path:
    """The checkpoint as a model of vectors: links to its files, and the settings of the pooling."""
    folder.mkdir()
    for file in source.iterdir():
        if file.name not in ("groups.safetensors", "manifest.json"):
            (folder / file.name).symlink_to(file)
    kinds = ("Transformer", "Pooling", "Normalize")
    modules = [
        {"type": f"sentence_transformers.models.{kind}", "path": "1_Pooling" if kind == "Pooling" else ""}
        for kind in kinds
    ]
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text('{"pooling_mode_lasttoken": true}', encoding="utf-8")
    return folder


def cluster_config(chat: Path, vectors: Path) -> dict[str, Any]:
    """Both models, a worker of one thread for each role, pinned to no core."""
    pool = {"size": 1, "num_threads": 1, "kv_cache_bytes": "128MiB", "cores": "none"}
    return {
        "gateway": {"port": 0, "http_port": 0},
        "models": {
            CHAT: {"model": {"path": str(chat)}, "pools": {"prefill": pool, "decode": pool}},
            VECTORS: {"model": {"path": str(vectors)}, "mode": "colocated", "pools": {"colocated": pool}},
        },
    }


def prompt(source: random.Random, num_tokens: int) -> list[int]:
    """A prompt of its own."""
    return [source.randrange(VOCABULARY) for _ in range(num_tokens)]


async def chat_ttft_s(client: httpx.AsyncClient, prompt_ids: Sequence[int]) -> float:
    """Seconds to the first token of one answer, which is read to its end."""
    body = {"model": CHAT, "prompt": list(prompt_ids), "max_tokens": 8, "temperature": 0, "stream": True}
    started, first = time.perf_counter(), None
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            if first is None and line.startswith("data: "):
                first = time.perf_counter() - started
    assert first is not None
    return first


async def embed(client: httpx.AsyncClient, texts: Sequence[Sequence[int]]) -> None:
    """One call."""
    body = {"model": VECTORS, "input": [list(text) for text in texts], "encoding_format": "base64"}
    (await client.post("/v1/embeddings", json=body)).raise_for_status()


async def flood(client: httpx.AsyncClient, calls: int, texts: int, num_tokens: int) -> None:
    """Calls without end, `calls` at a time."""

    async def one(seed: int) -> None:
        source = random.Random(seed)
        while True:
            await embed(client, [prompt(source, num_tokens) for _ in range(texts)])

    await asyncio.gather(*(one(seed) for seed in range(calls)))


async def round_of_chats(client: httpx.AsyncClient, source: random.Random, options: argparse.Namespace) -> list[float]:
    """Times to the first token, in seconds."""
    found = []
    for _ in range(options.chats):
        found.append(await chat_ttft_s(client, prompt(source, options.chat_tokens)))
        await asyncio.sleep(options.pause_s)
    return found


async def measure(address: str, options: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    source, times = random.Random(1), {"alone": [], "beside": []}  # type: ignore[var-annotated]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=f"http://{address}", timeout=120.0, limits=limits) as client:
        for _ in range(WARM_UP_CALLS):
            await chat_ttft_s(client, prompt(source, options.chat_tokens))
            await embed(client, [prompt(source, options.text_tokens)])
        throughput = await throughputs(client, options)
        for turn in range(options.rounds):
            for name in ("alone", "beside") if turn % 2 == 0 else ("beside", "alone"):
                task = None
                if name == "beside":
                    task = asyncio.create_task(flood(client, options.calls, options.texts, options.text_tokens))
                    await asyncio.sleep(1.0)
                times[name] += await round_of_chats(client, source, options)
                if task is not None:
                    task.cancel()
                    with suppress(asyncio.CancelledError):
                        await task
                    await asyncio.sleep(1.0)
    return {"times": times, **throughput}


async def throughputs(client: httpx.AsyncClient, options: argparse.Namespace) -> dict[str, float]:
    """Texts a second, in one call and one call after the other; in turns."""
    source, found = random.Random(2), {"batched": [], "one_by_one": []}  # type: ignore[var-annotated]
    for _ in range(options.rounds):
        for name in found:
            texts = [prompt(source, options.short_tokens) for _ in range(32)]
            started = time.perf_counter()
            for part in [texts] if name == "batched" else [[text] for text in texts]:
                await embed(client, part)
            found[name].append(len(texts) / (time.perf_counter() - started))
    return {name: statistics.median(rates) for name, rates in found.items()}


def main() -> None:
    """Measure, print the table, write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--chats", type=positive, default=40, help="of each round")
    parser.add_argument("--chat-tokens", type=positive, default=100)
    parser.add_argument("--pause-s", type=float, default=0.05)
    parser.add_argument("--calls", type=positive, default=4, help="of the flood, at a time")
    parser.add_argument("--texts", type=positive, default=16, help="of a call of the flood")
    parser.add_argument("--text-tokens", type=positive, default=200)
    parser.add_argument("--short-tokens", type=positive, default=16, help="of texts whose rate is measured")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    chat = resolve_model(options.model)
    with tempfile.TemporaryDirectory(prefix="disagg-bench-") as folder:
        vectors = make_embedder(chat, Path(folder) / VECTORS)
        with ProcessCluster(parse_config(cluster_config(chat, vectors))) as cluster:
            found = asyncio.run(measure(cluster.http_address, options))
    times = found["times"]
    rows = [
        {"chats": name, "number": len(each), **{f"p{p}_ms": round(percentile(each, p) * 1e3, 1) for p in (50, 90, 99)}}
        for name, each in times.items()
    ]
    summary = {
        **{f"ttft_p{p}_beside_over_alone": round(rows[1][f"p{p}_ms"] / rows[0][f"p{p}_ms"], 3) for p in (50, 90, 99)},
        "batched_over_one_by_one": round(found["batched"] / found["one_by_one"], 2),
        "texts_s_batched": round(found["batched"], 1),
    }
    print_table(
        "time to the first token of a chat, beside a flood of embeddings and without",
        ("chats", "number", "p50 ms", "p90 ms", "p99 ms"),
        [[str(value) for value in row.values()] for row in rows],
    )
    print(json.dumps(summary, indent=1))
    if options.json is not None:
        write_json(options.json, report(rows, summary))


if __name__ == "__main__":
    main()
