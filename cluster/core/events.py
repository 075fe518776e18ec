"""Events that go into the controller's core, and commands that come out. Plain frozen data: the server makes the events
and executes the commands, in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from disagg.cluster.core.forgotten import Note
from disagg.cluster.core.gateways import GATEWAY
from disagg.cluster.core.probes import Probe
from disagg.cluster.core.rollout import Plan
from disagg.proto.control import MembershipChange, PoolName
from disagg.proto.ids import GatewayId, Incarnation, WorkerId
from disagg.proto.messages import WorkerInfo


@dataclass(frozen=True, slots=True)
class Scale:
    """An operator sets the desired sizes; already checked by `ControlCore.refusal`."""

    sizes: Mapping[PoolName, int]


@dataclass(frozen=True, slots=True)
class Forget:
    """An operator has the KV of a tenant dropped; the workers that are registered are told otherwise."""

    tenant_tag: bytes
    at_s: float
    """The time, in seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class Apply:
    """An operator gives the cluster another configuration; already checked by `ControlCore.refusal`."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Drain:
    """An operator has this worker replaced by a new process; already checked by `ControlCore.refusal`."""

    worker_id: WorkerId
    deadline_s: float | None = None
    """Seconds that it may drain; None for `Settings.drain_timeout_s`."""


@dataclass(frozen=True, slots=True)
class WorkerRegistered:
    """A worker listens. Answered with `Accept` or `Reject`."""

    info: WorkerInfo
    is_proven: bool = False
    """Whether that process was ready under any controller."""


@dataclass(frozen=True, slots=True)
class WorkerStartFailed:
    """A worker could not start, as itself or the launcher reported."""

    worker_id: WorkerId
    error: str
    start_id: str = ""
    """Id of the start that failed, as in `StartWorker`; if it is unknown it is empty, and stands for the latest
    start."""


@dataclass(frozen=True, slots=True)
class WorkerStarting:
    """A worker has been starting for a while."""

    worker_id: WorkerId
    doing: str
    """Text for operators about what it does."""
    start_id: str = ""
    """Id of the start, as in `WorkerStartFailed`."""


@dataclass(frozen=True, slots=True)
class WorkerLeft:
    """The connection to that process of a worker broke; the process may still run."""

    worker_id: WorkerId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class WorkerHung:
    """That process of a worker sends no heartbeats on a connection that stands; it is being killed."""

    worker_id: WorkerId
    incarnation: Incarnation
    why: str
    """Reason, which follows the worker's name in a sentence."""


@dataclass(frozen=True, slots=True)
class WorkersStopped:
    """The launcher ended these processes."""

    worker_ids: tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True)
class ProcessExited:
    """A process ended by itself and is not coming back. `name` as in `Launcher`."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class ProbeEnded:
    """The probe of that number, which `StartProbe` began, has ended."""

    number: int
    error: str = ""
    """Reason of the failure; empty for success."""
    is_refusal: bool = False
    """Whether it failed only because a worker had no room."""


@dataclass(frozen=True, slots=True)
class StartsPending:
    """All processes whose start was begun and that cannot run yet, with what they wait for, by name."""

    reasons: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class GatewayJoined:
    """A gateway serves and follows. Answered with `Publish`."""

    gateway_id: GatewayId
    address: str
    pid: int
    http_address: str = ""
    draining: tuple[tuple[WorkerId, Incarnation], ...] = ()
    """Workers that it drains, as an earlier controller published."""
    name: str = GATEWAY
    """Name of the gateway's process."""
    own_address: str = ""
    own_http_address: str = ""


@dataclass(frozen=True, slots=True)
class GatewayStartFailed:
    """A gateway could not start, as itself or the launcher reported."""

    error: str
    name: str = GATEWAY


@dataclass(frozen=True, slots=True)
class GatewayLeft:
    """The connection to a gateway broke; its process may still run."""

    gateway_id: GatewayId


@dataclass(frozen=True, slots=True)
class GatewayStopped:
    """The launcher ended that gateway's process."""

    name: str = GATEWAY


