"""How much of the KV memory that sequences hold has KV in it, when a recorded trace is replayed.

python -m benchmarks.engine.kv_use --trace FILE [--scale 0.25] --json FILE

FILE is a trace of the Azure Public Dataset (`loadtests/workload/traces.py`). The scheduler and the block manager of a
worker run it without a model on a simulated clock: requests arrive at their recorded times, a step takes what it takes
on one core (`--prefill-tok-s`, `--decode-ms`). Lengths are scaled. At the end of each step, live slots are the tokens
whose KV is computed, allocated slots those of the blocks that sequences hold. The share is the sum of the one over the
sum of the other, each step weighted with its duration. What is lost is the unfilled end of each sequence's last block;
blocks that are promised and not allocated cost nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disagg.engine.blocks.block_manager import BlockManager
from disagg.engine.config import WorkerConfig
from disagg.engine.core.admission import new_sequence
from disagg.engine.core.scheduler import Scheduler
from disagg.engine.plan import StepPlan, StepResult
from disagg.engine.request import SequenceState
from disagg.loadtests.workload.traces import TraceRequest, read_trace
from disagg.proto.ids import GatewayId, RequestId
from disagg.proto.messages import Sampling, SequenceSpec
from disagg.proto.token_ids import pack_token_ids
from tests.support.reports import positive, print_table, report, write_json


@dataclass(frozen=True, kw_only=True)
class Speed:
    """How long a step takes."""

    prefill_tok_s: float
    decode_ms: float
    """Milliseconds that decodes add to a step with prompts."""

    def step_s(self, plan: StepPlan) -> float:
        """Seconds of one step."""
        num_prompt = sum(entry.num_tokens for entry in plan.prefills)
        return num_prompt / self.prefill_tok_s + (self.decode_ms / 1e3 if plan.decodes else 0.0)


@dataclass(kw_only=True)
class Use:
    """Slots times seconds, and what was done."""

    live: float = 0.0
    allocated: float = 0.0
    busy_s: float = 0.0
    steps: int = 0
    most_allocated: int = 0
    preemptions: int = 0

    @property
    def share(self) -> float:
        """Share of the allocated tokens that are live."""
        return self.live / self.allocated

    def note(self, scheduler: Scheduler, plan: StepPlan, step_s: float) -> None:
        """The state at the end of a step, before the sequences that end with it are gone."""
        computed = sum(sequence.num_computed_tokens for sequence in scheduler.running.values())
        live = computed + sum(entry.num_tokens for entry in plan.entries)
        allocated = scheduler.blocks.num_active * scheduler.blocks.block_size
        self.live += live * step_s
        self.allocated += allocated * step_s
        self.busy_s += step_s
        self.steps += 1
        self.most_allocated = max(self.most_allocated, allocated)


def scaled(requests: Sequence[TraceRequest], scale: float) -> list[TraceRequest]:
    """Lengths times `scale`, at least 1."""
    return [
        TraceRequest(
            time_s=request.time_s,
            num_input_tokens=max(1, round(request.num_input_tokens * scale)),
            num_output_tokens=max(1, round(request.num_output_tokens * scale)),
        )
        for request in requests
    ]


def replay(requests: Sequence[TraceRequest], scheduler: Scheduler, speed: Speed) -> Use:
    """All requests to their ends, in the order of their times.

    Raises:
        ValueError: for a request that the blocks can never hold.
    """
    use = Use()
    now_s = 0.0
    num_added = 0
    while num_added < len(requests) or scheduler.sequences:
        if not scheduler.sequences:
            now_s = max(now_s, requests[num_added].time_s)
        while num_added < len(requests) and requests[num_added].time_s <= now_s:
            _add(scheduler, requests[num_added], num_added)
            num_added += 1
        plan = scheduler.schedule()
        assert not scheduler.take_effects(), "without host memory there is nothing to copy"
        step_s = speed.step_s(plan)
        now_s += step_s
        use.note(scheduler, plan, step_s)
        scheduler.apply(plan, StepResult([0] * sum(entry.samples for entry in plan.entries)))
    use.preemptions = scheduler.totals["preemptions"]
    return use


def _add(scheduler: Scheduler, request: TraceRequest, index: int) -> None:
    if request.num_input_tokens + request.num_output_tokens > scheduler.max_model_len:
        raise ValueError(
            f"request {index} has {request.num_input_tokens} + {request.num_output_tokens} tokens; "
            f"the blocks hold {scheduler.max_model_len}"
        )
    spec = SequenceSpec(
        request_id=RequestId(f"trace-{index}"),
        attempt=0,
        gateway_id=GatewayId("bench"),
        prompt_token_ids=pack_token_ids([0] * request.num_input_tokens),
        sampling=Sampling(temperature=0.0, max_tokens=request.num_output_tokens),
    )
    scheduler.add(new_sequence(spec, SequenceState.WAITING, request.time_s))


def new_scheduler(num_blocks: int, block_size: int, token_budget: int) -> Scheduler:
    """A worker's, with its defaults for the rest; preempted sequences are computed again."""
    defaults = WorkerConfig(worker_id="bench", roles=("prefill", "decode"), model_path="fake")
    blocks = BlockManager(num_blocks, block_size, int(num_blocks * defaults.watermark))
    return Scheduler(
        blocks,
        max_num_seqs=defaults.max_num_seqs,
        token_budget=token_budget,
        max_model_len=num_blocks * block_size,
        decode_reserve_tokens=defaults.decode_reserve_tokens,
    )


