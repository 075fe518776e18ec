"""Workers and gateways that are killed in the middle of `disagg scale` and `disagg apply`: the end state is the desired
one, nothing is left over, and streams that run meanwhile are whole and right."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from disagg.client import Client
from disagg.cluster.config.cluster_config import PoolConfig, parse_config
from disagg.cluster.hosts.processes import ProcessCluster, ProcessLauncher
from disagg.engine.config import WorkerConfig
from disagg.proto.control import ApplyReply, ApplyRequest, ControlState, ScaleRequest
from tests.integration.scaling.test_scaling import endless_streams
from tests.integration.workers.test_processes import FAKE
from tests.support.leftovers import all_pids, is_ours
from tests.support.waiting import LONG_WAIT_S, wait_until
from tests.support.workers import wait_until_workers_idle

POOL = {"num_blocks": 256}
OLD_BLOCKS = 256


class Deaths:
    """Who is killed directly after the process of a worker was started: before that can do anything, and before the
    controller can have anything else done."""

    def __init__(self) -> None:
        self.victims: dict[str, list[str]] = {}
        """Of each worker: whom its first, second, ... start from now on kills."""
        self.killed: list[int] = []

    def started(self, launcher: ProcessLauncher, name: str) -> None:
        if victims := self.victims.get(name):
            self.killed.append(launcher.pid(victims.pop(0)))
            os.kill(self.killed[-1], signal.SIGKILL)


class Scene:
    """A cluster whose decode pool gets other KV sizes; and which processes there are beside those of its state."""

    def __init__(self, cluster: ProcessCluster, deaths: Deaths) -> None:
        self.cluster, self.deaths = cluster, deaths
        self.num_blocks, self.generation = OLD_BLOCKS, 1
        self._others = self._ours() - set(self._pids().values())

    def _pids(self) -> dict[str, int]:
        state = self.cluster.state()
        return {
            **{str(record.worker_id): record.info.pid for record in state.workers if record.info is not None},
            **{record.name: record.pid for record in state.gateways},
        }

    @staticmethod
    def _ours() -> set[int]:
        return {pid for pid in all_pids() if is_ours(pid)}

    def apply(self) -> None:
        """Begin to give decode workers another KV size."""
        self.num_blocks, self.generation = self.num_blocks + 16, self.generation + 1
        raw = configuration(self.num_blocks)
        request = ApplyRequest(config=msgspec.json.encode(parse_config(raw)))
        reply = self.cluster.control(request)
        assert isinstance(reply, ApplyReply)
        assert (reply.generation, reply.pools) == (self.generation, ("decode",))

    def scale(self, decode: int) -> None:
        reply = self.cluster.control(ScaleRequest(sizes={"decode": decode}))
        assert isinstance(reply, ControlState)

    def starts(self, name: str) -> int:
        return next((w.num_starts for w in self.cluster.state().workers if w.worker_id == name), 0)

    def check(self, decode: int = 2) -> None:
        """The state is the desired one, every worker has its configuration, and nothing else is there or held."""
        names = ["prefill-0", *(f"decode-{index}" for index in range(decode))]

        def is_as_wanted() -> bool:
            state = self.cluster.state()
            return state.is_settled and [w.worker_id for w in state.workers] == names

        assert wait_until(is_as_wanted, LONG_WAIT_S), self.cluster.state()
        state = self.cluster.state()
        assert (state.generation, state.rollout, state.rolled_back) == (self.generation, None, None)
        blocks = {str(info.worker_id): info.num_blocks for info in self.cluster.workers}
        assert blocks == {name: OLD_BLOCKS if name == "prefill-0" else self.num_blocks for name in names}
        assert [(record.name, record.phase) for record in state.gateways] == [
            ("gateway", "ready"),
            ("gateway-1", "ready"),
        ]
        assert wait_until(lambda: self._ours() == self._others | set(self._pids().values()), LONG_WAIT_S)
        asyncio.run(wait_until_workers_idle(self.cluster.workers, self.cluster.secret))
        assert self.cluster.killed == []
        assert not any(self.deaths.victims.values())
        assert not set(self.deaths.killed) & set(self._pids().values())


def configuration(num_blocks: int) -> dict[str, Any]:
    return {
        **FAKE,
        "gateway": {"port": 0, "replicas": 2},
        "placement": {"policy": "round_robin", "local_prefill": "never"},
        "pools": {"prefill": POOL, "decode": {"size": 2, "num_blocks": num_blocks}},
    }


@pytest.fixture
def scene() -> Iterator[Scene]:
    deaths, start_worker = Deaths(), ProcessLauncher.start_worker

    def start_and_die(launcher: ProcessLauncher, config: WorkerConfig, controller: str, pool: PoolConfig) -> None:
        start_worker(launcher, config, controller, pool)
        deaths.started(launcher, config.worker_id)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessLauncher, "start_worker", start_and_die)
        with ProcessCluster(parse_config(configuration(OLD_BLOCKS))) as cluster:
            yield Scene(cluster, deaths)


def test_a_worker_that_is_killed_while_it_starts_or_drains_by_scale(scene: Scene) -> None:
    cluster = scene.cluster
    with endless_streams(cluster.address) as wait_for_all:
        wait_for_all()
        scene.deaths.victims = {"decode-2": ["decode-2"]}
        scene.scale(decode=3)
        assert wait_until(lambda: cluster.state().is_settled, LONG_WAIT_S), cluster.state()
        assert scene.starts("decode-2") == 2
        wait_for_all()
        with Client(cluster.address) as client:
            held = cluster.pid("decode-2")
            os.kill(held, signal.SIGSTOP)  # what it has does not end, so it drains until it is killed

            def has_work() -> bool:
                running = [each for each in client.requests(100) if each.outcome == "running"]
                return any(each.decode_worker == "decode-2" for each in running)

            assert wait_until(has_work, LONG_WAIT_S)
            scene.scale(decode=2)
            (phase,) = [w.phase for w in cluster.state().workers if w.worker_id == "decode-2"]
            assert phase == "draining"
            os.kill(held, signal.SIGKILL)
        assert wait_until(lambda: cluster.state().is_settled, LONG_WAIT_S), cluster.state()
        wait_for_all()
    scene.check()


@pytest.mark.slow
def test_processes_that_are_killed_while_a_configuration_is_applied(scene: Scene) -> None:
    """First a new worker, before it is ready, and an old one; then, under the next configuration, a gateway."""
    deaths: tuple[dict[str, list[str]], ...] = (
        {"decode-2": ["decode-2", "decode-1"]},
        {"decode-2": ["gateway-1"]},
    )
    for victims in deaths:
        with endless_streams(scene.cluster.address) as wait_for_all:
            wait_for_all()
            scene.deaths.victims = victims
            scene.apply()
            assert wait_until(lambda: scene.cluster.state().generation == scene.generation, LONG_WAIT_S)
            wait_for_all()
        scene.check()
