"""The controller's server with real processes: it may restart without an effect on serving."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from disagg.client import Client
from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.control.controller_link import call_controller
from disagg.cluster.control.controller_thread import ControllerThread
from disagg.cluster.control.plan import ClusterPlan, plan_cluster
from disagg.cluster.hosts.processes import ProcessLauncher
from disagg.cluster.system.children import LaunchError
from disagg.engine.fake_runner import fake_generate
from disagg.gateway.event_loop.loop_times import LoopTimes
from disagg.gateway.event_loop.shell.heartbeat import HeartbeatConnection
from disagg.gateway.event_loop.shell.loop_watch import LoopWatch, TimedSelector
from disagg.gateway.models.membership import ControllerLink
from disagg.proto.control import ControlRefused, ControlState, DrainRequest, ScaleRequest, StateRequest
from disagg.proto.errors import UnavailableError
from disagg.proto.ids import GatewayId, Incarnation, WorkerId
from disagg.proto.messages import WorkerInfo
from disagg.router.config import RouterConfig
from tests.integration.workers.test_processes import FAKE, PROMPT
from tests.support.ports import free_port
from tests.support.secret import SECRET
from tests.support.waiting import wait_until

NUM_TOKENS = 2000
LONG_ANSWER = 100_000
"""Tokens of an answer that does not end before it is cancelled."""


class LastingLauncher(ProcessLauncher):
    """Its processes outlive controllers for as long as `keep` is set, as Ray's do."""

    keep = False

    def running(self) -> frozenset[str]:
        with self._lock:
            return frozenset(self._children)

    def stop_workers(self, worker_ids: Sequence[WorkerId]) -> None:
        if not self.keep:
            super().stop_workers(worker_ids)

    def stop_gateways(self, names: Sequence[str]) -> None:
        if not self.keep:
            super().stop_gateways(names)


def make_plan(decode: int = 1, **controller: object) -> ClusterPlan:
    num_blocks = 2 * LONG_ANSWER // 16
    pools = {"prefill": {"num_blocks": num_blocks}, "decode": {"size": decode, "num_blocks": num_blocks}}
    model = {"path": "fake", "max_model_len": LONG_ANSWER + len(PROMPT)}
    stays = {"migrations": 0}  # a drain lasts as long as its answers
    return plan_cluster(
        parse_config({**FAKE, "model": model, "pools": pools, "placement": stays, "controller": controller})
    )


@contextmanager
def running(plan: ClusterPlan, launcher: ProcessLauncher) -> Iterator[tuple[ControllerThread, str]]:
    """A controller whose cluster is complete, and its address."""
    controller = ControllerThread(plan, launcher, SECRET)
    address = controller.start()
    try:
        assert wait_until(lambda: controller.state().is_settled), controller.state()
        yield controller, address
    finally:
        controller.stop()


