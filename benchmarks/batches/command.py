"""A batch whose gateway is killed in its middle: is each line answered, and once? What does a batch cost interactive
requests? How much later does the end of an answer come because its use is written first?

    python -m benchmarks.batches [--json FILE] [--lines 2000] [--seconds 45] [--only killed|beside|usage]

The first: a real cluster of processes with the deterministic model. Each answer is compared with the one that the model
must give. The second: see beside.py; the third: usage.py.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from benchmarks.batches.beside import beside, ratios
from benchmarks.batches.usage import usage_cost, usage_figures
from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.hosts.processes import ProcessCluster
from disagg.engine.fake_runner import fake_generate
from tests.support.reports import print_table, report, write_json

ENDPOINT = "/v1/completions"
NUM_TOKENS = 16
NUM_PROMPTS = 100
MAX_RUNNING = 16
TIMEOUT_S = 300.0
Row = dict[str, Any]


def main() -> int:
    """The exit status: 0 where each line was answered once and right."""
    parser = argparse.ArgumentParser(prog="benchmarks.batches", description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--lines", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=45.0, help="of each of the four stretches beside a batch")
    parser.add_argument("--only", choices=("killed", "beside", "usage"))
    args = parser.parse_args()
    rows: list[Row] = []
    summary: Row = {}
    failed = False
    if args.only in (None, "killed"):
        with tempfile.TemporaryDirectory(prefix="disagg-bench-") as folder:
            row = killed(Path(folder), args.lines)
        print_rows("A batch whose gateway is killed", [row])
        rows.append(row)
        summary |= {name: row[name] for name in ("answered_once", "lost")}
        failed = row["answered_once"] != args.lines or row["wrong"] > 0
    if args.only in (None, "beside"):
        with tempfile.TemporaryDirectory(prefix="disagg-bench-") as folder:
            found = beside(Path(folder), args.seconds)
        print_rows("Interactive requests beside a batch", found)
        rows += found
        summary |= ratios(found)
    if args.only in (None, "usage"):
        with tempfile.TemporaryDirectory(prefix="disagg-bench-") as folder:
            costs = usage_cost(Path(folder))
        print_rows("The end of an answer", costs)
        rows += costs
        summary |= usage_figures(costs)
    print(" ".join(f"{name}={value}" for name, value in summary.items()))
    if args.json is not None:
        write_json(args.json, report(rows, summary))
    return int(failed)


def print_rows(title: str, rows: list[Row]) -> None:
    """A table of rows with the same fields."""
    print_table(title, list(rows[0]), [[str(value) for value in row.values()] for row in rows])


def killed(folder: Path, num_lines: int) -> Row:
    """One batch with a kill -9 of the gateway once a third is answered."""
    config = {
        "model": {"path": "fake", "max_model_len": 512},
        "transfer": {"transport": "shm"},
        "gateway": {"port": 0, "batches": {"folder": str(folder), "max_running": MAX_RUNNING}},
        "pools": {name: {"num_blocks": 4096, "max_num_seqs": 64} for name in ("prefill", "decode")},
    }
    with ProcessCluster(parse_config(config)) as cluster:
        http = httpx.Client(base_url=f"http://{cluster.http_address}", timeout=60.0)
        content = b"".join(line(number) for number in range(num_lines))
        began = time.monotonic()
        file = http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", content)}).json()
        given = {"input_file_id": file["id"], "endpoint": ENDPOINT, "completion_window": "24h"}
        url = f"/v1/batches/{http.post('/v1/batches', json=given).json()['id']}"
        wait_for(lambda: http.get(url).json()["request_counts"]["completed"] > num_lines // 3)
        pid = cluster.pid("gateway")
        os.kill(pid, signal.SIGKILL)
        killed_at = time.monotonic()
        wait_for(lambda: serves_again(cluster, pid))
        http.base_url = httpx.URL(f"http://{cluster.http_address}")
        at_restart = http.get(url).json()["request_counts"]["completed"]
        wait_for(lambda: http.get(url).json()["status"] == "completed")
        ended = time.monotonic()
        counts, wrong = check(http, http.get(url).json()["output_file_id"])
        http.close()
    return {
        "lines": num_lines,
        "answered_before_kill": at_restart,
        "answered_once": sum(count == 1 for count in counts.values()),
        "twice": sum(count > 1 for count in counts.values()),
        "lost": num_lines - len(counts),
        "wrong": wrong,
        "kill_to_end_s": round(ended - killed_at, 2),
        "seconds": round(ended - began, 2),
    }


def check(http: httpx.Client, file_id: str) -> tuple[Counter[int], int]:
    """How often each line is answered, and how many answers are wrong."""
    answers = [json.loads(row) for row in http.get(f"/v1/files/{file_id}/content").text.splitlines()]
    texts = [text_of(http, number) for number in range(NUM_PROMPTS)]
    numbers = [int(answer["custom_id"]) for answer in answers]
    found = [answer["response"]["body"]["choices"][0]["text"] for answer in answers]
    wrong = sum(text != texts[number % NUM_PROMPTS] for number, text in zip(numbers, found, strict=True))
    return Counter(numbers), wrong


def text_of(http: httpx.Client, number: int) -> str:
    """The answer that the model must give to a line."""
    ids = {"model": "fake", "tokens": fake_generate(prompt_of(number), NUM_TOKENS)}
    text: str = http.post("/detokenize", json=ids).json()["prompt"]
    return text


def prompt_of(number: int) -> list[int]:
    """Twenty tokens, others for each of `NUM_PROMPTS`."""
    return list(range(number % NUM_PROMPTS, number % NUM_PROMPTS + 20))


def line(number: int) -> bytes:
    """One line of the input."""
    given = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    body = {"model": "fake", "prompt": prompt_of(number), **given}
    return json.dumps({"custom_id": str(number), "method": "POST", "url": ENDPOINT, "body": body}).encode() + b"\n"


def serves_again(cluster: ProcessCluster, pid: int) -> bool:
    """Whether another gateway than process `pid` is ready."""
    state = cluster.state()
    return state.is_settled and all(gateway.pid != pid for gateway in state.gateways)


def wait_for(condition: Callable[[], bool]) -> None:
    """Raises `TimeoutError` where it does not become true."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the batch did not get on")
        time.sleep(0.05)
