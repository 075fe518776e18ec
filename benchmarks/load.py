"""Closed-loop load on the public gRPC API: some clients, each of which sends its next request when its last one ended.

    requests (seeded prompts) -> closed_loop (asyncio, one channel) -> `Run` (raw times) -> row, figures, summary, table

Times are taken in the client. TTFT: from sending the call to the message with the first token. TPOT: from the first to
the last token, over the number of tokens but one. Tokens are counted from the ids that arrive.

It calls the generated stub rather than `disagg.client`: the client shares the machine's cores with the cluster, and
what it spends on a message is lost to what is measured. `disagg load` is for open loops.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from disagg.v1 import inference_pb2 as pb
from disagg.v1.inference_pb2_grpc import InferenceServiceStub
from tests.support.pace import in_flight
from tests.support.reports import percentiles


@dataclass(frozen=True, kw_only=True)
class RequestSizes:
    """The requests of a run."""

    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One answered request; times in seconds."""

    ttft_s: float
    e2e_s: float
    output_tokens: int
    finished: pb.Finished = field(default_factory=pb.Finished)
    """The gateway's last message about the request."""

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; undefined for one token."""
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None


@dataclass(frozen=True, kw_only=True)
class Run:
    """All requests of one (mode, concurrency, repeat)."""

    mode: str
    """`disaggregated`, `colocated`, or `running` for a cluster that was there already."""
    concurrency: int
    repeat: int
    elapsed_s: float
    """Seconds from the first send to the last token of all requests."""
    timings: tuple[Timing, ...]

    @property
    def tok_s(self) -> float:
        """Output tokens per second, the run-in and the thinning-out at the end included."""
        return sum(timing.output_tokens for timing in self.timings) / self.elapsed_s


def random_prompt(seed: int, num_tokens: int, vocab_size: int) -> list[int]:
    """Token ids that share no prefix with those of another seed, but by chance."""
    rng = random.Random(seed)
    return [rng.randrange(vocab_size) for _ in range(num_tokens)]


def requests(model: pb.Model, shape: RequestSizes, first_seed: int, count: int) -> Iterator[pb.GenerateRequest]:
    """`count` greedy requests of exactly this shape, each with a prompt of its own."""
    for seed in range(first_seed, first_seed + count):
        yield pb.GenerateRequest(
            model=model.name,
            token_ids=pb.TokenIds(ids=random_prompt(seed, shape.input_tokens, model.vocab_size)),
            sampling=pb.SamplingParams(temperature=0.0),
            stopping=pb.StopConditions(max_tokens=shape.output_tokens, ignore_eos=True),
        )


async def send(stub: InferenceServiceStub, request: pb.GenerateRequest) -> Timing:
    """One request, measured.

    Raises:
        RuntimeError: if the answer has another number of tokens than was requested, or no end.
    """
    sent = time.perf_counter()
    first = last = sent
    num_tokens = 0
    finished: pb.Finished | None = None
    async for response in stub.Generate(request):
        if response.delta.token_ids:
            last = time.perf_counter()
            first = last if num_tokens == 0 else first
            num_tokens += len(response.delta.token_ids)
        elif response.HasField("finished"):
            finished = response.finished
    if num_tokens != request.stopping.max_tokens:
        raise RuntimeError(f"{num_tokens} tokens came, {request.stopping.max_tokens} were asked for")
    if finished is None:
        raise RuntimeError("the stream ended, and the answer did not")
    return Timing(ttft_s=first - sent, e2e_s=last - sent, output_tokens=num_tokens, finished=finished)


async def closed_loop(
    stub: InferenceServiceStub, work: Iterator[pb.GenerateRequest], concurrency: int
) -> tuple[float, tuple[Timing, ...]]:
    """Keep `concurrency` requests in flight until `work` is used up; the seconds taken, the timings in order of end."""
    timings: list[Timing] = []

    async def one(request: pb.GenerateRequest) -> None:
        timings.append(await send(stub, request))

    started = time.perf_counter()
    await in_flight(one, work, concurrency)
    return time.perf_counter() - started, tuple(timings)


# ---------------------------------------------------------------- what is reported


def row(run: Run) -> dict[str, Any]:
    """A run as one JSON row: its figures and every measurement behind them."""
    return {
        "mode": run.mode,
        "concurrency": run.concurrency,
        "repeat": run.repeat,
        "requests": len(run.timings),
        "elapsed_s": round(run.elapsed_s, 4),
        "tok_s": round(run.tok_s, 2),
        "ttft_ms": [round(timing.ttft_s * 1e3, 3) for timing in run.timings],
        "tpot_ms": [round(tpot * 1e3, 3) for timing in run.timings if (tpot := timing.tpot_s) is not None],
    }


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The runs of one (mode, concurrency): the median run's tokens/s, percentiles over the requests of all runs."""

    requests: int
    tok_s: float
    ttft_ms: Mapping[str, float]
    tpot_ms: Mapping[str, float]
    """Empty when every answer had one token."""


def figures(runs: Sequence[Run]) -> Figures:
    """The figures of at least one run."""
    timings = [timing for run in runs for timing in run.timings]
    tpots_ms = [tpot * 1e3 for timing in timings if (tpot := timing.tpot_s) is not None]
    return Figures(
        requests=len(timings),
        tok_s=percentiles([run.tok_s for run in runs], (50,))["p50"],
        ttft_ms=percentiles([timing.ttft_s * 1e3 for timing in timings]),
        tpot_ms=percentiles(tpots_ms) if tpots_ms else {},
    )


def by_cell(runs: Sequence[Run]) -> dict[tuple[str, int], list[Run]]:
    """Runs by (mode, concurrency), in the order in which they were made."""
    cells: dict[tuple[str, int], list[Run]] = {}
    for run in runs:
        cells.setdefault((run.mode, run.concurrency), []).append(run)
    return cells


def summary(runs: Sequence[Run]) -> dict[str, float]:
    """Flat figures: `tok_s_c8`, `ttft_p50_ms_c8`, `tpot_p99_ms_c8`, ...; of the colocated mode, after `colocated_`."""
    flat: dict[str, float] = {}
    for (mode, concurrency), cell in by_cell(runs).items():
        prefix = "colocated_" if mode == "colocated" else ""
        found = figures(cell)
        flat[f"{prefix}tok_s_c{concurrency}"] = round(found.tok_s, 2)
        for kind, values in (("ttft", found.ttft_ms), ("tpot", found.tpot_ms)):
            for name, value in values.items():
                flat[f"{prefix}{kind}_{name}_ms_c{concurrency}"] = round(value, 3)
    return flat


def table(runs: Sequence[Run]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Column titles and one line per (mode, concurrency)."""
    columns = (
        "mode",
        "concurrency",
        "requests",
        "output tok/s",
        "TTFT ms p50",
        "p90",
        "p99",
        "TPOT ms p50",
        "p90",
        "p99",
    )
    lines = []
    for (mode, concurrency), cell in by_cell(runs).items():
        found = figures(cell)
        times = [*found.ttft_ms.values(), *(found.tpot_ms.values() or (float("nan"),) * 3)]
        cells = (mode, str(concurrency), str(found.requests), f"{found.tok_s:.1f}", *(f"{t:.1f}" for t in times))
        lines.append(cells)
    return columns, lines