def test_a_controller_that_comes_back_finds_everybody_and_no_stream_minds(tmp_path: Path) -> None:
    plan, launcher = make_plan(port=free_port()), LastingLauncher(tmp_path, SECRET)
    names = ("prefill-0", "decode-0", "gateway")
    with running(plan, launcher) as (first, address):
        pids = [launcher.pid(name) for name in names]
        client = Client(first.state().gateways[0].address)
        stream = client.stream(PROMPT, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
        tokens = list(next(stream).token_ids)
        launcher.keep = True
    with client:
        with pytest.raises(UnavailableError, match=r"^the controller does not answer") as caught:
            client.scale({"decode": 2})
        assert caught.value.code == "controller_away"
        with pytest.raises(UnavailableError, match=f"^the controller at {address} does not answer"):
            call_controller(address, StateRequest(), SECRET, timeout_s=1)
        state = client.cluster_state()
        assert ([w.worker_id for w in state.workers], len(state.pools)) == (["decode-0", "prefill-0"], 0)
        with running(plan, launcher) as (second, _):
            launcher.keep = False
            assert [launcher.pid(name) for name in names] == pids
            assert [record.num_starts for record in second.state().workers] == [1, 1]
            client.scale({"decode": 2})
            assert wait_until(lambda: second.state().is_settled)
            tokens += [token for delta in stream for token in delta.token_ids]
    assert tokens == fake_generate(PROMPT, NUM_TOKENS)
    assert launcher.killed == []


def test_a_worker_that_does_not_run_forgets_a_tenant_when_it_comes_back(tmp_path: Path) -> None:
    tiers = {"min_tokens": 128, "disk": {"path": str(tmp_path / "kv"), "bytes": "1MiB"}}
    plan = plan_cluster(
        parse_config(
            {
                **FAKE,
                "mode": "colocated",
                "model": {"path": "fake", "max_model_len": 400},
                "pools": {"colocated": {"num_blocks": 64}},
                "kv_cache": {"tiers": tiers},
            }
        )
    )

    def num_files() -> int:
        return len([*(tmp_path / "kv").rglob("*.kv")])

    launcher = ProcessLauncher(tmp_path, SECRET)
    with (
        running(plan, launcher) as (controller, _),
        Client(controller.state().gateways[0].address) as client,
    ):
        for _ in client.stream(tuple(range(300)), max_tokens=4, temperature=0.0):
            pass
        assert wait_until(lambda: num_files() == 2)
        os.kill(launcher.pid("colocated-0"), signal.SIGKILL)
        assert wait_until(lambda: controller.state().workers[0].phase != "ready")
        client.forget("")
        assert num_files() == 2
        assert wait_until(lambda: controller.state().is_settled)
        assert wait_until(lambda: not num_files())


def test_a_drain_goes_on_under_the_next_controller(tmp_path: Path) -> None:
    """The answer that keeps the worker busy ends when the second controller is there."""
    plan, launcher = make_plan(decode=2, port=free_port()), LastingLauncher(tmp_path, SECRET)

    def incarnation_of(controller: ControllerThread, name: str) -> tuple[str, str]:
        [record] = [record for record in controller.state().workers if record.worker_id == name]
        return record.phase, "" if record.info is None else record.info.incarnation

    with running(plan, launcher) as (first, _):
        client = Client(first.state().gateways[0].address)
        stream = client.stream(PROMPT, max_tokens=LONG_ANSWER, temperature=0.0, ignore_eos=True)
        next(stream)

        def busy() -> list[str]:
            workers = client.cluster_state().workers
            return [w.worker_id for w in workers if w.sequences and w.worker_id.startswith("decode")]

        assert wait_until(lambda: len(busy()) == 1)
        [name] = busy()
        _, incarnation = incarnation_of(first, name)
        client.drain(name)
        assert wait_until(lambda: incarnation_of(first, name) == ("draining", incarnation))
        launcher.keep = True
    second = ControllerThread(plan, launcher, SECRET)
    second.start()
    try:
        with client:
            assert wait_until(lambda: incarnation_of(second, name) == ("draining", incarnation)), second.state()
            other = {"decode-0": "decode-1", "decode-1": "decode-0"}[name]
            assert wait_until(lambda: incarnation_of(second, other)[0] == "ready"), second.state()
            refused = second.control(DrainRequest(worker_id=WorkerId(other)))
            assert isinstance(refused, ControlRefused)
            assert refused.message == f"{other} is the only ready worker of its pool; make the pool larger first"
            launcher.keep = False
            stream.close()
            assert wait_until(lambda: second.state().is_settled), second.state()
            assert incarnation_of(second, name)[1] != incarnation
            answer = client.generate(PROMPT, max_tokens=5, temperature=0.0, ignore_eos=True)
            assert list(answer.token_ids) == fake_generate(PROMPT, 5)
    finally:
        launcher.keep = False
        second.stop()


class NotingLauncher(ProcessLauncher):
    """Notes when a gateway is to be killed, and kills nothing. A worker may be silent too, on a busy machine."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, SECRET)
        self.noted: list[tuple[str, int]] = []
        self.has_noted = threading.Event()

    def kill(self, name: str, pid: int) -> None:
        if name == "gateway":
            self.noted.append((name, pid))
            self.has_noted.set()


class HeldGateway:
    """A gateway without clients, whose event loop is held from `hold` to `release`."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready, self._held, self._end = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> HeldGateway:
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._held.set()
        self._end.set()
        self._thread.join()

    def hold(self) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._held.wait)

    def _run(self) -> None:
        selector = TimedSelector()
        with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
            runner.run(self._serve(selector.times))

    async def _serve(self, times: LoopTimes) -> None:
        self._loop = asyncio.get_running_loop()
        gateway_id, watch = GatewayId("held"), LoopWatch(times)
        link = ControllerLink(gateway_id, lambda: self._address, NoWorkers(), SECRET)
        beats = HeartbeatConnection(gateway_id, lambda: self._address, SECRET, watch.state)
        watch.start()
        link.start("127.0.0.1:1", os.getpid())
        beats.start()
        self._ready.set()
        await asyncio.to_thread(self._end.wait)
        await asyncio.to_thread(beats.stop)
        await link.stop()
        watch.stop()


