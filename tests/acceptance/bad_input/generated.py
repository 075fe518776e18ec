"""Throws generated bad input at a gateway and judges what comes back; see `generated_http.py` and `generated_grpc.py`.

run(...) ──> `Outcome` per kind: how many, which statuses, the first problem ──> good requests must work as before
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TypeVar

import grpc.aio
from prometheus_client.parser import text_string_to_metric_families

from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.hosts.processes import ProcessCluster
from disagg.gateway.text.tokenizer import ModelInfo, fake_model
from disagg.v1 import inference_pb2 as pb
from tests.acceptance.bad_input import generated_grpc, generated_http
from tests.support.inference_stub import channel as channel_to
from tests.support.pace import in_flight
from tests.support.raw_clients import GENERATE

T = TypeVar("T")

MAX_MODEL_LEN = 1024
MODEL = fake_model("fake", MAX_MODEL_LEN).info
"""What the cluster below serves."""
CONFIG = {
    "model": {"path": "fake", "max_model_len": MAX_MODEL_LEN},
    "gateway": {"port": 0, "http_port": 0},
    "pools": {"prefill": {"num_blocks": 256}, "decode": {"num_blocks": 256}},
}
AT_ONCE = 8
SETTLE_S = 1.0
"""Until the workers' reports are complete."""
_COMPUTED = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
_HELD = ("disagg_kv_blocks", "disagg_requests_in_flight")
_NOT_HELD = ("free", "cached")
TIMEOUT_S = 20.0
"""For one of them to be answered. A gateway answers in milliseconds; the machine may be busy."""


@dataclass
class Outcome:
    """What one kind of bad input got."""

    num_requests: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


class Outcomes:
    """By kind."""

    def __init__(self) -> None:
        self.kinds: dict[str, Outcome] = {}
        self.by_protocol: Counter[str] = Counter()

    def note(self, protocol: str, kind: str, answer: str, problem: str | None) -> None:
        """One input's end."""
        self.by_protocol[protocol] += 1
        outcome = self.kinds.setdefault(kind, Outcome())
        outcome.num_requests += 1
        outcome.answers[answer] += 1
        if problem is not None:
            outcome.problems.append(problem)

    def find(self, kind: str, problem: str) -> None:
        """A problem that is not the answer to one input."""
        self.kinds.setdefault(kind, Outcome()).problems.append(problem)

    @property
    def num_requests(self) -> int:
        """Of all kinds."""
        return sum(outcome.num_requests for outcome in self.kinds.values())

    @property
    def problems(self) -> list[str]:
        """Of all kinds, with their kind."""
        return [f"{kind}: {problem}" for kind, outcome in self.kinds.items() for problem in outcome.problems]

    def summary(self) -> dict[str, float]:
        """Inputs and problems, all together and by protocol."""
        flat: dict[str, float] = {"inputs": self.num_requests, "kinds": len(self.kinds), "problems": len(self.problems)}
        return flat | {f"inputs_{name}": count for name, count in self.by_protocol.items()}


async def run(grpc_address: str, http_address: str, model: ModelInfo, seed: int, count: int) -> Outcomes:
    """`count` bad inputs: half over HTTP, a third as gRPC messages, the rest as broken HTTP/2."""
    outcomes = Outcomes()
    num_http, num_messages = count // 2, count // 3
    await _http(http_address, model, random.Random(seed), num_http, outcomes)
    await _messages(grpc_address, model, random.Random(seed + 1), num_messages, outcomes)
    await _frames(grpc_address, model, random.Random(seed + 2), count - num_http - num_messages, outcomes)
    return outcomes


async def _http(address: str, model: ModelInfo, dice: random.Random, count: int, outcomes: Outcomes) -> None:
    async def one(bad: generated_http.BadHttp) -> None:
        try:
            reply = await generated_http.exchange(address, bad.raw, TIMEOUT_S, ends=bad.may_close)
        except TimeoutError:
            outcomes.note("http", _family(bad.kind), "nothing", f"no answer to {bad.raw[:300]!r}")
            return
        problem = generated_http.problem(bad, reply)
        answer = "closed" if reply.status is None else str(reply.status)
        outcomes.note("http", _family(bad.kind), answer, problem and f"{problem} to {bad.kind}: {bad.raw[:600]!r}")

    await in_flight(one, itertools.islice(generated_http.bad_requests(dice, model), count), AT_ONCE)


