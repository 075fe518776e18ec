"""The controller dies in the middle of `disagg scale` and `disagg apply`. One whose processes outlive it, as under Ray,
is followed by one that goes on with what it had saved; with `disagg up --launcher processes` all ends with it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
import yaml

from disagg.client import Client
from disagg.cluster.config.cluster_config import PoolConfig, parse_config
from disagg.cluster.control import server
from disagg.cluster.control.controller_thread import ControllerThread
from disagg.cluster.control.plan import ClusterPlan, plan_cluster
from disagg.cluster.control.plans import SavedState
from disagg.cluster.control.probe_link import Prober
from disagg.cluster.core.probes import Probe
from disagg.cluster.hosts.processes import ProcessLauncher
from disagg.cluster.system.logs import LoggingConfig
from disagg.cluster.system.process_tools import ProcessRef
from disagg.engine.config import WorkerConfig
from disagg.engine.fake_runner import fake_generate
from disagg.proto.control import ApplyReply, ApplyRequest, ControlState, ScaleRequest
from disagg.proto.ids import WorkerId
from tests.integration.scaling.test_scaling import endless_streams
from tests.integration.workers.test_processes import FAKE, PROMPT
from tests.support.leftovers import all_pids, is_ours
from tests.support.ports import free_port
from tests.support.secret import SECRET
from tests.support.shared_templates import SharedTemplates
from tests.support.waiting import LONG_WAIT_S, wait_until
from tests.support.workers import wait_until_workers_idle

ANSWER_TOKENS = 100_000
"""Of an answer that does not end before it is cancelled."""


def configuration(port: int = 0, decode: int = 1, num_blocks: int = 256, **sections: Any) -> dict[str, Any]:
    return {
        **FAKE,
        "placement": {"policy": "round_robin", "local_prefill": "never"},
        "controller": {"port": port},
        "pools": {"prefill": {"num_blocks": 256}, "decode": {"size": decode, "num_blocks": num_blocks}},
        **sections,
    }


class DyingController:
    """A controller whose launcher and store do nothing more from a certain call of the launcher on, as if it had died
    with that call. Its processes live on."""

    def __init__(self, launcher: LastingLauncher, plan: ClusterPlan, saved: SavedState | None) -> None:
        self.launcher, self.saved = launcher, saved
        launcher.is_dead.clear()
        launcher.probed.clear()
        self.thread = ControllerThread(plan, launcher, SECRET, saved=saved, on_saved=self._save)
        self.thread.start()

    def _save(self, saved: SavedState) -> None:
        if not self.launcher.is_dead.is_set():
            self.saved = saved

    def settled(self) -> bool:
        return self.thread.state().is_settled

    def end(self) -> None:
        """Take away what is left of it."""
        self.launcher.is_dead.set()
        self.thread.stop()


class LastingLauncher(ProcessLauncher):
    """Its processes outlive controllers, as Ray's do."""

    def __init__(self, log_dir: Path) -> None:
        self.templates = SharedTemplates(log_dir, LoggingConfig())
        super().__init__(log_dir, SECRET, templates=self.templates)
        self.is_dead = threading.Event()
        self.dies_at = ""
        """The call at which the controller dies: `start`, `stop` or `probe` and the name of a worker."""
        self.probed: list[WorkerId] = []
        """Decode workers of the probes that the present controller began."""

    def running(self) -> frozenset[str]:
        with self._lock:
            return frozenset(self._children)

    def start_worker(self, config: WorkerConfig, controller_address: str, pool: PoolConfig) -> None:
        if self.lives(f"start {config.worker_id}"):
            super().start_worker(config, controller_address, pool)

    def stop_workers(self, worker_ids: Sequence[WorkerId]) -> None:
        if all(self.lives(f"stop {worker_id}") for worker_id in worker_ids):
            super().stop_workers(worker_ids)

    def stop_gateways(self, names: Sequence[str]) -> None:
        if not self.is_dead.is_set():
            super().stop_gateways(names)

    def exited(self) -> dict[str, str]:
        return {} if self.is_dead.is_set() else super().exited()

    def prober(self, *args: Any) -> Prober:
        """Of a controller: probes nothing more once it is dead."""
        return MortalProber(self, *args)

    def lives(self, call: str) -> bool:
        if call == self.dies_at:
            self.is_dead.set()
        return not self.is_dead.is_set()


class MortalProber(Prober):
    """Sends no more probes from the death of its controller on."""

    def __init__(self, launcher: LastingLauncher, *args: Any) -> None:
        super().__init__(*args)
        self._launcher = launcher

    def start(self, probe: Probe) -> None:
        if self._launcher.lives(f"probe {probe.decode.worker_id}"):
            self._launcher.probed.append(probe.decode.worker_id)
            super().start(probe)


