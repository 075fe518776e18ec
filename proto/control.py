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
from disagg.proto.messages import Adapter, Message, WorkerInfo

HEARTBEAT_S = 0.5
"""Interval of the heartbeats of workers and gateways."""
MAX_POOL_SIZE = 1024
PoolKind = Literal["prefill", "decode", "colocated", "workers"]
PoolName = str
"""Name of a pool: its kind, and where the cluster has several models the key of one before it, such as `qwen/decode`.
"""
MemberState = Literal["ready", "draining"]
WorkerPhase = Literal["starting", "ready", "draining", "stopping", "lost", "failed"]
"""Phase of a worker. `lost`: it was ready, its stream or its process ended, and it is expected back or started again.
`failed`: its start failed; it is tried again."""
GatewayPhase = Literal["starting", "ready", "stopping", "lost", "failed"]
"""Phase of a gateway, with the meanings of `WorkerPhase`; a gateway is not drained."""


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
    """The start that failed, as in `WorkerInfo.start_id`."""


class WorkerStarting(Message, frozen=True, kw_only=True, tag=True):
    """The worker has been starting for a while. The answer ends at once."""

    worker_id: WorkerId
    doing: str
    """What the worker is doing, as text for operators."""
    start_id: str = ""
    """The start that is under way, as in `WorkerInfo.start_id`."""


class WorkerHeartbeat(Message, frozen=True, kw_only=True, tag=True):
    """A heartbeat of a worker, periodically after its hello."""

    turn_s: float = 0.0
    """Time for which its engine has been in its present turn, or has waited for a copy of KV, in seconds; 0 where it
    waits for nothing of its own."""
    expected_s: float = 0.0
    """Predicted duration of that turn in seconds; 0 where no turn lasts long."""
    doing: str = ""
    """What takes that long, for the log; empty for a step."""


WorkerToController = WorkerHello | WorkerFailed | WorkerStarting | WorkerHeartbeat


class WorkerWelcome(Message, frozen=True, kw_only=True, tag=True):
    """The controller registered the worker."""


class WorkerProven(Message, frozen=True, kw_only=True, tag=True):
    """A probe went through the worker, and it counts as ready. The worker remembers this for the next controller."""


class ForgetTenants(Message, frozen=True, kw_only=True, tag=True):
    """Drop the KV that is kept of these tenants and that no sequence uses, and delete its files. Sent behind the
    welcome to a worker that may have missed it, and to all that are registered."""

    tenant_tags: tuple[bytes, ...]


class WorkerRejected(Message, frozen=True, kw_only=True, tag=True):
    """The controller did not request this worker (any more), or it does not fit the others: its process should end."""

    reason: str


ControllerToWorker = WorkerWelcome | WorkerProven | ForgetTenants | WorkerRejected


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
    """host:port of its HTTP server; empty where it serves none."""
    draining: tuple[WorkerIncarnation, ...] = ()
    """The workers that it drains because an earlier controller asked for it."""
    name: str = "gateway"
    """Name of the gateway's process."""
    own_address: str = ""
    """host:port where only this gateway listens too, if several gateways share one address; else empty."""
    own_http_address: str = ""
    """host:port where only this gateway serves HTTP too, if several gateways share one address; else empty."""


class GatewayFailed(Message, frozen=True, kw_only=True, tag=True):
    """The gateway could not start; its process is about to end. The only message of the stream."""

    gateway_id: GatewayId
    error: str
    name: str = "gateway"


class GatewayCounts(Message, frozen=True, kw_only=True):
    """Counts of one gateway, which are sent to the views of all gateways."""

    num_queued: int
    num_running: int
    stages: dict[str, int]
    """Number of requests by what they wait for."""
    slos: dict[str, tuple[int, int]]
    """Counts of the last minute by target: (requests that met it, requests that had it)."""
    requests_per_s: float
    output_tokens_per_s: float


class WorkerDrained(Message, frozen=True, kw_only=True, tag=True):
    """The gateway has no request left on that draining worker."""

    worker_id: WorkerId
    incarnation: Incarnation


class GatewayHeartbeat(Message, frozen=True, kw_only=True, tag=True):
    """A heartbeat of a gateway. Sent periodically: on the stream of its hello by its event loop, and, with all fields,
    on a stream of their own by a thread."""

    gateway_id: GatewayId = GatewayId("")
    pid: int = 0
    turn_s: float = 0.0
    """Time for which its event loop has been in its present turn, in seconds."""
    doing: str = ""
    """What the event loop does in that turn, as sampled; for the log."""
    name: str = "gateway"
    counts: GatewayCounts | None = None
    """Counts of the gateway; only on the stream of its hello, and only where there are several gateways."""


class MembershipRequest(Message, frozen=True, kw_only=True, tag=True):
    """The gateway missed a change of the membership, and requests all of it."""


