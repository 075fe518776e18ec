"""Messages between the controller, which owns the membership of a cluster, and the processes that belong to it.

    worker   -> controller   Register   its address, or a failed start; the open stream is membership; heartbeats
    gateway  <- controller   Follow     all members once, then what changes; up: which draining workers are empty
    operator -> controller   Control    scale a pool, drain a worker, what is there

A worker that stays is a member for as long as its Register stream stands. Losing the controller ends neither workers
nor gateways: they go on serving with the last membership, and reconnect when it is back.
"""

from __future__ import annotations

from typing import Literal

from disagg.proto.autoscaling import AutoscalerState, LoadReport
from disagg.proto.ids import GatewayId, Incarnation, WorkerId
from disagg.proto.messages import Message, WorkerInfo

HEARTBEAT_S = 0.5
"""Interval of the heartbeats of workers and gateways."""
MAX_POOL_SIZE = 1024
PoolKind = Literal["prefill", "decode", "colocated", "workers"]
PoolName = str
"""A kind of pool; where the cluster has several models, with the key of one: `qwen/decode`."""
MemberState = Literal["ready", "draining"]
WorkerPhase = Literal["starting", "ready", "draining", "stopping", "lost", "failed"]
"""`lost`: it was there, its stream or its process ended, and it is expected back or started again. `failed`: its start
failed; it is tried again."""
GatewayPhase = Literal["starting", "ready", "stopping", "lost", "failed"]
"""As for workers; a gateway is not drained."""


# ---------------------------------------------------------------- worker -> controller


class WorkerHello(Message, frozen=True, kw_only=True, tag=True):
    """The worker listens and can be used. The answer stays open for as long as both live."""

    info: WorkerInfo
    is_proven: bool = False
    """Whether a controller sent `WorkerProven` to this process."""


class WorkerFailed(Message, frozen=True, kw_only=True, tag=True):
    """The worker could not start; its process is about to end. The answer ends at once."""

    worker_id: WorkerId
    error: str
    start_id: str = ""
    """As in `WorkerInfo`."""


class WorkerStarting(Message, frozen=True, kw_only=True, tag=True):
    """The worker has been starting for a while. The answer ends at once."""

    worker_id: WorkerId
    doing: str
    """For people to read."""
    start_id: str = ""
    """As in `WorkerInfo`."""


class WorkerHeartbeat(Message, frozen=True, kw_only=True, tag=True):
    """A heartbeat of a worker, periodically after its hello."""

    turn_s: float = 0.0
    """For how long its engine has been in its present turn; 0 where it waits."""
    expected_s: float = 0.0
    """For how long that was predicted to last; 0 where no turn lasts long."""


WorkerToController = WorkerHello | WorkerFailed | WorkerStarting | WorkerHeartbeat


class WorkerWelcome(Message, frozen=True, kw_only=True, tag=True):
    """The controller registered the worker."""


class WorkerProven(Message, frozen=True, kw_only=True, tag=True):
    """A probe went through the worker, and it counts as ready. It keeps that for the next controller."""


class WorkerRejected(Message, frozen=True, kw_only=True, tag=True):
    """The controller did not request this worker (any more), or it does not fit the others: its process should end."""

    reason: str


ControllerToWorker = WorkerWelcome | WorkerProven | WorkerRejected


# ---------------------------------------------------------------- gateway <-> controller


class WorkerIncarnation(Message, frozen=True, kw_only=True):
    """One start of a worker."""

    worker_id: WorkerId
    incarnation: Incarnation


class GatewayHello(Message, frozen=True, kw_only=True, tag=True):
    """A gateway follows the membership. Its first message."""

    gateway_id: GatewayId
    address: str
    """host:port of its public server; empty while it does not listen yet."""
    pid: int
    http_address: str = ""
    """The same of HTTP; empty where it serves none."""
    draining: tuple[WorkerIncarnation, ...] = ()
    """The workers that it drains on request of an earlier controller."""
    name: str = "gateway"
    """Of its process."""
    own_address: str = ""
    """With several gateways at one address: where only this one listens, too; empty with one."""
    own_http_address: str = ""
    """The same of HTTP."""


class GatewayFailed(Message, frozen=True, kw_only=True, tag=True):
    """The gateway could not start; its process is about to end. The only message of the stream."""

    gateway_id: GatewayId
    error: str
    name: str = "gateway"


