"""The controller's core: reconciles the observed with the desired state. Pure: (event, now) -> commands.

    Scale ──> desired sizes ─┐
    Apply ──> a rollout ─────┤  (`cluster/core/rollout.py`)
                             ├─ reconcile ──> start, stop, restart after a pause, drain
    registered, left, ... ───┘       └──────> membership ──Publish──> gateways ──WorkerEmpty──> drained: stop

A worker that registered is ready once a tiny request went through it (`cluster/core/probes.py`); before that it is no
member.

The worker with the highest index leaves first. A worker that becomes desired again while it drains finishes draining,
and is then started again. Gateways move what runs on a draining worker to others. Nothing is drained for longer than
`drain_timeout_s`, or the deadline of the operator's request: then it leaves the membership, and gateways retry what is
left there elsewhere.

During a rollout, the rollout determines how many workers each pool of its models has, and with which configuration each
is started.

A controller that comes back finds processes that run already: it waits for them to register, and publishes nothing
until they have (or `ADOPT_GRACE_S` is over), so that gateways keep the membership that they have. A worker says when it
registers whether a probe went through it before; one that was being probed is probed again. A gateway that joins
reports which workers it drains: an operator's drain continues under the next controller.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from disagg.cluster.core import events
from disagg.cluster.core.desired import DesiredState
from disagg.cluster.core.events import Command, Event
from disagg.cluster.core.gateways import Follower, Gateways
from disagg.cluster.core.probes import Probes, Verdict
from disagg.cluster.core.refusals import refusal
from disagg.cluster.core.rollout import Desired, Target
from disagg.cluster.core.workers import (
    USUAL_START_S,
    Worker,
    in_order,
    misfit,
    num_ready,
    split_worker_id,
    worker_id,
)
from disagg.proto.control import (
    ControlRefused,
    ControlRequest,
    ControlState,
    Member,
    Membership,
    PoolName,
    PoolState,
)
from disagg.proto.ids import Incarnation, WorkerId
from disagg.proto.membership import MembershipLog
from disagg.proto.messages import WorkerInfo

ADOPT_GRACE_S = 10.0
"""Seconds that a new controller waits for the workers that an earlier one started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Time limits of the controller, in seconds."""

    drain_timeout_s: float
    lost_grace_s: float
    """Seconds that a process may take to come back after it left, if its end was not reported."""
    gateways: int = 1
    """Number of gateways that the controller starts."""
    probes: bool = True
    """Whether new workers are probed before they count as ready."""


class ControlCore:
    """Owner of the desired state and of all records.

    Args:
        sizes: desired size of each pool; their order is the order in which workers are shown.
        running: names of processes that an earlier controller started.
        controller_id: part of the ids of its starts; no other controller has the same.
        desired: the state that an earlier controller saved, in place of `sizes`; see `saved`.
    """

    def __init__(
        self,
        sizes: Mapping[PoolName, int],
        settings: Settings,
        running: Collection[str] = (),
        controller_id: str = "",
        desired: Desired | None = None,
    ) -> None:
        if desired is None:
            desired = Desired(target=Target(generation=1, sizes=dict(sizes), config_hashes=dict.fromkeys(sizes, "")))
        self._desired = DesiredState(desired, settings.drain_timeout_s)
        self._settings = settings
        self._running = frozenset(running)
        self._controller_id = controller_id
        self._num_starts = 0
        self._workers: dict[WorkerId, Worker] = {}
        self._gateways = Gateways(settings.gateways)
        self._begun = False
        self._adopting_until: float | None = None
        self._probes = Probes()
        self._published = MembershipLog(controller_id)
        self._expected: dict[WorkerId, float] = {}
        """Times at which starting workers are expected to be ready, as published last."""
        self._drains: set[tuple[WorkerId, Incarnation]] = set()
        """Processes that gateways reported as draining and that have not registered with this controller."""
        self._out: list[Command] = []
        self._to_stop: list[WorkerId] = []

    # ------------------------------------------------------------ observed state

    @property
    def sizes(self) -> dict[PoolName, int]:
        """The desired sizes; during a rollout the present ones."""
        return self._desired.sizes

    @property
    def target(self) -> Target:
        """The present target; during a rollout the previous one."""
        return self._desired.target

    @property
    def latest(self) -> int:
        """The generation that was requested last."""
        return self._desired.latest

    def saved(self) -> Desired:
        """The desired state, for the next controller."""
        return self._desired.saved()

    def is_changing(self, pool: PoolName) -> bool:
        """Whether a rollout controls the size of a pool."""
        return self._desired.is_changing(pool)

    @property
    def worker_ids(self) -> tuple[WorkerId, ...]:
        """All workers that may have a process."""
        return tuple(self._workers)

    def state(self, now: float = 0.0) -> ControlState:
        """State of the cluster for operators. `now` is for the duration of a rollout."""
        desired, rollout = self._desired, self._desired.rollout
        return ControlState(
            pools=tuple(
                PoolState(name=name, desired=size, ready=num_ready(self._workers.values(), name))
                for name, size in self.sizes.items()
            ),
            workers=in_order(self._workers.values(), list(self.sizes), self._probes.doing),
            gateways=self._gateways.records(),
            generation=desired.target.generation,
            rollout=None if rollout is None else rollout.state(self._workers.values(), now),
            rolled_back=desired.rolled_back,
        )

    def membership(self) -> Membership:
        """The workers that gateways route to, as published last."""
        return self._published.snapshot()

    def refusal(self, request: ControlRequest) -> ControlRefused | None:
        """Reason why a request is refused, or None."""
        desired, is_adopting = self._desired, self._adopting_until is not None
        return refusal(request, desired.plan, desired.target.sizes, self._workers, is_adopting=is_adopting)

    def next_wakeup(self) -> float | None:
        """Time at which a `Tick` is due, or None."""
        dues = [worker.due for worker in self._workers.values()]
        dues += [self._gateways.next_due(), self._adopting_until, self._probes.next_due()]
        if self._desired.rollout is not None and self._adopting_until is None:
            dues.append(self._desired.rollout.next_due(self._workers.values()))
        return min((due for due in dues if due is not None), default=None)

    # ------------------------------------------------------------ events

    def handle(self, event: Event, now: float) -> list[Command]:
        """Handle an event, and return the commands, to be executed in order."""
        if not self._begun:
            self._begun = True
            self._begin(now)
        self._take(event, now)
        self._expire(now)
        self._probe(now)
        self._roll(now)
        self._reconcile(now)
        self._reconcile_gateways(now)
        self._publish(now)
        if self._to_stop:  # after they left the membership
            self._out.append(events.StopWorkers(tuple(self._to_stop)))
        out, self._out, self._to_stop = self._out, [], []
        return out

    def _take(self, event: Event, now: float) -> None:
        match event:
            case events.Scale(sizes=sizes):
                self._out += self._desired.scale(sizes)
            case events.Apply(plan=plan):
                self._out += self._desired.apply(plan, now)
            case events.Forget(tenant_tag=tag, at_s=at_s):
                self._out += self._desired.forget(tag, at_s)
            case events.Drain(worker_id=name, deadline_s=deadline_s):
                self._drain(self._workers[name], now, deadline_s)
            case events.WorkerRegistered(info=info, is_proven=is_proven):
                self._on_registered(info, is_proven, now)
            case events.WorkerStartFailed(worker_id=name, error=error, start_id=start_id):
                self._on_start_failed(name, error, start_id, now)
            case events.WorkerStarting(worker_id=name, doing=doing, start_id=start_id):
                if (worker := self._workers.get(name)) is not None and worker.is_latest_start(start_id):
                    worker.doing = doing
            case events.WorkerLeft():
                self._on_left(event, now)
            case events.WorkerHung():
                self._on_hung(event, now)
            case events.WorkersStopped(worker_ids=names):
                for name in names:
                    self._on_stopped(name, now)
            case events.ProcessExited(name=process, why=why):
                self._on_exited(process, why, now)
            case events.ProbeEnded(number=number, error=error, is_refusal=is_refusal):
                present = {
                    worker.info.incarnation
                    for worker in self._workers.values()
                    if worker.info is not None and worker.phase in ("ready", "starting")
                }
                self._judge(self._probes.ended(number, error, is_refusal, present, now), now)
            case events.StartsPending(reasons=reasons):
                for worker in self._workers.values():
                    worker.pending = reasons.get(worker.worker_id, "")
            case _:
                self._take_gateway(event, now)

    def _take_gateway(self, event: Event, now: float) -> None:
        gateways = self._gateways
        match event:
            case events.GatewayJoined(gateway_id, address, pid, http_address):
                own = event.own_address, event.own_http_address
                gateways.joined(Follower(gateway_id, address, pid, http_address, event.name, *own), now)
                self._drains.update(event.draining)
                self._resume_drains(now)
            case events.GatewayStartFailed(error=error, name=name):
                gateways.failed(name, error, now)
            case events.GatewayLeft(gateway_id=gateway_id):
                gateways.left(gateway_id, now + self._settings.lost_grace_s)
            case events.GatewayStopped(name=name):
                gateways.own[name].enter(None)
            case events.MembershipMissed(gateway_id=gateway_id):
                if gateway_id in gateways.followers:
                    gateways.followers[gateway_id].needs_snapshot = True
            case events.SettingsFollowed(gateway_id=gateway_id, generation=generation):
                if gateway_id in gateways.followers:
                    gateways.followers[gateway_id].generation = generation
            case events.WorkerEmpty(gateway_id=gateway_id, worker_id=name, incarnation=incarnation):
                if gateway_id in gateways.followers:
                    gateways.followers[gateway_id].empty.add((name, incarnation))

    def _begin(self, now: float) -> None:
        """Adopt the desired processes that an earlier controller started, and stop the others."""
        grace_end = now + self._settings.lost_grace_s
        self._desired.begin(now)
        sizes = self.sizes
        for pool, size in sizes.items():
            for index in range(size):
                if (name := worker_id(pool, index)) in self._running:
                    self._workers[name] = Worker(name, pool, index, "lost", due=grace_end)
        self._gateways.adopt(self._running, grace_end)
        if self._workers:
            self._adopting_until = now + ADOPT_GRACE_S
        for surplus in sorted(self._running - set(self._workers) - set(self._gateways.own)):
            unwanted = WorkerId(surplus)
            of_pool, index = split_worker_id(unwanted)
            if of_pool in sizes:
                self._workers[unwanted] = Worker(unwanted, of_pool, index, "stopping")
            self._to_stop.append(unwanted)

    def _on_registered(self, info: WorkerInfo, is_proven: bool, now: float) -> None:
        name, incarnation = info.worker_id, info.incarnation
        worker = self._workers.get(name)
        if worker is None or worker.phase == "stopping":
            reason = f"{name} is not in the desired state" if worker is None else "it is being stopped"
            self._out.append(events.Reject(name, incarnation, reason))
        elif not worker.is_latest_start(info.start_id):
            self._out.append(events.Reject(name, incarnation, "it is of an earlier start, which was replaced"))
        elif worker.phase == "draining" and not worker.is_current(incarnation):
            self._out.append(events.Reject(name, incarnation, "the process that it replaces was draining"))
            self._stop(worker)
        elif (why := self._misfit(worker, info)) is not None:
            self._out.append(events.Reject(name, incarnation, why))
            worker.fault("failed", why, now)
        else:
            self._out.append(events.Accept(name, incarnation, self._desired.forgotten.due(name)))
            if worker.phase == "draining":
                return
            was_ready = is_proven or (worker.is_proven and worker.is_current(incarnation))
            if was_ready and not is_proven:  # it broke off before `Proven` was there
                self._out.append(events.Proven(name, incarnation))
            if was_ready or not self._settings.probes:
                self._ready(worker, info, now)
            else:
                worker.listens(info, now)
                self._probes.add(info, now)
                self._note_registered(worker)

    def _ready(self, worker: Worker, info: WorkerInfo, now: float) -> None:
        worker.ready(info, now)
        self._out += self._desired.was_ready(worker.worker_id)
        self._note_registered(worker)
        self._resume_drains(now)

    def _note_registered(self, worker: Worker) -> None:
        if self._desired.rollout is not None:
            self._desired.rollout.registered(worker)

    def _probe(self, now: float) -> None:
        for worker in self._workers.values():
            if worker.phase != "starting" or worker.info is None:
                self._probes.forget(worker.worker_id)
        ready = [w.info for w in self._workers.values() if w.phase == "ready" and w.info is not None]
        probes, verdicts = self._probes.begin(ready, [pool for pool, size in self.sizes.items() if size], now)
        self._out += [events.StartProbe(probe) for probe in probes]
        self._judge(verdicts, now)

    def _judge(self, verdicts: list[Verdict], now: float) -> None:
        for name, is_ready, why in verdicts:
            worker = self._workers.get(name)
            if worker is None or worker.info is None or worker.phase != "starting":
                continue
            if is_ready:
                self._out.append(events.Proven(name, worker.info.incarnation))
                self._ready(worker, worker.info, now)
            else:
                worker.fault("failed", why, now)

    def _misfit(self, worker: Worker, info: WorkerInfo) -> str | None:
        """Reason why a worker cannot work with the other present ones, or None. During a rollout that replaces all
        workers it must work with those of its own configuration."""
        candidate, rollout = replace(worker, config_hash=info.config_hash), self._desired.rollout
        others = (
            other.info
            for other in self._workers.values()
            if other is not worker
            and other.model == worker.model
            and (other.is_member or other.phase == "starting")
            and (rollout is None or rollout.fits(candidate, other))
        )
        return misfit(info, [other for other in others if other is not None])

    def _on_start_failed(self, name: WorkerId, error: str, start_id: str, now: float) -> None:
        worker = self._workers.get(name)
        if worker is not None and worker.phase in ("starting", "lost", "failed") and worker.is_latest_start(start_id):
            worker.fault("failed", error, now)

    def _on_left(self, event: events.WorkerLeft, now: float) -> None:
        worker = self._workers.get(event.worker_id)
        if worker is not None and worker.phase in ("ready", "starting") and worker.is_current(event.incarnation):
            worker.enter("lost", due=now + self._settings.lost_grace_s)
            worker.detail = "its connection to the controller broke"

    def _on_hung(self, event: events.WorkerHung, now: float) -> None:
        worker = self._workers.get(event.worker_id)
        if worker is None or not worker.is_current(event.incarnation):
            return
        if worker.phase in ("ready", "starting"):
            worker.enter("lost", due=now + self._settings.lost_grace_s)
        worker.detail, worker.was_killed = f"it {event.why} and was killed", True

    def _on_stopped(self, name: WorkerId, now: float) -> None:
        """Handle the end of a process: it is started again if it is desired. Processes that an earlier controller left
        in other pools have no record."""
        worker = self._workers.get(name)
        if worker is None:
            return
        assert worker.phase == "stopping", f"{name} is {worker.phase}"
        worker.info = None
        if worker.index < self.sizes.get(worker.pool, 0):
            self._start(worker, now)
        else:
            del self._workers[worker.worker_id]

    def _on_exited(self, process: str, why: str, now: float) -> None:
        if process in self._gateways.own:
            self._gateways.exited(process, why, now)
            return
        worker = self._workers.get(WorkerId(process))
        if worker is None:
            return
        if worker.phase == "draining":
            self._stop(worker)
        elif worker.phase in ("ready", "lost"):
            worker.fault("lost", worker.detail if worker.was_killed else why, now)
        elif worker.phase == "starting":
            worker.fault("failed", why, now)

    # ------------------------------------------------------------ time

    def _expire(self, now: float) -> None:
        for worker in self._workers.values():
            if worker.due is None or worker.due > now:
                continue
            if worker.phase == "lost" and worker.info is not None:  # it never came back
                worker.num_faults += 1
            self._stop(worker)
        self._out += [events.StopGateway(name) for name in self._gateways.expire(now)]
        is_waiting = any(
            worker.phase == "lost" or (worker.phase == "starting" and worker.info is not None)
            for worker in self._workers.values()
        )
        if self._adopting_until is not None and (self._adopting_until <= now or not is_waiting):
            self._adopting_until = None

    def _roll(self, now: float) -> None:
        if self._adopting_until is not None:
            return
        turn, commands = self._desired.roll(self._workers, self._gateways.serve, now)
        self._out += commands
        for worker in turn:
            worker.num_faults, worker.unready_since = 0, None
            if worker.phase == "ready":
                self._drain(worker, now)
            else:
                self._stop(worker)

    # ------------------------------------------------------------ reconcile

    def _reconcile(self, now: float) -> None:
        sizes = self.sizes
        for pool, size in sizes.items():
            for index in range(size):
                name = worker_id(pool, index)
                if name not in self._workers and not self._waits_for_stage(pool, index):
                    self._workers[name] = Worker(name, pool, index)
                    self._start(self._workers[name], now)
        surplus = [worker for worker in self._workers.values() if worker.index >= sizes[worker.pool]]
        for worker in sorted(surplus, key=lambda w: w.index, reverse=True):
            if worker.phase in ("ready", "lost") and worker.info is not None and worker.is_proven:
                self._drain(worker, now)
            elif worker.phase in ("starting", "lost", "failed"):
                self._stop(worker)
        for worker in self._workers.values():
            if worker.phase == "draining" and self._is_empty(worker):
                self._stop(worker)

    def _waits_for_stage(self, pool: PoolName, index: int) -> bool:
        """Whether a place that the new configuration does not have may be over already: a new controller knows the
        progress of the rollout only after the running workers have registered."""
        rollout = self._desired.rollout
        return rollout is not None and self._adopting_until is not None and index >= rollout.plan.new.sizes.get(pool, 0)

    def _start(self, worker: Worker, now: float) -> None:
        if worker.phase != "starting":
            worker.enter("starting")
        worker.config_hash = self._desired.config_hash(worker)
        if worker.unready_since is None:
            worker.unready_since = now
        worker.num_starts += 1
        worker.is_proven = False
        self._num_starts += 1
        worker.start_id = f"{self._controller_id}.{self._num_starts}"
        self._out.append(
            events.StartWorker(worker.worker_id, worker.pool, worker.index, worker.start_id, worker.config_hash)
        )

    def _resume_drains(self, now: float) -> None:
        """Continue the drains of an earlier controller. A process that is neither registered nor expected is
        forgotten."""
        for name, incarnation in sorted(self._drains):
            worker = self._workers.get(name)
            if worker is not None and worker.phase == "ready" and worker.is_current(incarnation):
                self._drain(worker, now)
            elif worker is not None and (
                (worker.phase == "lost" and worker.info is None)
                or (worker.phase in ("lost", "starting") and worker.is_current(incarnation))
            ):
                continue  # it may register yet, or is probed again
            self._drains.discard((name, incarnation))

    def _drain(self, worker: Worker, now: float, deadline_s: float | None = None) -> None:
        limit_s = self._desired.drain_timeout_s if deadline_s is None else deadline_s
        worker.enter("draining", due=now + limit_s)

    def _stop(self, worker: Worker) -> None:
        worker.enter("stopping")
        self._to_stop.append(worker.worker_id)
        self._probes.forget(worker.worker_id)
        self._gateways.forget_worker(worker.worker_id)

    def _is_empty(self, worker: Worker) -> bool:
        """Whether no gateway has requests on the worker."""
        return worker.info is None or self._gateways.are_done_with(worker.worker_id, worker.info.incarnation)

    def _reconcile_gateways(self, now: float) -> None:
        starts = self._gateways.begin_due(self._desired.target.sizes, self._workers.values(), now)
        ready = tuple(w.info for w in self._workers.values() if w.phase == "ready" and w.info is not None)
        self._out += [events.StartGateway(ready, address, http_address, name) for name, address, http_address in starts]

    def _publish(self, now: float) -> None:
        if self._adopting_until is not None:
            return
        change = self._published.update(
            [
                Member(info=worker.info, state="draining" if worker.phase == "draining" else "ready")
                for worker in self._workers.values()
                if worker.is_member and worker.info is not None
            ]
        )
        behind = self._gateways.behind()
        if change is not None or behind:
            self._out.append(events.Publish(change, behind))
        self._expect(now, is_anew=bool(behind))

    def _expect(self, now: float, *, is_anew: bool) -> None:
        """Tell gateways to wait for the workers that are starting, if these have changed."""
        longest: dict[PoolName, float] = {}
        for worker in self._workers.values():
            if worker.start_s is not None:
                longest[worker.pool] = max(worker.start_s, longest.get(worker.pool, 0.0))
        for worker in self._workers.values():
            is_desired = worker.index < self.sizes.get(worker.pool, 0)
            worker.expect(longest.get(worker.pool, USUAL_START_S), now, is_desired=is_desired)
        before, self._expected = (
            self._expected,
            {name: worker.expected_at for name, worker in self._workers.items() if worker.expected_at is not None},
        )
        if self._expected != before or (is_anew and before):
            self._out.append(events.Expect({name: max(0.0, at - now) for name, at in self._expected.items()}))