@dataclass(frozen=True, slots=True)
class MembershipMissed:
    """That gateway missed a change of the membership. Answered with `Publish`."""

    gateway_id: GatewayId


@dataclass(frozen=True, slots=True)
class SettingsFollowed:
    """That gateway serves the models of a generation."""

    gateway_id: GatewayId
    generation: int


@dataclass(frozen=True, slots=True)
class WorkerEmpty:
    """That gateway has no request left on that draining worker."""

    gateway_id: GatewayId
    worker_id: WorkerId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; due at `ControlCore.next_wakeup()`. The first one starts everything."""


Event = (
    Scale
    | Forget
    | Apply
    | Drain
    | WorkerRegistered
    | WorkerStartFailed
    | WorkerStarting
    | WorkerLeft
    | WorkerHung
    | WorkersStopped
    | ProcessExited
    | ProbeEnded
    | StartsPending
    | GatewayJoined
    | GatewayStartFailed
    | GatewayLeft
    | GatewayStopped
    | MembershipMissed
    | SettingsFollowed
    | WorkerEmpty
    | Tick
)


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Start a worker; a failure is reported as `WorkerStartFailed`."""

    worker_id: WorkerId
    pool: PoolName
    index: int
    start_id: str
    """Id of the start, different for each one by any controller; the process sends it when it registers."""
    config_hash: str = ""
    """Hash of the configuration of its pool to start it with; the process sends it, too."""


@dataclass(frozen=True, slots=True)
class StopWorkers:
    """End these processes; followed by `WorkersStopped`."""

    worker_ids: tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True)
class StartGateway:
    """Start a gateway for these workers; a failure is reported as `GatewayStartFailed`."""

    workers: tuple[WorkerInfo, ...]
    address: str
    """Address at which an earlier process of it listened, or another gateway listens; empty the first time."""
    http_address: str = ""
    """HTTP address of the same; empty the first time, and where it serves no HTTP."""
    name: str = GATEWAY


@dataclass(frozen=True, slots=True)
class StopGateway:
    """End that gateway's process; followed by `GatewayStopped`."""

    name: str = GATEWAY


@dataclass(frozen=True, slots=True)
class StartProbe:
    """Send a tiny request through new workers; followed by `ProbeEnded`."""

    probe: Probe


@dataclass(frozen=True, slots=True)
class Accept:
    """Confirm the registration of that process of a worker."""

    worker_id: WorkerId
    incarnation: Incarnation
    forget: tuple[Note, ...] = ()
    """Tenants whose KV it has to drop."""


@dataclass(frozen=True, slots=True)
class Proven:
    """Tell that process of a worker that it was ready; it remembers that for the next controller."""

    worker_id: WorkerId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Reject:
    """Refuse that process of a worker, which then ends."""

    worker_id: WorkerId
    incarnation: Incarnation
    reason: str


@dataclass(frozen=True, slots=True)
class Publish:
    """Send the change of the membership to gateways."""

    change: MembershipChange | None
    """The change for every gateway that is not in `snapshot_for`; None where nothing changed."""
    snapshot_for: tuple[GatewayId, ...] = ()
    """Gateways that joined or missed a change: they get the whole membership, `ControlCore.membership()`."""


@dataclass(frozen=True, slots=True)
class Expect:
    """Send all gateways the list of starting workers, after the membership."""

    in_s: Mapping[WorkerId, float]
    """Seconds until each worker is expected to be ready."""


@dataclass(frozen=True, slots=True)
class Save:
    """Save `ControlCore.saved()` for the next controller."""


@dataclass(frozen=True, slots=True)
class Configure:
    """Apply those settings of that generation that need no restart of a worker."""

    generation: int


Command = (
    Save
    | Configure
    | StartWorker
    | StopWorkers
    | StartGateway
    | StopGateway
    | StartProbe
    | Accept
    | Proven
    | Reject
    | Publish
    | Expect
)