class GatewayCounts(Message, frozen=True, kw_only=True):
    """What one gateway counts, for the views of all of them."""

    num_queued: int
    num_running: int
    stages: dict[str, int]
    """Requests by what they wait for."""
    slos: dict[str, tuple[int, int]]
    """Of the last minute: (requests that met it, requests that had it)."""
    requests_per_s: float
    output_tokens_per_s: float


class WorkerDrained(Message, frozen=True, kw_only=True, tag=True):
    """This gateway has nothing left on that draining worker."""

    worker_id: WorkerId
    incarnation: Incarnation


class GatewayHeartbeat(Message, frozen=True, kw_only=True, tag=True):
    """A heartbeat of a gateway. Sent periodically: on the stream of its hello by its event loop, and, with all fields,
    on a stream of their own by a thread."""

    gateway_id: GatewayId = GatewayId("")
    pid: int = 0
    turn_s: float = 0.0
    """For how long its event loop has been in its present turn."""
    doing: str = ""
    """What the loop does in it, as sampled, for the log."""
    name: str = "gateway"
    counts: GatewayCounts | None = None
    """On the stream of its hello, where there are several gateways."""


class MembershipRequest(Message, frozen=True, kw_only=True, tag=True):
    """The gateway missed a change of the membership, and requests all of it."""


class SettingsFollowed(Message, frozen=True, kw_only=True, tag=True):
    """The gateway does what `GatewaySettings` of that generation say. A model that it cannot load is not served, which
    is in its log."""

    generation: int


GatewayToController = (
    GatewayHello | GatewayFailed | WorkerDrained | GatewayHeartbeat | MembershipRequest | SettingsFollowed | LoadReport
)


class Member(Message, frozen=True, kw_only=True):
    """One worker of the cluster."""

    info: WorkerInfo
    state: MemberState


class Membership(Message, frozen=True, kw_only=True, tag=True):
    """All workers; replaces what was known."""

    members: tuple[Member, ...]
    source: str = ""
    """Names the list that the revision is of; another controller has another."""
    revision: int = 0
    """Counts the changes of the list."""


class MembershipChange(Message, frozen=True, kw_only=True, tag=True):
    """What became of the membership of the revision before."""

    source: str
    revision: int
    """After the change."""
    changed: tuple[Member, ...] = ()
    """Workers that came, or are not what they were."""
    removed: tuple[WorkerId, ...] = ()


class GatewaySettings(Message, frozen=True, kw_only=True, tag=True):
    """What a gateway is to do differently from now on, without a restart."""

    generation: int
    """Of the configuration that says so; answered with `SettingsFollowed`."""
    routers: bytes
    """The `RouterConfig` of each model, by its key, as JSON; the key is empty where there is one."""
    models: bytes
    """The `ModelSource` of each model that is to be served, as JSON."""
    load_every_s: float | None
    """Between two reports to an autoscaler; None without one."""


class ExpectedWorkers(Message, frozen=True, kw_only=True, tag=True):
    """The workers that are starting, or are about to; replaces what was known of them."""

    in_s: dict[WorkerId, float]
    """Seconds until each is expected to be ready, as the message is sent."""


ControllerToGateway = Membership | MembershipChange | ExpectedWorkers | AutoscalerState | GatewaySettings


# ---------------------------------------------------------------- operator -> controller


class ScaleRequest(Message, frozen=True, kw_only=True, tag=True):
    """Make pools this large from now on. Answered as soon as it is noted."""

    sizes: dict[PoolName, int]


class DrainRequest(Message, frozen=True, kw_only=True, tag=True):
    """Replace this worker by a new incarnation, after its sequences have moved to others or ended. Answered at once."""

    worker_id: WorkerId
    deadline_s: float | None = None
    """After so many seconds what is left of them is retried elsewhere; None for `controller.drain_timeout_s`."""


class ApplyRequest(Message, frozen=True, kw_only=True, tag=True):
    """Give the cluster another configuration. Answered with `ApplyReply` as soon as it is noted."""

    config: bytes
    """`ClusterConfig` as JSON."""
    dry_run: bool = False
    """Only say what would be done."""
    surge: bool = True
    """Whether each pool has one worker more while its workers are replaced; without, one less."""
    restart: bool = False
    """Replace all workers, also where nothing differs: for new weights or code in the old place."""
    ready_timeout_s: float = 300.0
    """How long a new worker may take to be ready, before the old configuration is restored."""