class Succession:
    """One controller after the other, of one cluster."""

    SAID: ClassVar = "an earlier controller was applying generation"

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.launcher = LastingLauncher(folder)
        self.plan = plan_cluster(parse_config(configuration(self.port)))
        self.controller = DyingController(self.launcher, self.plan, None)
        assert wait_until(self.controller.settled, LONG_WAIT_S), self.controller.thread.state()
        self.gateway_pid = self.launcher.pid("gateway")

    @property
    def address(self) -> str:
        return self.controller.thread.state().gateways[0].address

    def dies(self, call: str, request: ApplyRequest | ScaleRequest) -> None:
        """The controller gets a request, and dies at that call of its launcher; the next one makes all of it true."""
        self.launcher.dies_at = call
        reply = self.controller.thread.control(request)
        assert isinstance(reply, ApplyReply | ControlState)
        assert self.launcher.is_dead.wait(LONG_WAIT_S)
        self.launcher.dies_at = ""
        self.controller.end()
        self.controller = DyingController(self.launcher, self.plan, self.controller.saved)
        assert wait_until(self.controller.settled, LONG_WAIT_S), self.controller.thread.state()

    def check(self, decode: int, num_blocks: int, generation: int) -> None:
        state = self.controller.thread.state()
        assert (state.generation, state.rollout, state.rolled_back) == (generation, None, None)
        infos = [record.info for record in state.workers if record.info is not None]
        blocks = {str(info.worker_id): info.num_blocks for info in infos}
        assert blocks == {"prefill-0": 256} | {f"decode-{index}": num_blocks for index in range(decode)}
        assert self.launcher.running() == {*blocks, "gateway"}
        pids = {self.launcher.pid(name) for name in self.launcher.running()}
        assert pids == {info.pid for info in infos} | {self.gateway_pid}
        assert (state.gateways[0].pid, state.gateways[0].detail) == (self.gateway_pid, "")

    def check_idle(self) -> None:
        infos = [record.info for record in self.controller.thread.state().workers if record.info is not None]
        asyncio.run(wait_until_workers_idle(infos))

    def close(self) -> None:
        self.controller.thread.stop()
        self.launcher.templates.close()
        assert self.launcher.running() == frozenset()
        assert self.launcher.killed == []


def applying(config: dict[str, Any]) -> ApplyRequest:
    return ApplyRequest(config=msgspec.json.encode(parse_config(config)))


def test_the_next_controller_makes_true_what_was_being_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clusters = Succession(tmp_path)
    try:
        with endless_streams(clusters.address, num_streams=3) as wait_for_all:
            wait_for_all()
            monkeypatch.setattr(server, "Prober", clusters.launcher.prober)
            clusters.dies("start decode-1", ScaleRequest(sizes={"decode": 2}))
            clusters.check(decode=2, num_blocks=256, generation=1)
            clusters.dies("stop decode-1", ScaleRequest(sizes={"decode": 1}))
            clusters.check(decode=1, num_blocks=256, generation=1)
            assert Succession.SAID not in caplog.text
            for generation, call, where in (
                (2, "start decode-1", ", whose first new workers were not ready yet"),
                (3, "stop decode-0", ""),
                (4, "start decode-0", ""),
                (5, "probe decode-1", ", whose first new workers were not ready yet"),
            ):
                caplog.clear()
                num_blocks = 256 + 16 * generation
                clusters.dies(call, applying(configuration(clusters.port, num_blocks=num_blocks)))
                clusters.check(decode=1, num_blocks=num_blocks, generation=generation)
                said = [message for message in caplog.messages if message.startswith(Succession.SAID)]
                assert said == [f"{Succession.SAID} {generation} of the configuration{where}: going on with that"]
            assert clusters.launcher.probed == ["decode-1", "decode-0"]  # the one on trial, then the next new one
            wait_for_all()
        clusters.check_idle()
    finally:
        clusters.close()


@contextmanager
def started(file: Path, config: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
    """`disagg up` with this configuration, once it serves."""
    file.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "disagg.cli", "up", "--launcher", "processes", "--config", str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as up:
        timer = threading.Timer(2 * LONG_WAIT_S, up.kill)
        timer.start()
        try:
            assert up.stdout is not None
            assert any(line.startswith("serving ") for line in up.stdout)
            yield up
        finally:
            up.terminate()
            up.communicate()
            timer.cancel()


def ours() -> set[int]:
    return {pid for pid in all_pids() if is_ours(pid)}


def test_all_ends_with_a_disagg_up_that_is_killed_and_the_next_one_has_the_new_file(tmp_path: Path) -> None:
    """In the middle: an answer that does not end holds the first old worker."""
    room: dict[str, Any] = {"num_blocks": 2 * ANSWER_TOKENS // 16}
    sections: dict[str, Any] = {
        "model": {"path": "fake", "max_model_len": ANSWER_TOKENS + len(PROMPT)},
        "gateway": {"port": free_port(), "http_port": None},
        "placement": {"migrations": 0},
    }
    before = configuration(**sections)
    before["pools"] = {"prefill": room, "decode": {"size": 1, **room}}
    after = {**before, "pools": {"prefill": room, "decode": {"size": 2, "num_blocks": room["num_blocks"] + 16}}}
    file, others = tmp_path / "cluster.yaml", ours()
    with started(file, before) as up, Client(f"127.0.0.1:{sections['gateway']['port']}") as client:
        stream = client.stream(PROMPT, max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
        next(stream)
        client.apply(msgspec.to_builtins(parse_config(after)))
        assert wait_until(lambda: "draining" in {w.phase for w in client.cluster_state().workers}, LONG_WAIT_S)
        everything = [ProcessRef.of(pid) for pid in ours() - others]
        assert len(everything) > 5  # the command, two templates, a gateway, three workers
        up.kill()
        assert wait_until(lambda: not any(process.is_alive() for process in everything), LONG_WAIT_S)
        stream.close()
    with started(file, after), Client(f"127.0.0.1:{sections['gateway']['port']}") as client:
        state = client.cluster_state()
        assert [(w.worker_id, w.phase) for w in state.workers] == [
            ("prefill-0", "ready"),
            ("decode-0", "ready"),
            ("decode-1", "ready"),
        ]
        answer = client.generate(PROMPT, max_tokens=20, temperature=0.0, ignore_eos=True)
        assert list(answer.token_ids) == fake_generate(PROMPT, 20)
