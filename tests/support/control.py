"""Drives the controller's core by hand: scripted workers and launcher, a clock that the test sets."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from disagg.cluster.core import events
from disagg.cluster.core.core import ControlCore, Settings
from disagg.cluster.core.events import Command, Event
from disagg.cluster.core.probes import Probe
from disagg.cluster.core.rollout import Desired
from disagg.proto.control import PoolName, WorkerRecord
from disagg.proto.ids import GatewayId, Incarnation, WorkerId
from disagg.proto.messages import KvLayout, RoleName, WorkerInfo

GATEWAY_ID = GatewayId("g1")
ADDRESS = "127.0.0.1:8470"
DRAIN_TIMEOUT_S = 300.0
LOST_GRACE_S = 10.0


_ROLES: dict[str, tuple[RoleName, ...]] = {
    "decode": ("decode",),
    "colocated": ("prefill", "decode"),
    "workers": ("prefill", "decode"),
}


def make_info(
    name: str,
    incarnation: int = 1,
    fingerprint: str = "f",
    num_layers: int = 1,
    start_id: str = "",
    config_hash: str = "",
) -> WorkerInfo:
    """What a worker registers; its incarnation is `name.incarnation`."""
    layout = KvLayout.dense(num_layers=num_layers, num_kv_heads=1, head_dim=1, dtype="fake", bytes_per_token=4)
    return WorkerInfo(
        worker_id=WorkerId(name),
        incarnation=Incarnation(f"{name}.{incarnation}"),
        roles=_ROLES.get(name.partition("-")[0], ("prefill",)),
        is_elastic=name.startswith("workers-"),
        address="127.0.0.1:1",
        pid=incarnation,
        start_id=start_id,
        config_hash=config_hash,
        fingerprint=fingerprint,
        kv_layout=layout,
        num_blocks=1,
        block_size=16,
        max_num_seqs=1,
        token_budget=1,
        max_model_len=100,
    )


class Driver:
    """A core, its clock, and short names for what happens to it. Commands are given back as short lines:
    `start prefill-0`, `start prefill-0 as t2`, `stop prefill-0 decode-0`, `accept x`, `reject x: why`, `configure 2`,
    `gateway prefill-0 decode-0`, `stop gateway`, `publish prefill-0 decode-0(draining)`,
    `probe prefill-0 decode-0`. Saving gives no line, nor does what a worker keeps (`proven`)."""

    def __init__(
        self,
        sizes: Mapping[PoolName, int],
        running: Collection[str] = (),
        desired: Desired | None = None,
        gateways: int = 1,
        probes: bool = False,
    ) -> None:
        settings = Settings(
            drain_timeout_s=DRAIN_TIMEOUT_S, lost_grace_s=LOST_GRACE_S, gateways=gateways, probes=probes
        )
        self.core = ControlCore(sizes, settings, running, controller_id="c1", desired=desired)
        self.probes_workers = probes
        self.now = 1000.0
        self.start_ids: dict[str, str] = {}
        """Of the latest start of each worker."""
        self.config_hashes: dict[str, str] = {}
        """The same; the worker registers with it."""
        self.probes: list[Probe] = []
        """All that were begun."""
        self.proven: set[Incarnation] = set()
        """Processes that keep that they were ready; they register with it."""
        self.saved: Desired | None = None
        """What the core had saved last."""

    def __call__(self, event: Event) -> list[str]:
        lines = [self._line(command) for command in self.core.handle(event, self.now)]
        return [line for line in lines if line]

    def tick(self, after_s: float = 0.0) -> list[str]:
        self.now += after_s
        return self(events.Tick())

    def register(
        self, name: str, incarnation: int = 1, fingerprint: str = "f", num_layers: int = 1, start_id: str = ""
    ) -> list[str]:
        config_hash = self.config_hashes.get(name, "")
        info = make_info(name, incarnation, fingerprint, num_layers, start_id, config_hash)
        return self(events.WorkerRegistered(info, info.incarnation in self.proven))

    def left(self, name: str, incarnation: int = 1) -> list[str]:
        return self(events.WorkerLeft(WorkerId(name), Incarnation(f"{name}.{incarnation}")))

    def hung(self, name: str, incarnation: int = 1, why: str = "was unresponsive for 4.0 s") -> list[str]:
        return self(events.WorkerHung(WorkerId(name), Incarnation(f"{name}.{incarnation}"), why))

    def exited(self, name: str, why: str = "killed by SIGKILL") -> list[str]:
        return self(events.ProcessExited(name, why))

    def failed(self, name: str, error: str = "no weights", start_id: str = "") -> list[str]:
        return self(events.WorkerStartFailed(WorkerId(name), error, start_id))

    def stopped(self, *names: str) -> list[str]:
        return self(events.WorkersStopped(tuple(WorkerId(name) for name in names)))

    def joined(self, address: str = ADDRESS, draining: Collection[str] = ()) -> list[str]:
        """`draining`: incarnations that the gateway drains, such as `decode-0.1`."""
        incarnations = tuple(
            (WorkerId(incarnation.partition(".")[0]), Incarnation(incarnation)) for incarnation in draining
        )
        return self(events.GatewayJoined(GATEWAY_ID, address, 7, draining=incarnations))

    def drain(self, name: str) -> list[str]:
        return self(events.Drain(WorkerId(name)))

    def empty(self, name: str, incarnation: int = 1) -> list[str]:
        return self(events.WorkerEmpty(GATEWAY_ID, WorkerId(name), Incarnation(f"{name}.{incarnation}")))

    def scale(self, **sizes: int) -> list[str]:
        return self(events.Scale(sizes))

    def probed(self, error: str = "", is_refusal: bool = False, which: int = -1) -> list[str]:
        """The latest probe ended, or another one."""
        return self(events.ProbeEnded(self.probes[which].number, error, is_refusal))

    def record(self, name: str) -> WorkerRecord:
        (record,) = [record for record in self.core.state().workers if record.worker_id == name]
        return record

    def phases(self) -> dict[str, str]:
        """Of all workers and, once it was started, the gateway."""
        state = self.core.state()
        return dict(
            [
                *((str(w.worker_id), str(w.phase)) for w in state.workers),
                *(("gateway", g.phase) for g in state.gateways),
            ]
        )

    def _line(self, command: Command) -> str:
        match command:
            case events.Save():
                self.saved = self.core.saved()
                return ""
            case events.Configure(generation=generation):
                return f"configure {generation}"
            case events.StartWorker(worker_id=name, start_id=start_id, config_hash=config_hash):
                self.start_ids[name], self.config_hashes[name] = start_id, config_hash
                return f"start {name}" + (f" as {config_hash}" if config_hash else "")
            case events.StopWorkers(worker_ids=names):
                return f"stop {' '.join(names)}"
            case events.StartProbe(probe=probe):
                self.probes.append(probe)
                return f"probe {' '.join(info.worker_id for info in probe.workers)}"
            case events.Accept(worker_id=name):
                return f"accept {name}"
            case events.Proven(incarnation=incarnation):
                self.proven.add(incarnation)
                return ""
            case events.Reject(worker_id=name, reason=reason):
                return f"reject {name}: {reason}"
            case events.StartGateway(workers=workers, address=address, name=name):
                return f"{name} {' '.join(info.worker_id for info in workers)}" + (f" at {address}" if address else "")
            case events.StopGateway(name=name):
                return f"stop {name}"
            case events.Expect():
                return ""
            case events.Publish(change=change, snapshot_for=snapshot_for):
                members = self.core.membership().members
                shown = [m.info.worker_id + ("" if m.state == "ready" else f"({m.state})") for m in members]
                assert change is not None or snapshot_for, "nothing to publish"
                return f"publish {' '.join(shown)}".rstrip()


def succeeding(before: Driver, running: Collection[str]) -> Driver:
    """The next controller, after `before` died: these processes of workers run, and a gateway. It has begun, and none
    has registered."""
    desired = before.core.saved() if before.saved is None else before.saved
    driver = Driver({}, [*running, "gateway"], desired, probes=before.probes_workers)
    driver.config_hashes, driver.proven = dict(before.config_hashes), set(before.proven)
    driver.tick()
    return driver


def settled(sizes: Mapping[PoolName, int], desired: Desired | None = None) -> Driver:
    """A cluster of these sizes that runs; `desired`: with what an earlier controller saved."""
    driver = Driver(sizes, desired=desired)
    driver.tick()
    for name, size in sizes.items():
        for index in range(size):
            driver.register(f"{name}-{index}")
    driver.joined()
    assert driver.core.state().is_settled
    return driver
