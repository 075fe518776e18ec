"""Real processes that fail on purpose. Clients see exact answers all the same, and nothing is held in the end; a worker
that dies while a pair is formed affects no other request, and restarts at its address."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from disagg.client import AsyncClient
from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.hosts.processes import (
    DEFAULT_LOGGING,
    WORKER_MODULE,
    Child,
    ProcessCluster,
    start_child,
    stop_children,
)
from disagg.cluster.system.process_tools import thread_environment
from disagg.cluster.templates.templates import Templates
from disagg.engine.config import TransferLimits, TransportName, WorkerConfig
from disagg.engine.fake_runner import fake_generate
from disagg.engine.faults.faulty import FAILPOINTS_VARIABLE, FIRED
from disagg.proto.ids import AttemptKey, RequestId
from disagg.proto.messages import RoleName, WorkerInfo
from tests.support.cluster_state import requests_of, until_counts
from tests.support.ports import free_port
from tests.support.registry import Registry
from tests.support.secret import SECRET
from tests.support.shared_templates import SharedTemplates
from tests.support.transports import NIXL, needs_nixl
from tests.support.workers import GatewayStub, wait_until_workers_idle

CONFIG: dict[str, Any] = {
    "model": {"path": "fake"},
    "gateway": {"port": 0},
    "placement": {"local_prefill": "never"},
    "recovery": {"failpoints": True},
    "transfer": {
        "chunk_bytes": 128,
        "staging_bytes": 1024,
        "heartbeat_s": 0.1,
        "lease_timeout_s": 1.0,
        "timeout_s": 1.0,
    },
    "pools": {
        "prefill": {"size": 2, "token_budget": 64, "num_blocks": 256},
        "decode": {"size": 2, "num_blocks": 256},
    },
}
NUM_REQUESTS = 120
SOME_FAULTS = ";".join(
    f"{fault})"
    for fault in (
        "transport.receive=corrupt(worker=decode-1,times=4,p=0.03",
        "transport.receive=fail(worker=decode-1,times=1,p=0.01",
        "transport.receive=delay(worker=decode-*,times=9,p=0.05,ms=20",
        "control.send=drop(worker=decode-1,times=2,p=0.08,message=CommitAck",
        "control.send=drop(worker=decode-1,times=1,p=0.01,message=ClearToSend",
        "control.receive=drop(worker=decode-1,times=2,p=0.08,message=Commit",
        "control.send=duplicate(worker=decode-1,times=2,p=0.08,message=Reserved",
        "control.receive=resize(worker=decode-1,times=2,p=0.01",
        "control.send=delay(worker=*,times=9,p=0.02,ms=10",
        "engine.step=raise(worker=decode-1,times=2,p=0.005",
        "transport.send=corrupt(worker=prefill-1,times=1,p=0.02",
        "control.send=reorder(worker=prefill-1,times=1,p=0.01",
    )
)
"""One decode worker is bad. A request that failed there goes to the other one, so that none fails five times; of the
prefill workers, which are to blame for nothing, one errs twice."""
HARMLESS = ("transport.receive=delay", "control.send=delay")


async def until_idle(client: AsyncClient, cluster: ProcessCluster) -> None:
    """Nothing is queued, running or held anywhere."""
    await until_counts(client, requests_of, (0, 0), timeout_s=60.0)
    await wait_until_workers_idle(cluster.workers, cluster.secret, timeout_s=60.0)


def fired(logs: Path) -> Counter[str]:
    """How often each failpoint fell, by the logs."""
    lines = (line for log in logs.glob("*-*.log") for line in log.read_text().splitlines() if f"{FIRED} " in line)
    return Counter(line.rpartition(f"{FIRED} ")[2] for line in lines)


@pytest.mark.parametrize("transport", ["shm", NIXL])
async def test_clients_of_a_cluster_that_fails_get_exact_answers(
    transport: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(FAILPOINTS_VARIABLE, f"seed=3;{SOME_FAULTS}")
    dice = random.Random(8)
    shared = [dice.randrange(250) for _ in range(64)]
    turns = asyncio.Semaphore(8)

    async def run(client: AsyncClient, prompt: list[int], num_tokens: int) -> None:
        async with turns:
            answer = await client.generate(prompt, max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        assert list(answer.token_ids) == fake_generate(prompt, num_tokens)

    config = parse_config({**CONFIG, "transfer": {**CONFIG["transfer"], "transport": transport}})
    with ProcessCluster(config, log_dir=tmp_path) as cluster:
        incarnations = [info.incarnation for info in cluster.workers]
        async with AsyncClient(cluster.address) as client:
            jobs = []
            for _ in range(NUM_REQUESTS):
                prompt = shared[: dice.choice((0, 32, 64))] + [
                    dice.randrange(250) for _ in range(dice.randrange(8, 90))
                ]
                jobs.append(run(client, prompt, dice.randrange(1, 30)))
            await asyncio.gather(*jobs)
            await until_idle(client, cluster)
        assert [info.incarnation for info in cluster.workers] == incarnations
    assert cluster.killed == []
    faults = fired(tmp_path)
    assert sum(number for fault, number in faults.items() if fault not in HARMLESS) >= 0.05 * NUM_REQUESTS
    assert len(faults) >= 5, faults


async def test_a_session_that_breaks_is_one_stream_for_the_client(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each decode worker drops its gateway's stream in the middle of answers. Not before all have begun: a request that
    comes while no decode worker is connected is refused."""
    monkeypatch.setenv(FAILPOINTS_VARIABLE, "tokens.send=drop(after=300,times=1,worker=decode-*)")
    with ProcessCluster(parse_config(CONFIG), log_dir=tmp_path) as cluster:
        async with AsyncClient(cluster.address) as client:
            prompts = [[number, *range(50)] for number in range(6)]
            answers = await asyncio.gather(
                *(client.generate(prompt, max_tokens=600, temperature=0.0, ignore_eos=True) for prompt in prompts)
            )
            assert [list(answer.token_ids) for answer in answers] == [fake_generate(prompt, 600) for prompt in prompts]
            await until_idle(client, cluster)
    assert fired(tmp_path)["tokens.send=drop"] == 2


