"""How long a client waits for the refusal of bad input, and whether all of it is refused.

    python -m tests.acceptance.bad_input [--address 127.0.0.1:8470] [--json FILE]    times, one kind a row
    python -m tests.acceptance.bad_input --generated 12000 [--seed 1] [--json FILE]  generated input, over HTTP and gRPC
    python -m tests.acceptance.bad_input --fields 0 [--seed 1] [--json FILE]         every field, every kind of value

Times are of everything that can be seen before tokenizing. Requests go one at a time over one open connection, so the
figure is the round trip plus the check. The target is 10 ms. A deadline that has passed already is not here: the
client's own library answers it.

Generated input (generated_http.py, generated_grpc.py) goes to a cluster of processes with the model without weights.
Each must be refused, no worker may compute or hold anything, and good requests must be answered before and after.
What every field of a request makes of every kind of value is in fields.py.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path
from typing import NamedTuple

import grpc
import grpc.aio

from disagg.v1 import inference_pb2 as pb
from disagg.v1.inference_pb2_grpc import InferenceServiceStub
from tests.acceptance.bad_input.fields import sweep
from tests.acceptance.bad_input.generated import Outcomes, throw_at_a_cluster
from tests.support.inference_stub import channel, only_model, service
from tests.support.launch import LAUNCHERS, launched
from tests.support.reports import percentiles, print_table, report, write_json

TARGET_MS = 10.0
WARMUP = 20


class Kind(NamedTuple):
    """One way to be wrong."""

    name: str
    request: pb.GenerateRequest
    expected: grpc.StatusCode


class Measured(NamedTuple):
    """What was seen for one kind."""

    name: str
    expected: grpc.StatusCode
    times_ms: list[float]


def kinds(model: pb.Model) -> list[Kind]:
    """Every kind of bad input, for a model."""
    invalid, missing = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
    good = pb.GenerateRequest(model=model.name, text="hello")

    def changed(change: pb.GenerateRequest) -> pb.GenerateRequest:
        request = pb.GenerateRequest()
        request.CopyFrom(good)
        request.MergeFrom(change)
        return request

    sampling = {
        "temperature_nan": pb.SamplingParams(temperature=float("nan")),
        "temperature_huge": pb.SamplingParams(temperature=1e9),
        "top_p_above_one": pb.SamplingParams(top_p=1.5),
        "top_k_negative": pb.SamplingParams(top_k=-2),
        "min_p_above_one": pb.SamplingParams(min_p=1.5),
        "presence_penalty_huge": pb.SamplingParams(presence_penalty=3.0),
        "repetition_penalty_zero": pb.SamplingParams(repetition_penalty=0.0),
    }
    stopping = {
        "max_tokens_zero": pb.StopConditions(max_tokens=0),
        "min_above_max_tokens": pb.StopConditions(max_tokens=1, min_tokens=2),
        "stop_id_unknown": pb.StopConditions(stop_token_ids=[model.vocab_size]),
        "stop_strings_too_many": pb.StopConditions(stop=[str(i) for i in range(17)]),
    }
    prompts = {
        "prompt_missing": pb.GenerateRequest(),
        "text_too_large": pb.GenerateRequest(text="x" * (1 << 20) + "x"),
        "ids_empty": pb.GenerateRequest(token_ids=pb.TokenIds()),
        "id_unknown": pb.GenerateRequest(token_ids=pb.TokenIds(ids=[0, model.vocab_size])),
        "ids_too_many": pb.GenerateRequest(token_ids=pb.TokenIds(ids=[0] * (model.max_model_len + 1))),
        "chat_empty": pb.GenerateRequest(chat=pb.ChatMessages()),
        "chat_role_unknown": pb.GenerateRequest(chat=pb.ChatMessages(messages=[pb.ChatMessage(role="robot")])),
    }
    for request in prompts.values():
        request.model = model.name
    return [
        Kind("model_unknown", changed(pb.GenerateRequest(model="no-such-model")), missing),
        *(Kind(name, request, invalid) for name, request in prompts.items()),
        *(Kind(name, changed(pb.GenerateRequest(sampling=value)), invalid) for name, value in sampling.items()),
        *(Kind(name, changed(pb.GenerateRequest(stopping=value)), invalid) for name, value in stopping.items()),
    ]


async def refusal_ms(stub: InferenceServiceStub, kind: Kind) -> float:
    """Milliseconds until the refusal came.

    Raises:
        RuntimeError: if the request was taken, or refused with another status.
    """
    sent = time.perf_counter()
    try:
        async for _ in stub.Generate(kind.request):
            break
    except grpc.aio.AioRpcError as error:
        if error.code() is kind.expected:
            return (time.perf_counter() - sent) * 1e3
        raise RuntimeError(f"{kind.name}: {error.code().name} ({error.details()}), not {kind.expected.name}") from None
    raise RuntimeError(f"{kind.name}: was taken")


async def measure(address: str, repeats: int) -> list[Measured]:
    """Every kind, `repeats` times after a warm-up."""
    async with channel(address) as connection:
        stub = service(connection)
        all_kinds = kinds(await only_model(stub))
        for _ in range(WARMUP):
            await refusal_ms(stub, all_kinds[0])
        return [Measured(k.name, k.expected, [await refusal_ms(stub, k) for _ in range(repeats)]) for k in all_kinds]


def summary(measured: list[Measured]) -> dict[str, float]:
    """`<kind>_p50_ms`, `<kind>_p99_ms`, and the worst p99 of all."""
    flat = {}
    for name, _, times_ms in measured:
        for percent, value in percentiles(times_ms, (50, 99)).items():
            flat[f"{name}_{percent}_ms"] = round(value, 3)
    flat["worst_p99_ms"] = max(value for name, value in flat.items() if name.endswith("_p99_ms"))
    return flat


def show(measured: list[Measured]) -> None:
    """Print the table."""
    lines = []
    for name, expected, times_ms in measured:
        found = percentiles(times_ms, (50, 99))
        met = "yes" if found["p99"] <= TARGET_MS else "no"
        lines.append((name, expected.name, str(len(times_ms)), f"{found['p50']:.2f}", f"{found['p99']:.2f}", met))
    title = f"Time to refusal (target: p99 of {TARGET_MS:g} ms)"
    print_table(title, ("bad input", "answer", "requests", "p50 ms", "p99 ms", "within"), lines)


def show_outcomes(outcomes: Outcomes) -> None:
    """Print the table, and every problem."""
    lines = []
    for kind, outcome in sorted(outcomes.kinds.items()):
        answers = ", ".join(f"{count} {answer}" for answer, count in sorted(outcome.answers.items()))
        lines.append((kind, str(outcome.num_requests), answers, str(len(outcome.problems))))
    print_table(f"{outcomes.num_requests} bad inputs", ("kind", "inputs", "answers", "problems"), lines)
    for problem in outcomes.problems:
        print(problem)


def generated_rows(outcomes: Outcomes) -> list[dict[str, object]]:
    """One per kind."""
    return [
        {"kind": kind, "inputs": o.num_requests, "answers": dict(o.answers), "problems": o.problems}
        for kind, o in sorted(outcomes.kinds.items())
    ]


def main() -> None:
    """Measure, print the table, write the report."""
    options = parse_arguments()
    outcomes = None
    if options.generated:
        outcomes = throw_at_a_cluster(options.seed, options.generated)
    elif options.fields is not None:
        outcomes = sweep(options.seed, options.fields)
    if outcomes is not None:
        show_outcomes(outcomes)
        rows, flat = generated_rows(outcomes), outcomes.summary()
    else:
        measured = measure_somewhere(options)
        show(measured)
        rows = [
            {"kind": name, "answer": code.name, "times_ms": [round(t, 3) for t in ms]} for name, code, ms in measured
        ]
        flat = summary(measured)
    if options.json:
        write_json(options.json, report(rows, flat))
        print(f"report: {options.json}")
    if outcomes is not None and outcomes.problems:
        sys.exit(1)


def measure_somewhere(options: argparse.Namespace) -> list[Measured]:
    """At the address that was given, or at a cluster of its own."""
    if options.address:
        return asyncio.run(measure(options.address, options.repeats))
    print("starting a cluster ...", file=sys.stderr, flush=True)
    with launched("disaggregated", {}, options.launcher) as address:
        return asyncio.run(measure(address, options.repeats))


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.acceptance.bad_input",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--address", help="host:port of a running cluster; without it one is started")
    parser.add_argument("--launcher", choices=LAUNCHERS, default="ray", help="what starts the processes")
    parser.add_argument("--repeats", type=int, default=200, help="requests of each kind")
    parser.add_argument("--json", type=Path, help="write the report to this file")
    parser.add_argument("--generated", type=int, default=0, help="throw so many generated inputs instead")
    parser.add_argument("--fields", type=int, help="try so many values of fields instead; 0 for all, a minute")
    parser.add_argument("--seed", type=int, default=1, help="of the generated inputs")
    return parser.parse_args()