async def _messages(address: str, model: ModelInfo, dice: random.Random, count: int, outcomes: Outcomes) -> None:
    async with channel_to(address) as channel:

        async def one(bad: generated_grpc.BadMessage) -> None:
            problem = await generated_grpc.call(channel, bad, TIMEOUT_S)
            answer = "/".join(code.name for code in bad.allowed) if problem is None else "other"
            outcomes.note("grpc", _family(bad.kind), answer, problem and f"{problem} to {bad.kind}: {bad.raw[:300]!r}")

        await in_flight(one, itertools.islice(generated_grpc.bad_messages(dice, model), count), AT_ONCE)


async def _frames(address: str, model: ModelInfo, dice: random.Random, count: int, outcomes: Outcomes) -> None:
    async def one(bad: generated_grpc.BadFrames) -> None:
        problem = await generated_grpc.send_frames(address, bad, TIMEOUT_S)
        outcomes.note("http2", bad.kind, "no answer", problem and f"{problem} to {bad.raw[:300]!r}")

    await in_flight(one, itertools.islice(generated_grpc.bad_frames(dice, model), count), AT_ONCE)


def _family(kind: str) -> str:
    """Kinds with several wrong values count as one."""
    return "values, several" if "+" in kind else kind


async def answers_well(grpc_address: str, http_address: str, model: ModelInfo) -> list[str]:
    """What a good request over each protocol does wrong; nothing from a healthy gateway."""
    found = []
    body = {"model": model.name, "prompt": "hello", "max_tokens": 2, "ignore_eos": True}
    raw = generated_http.post("/v1/completions", json.dumps(body).encode())
    reply = await generated_http.exchange(http_address, raw, TIMEOUT_S)
    if reply.status != 200:
        found.append(f"HTTP: status {reply.status}: {reply.body[:200]!r}")
    request = pb.GenerateRequest(
        model=model.name, text="hello", stopping=pb.StopConditions(max_tokens=2, ignore_eos=True)
    ).SerializeToString()
    async with channel_to(grpc_address) as channel:
        try:
            last = b""
            async for message in channel.unary_stream(GENERATE, None, None)(request, timeout=TIMEOUT_S):
                last = message
        except grpc.aio.AioRpcError as error:
            return [*found, f"gRPC: {error.code().name}: {error.details()}"]
    finished = pb.GenerateResponse.FromString(last).finished
    if finished.usage.completion_tokens != 2:
        found.append(f"gRPC: {finished}")
    return found


async def holdings(http_address: str) -> dict[str, float]:
    """What the cluster has computed up to now (`*_tokens_total`), and holds (blocks by state, requests in flight), from
    its metrics."""
    question = b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    reply = await generated_http.exchange(http_address, question, TIMEOUT_S)
    if reply.status != 200:
        raise RuntimeError(f"/metrics: status {reply.status}")
    found: defaultdict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(reply.body.decode()):
        for sample in family.samples:
            if sample.name in _COMPUTED:
                found[sample.name] += sample.value
            elif sample.name in _HELD and sample.labels.get("state") not in _NOT_HELD:
                found[" ".join([sample.name, sample.labels.get("state", "")]).strip()] += sample.value
    return dict(found)


def throw_at_a_cluster(seed: int, count: int) -> Outcomes:
    """`run` against a cluster of processes of its own. What is computed or held because of bad input, or answered badly
    afterwards, is a problem of the kind `afterwards`."""
    with ProcessCluster(parse_config(CONFIG)) as cluster:
        return asyncio.run(_throw(cluster.address, cluster.http_address, seed, count))


async def _throw(grpc_address: str, http_address: str, seed: int, count: int) -> Outcomes:
    unwell = await answers_well(grpc_address, http_address, MODEL)
    if unwell:
        raise RuntimeError("; ".join(unwell))
    await asyncio.sleep(SETTLE_S)
    before = await holdings(http_address)
    outcomes = await run(grpc_address, http_address, MODEL, seed, count)
    await asyncio.sleep(SETTLE_S)
    after = await holdings(http_address)
    changed = {name: (before[name], after.get(name)) for name in before if before[name] != after.get(name)}
    if changed:
        outcomes.find("afterwards", f"computed or held: {changed}")
    for problem in await answers_well(grpc_address, http_address, MODEL):
        outcomes.find("afterwards", problem)
    return outcomes