def test_failpoints_that_do_not_exist_stop_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(FAILPOINTS_VARIABLE, "transport.recieve=corrupt")
    config = worker_config("decode-0", free_port())
    with Registry() as registry:
        child = start_child("decode-0", WORKER_MODULE, config, registry.address, SECRET, tmp_path, {})
        assert child.process.wait(60) == 1
        stop_children([child])
    assert "DISAGG_FAILPOINTS: there is no failpoint 'transport.recieve'" in child.log.read_text()


# ---------------------------------------------------------------- deaths while a pair is formed


def worker_config(worker_id: str, port: int, transport: TransportName = "gloo") -> WorkerConfig:
    role: RoleName = "prefill" if worker_id.startswith("prefill") else "decode"
    return WorkerConfig(
        worker_id=worker_id,
        roles=(role,),
        model_path="fake",
        port=port,
        num_blocks=256,
        transfer=TransferLimits(heartbeat_s=0.1),
        failpoints=True,
        transport=transport,
    )


class RestartableWorkers:
    """Workers at fixed ports, each of which can be started again."""

    def __init__(self, registry: Registry, logs: Path, templates: Templates, transport: TransportName) -> None:
        self.children: list[Child] = []
        self._registry = registry
        self._logs = logs
        self._templates = templates
        self._transport: TransportName = transport
        self._ports = {name: free_port() for name in ("prefill-0", "decode-0")}
        self._num_starts: Counter[str] = Counter()

    def start(self, name: str, failpoints: str = "") -> WorkerInfo:
        """An incarnation of a worker; its log has a name of its own."""
        self._num_starts[name] += 1
        config = worker_config(name, self._ports[name], self._transport)
        environment = {**thread_environment(1), FAILPOINTS_VARIABLE: failpoints}
        self._registry.forget(name)
        self.children.append(
            start_child(
                f"{name}-{self._num_starts[name]}",
                WORKER_MODULE,
                config,
                self._registry.address,
                SECRET,
                self._logs,
                environment,
                self._templates,
            )
        )
        (info,) = self._registry.wait([name])
        return info

    async def start_both(self, prefill: str, decode: str) -> dict[str, WorkerInfo]:
        """The first incarnations, with these failpoints."""
        infos = await asyncio.gather(
            asyncio.to_thread(self.start, "prefill-0", prefill), asyncio.to_thread(self.start, "decode-0", decode)
        )
        return {info.worker_id: info for info in infos}