class SettingsFollowed(Message, frozen=True, kw_only=True, tag=True):
    """The gateway does what `GatewaySettings` of that generation say. A model that it cannot load is not served, which
    is in its log."""

    generation: int


class AdaptersFollowed(Message, frozen=True, kw_only=True, tag=True):
    """The gateway serves the adapters of that `ServedAdapters`, and no others."""

    revision: int


GatewayToController = (
    GatewayHello
    | GatewayFailed
    | WorkerDrained
    | GatewayHeartbeat
    | MembershipRequest
    | SettingsFollowed
    | AdaptersFollowed
    | LoadReport
)


class Member(Message, frozen=True, kw_only=True):
    """One worker of the cluster."""

    info: WorkerInfo
    state: MemberState


class Membership(Message, frozen=True, kw_only=True, tag=True):
    """The complete list of workers, which replaces the previous one."""

    members: tuple[Member, ...]
    source: str = ""
    """Name of the list that the revision belongs to; each controller has its own."""
    revision: int = 0
    """Number of changes of the list so far."""


class MembershipChange(Message, frozen=True, kw_only=True, tag=True):
    """The difference between the membership and its previous revision."""

    source: str
    revision: int
    """Revision of the list after this change."""
    changed: tuple[Member, ...] = ()
    """Workers that are new or have changed."""
    removed: tuple[WorkerId, ...] = ()


class GatewaySettings(Message, frozen=True, kw_only=True, tag=True):
    """Settings that a gateway applies from now on, without a restart."""

    generation: int
    """Generation of the configuration that contains these settings; answered with `SettingsFollowed`."""
    routers: bytes
    """The `RouterConfig` of each model, by its key, as JSON; the key is empty where there is one."""
    models: bytes
    """The `ModelSource` of each model that is to be served, as JSON."""
    load_every_s: float | None
    """Seconds between two load reports for the autoscaler; None without one."""


class ExpectedWorkers(Message, frozen=True, kw_only=True, tag=True):
    """The complete list of workers that are starting or are about to, which replaces the previous one."""

    in_s: dict[WorkerId, float]
    """Seconds until each worker is expected to be ready, counted from when the message is sent."""


class ServedAdapter(Message, frozen=True, kw_only=True):
    """An adapter that requests may name."""

    model: str
    """Key of its base model; empty where there is one."""
    adapter: Adapter
    num_bytes: int = 0
    """Bytes of its tensors."""


class ServedAdapters(Message, frozen=True, kw_only=True, tag=True):
    """The complete list of adapters that are served, which replaces the previous one."""

    adapters: tuple[ServedAdapter, ...]
    revision: int
    """Number of the list; answered with `AdaptersFollowed`."""


ControllerToGateway = (
    Membership | MembershipChange | ExpectedWorkers | AutoscalerState | GatewaySettings | ServedAdapters
)


# ---------------------------------------------------------------- operator -> controller


class ScaleRequest(Message, frozen=True, kw_only=True, tag=True):
    """Set the desired sizes of these pools. Answered as soon as it is noted."""

    sizes: dict[PoolName, int]


class DrainRequest(Message, frozen=True, kw_only=True, tag=True):
    """Replace this worker by a new incarnation, after its sequences have moved to others or ended. Answered at once."""

    worker_id: WorkerId
    deadline_s: float | None = None
    """Seconds after which its remaining requests are retried on other workers; None for `controller.drain_timeout_s`.
    """


class ForgetRequest(Message, frozen=True, kw_only=True, tag=True):
    """Have all workers drop the KV of a tenant, those that do not run before they serve again. Answered as soon as it
    is noted."""

    tenant_tag: bytes


class ApplyRequest(Message, frozen=True, kw_only=True, tag=True):
    """Give the cluster another configuration. Answered with `ApplyReply` as soon as it is noted."""

    config: bytes
    """The `ClusterConfig` as JSON."""
    dry_run: bool = False
    """Whether only to report what would be done."""
    surge: bool = True
    """Whether each pool has one worker more while its workers are replaced; else it has one less."""
    restart: bool = False
    """Whether to replace all workers even where nothing differs: for new weights or code at the old path."""
    ready_timeout_s: float = 300.0
    """How long a new worker may take to be ready, before the old configuration is restored."""


class StateRequest(Message, frozen=True, kw_only=True, tag=True):
    """Ask for the state of the cluster, a `ControlState`."""


class AddAdapter(Message, frozen=True, kw_only=True, tag=True):
    """Serve an adapter, or the present content of its folder under a name that is served. Answered with `AdapterList`,
    once all ready workers of its model have loaded it and the gateways serve it."""

    name: str
    path: str
    """Its folder below `adapters.folder`."""
    base: str = ""
    """Name of its base model; empty for the only one that takes adapters."""
    replaces: bool = True
    """Whether an adapter of that name is replaced; else it is an error."""


class RemoveAdapter(Message, frozen=True, kw_only=True, tag=True):
    """Serve an adapter no more. Sequences that run end with it. Answered with `AdapterList`, once no gateway serves
    it."""

    name: str


