"""What a tenant sees of another one that offers ten times its share: `tests.acceptance.isolation.tenants`
on a real `disagg up`, whose model has no weights and whose steps take `STEP_MS`.

    python -m tests.acceptance.isolation.tenants_real [--answers N] [--stated] [--loads NAMES] [--record FOLDER]
        [--json FILE]

The neighbour asks for a quarter of what the cluster can do, one answer a call over gRPC, alone and then beside the
flood, which comes over HTTP in each of four manners: many calls, n = 16, long prompts, refused ones. The flood begins
after the neighbour's first `NUM_BEFORE` answers. Of those that it asks for from then on, counted is the share whose
first token came within `TTFT_S`, whose tokens came within `ITL_S` of each other on average, and both.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
import secrets
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disagg.client import AsyncClient, Targets
from tests.acceptance.faults.cluster import Up
from tests.acceptance.faults.load import Model, Stream, send
from tests.support.pace import on_time, steady
from tests.support.raw_clients import COMPLETIONS, http_request
from tests.support.reports import percentile, print_table, report, write_json

STEP_MS = 30.0
TOKEN_BUDGET = 512
NUM_PREFILLS, NUM_DECODES, PLACES = 2, 2, 16
OUTPUT_TOKENS = 40
TTFT_S, ITL_S = 0.5, 2.5 * STEP_MS / 1000
CAPACITY_PER_S = NUM_DECODES * PLACES / (OUTPUT_TOKENS * STEP_MS / 1000)
NEIGHBOUR_PER_S = CAPACITY_PER_S / 4
NUM_BEFORE = 20
MAX_MODEL_LEN = 16_384
MAX_N = 16
"""Answers to one prompt of a call."""
EMPTY_TIMEOUT_S = 60.0

Row = dict[str, Any]


@dataclass(frozen=True)
class Flood:
    """What the other tenant sends; it is `limited` where a limit of tokens a minute refuses it."""

    prompt_tokens: int
    output_tokens: int
    num_answers: int = 1
    limited: bool = False

    @property
    def calls_per_s(self) -> float:
        """Ten times its share of places to decode or of prefill workers, whichever it takes more of."""
        of_decode = self.output_tokens / OUTPUT_TOKENS / CAPACITY_PER_S
        of_prefill = self.prompt_tokens / TOKEN_BUDGET * STEP_MS / 1000 / NUM_PREFILLS
        return 10 * 0.5 / max(of_decode, of_prefill) / self.num_answers


FLOODS = {
    "many calls": Flood(100, OUTPUT_TOKENS),
    "n = 16": Flood(100, 2000, 16),
    "long prompts": Flood(4000, 16),
    "refused": Flood(100, OUTPUT_TOKENS, 64, limited=True),
}


class Flooding:
    """Calls at a steady rate from `start` until the block ends; those that run then are given up."""

    def __init__(self, address: str, key: str, model: str, flood: Flood) -> None:
        self.statuses: Counter[int] = Counter()
        self.num_calls = 0
        self._flood, self._model = flood, model
        self._address, self._key = address, key
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Flooding:
        return self

    def start(self) -> None:
        """Begin to call."""
        self._tasks.add(asyncio.create_task(self._start()))

    async def __aexit__(self, *_: object) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _start(self) -> None:
        rng = random.Random(2)
        async for number in on_time(steady(self._flood.calls_per_s)):
            prompt = [rng.randrange(1, 250) for _ in range(self._flood.prompt_tokens)]
            task = asyncio.create_task(self._call(prompt))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            self.num_calls = number + 1

    async def _call(self, prompt: list[int]) -> None:
        body = {
            "model": self._model,
            "prompt": [prompt] * -(-self._flood.num_answers // MAX_N),
            "max_tokens": self._flood.output_tokens,
            "n": min(self._flood.num_answers, MAX_N),
            "ignore_eos": True,
        }
        request = http_request(COMPLETIONS, body, [("authorization", f"Bearer {self._key}"), ("connection", "close")])
        host, _, port = self._address.rpartition(":")
        writer = None
        try:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(request)
            words = (await reader.readline()).split()
            self.statuses[int(words[1]) if len(words) > 1 else 0] += 1
            await reader.read()
        except OSError:
            self.statuses[0] += 1
        finally:
            if writer is not None:
                with contextlib.suppress(OSError):
                    writer.close()


async def neighbour(
    client: AsyncClient, model: Model, num_answers: int, targets: Targets, flooding: Flooding | None = None
) -> list[Stream]:
    """Its answers from the begin of the flood on, asked for at the times of a Poisson process, the same in each row."""
    rng = random.Random(1)
    pairs = model.pairs(OUTPUT_TOKENS * 3 // 2)
    due_s = itertools.accumulate(rng.expovariate(NEIGHBOUR_PER_S) for _ in range(NUM_BEFORE + num_answers))
    tasks = []
    async for number in on_time(due_s):
        prompt, expected = pairs[number % len(pairs)]
        num_tokens = rng.randint(OUTPUT_TOKENS // 2, OUTPUT_TOKENS * 3 // 2)
        tasks.append(asyncio.create_task(send(client, prompt, expected[:num_tokens], targets=targets)))
        if number == NUM_BEFORE - 1 and flooding is not None:
            flooding.start()
    return list(await asyncio.gather(*tasks))[NUM_BEFORE:]


def row_of(name: str, streams: Sequence[Stream], flooding: Flooding | None, left: dict[str, int]) -> Row:
    """What came of it."""
    in_time = [not stream.error and stream.ttft_s <= TTFT_S for stream in streams]
    itls = [
        (each.times[-1] - each.times[0]) / max(1, len(each.token_ids) - 1) if each.times else 0.0 for each in streams
    ]
    steady = [not stream.error and itl <= ITL_S for stream, itl in zip(streams, itls, strict=True)]
    both = [one and other for one, other in zip(in_time, steady, strict=True)]
    ttfts = [1000 * stream.ttft_s for stream in streams]
    return {
        "load": name,
        "answers": len(streams),
        "ttft_percent": round(100 * statistics.mean(in_time), 2),
        "itl_percent": round(100 * statistics.mean(steady), 2),
        "both_percent": round(100 * statistics.mean(both), 2),
        "ttft_p50_ms": round(percentile(ttfts, 50), 1),
        "ttft_p99_ms": round(percentile(ttfts, 99), 1),
        "itl_p99_ms": round(1000 * percentile(itls, 99), 1),
        "errors": sum(bool(stream.error) for stream in streams),
        "wrong": sum(stream.is_wrong for stream in streams),
        "flood_calls": 0 if flooding is None else flooding.num_calls,
        "flood_statuses": ""
        if flooding is None
        else " ".join(f"{s}:{n}" for s, n in sorted(flooding.statuses.items())),
        "left": sum(left.values()),
    }


async def measure(num_answers: int, targets: Targets, loads: Sequence[str], record: Path | None) -> list[Row]:
    """The row without a flood and one for each of `loads`, on one cluster; `record`: the folder for the router's
    events."""
    keys = {name: secrets.token_hex(16) for name in ("neighbour", "flood", "limited", "operators")}
    pool = {"num_blocks": 8192, "max_num_seqs": PLACES, "token_budget": TOKEN_BUDGET}
    model = Model()
    with tempfile.TemporaryDirectory(prefix="disagg-keys-") as folder:
        file = Path(folder) / "keys.yaml"
        file.touch(mode=0o600)
        file.write_text(
            f"- {{tenant: neighbour, key: {keys['neighbour']}}}\n- {{tenant: flood, key: {keys['flood']}}}\n"
            f"- {{tenant: limited, key: {keys['limited']}, limits: {{tokens_per_minute: 1000}}}}\n"
            f"- {{tenant: operators, key: {keys['operators']}, admin: true}}\n"
        )
        config: dict[str, dict[str, Any]] = {
            "model": {"path": model.path, "dtype": model.dtype, "max_model_len": MAX_MODEL_LEN},
            "pools": {
                "prefill": {**pool, "size": NUM_PREFILLS, "max_num_seqs": 64},
                "decode": {**pool, "size": NUM_DECODES},
            },
            "placement": {"local_prefill": "never"},
            "gateway": {"api_keys": str(file)},
        }
        if record is not None:
            config["gateway"] |= {"record_events": {"folder": str(record.absolute())}}
        async with Up(config, step_ms=STEP_MS, key=keys["operators"]) as up:
            client = AsyncClient(up.address, keys["neighbour"])
            try:
                await neighbour(client, model, 10, targets)  # pairs are formed, and the costs of steps are known
                rows = [await _row("alone", None, up, client, keys, num_answers, targets)]
                rows += [await _row(name, FLOODS[name], up, client, keys, num_answers, targets) for name in loads]
                return rows
            finally:
                await client.close()


async def _row(
    name: str,
    flood: Flood | None,
    up: Up,
    client: AsyncClient,
    keys: dict[str, str],
    num_answers: int,
    targets: Targets,
) -> Row:
    model, flooding = Model(), None
    if flood is None:
        streams = await neighbour(client, model, num_answers, targets)
    else:
        key = keys["limited" if flood.limited else "flood"]
        async with Flooding(up.http_address, key, model.name, flood) as flooding:
            streams = await neighbour(client, model, num_answers, targets, flooding)
    _, left = await up.emptied(EMPTY_TIMEOUT_S)
    row = row_of(name, streams, flooding, left)
    print(row, file=sys.stderr, flush=True)
    return row


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """The most that the neighbour loses, in points."""
    alone, *beside = (row["both_percent"] for row in rows)
    return {"neighbour_alone_percent": alone, "neighbour_most_lost_points": round(alone - min(beside), 2)}


def main() -> None:
    """Measure, print, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=120, help="of the neighbour in each row")
    parser.add_argument(
        "--stated", action="store_true", help="the neighbour states its TTFT target, and may be refused"
    )
    parser.add_argument("--loads", default=",".join(FLOODS), help=f"of {', '.join(FLOODS)}")
    parser.add_argument("--record", type=Path, help="record the router's events in this folder, for `disagg replay`")
    parser.add_argument("--json", type=Path, help="write the report to this file")
    options = parser.parse_args()
    loads = options.loads.split(",")
    if unknown := sorted(set(loads) - set(FLOODS)):
        parser.error(f"--loads: there is no {', '.join(unknown)}; there is {', '.join(FLOODS)}")
    targets = Targets(ttft_ms=1000 * TTFT_S) if options.stated else Targets()
    rows = asyncio.run(measure(options.answers, targets, loads, options.record))
    columns = list(rows[0])
    print_table(
        "Tenants, real cluster",
        [name.replace("_", " ") for name in columns],
        [[str(row[name]) for name in columns] for row in rows],
    )
    print(summary(rows))
    if options.json is not None:
        write_json(options.json, report(rows, summary(rows)))


if __name__ == "__main__":
    main()