@contextlib.asynccontextmanager
async def restartable(
    logs: Path, transport: TransportName = "gloo"
) -> AsyncIterator[tuple[RestartableWorkers, GatewayStub]]:
    gateway = GatewayStub()
    with Registry() as registry, contextlib.closing(SharedTemplates(logs, DEFAULT_LOGGING)) as templates:
        running = RestartableWorkers(registry, logs, templates, transport)
        try:
            yield running, gateway
        finally:
            await gateway.close()
            killed = await asyncio.to_thread(stop_children, running.children)
    assert killed == []


async def reconnect(gateway: GatewayStub, info: WorkerInfo) -> None:
    """To another incarnation of a worker."""
    gateway.cancel(AttemptKey(RequestId("nobody"), 1))  # what feeds the broken stream waits for one more frame
    await asyncio.sleep(0.02)
    await gateway._channels.pop(info.worker_id).close(None)
    await gateway.connect(info)


async def assert_serves(gateway: GatewayStub, prompt: list[int]) -> None:
    answer = await gateway.run(prompt, worker="prefill-0", to="decode-0", max_tokens=5)
    assert (answer.reason, answer.token_ids) == ("length", fake_generate(prompt, 5))


@pytest.mark.parametrize(
    ("dead", "transport"),
    [
        ("prefill-0", "gloo"),
        pytest.param("decode-0", "nixl", marks=needs_nixl),
        pytest.param("prefill-0", "nixl", marks=[needs_nixl, pytest.mark.slow]),
        pytest.param("decode-0", "gloo", marks=pytest.mark.slow),
    ],
)
async def test_a_worker_dies_while_the_pair_is_formed_and_returns_at_its_address(
    dead: str, transport: TransportName, tmp_path: Path
) -> None:
    """The first try fails on both sides, which is a refusal. In the second one it kills itself."""
    async with restartable(tmp_path, transport) as (workers, gateway):
        faults = f"pair.setup=fail(times=1);pair.setup=kill(worker={dead})"
        infos = await workers.start_both(faults, faults)
        for info in infos.values():
            await gateway.connect(info)
        refused = await gateway.run(list(range(40)), worker="prefill-0", to="decode-0", max_tokens=5)
        assert refused.reason == "refused"
        _, answer = gateway.submit(list(range(40)), worker="prefill-0", to="decode-0", max_tokens=5)
        (child,) = [child for child in workers.children if child.name == f"{dead}-1"]
        assert await asyncio.to_thread(child.process.wait, 60) == -signal.SIGKILL
        (alive,) = [info for name, info in infos.items() if name != dead]
        if dead == "decode-0":
            await asyncio.wait_for(answer.ended.wait(), 60)
            assert answer.reason == "refused"
        await wait_until_workers_idle([alive])
        again = await asyncio.to_thread(workers.start, dead)
        assert (again.address, again.incarnation != infos[dead].incarnation) == (infos[dead].address, True)
        await reconnect(gateway, again)
        await assert_serves(gateway, list(range(40)))
        await wait_until_workers_idle([alive, again])


async def test_a_worker_is_killed_while_it_hangs_in_forming_a_pair(tmp_path: Path) -> None:
    """P waits for D in the store; D never comes. Attempts keep their deadline, and P is free at once when D is gone."""
    async with restartable(tmp_path) as (workers, gateway):
        infos = await workers.start_both("", "pair.setup=hang(ms=60000)")
        prefill, decode = infos["prefill-0"], infos["decode-0"]
        for info in infos.values():
            await gateway.connect(info)
        late = await gateway.run(list(range(30)), worker="prefill-0", to="decode-0", timeout_s=0.3)
        assert late.reason == "deadline"
        _, answer = gateway.submit(list(range(40)), worker="prefill-0", to="decode-0", max_tokens=5)
        await asyncio.sleep(0.1)
        assert not answer.ends
        os.kill(decode.pid, signal.SIGKILL)
        again = await asyncio.to_thread(workers.start, "decode-0")
        await reconnect(gateway, again)
        await assert_serves(gateway, list(range(40)))
        await wait_until_workers_idle([prefill, again])
