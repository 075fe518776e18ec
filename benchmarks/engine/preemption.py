"""What it costs to run out of KV blocks: the same answers with room for all, with host memory for what is preempted,
and with neither.

    python -m benchmarks.engine.preemption [--sequences 8] [--prompt 64] [--output 256] [--share 0.6] [--json FILE]

One engine core in this process, without sockets. All sequences come at once; `--share` is how much of the blocks that
they need in the end there is. The ways are run one after the other, and once more in reverse, so that a slow drift
favours no way. Every way must give the same tokens in fp32; the output counts once however often it is computed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disagg.cluster.models.catalog import resolve_model
from disagg.engine.commands import Add, TokenSampled
from disagg.engine.config import WorkerConfig
from disagg.engine.core.engine_core import EngineCore
from disagg.engine.core.reports import EngineTotals
from disagg.engine.parallel.factories import make_runner, warm_up
from disagg.engine.plan import ModelRunner
from disagg.proto.block_hash import chain_hashes, root_hash
from disagg.proto.ids import GatewayId, RequestId
from disagg.proto.messages import Sampling, SequenceSpec
from disagg.proto.token_ids import pack_token_ids
from tests.support.reports import print_table, report, write_json

BLOCK = 16


@dataclass(frozen=True, kw_only=True)
class Way:
    """One row."""

    name: str
    num_blocks: int
    swap_bytes: int


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of one way."""

    elapsed_s: float
    computed_tokens: int
    totals: EngineTotals
    answers: tuple[tuple[int, ...], ...]


def make_specs(count: int, num_prompt: int, num_output: int, vocab_size: int) -> list[SequenceSpec]:
    """Greedy requests with random prompts, the same at every call."""
    dice = random.Random(0)
    specs = []
    for number in range(count):
        prompt = pack_token_ids(dice.randrange(vocab_size) for _ in range(num_prompt))
        specs.append(
            SequenceSpec(
                request_id=RequestId(f"r{number}"),
                attempt=0,
                gateway_id=GatewayId("benchmark"),
                prompt_token_ids=prompt,
                block_hashes=tuple(chain_hashes(root_hash("benchmark"), prompt)),
                root_hash=root_hash("benchmark"),
                sampling=Sampling(temperature=0.0, max_tokens=num_output),
            )
        )
    return specs


def run(core: EngineCore, specs: Sequence[SequenceSpec]) -> Outcome:
    """All requests at once, until the last one has ended."""
    answers: dict[str, list[int]] = {spec.request_id: [] for spec in specs}
    computed = 0
    started = time.perf_counter()
    for spec in specs:
        core.handle(Add(spec), time.monotonic())
    while core.has_work:
        for event in core.step(time.monotonic()):
            if isinstance(event, TokenSampled):
                answers[event.key.request_id].append(event.token_id)
        computed += core.last_plan.num_tokens
    elapsed_s = time.perf_counter() - started
    return Outcome(
        elapsed_s=elapsed_s,
        computed_tokens=computed,
        totals=core.totals(),
        answers=tuple(map(tuple, answers.values())),
    )


def run_way(way: Way, runner: ModelRunner, config: Mapping[str, Any], specs: Sequence[SequenceSpec]) -> Outcome:
    """With a core of its own, whose cache is empty. It uses the first blocks of the runner's."""
    own = WorkerConfig(**{**config, "swap_bytes": way.swap_bytes})
    whole, runner.num_blocks = runner.num_blocks, way.num_blocks
    try:
        return run(EngineCore(runner, config=own), specs)
    finally:
        runner.num_blocks = whole


def main() -> None:
    """Run and print."""
    arguments = _parse()
    needed = arguments.sequences * -(-(arguments.prompt + arguments.output) // BLOCK)
    short = max(-(-(arguments.prompt + arguments.output) // BLOCK), int(needed * arguments.share))
    ways = [
        Way(name="room for all", num_blocks=needed, swap_bytes=0),
        Way(name="kept in host memory", num_blocks=short, swap_bytes=4 << 30),
        Way(name="computed again", num_blocks=short, swap_bytes=0),
    ]
    config: dict[str, Any] = {
        "worker_id": "benchmark",
        "roles": ("prefill", "decode"),
        "model_path": str(resolve_model(arguments.model)),
        "dtype": "float32",
        "num_blocks": needed,
        "num_threads": arguments.threads,
        "decode_reserve_tokens": BLOCK,
        "watermark": 0.0,
    }
    runner = make_runner(WorkerConfig(**config))
    warm_up(runner, WorkerConfig(**config))
    specs = make_specs(arguments.sequences, arguments.prompt, arguments.output, runner.vocab_size)
    outcomes: defaultdict[str, list[Outcome]] = defaultdict(list)
    for way in [*ways, *reversed(ways)]:
        outcomes[way.name].append(run_way(way, runner, config, specs))
    rows = [_row(way, outcomes[way.name]) for way in ways]
    equal = len({outcome.answers for of_way in outcomes.values() for outcome in of_way}) == 1
    print_table(
        f"{arguments.sequences} x ({arguments.prompt} + {arguments.output}) tokens, {short} of {needed} blocks",
        list(rows[0]),
        [[str(value) for value in row.values()] for row in rows],
    )
    summary = {
        "answers_equal": float(equal),
        "kept_over_room": rows[1]["elapsed_s"] / rows[0]["elapsed_s"],
        "again_over_room": rows[2]["elapsed_s"] / rows[0]["elapsed_s"],
    }
    if arguments.json:
        write_json(arguments.json, report(rows, summary))
    if not equal:
        sys.exit("the answers differ")


def _row(way: Way, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    totals = outcomes[0].totals
    return {
        "way": way.name,
        "elapsed_s": round(sum(outcome.elapsed_s for outcome in outcomes) / len(outcomes), 2),
        "computed_tokens": outcomes[0].computed_tokens,
        "preemptions": totals.preemptions,
        "blocks_out": totals.swapped_out_blocks,
        "blocks_in": totals.swapped_in_blocks,
    }


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--output", type=int, default=256, help="tokens")
    parser.add_argument("--share", type=float, default=0.6, help="of the blocks that are needed")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