class NoWorkers:
    """Implements `membership.Workers`, and uses none."""

    on_drained: Callable[[WorkerId, Incarnation], None]

    async def add_worker(self, info: WorkerInfo) -> None: ...

    async def remove_worker(self, worker_id: WorkerId) -> None: ...

    async def wait_until_connected(self, timeout_s: float) -> None: ...

    def drain_worker(self, worker_id: WorkerId, incarnation: Incarnation) -> None: ...

    def resume_worker(self, worker_id: WorkerId, incarnation: Incarnation) -> None: ...

    def expect_workers(self, in_s: Mapping[WorkerId, float]) -> None: ...

    def configure(self, configs: Mapping[str, RouterConfig]) -> None: ...


def test_a_gateway_whose_event_loop_is_held_is_busy_at_first_and_hung_in_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The silence that counts would have had it killed after one second, and for another reason."""
    recovery = {"kill_after_s": 1.0, "gateway_stuck_after_s": 4.0}
    launcher = NotingLauncher(tmp_path)
    plan = plan_cluster(parse_config({**FAKE, "recovery": recovery}))
    with running(plan, launcher) as (controller, address), HeldGateway(address) as gateway:
        assert wait_until(lambda: "held" in {record.gateway_id for record in controller.state().gateways})
        gateway.hold()
        assert launcher.has_noted.wait(60)
    assert launcher.noted == [("gateway", os.getpid())]
    (line,) = [message for message in caplog.messages if "gateway" in message and "killing it" in message]
    held = re.search(rf"gateway \(process {os.getpid()}\) has been busy for (\d+) s \(a callback in ", line)
    assert held is not None
    assert int(held[1]) >= 4  # More on a busy machine, which looks later.


def test_control_over_grpc(tmp_path: Path) -> None:
    with running(make_plan(), ProcessLauncher(tmp_path, SECRET)) as (_, address):
        state = call_controller(address, StateRequest(), SECRET)
        assert isinstance(state, ControlState)
        assert state.is_settled
        refused = call_controller(address, ScaleRequest(sizes={"colocated": 3}), SECRET)
        assert refused == ControlRefused(field="sizes.colocated", message="this cluster has prefill, decode")
        assert isinstance(call_controller(address, DrainRequest(worker_id=WorkerId("x")), SECRET), ControlRefused)
        assert call_controller(address, ScaleRequest(sizes={"decode": 1}), SECRET) == state


def test_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        controller = ControllerThread(make_plan(port=port), ProcessLauncher(tmp_path, SECRET), SECRET)
        with pytest.raises(LaunchError, match=rf"^controller\.port: cannot listen on {port}"):
            controller.start()
        controller.stop()
