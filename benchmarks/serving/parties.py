"""Who is measured side by side: our clusters by gRPC and by HTTP, another OpenAI server, and the bare engine.

A party takes a load and answers with a `Run`. All parties of a comparison are up at the same time; those whose turn it
is not are idle. Prompts are random and of one length, and never the same twice: two parties may share a cluster, which
remembers prompts.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from benchmarks import load, load_http
from benchmarks.engine.process import Engine, running_engine
from benchmarks.engine.rig import LoopShape
from disagg.cluster.config.cluster_config import ClusterConfig, parse_config
from disagg.cluster.control.plan import worker_config
from disagg.cluster.system.cores import available_cores
from disagg.engine.config import WorkerConfig
from tests.support import inference_stub
from tests.support.launch import cluster_config, launched
from tests.support.ports import free_port

WARM_UP_SEED = 1 << 40
"""Prompts of the warm-up; measured ones count up from 0."""


@dataclass(frozen=True, kw_only=True)
class ServedShape:
    """A cluster shape for two cores."""

    mode: str
    pool: Mapping[str, Any]
    """Of the colocated pool, whose engines alone can do the same work, or of the elastic one."""


SHAPES: Mapping[str, ServedShape] = {
    "colocated-2x1": ServedShape(mode="colocated", pool={"size": 2, "num_threads": 1}),
    "colocated-1x2": ServedShape(mode="colocated", pool={"size": 1, "num_threads": 2}),
    "1p1d": ServedShape(mode="disaggregated", pool={}),
    "elastic-2x1": ServedShape(mode="elastic", pool={"size": 2, "num_threads": 1}),
    "elastic-1x2": ServedShape(mode="elastic", pool={"size": 1, "num_threads": 2}),
}


class Party(ABC):
    """One that is measured."""

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def run(self, shape: load.RequestSizes, concurrency: int, repeat: int, first_seed: int, count: int) -> load.Run:
        """`count` requests, `concurrency` at a time, with the prompts of `first_seed` on."""

    def _made(self, concurrency: int, repeat: int, measured: tuple[float, tuple[load.Timing, ...]]) -> load.Run:
        elapsed_s, timings = measured
        return load.Run(mode=self.name, concurrency=concurrency, repeat=repeat, elapsed_s=elapsed_s, timings=timings)


class GrpcParty(Party):
    """A cluster of ours, by gRPC."""

    def __init__(self, name: str, address: str) -> None:
        super().__init__(name)
        self._address = address

    @override
    def run(self, shape: load.RequestSizes, concurrency: int, repeat: int, first_seed: int, count: int) -> load.Run:
        async def measure() -> tuple[float, tuple[load.Timing, ...]]:
            async with inference_stub.channel(self._address) as channel:
                stub = inference_stub.service(channel)
                model = await inference_stub.only_model(stub)
                return await load.closed_loop(stub, load.requests(model, shape, first_seed, count), concurrency)

        return self._made(concurrency, repeat, asyncio.run(measure()))


class HttpParty(Party):
    """A server, ours or another one, by HTTP."""

    def __init__(self, name: str, address: str, vocab_size: int) -> None:
        super().__init__(name)
        self._address = address
        self._vocab_size = vocab_size
        self._model = load_http.only_model(address)

    @override
    def run(self, shape: load.RequestSizes, concurrency: int, repeat: int, first_seed: int, count: int) -> load.Run:
        made = [
            load_http.request_bytes(self._model, self._vocab_size, shape, seed)
            for seed in range(first_seed, first_seed + count)
        ]
        return self._made(
            concurrency,
            repeat,
            asyncio.run(load_http.closed_loop(self._address, iter(made), shape.output_tokens, concurrency)),
        )


class EngineParty(Party):
    """Engines without a server: each has its part of the requests in flight, and of all requests."""

    def __init__(self, name: str, engines: Sequence[Engine]) -> None:
        super().__init__(name)
        self._engines = engines

    @override
    def run(self, shape: load.RequestSizes, concurrency: int, repeat: int, first_seed: int, count: int) -> load.Run:
        """With fewer requests at a time than engines, the last ones have nothing to do."""
        engines = self._engines[:concurrency]
        places, counts = divided(concurrency, len(engines)), divided(count, len(engines))
        seed = first_seed
        for engine, num_places, num_requests in zip(engines, places, counts, strict=True):
            part = LoopShape(
                concurrency=num_places,
                requests=num_requests,
                input_tokens=shape.input_tokens,
                output_tokens=shape.output_tokens,
                first_seed=seed,
            )
            engine.begin_loop(part)
            seed += num_requests
        results = [engine.end_loop() for engine in engines]
        timings = tuple(
            load.Timing(ttft_s=ttft_s, e2e_s=e2e_s, output_tokens=shape.output_tokens)
            for result in results
            for ttft_s, e2e_s in zip(result.ttft_s, result.e2e_s, strict=True)
        )
        return self._made(concurrency, repeat, (max(result.elapsed_s for result in results), timings))


def divided(total: int, parts: int) -> list[int]:
    """`total` in whole parts that differ by at most one, the larger ones first."""
    return [total // parts + (index < total % parts) for index in range(parts)]


@contextmanager
def our_parties(
    name: str, base: dict[str, Any], launcher: str, model_path: Path, *, with_engine: bool
) -> Iterator[list[Party]]:
    """A cluster of one of `SHAPES`, by gRPC and by HTTP, and the engines that correspond to it."""
    served = SHAPES[name]
    http_port = free_port()
    pools = base.get("pools", {})
    pool = "workers" if served.mode == "elastic" else "colocated"
    config = {
        **base,
        "gateway": {**base.get("gateway", {}), "http_port": http_port},
        "pools": {**pools, pool: {**pools.get(pool, {}), **served.pool}},
    }
    with ExitStack() as stack:
        grpc_address = stack.enter_context(launched(served.mode, config, launcher))
        vocab_size = asyncio.run(_vocab_size(grpc_address))
        parties: list[Party] = [
            GrpcParty(f"{name} gRPC", grpc_address),
            HttpParty(f"{name} HTTP", f"127.0.0.1:{http_port}", vocab_size),
        ]
        if with_engine and served.mode == "colocated":
            cluster = parse_config(cluster_config(config, served.mode, 0))
            engines = [stack.enter_context(running_engine(each)) for each in _workers(cluster, model_path)]
            parties.append(EngineParty(f"{name} engine", engines))
        yield parties


def _workers(cluster: ClusterConfig, model_path: Path) -> list[WorkerConfig]:
    """The configuration of the cluster's colocated workers, cores included."""
    return [
        worker_config(cluster, "colocated", index, str(model_path), available_cores())
        for index in range(cluster.pools.colocated.size)
    ]


async def _vocab_size(address: str) -> int:
    async with inference_stub.channel(address) as channel:
        model = await inference_stub.only_model(inference_stub.service(channel))
        return int(model.vocab_size)