def report_row(use: Use, options: argparse.Namespace, num_requests: int) -> dict[str, Any]:
    """All that was seen."""
    return {
        "requests": num_requests,
        "scale": options.scale,
        "block_size": options.block_size,
        "num_blocks": options.num_blocks,
        "prefill_tok_s": options.prefill_tok_s,
        "decode_ms": options.decode_ms,
        "kv_live_share": round(use.share, 4),
        "mean_live_slots": round(use.live / use.busy_s, 1),
        "mean_allocated_slots": round(use.allocated / use.busy_s, 1),
        "most_allocated_slots": use.most_allocated,
        "steps": use.steps,
        "busy_s": round(use.busy_s, 1),
        "preemptions": use.preemptions,
    }


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, help="CSV of the Azure Public Dataset")
    parser.add_argument("--scale", type=float, default=0.25, help="of all lengths")
    parser.add_argument("--first", type=positive, help="only so many requests")
    parser.add_argument("--block-size", type=positive, default=16)
    parser.add_argument("--num-blocks", type=positive, default=2912, help="default: 1 GiB of the default model's KV")
    parser.add_argument("--token-budget", type=positive, default=512)
    parser.add_argument("--prefill-tok-s", type=float, default=2500.0)
    parser.add_argument("--decode-ms", type=float, default=10.0)
    parser.add_argument("--json", type=Path, help="write the report to this file")
    options = parser.parse_args(argv)
    for name in ("scale", "prefill_tok_s", "decode_ms"):
        if not 0 < getattr(options, name) < float("inf"):
            parser.error(f"--{name.replace('_', '-')} must be positive")
    return options


def main() -> None:
    """Replay, print the table, write the report."""
    options = parse_arguments()
    requests = scaled(read_trace(options.trace, "azure", options.first), options.scale)
    speed = Speed(prefill_tok_s=options.prefill_tok_s, decode_ms=options.decode_ms)
    use = replay(requests, new_scheduler(options.num_blocks, options.block_size, options.token_budget), speed)
    row = report_row(use, options, len(requests))
    figures = [name for name in row if name not in ("scale", "prefill_tok_s", "decode_ms")]
    print_table(f"KV memory, lengths x {options.scale:g}", figures, [tuple(str(row[name]) for name in figures)])
    if options.json:
        write_json(options.json, report([row], {"kv_live_share": row["kv_live_share"]}))
        print(f"report: {options.json}")


if __name__ == "__main__":
    main()