class ListAdapters(Message, frozen=True, kw_only=True, tag=True):
    """Ask for all adapters, an `AdapterList`."""


AdapterRequest = AddAdapter | RemoveAdapter | ListAdapters
ControlRequest = (
    ScaleRequest
    | DrainRequest
    | ForgetRequest
    | ApplyRequest
    | StateRequest
    | AddAdapter
    | RemoveAdapter
    | ListAdapters
)


class PoolState(Message, frozen=True, kw_only=True):
    """Desired and observed size of one pool."""

    name: PoolName
    desired: int
    ready: int


class WorkerRecord(Message, frozen=True, kw_only=True):
    """One worker that is in the cluster, or is going to be."""

    worker_id: WorkerId
    pool: PoolName
    phase: WorkerPhase
    info: WorkerInfo | None = None
    """Information about its present incarnation."""
    num_starts: int = 0
    detail: str = ""
    """Reason why it was last lost or failed."""


class GatewayRecord(Message, frozen=True, kw_only=True):
    """A gateway that is connected to the controller, or is going to be."""

    gateway_id: GatewayId
    """Id of the gateway; empty until it is connected."""
    address: str
    """host:port for clients; empty until it is connected."""
    pid: int
    http_address: str = ""
    """host:port of its HTTP server; empty where it serves none."""
    phase: GatewayPhase = "ready"
    detail: str = ""
    """Reason why it was last lost or failed."""
    name: str = "gateway"
    """Name of the gateway's process."""
    own_address: str = ""
    """host:port where only this gateway listens too, if several gateways share one address."""
    own_http_address: str = ""
    """host:port where only this gateway serves HTTP too, if several gateways share one address."""
    counts: GatewayCounts | None = None
    """The latest counts of the gateway, where there are several."""


class RolloutState(Message, frozen=True, kw_only=True):
    """Progress of the rollout of a configuration."""

    generation: int
    """Generation that is being applied."""
    previous: int
    stage: str
    """`canary`: the first new workers start; `rolling`: other workers are replaced; `finishing`: workers beyond the new
    sizes leave."""
    num_done: int
    """Workers that have the new configuration and are ready."""
    num_workers: int
    """Workers that will have the new configuration."""
    running_s: float
    doing: str
    next: str
    is_back: bool = False
    """Whether this is a rollback: `previous` failed, and its workers are replaced by those of `generation`."""
    why: str = ""
    """Reason of the rollback: what failed."""


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
    """State of the autoscaler; None where it is not enabled."""
    generation: int = 1
    """Generation of the configuration: the number of configurations that were applied."""
    rollout: RolloutState | None = None
    """Progress of the configuration that is being applied; None while there is no rollout."""
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
    """The request cannot be carried out; nothing was changed."""

    field: str
    message: str
    is_missing: bool = False
    """Whether there is nothing of the name that the request has."""


class FieldChange(Message, frozen=True, kw_only=True):
    """One field in which the configuration differs, and what follows from that."""

    field: str
    """Path of the field in the file."""
    before: str
    after: str
    how: Literal["in place", "replaces workers", "no effect", "refused"]
    detail: str = ""
    """The pools whose workers are replaced, or the reason of the refusal."""


class ApplyReply(Message, frozen=True, kw_only=True, tag=True):
    """The changes that are being made, or that would be made."""

    generation: int
    """Generation that is being applied; the present one where nothing differs, and in a dry run."""
    changes: tuple[FieldChange, ...]
    pools: tuple[PoolName, ...]
    """Pools that are added or removed, or whose workers are replaced."""


AdapterPhase = Literal["ready", "pending", "failed"]
"""Phase of an adapter. `pending`: the configuration has it, or another folder for it, and no worker has checked it yet;
`failed`: a worker refused it, and it is tried again."""


class AdapterRecord(Message, frozen=True, kw_only=True):
    """One adapter that is registered."""

    name: str
    path: str
    """Its folder below `adapters.folder`."""
    model: str
    """Key of its base model; empty where there is one."""
    base: str = ""
    """Name of its base model; filled where it is shown."""
    folder: str = ""
    """Value of `adapters.folder` by which it was added."""
    phase: AdapterPhase = "ready"
    detail: str = ""
    """Why it failed."""
    is_in_file: bool = False
    """Whether it is in the configuration; else an operator added it."""
    served: Adapter | None = None
    """What requests that name it get; the earlier content while another path fails. None before the first success."""
    num_bytes: int = 0
    """Bytes of its tensors."""


class AdapterList(Message, frozen=True, kw_only=True, tag=True):
    """All adapters that are registered, by name."""

    adapters: tuple[AdapterRecord, ...]
    notes: tuple[str, ...] = ()
    """What did not go as it should, though the request was carried out."""


ControlReply = ControlState | ControlRefused | ApplyReply | AdapterList
