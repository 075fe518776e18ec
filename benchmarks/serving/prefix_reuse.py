"""Prompt tokens that a cluster computes for a workload of shared prefixes, policy against policy.

python -m benchmarks.serving.prefix_reuse                  SmolLM2 on 2 prefill and 2 decode workers
python -m benchmarks.serving.prefix_reuse --model fake     the same placements without the work

16 prefixes of 1,024 tokens, each request one of them (drawn at random) and 64 tokens of its own. The cache of every
worker holds 10 of the 16 prefixes, so that a policy that sends each prefix everywhere evicts all the time. A computed
token is a prompt token that no worker had: local prefill on a decode worker counts like any other.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import load
from disagg.v1 import inference_pb2 as pb
from disagg.v1.inference_pb2_grpc import AdminServiceStub
from tests.support import inference_stub
from tests.support.launch import LAUNCHERS, launched
from tests.support.reports import percentile, print_table, report, write_json

BLOCK_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests that share prefixes."""

    num_requests: int
    num_prefixes: int
    prefix_tokens: int
    own_tokens: int
    output_tokens: int
    cached_prefixes: int
    """How many prefixes the cache of one worker holds."""
    seed: int

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens of all requests together."""
        return self.num_requests * (self.prefix_tokens + self.own_tokens)

    def num_blocks(self, concurrency: int) -> int:
        """Blocks of a worker: the prefixes, and for each request at a time what it has of its own, twice, since some of
        that stays cached for a while."""
        own = -(-(self.own_tokens + self.output_tokens) // BLOCK_TOKENS) + 1
        return self.cached_prefixes * self.prefix_tokens // BLOCK_TOKENS + 2 * own * concurrency

    def requests(self, model: pb.Model) -> Iterator[pb.GenerateRequest]:
        """The same ones for every policy."""
        rng = random.Random(self.seed)
        for index in range(self.num_requests):
            prefix = rng.randrange(self.num_prefixes)
            ids = load.random_prompt(self.seed + 1 + prefix, self.prefix_tokens, model.vocab_size)
            ids += load.random_prompt(self.seed + 1000 + index, self.own_tokens, model.vocab_size)
            yield pb.GenerateRequest(
                model=model.name,
                token_ids=pb.TokenIds(ids=ids),
                sampling=pb.SamplingParams(temperature=0.0),
                stopping=pb.StopConditions(max_tokens=self.output_tokens, ignore_eos=True),
            )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One policy on the whole workload."""

    policy: str
    repeat: int
    computed_tokens: int
    elapsed_s: float
    ttft_p50_ms: float
    local_prefills: int
    """Requests whose prompt a decode worker computed."""
    placements: dict[str, int]
    """Worker that computed the prompt -> requests."""


async def measure(address: str, workload: Workload, concurrency: int, policy: str, repeat: int) -> Outcome:
    """The workload in a closed loop on one fresh cluster."""
    async with inference_stub.channel(address) as channel:
        stub = inference_stub.service(channel)
        work = workload.requests(await inference_stub.only_model(stub))
        elapsed_s, timings = await load.closed_loop(stub, work, concurrency)
        admin = AdminServiceStub(channel)  # type: ignore[no-untyped-call]
        routes = [
            await admin.ExplainRequest(pb.ExplainRequestRequest(request_id=timing.finished.request_id))
            for timing in timings
        ]
    usages = [timing.finished.usage for timing in timings]
    return Outcome(
        policy=policy,
        repeat=repeat,
        computed_tokens=sum(usage.prompt_tokens - usage.cached_tokens for usage in usages),
        elapsed_s=round(elapsed_s, 3),
        ttft_p50_ms=round(percentile([timing.ttft_s * 1e3 for timing in timings], 50), 3),
        local_prefills=sum(not route.prefill_worker for route in routes),
        placements=dict(sorted(Counter(route.prefill_worker or route.decode_worker for route in routes).items())),
    )


def config(options: argparse.Namespace, workload: Workload, policy: str) -> dict[str, Any]:
    """Two pools of two workers whose caches are as small as the workload's."""
    pool = {"size": 2, "num_blocks": workload.num_blocks(options.concurrency)}
    return {
        "model": {"path": "fake"} if options.model == "fake" else {"name": options.model},
        "placement": {"policy": policy, "local_prefill": options.local_prefill},
        "pools": {"prefill": pool, "decode": pool},
    }


def measure_all(options: argparse.Namespace, workload: Workload) -> list[Outcome]:
    """Every policy, forth and back again, each time on a new cluster."""
    outcomes = []
    for repeat in range(options.repeats):
        policies = options.policies if repeat % 2 == 0 else options.policies[::-1]
        for policy in policies:
            print(f"{policy}: {workload.num_requests} requests ...", file=sys.stderr, flush=True)
            with launched("disaggregated", config(options, workload, policy), options.launcher) as address:
                outcomes.append(asyncio.run(measure(address, workload, options.concurrency, policy, repeat)))
    return outcomes


def summary(outcomes: Sequence[Outcome], policies: Sequence[str]) -> dict[str, float]:
    """Median computed tokens of each policy, and the share that the first one saves against each other one."""
    computed = {
        policy: percentile([outcome.computed_tokens for outcome in outcomes if outcome.policy == policy], 50)
        for policy in policies
    }
    flat = {f"computed_tokens_{policy}": tokens for policy, tokens in computed.items()}
    for other in policies[1:]:
        flat[f"saved_against_{other}"] = round(1 - computed[policies[0]] / computed[other], 4)
    return flat


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="name of an imported model, or 'fake'")
    parser.add_argument("--policies", nargs="+", default=["joint", "round_robin"], help="the first one is compared")
    parser.add_argument("--local-prefill", choices=("auto", "never"), default="auto")
    parser.add_argument("--launcher", choices=LAUNCHERS, default="processes")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--output-tokens", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the report to this file")
    return parser.parse_args()


def main() -> None:
    options = parse()
    workload = Workload(
        num_requests=options.requests,
        num_prefixes=16,
        prefix_tokens=1024,
        own_tokens=64,
        output_tokens=options.output_tokens,
        cached_prefixes=10,
        seed=options.seed,
    )
    outcomes = measure_all(options, workload)
    lines = [
        (
            f"{outcome.policy} #{outcome.repeat}",
            f"{outcome.computed_tokens}",
            f"{outcome.computed_tokens / workload.num_prompt_tokens:.1%}",
            f"{outcome.local_prefills}",
            f"{outcome.ttft_p50_ms:.1f}",
            f"{outcome.elapsed_s:.1f}",
            " ".join(f"{worker}:{count}" for worker, count in outcome.placements.items()),
        )
        for outcome in outcomes
    ]
    columns = ("policy", "computed tokens", "of all", "local prefills", "TTFT ms p50", "elapsed s", "prompts by worker")
    print_table(f"{workload.num_requests} requests, 16 prefixes x 1,024 + 64 tokens", columns, lines)
    flat = summary(outcomes, options.policies)
    for name, value in flat.items():
        print(f"{name}: {value:g}")
    if options.json:
        write_json(options.json, report([asdict(outcome) for outcome in outcomes], flat))
        print(f"report: {options.json}")


if __name__ == "__main__":
    main()