class StateRequest(Message, frozen=True, kw_only=True, tag=True):
    """What is there."""


ControlRequest = ScaleRequest | DrainRequest | ApplyRequest | StateRequest


class PoolState(Message, frozen=True, kw_only=True):
    """One pool: desired and observed."""

    name: PoolName
    desired: int
    ready: int


class WorkerRecord(Message, frozen=True, kw_only=True):
    """One worker that is, or is to be, in the cluster."""

    worker_id: WorkerId
    pool: PoolName
    phase: WorkerPhase
    info: WorkerInfo | None = None
    """Of its present incarnation."""
    num_starts: int = 0
    detail: str = ""
    """Why it was lost or failed, the last time."""


class GatewayRecord(Message, frozen=True, kw_only=True):
    """A gateway that follows, or that is to."""

    gateway_id: GatewayId
    """Empty until it follows."""
    address: str
    """host:port for clients; empty until it follows."""
    pid: int
    http_address: str = ""
    """The same of HTTP; empty where it serves none."""
    phase: GatewayPhase = "ready"
    detail: str = ""
    """Why it was lost or failed, the last time."""
    name: str = "gateway"
    """Of its process."""
    own_address: str = ""
    """With several gateways at one address: where only this one listens, too."""
    own_http_address: str = ""
    """The same of HTTP."""
    counts: GatewayCounts | None = None
    """Its latest, where there are several gateways."""


class RolloutState(Message, frozen=True, kw_only=True):
    """How far the way to another configuration is."""

    generation: int
    """That is being applied."""
    previous: int
    stage: str
    """`canary`: the first new workers start; `rolling`: others are replaced; `finishing`: workers that stood in leave.
    """
    num_done: int
    """Workers that have the new configuration and are ready."""
    num_workers: int
    """Workers that are to have it."""
    running_s: float
    doing: str
    next: str
    is_back: bool = False
    """Whether `previous` failed, and its workers are replaced by those of `generation`."""
    why: str = ""
    """It failed."""


class RolledBack(Message, frozen=True, kw_only=True):
    """A configuration that could not be applied."""

    generation: int
    why: str


class ControlState(Message, frozen=True, kw_only=True, tag=True):
    """The controller's state of the cluster."""

    pools: tuple[PoolState, ...]
    workers: tuple[WorkerRecord, ...]
    gateways: tuple[GatewayRecord, ...]
    autoscaler: AutoscalerState | None = None
    """None where it is not enabled."""
    generation: int = 1
    """Of the configuration; counts those that were applied."""
    rollout: RolloutState | None = None
    """Of the configuration that is being applied."""
    rolled_back: RolledBack | None = None
    """The configuration that was requested last, where it could not be applied."""

    @property
    def is_settled(self) -> bool:
        """Whether every pool has its desired size and configuration, and each gateway serves."""
        serving = {g.name for g in self.gateways if g.phase == "ready"}
        sizes_met = all(pool.ready == pool.desired for pool in self.pools)
        return (
            self.rollout is None
            and sizes_met
            and all(w.phase == "ready" for w in self.workers)
            and bool(serving)
            and all(g.name in serving for g in self.gateways)
        )


class ControlRefused(Message, frozen=True, kw_only=True, tag=True):
    """The request cannot be followed; nothing was changed."""

    field: str
    message: str


class FieldChange(Message, frozen=True, kw_only=True):
    """What becomes of one field in which the configuration differs."""

    field: str
    """Its path in the file."""
    before: str
    after: str
    how: Literal["in place", "replaces workers", "no effect", "refused"]
    detail: str = ""
    """The pools whose workers are replaced; why it is refused."""


class ApplyReply(Message, frozen=True, kw_only=True, tag=True):
    """What is being done, or would be."""

    generation: int
    """That is being applied; the present one where nothing differs, or for a dry run."""
    changes: tuple[FieldChange, ...]
    pools: tuple[PoolName, ...]
    """Whose workers are replaced, or that come or go."""


ControlReply = ControlState | ControlRefused | ApplyReply
