"""The gateways in the observed state: those that the controller starts, and all that are connected to it. Pure.

absent ──StartGateway──> starting ──joined──> ready ──left, exited──> lost ──due──> stopping ──> absent
                            └──> failed ──due──────────────────────────────────────────^
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from disagg.cluster.core.backoff import next_start
from disagg.cluster.core.workers import Worker, complete_models, num_ready
from disagg.proto.control import GatewayPhase, GatewayRecord, PoolName
from disagg.proto.ids import GatewayId, Incarnation, WorkerId

GATEWAY = "gateway"
"""Name of the first gateway that the controller starts, among the launcher's processes."""
INITIAL_POOLS_TIMEOUT_S = 20.0
"""Seconds that the gateway's first start waits for all workers of the pools, once there is one of each pool."""


def gateway_names(replicas: int) -> tuple[str, ...]:
    """Names of the gateways that the controller starts: `gateway`, `gateway-1`, `gateway-2` ..."""
    return (GATEWAY, *(f"{GATEWAY}-{index}" for index in range(1, replicas)))


def is_gateway(process: str) -> bool:
    """Whether a process of that name is a gateway; else it is a worker."""
    return re.fullmatch(rf"{GATEWAY}(-\d+)?", process) is not None


TRANSITIONS: dict[GatewayPhase | None, frozenset[GatewayPhase | None]] = {
    None: frozenset({"starting"}),
    "starting": frozenset({"ready", "failed"}),
    "ready": frozenset({"ready", "lost"}),
    "lost": frozenset({"ready", "lost", "stopping"}),
    "failed": frozenset({"ready", "failed", "stopping"}),
    "stopping": frozenset({None}),
}
"""Phases that may follow each phase; None is absent."""


_NOT_KNOWN = GatewayId("")


@dataclass(slots=True)
class Follower:
    """A gateway that is connected to the controller."""

    gateway_id: GatewayId
    address: str
    pid: int
    http_address: str = ""
    name: str = GATEWAY
    own_address: str = ""
    own_http_address: str = ""
    empty: set[tuple[WorkerId, Incarnation]] = field(default_factory=set)
    """Draining workers on which none of its requests runs any more."""
    generation: int = 0
    """Generation whose models it serves; 0 before it reports one."""
    needs_snapshot: bool = True
    """Whether it needs the whole membership: it got none yet, or missed a change."""

    def record(self) -> GatewayRecord:
        """Record for the cluster state that `disagg status` shows."""
        return GatewayRecord(
            gateway_id=self.gateway_id,
            address=self.address,
            pid=self.pid,
            http_address=self.http_address,
            name=self.name,
            own_address=self.own_address,
            own_http_address=self.own_http_address,
        )


@dataclass(slots=True)
class OwnGateway:
    """A gateway that the controller starts. Owner: the controller's core."""

    name: str = GATEWAY
    phase: GatewayPhase | None = None
    gateway_id: GatewayId = _NOT_KNOWN
    address: str = ""
    """Address of the gateway, kept after its end: the next process listens there."""
    http_address: str = ""
    """HTTP address of the gateway, also kept."""
    own_address: str = ""
    own_http_address: str = ""
    pid: int = 0
    num_starts: int = 0
    num_faults: int = 0
    detail: str = ""
    due: float | None = None
    """Time at which a lost or failed gateway is started again."""
    ready_since: float = 0.0

    def enter(self, phase: GatewayPhase | None, *, due: float | None = None) -> None:
        """Enter `phase`; raises `ValueError` where the table forbids it, and changes nothing."""
        if phase not in TRANSITIONS[self.phase]:
            raise ValueError(f"{self.name}: {self.phase} -> {phase}")
        self.phase, self.due = phase, due

    def ready(self, follower: Follower, now: float) -> None:
        """Note that its process is connected and serves."""
        self.enter("ready")
        self.gateway_id, self.pid = follower.gateway_id, follower.pid
        self.address, self.http_address = follower.address, follower.http_address
        self.own_address, self.own_http_address = follower.own_address, follower.own_http_address
        self.ready_since = now

    def fault(self, phase: GatewayPhase, why: str, now: float) -> None:
        """Note that its process failed; it is started again after a pause."""
        ready_for_s = now - self.ready_since if self.phase in ("ready", "lost") else None
        num_faults, pause_s = next_start(self.num_faults, ready_for_s)
        self.enter(phase, due=now + pause_s)
        self.num_faults, self.detail = num_faults, why

    def record(self) -> GatewayRecord:
        """Record for the cluster state that `disagg status` shows."""
        is_ready = self.phase == "ready"
        return GatewayRecord(
            gateway_id=self.gateway_id,
            address=self.address if is_ready else "",
            http_address=self.http_address if is_ready else "",
            pid=self.pid,
            name=self.name,
            own_address=self.own_address if is_ready else "",
            own_http_address=self.own_http_address if is_ready else "",
            phase=self.phase or "starting",
            detail=self.detail,
        )


class Gateways:
    """All gateways. Owner of their records; a part of the controller's core.

    Args:
        replicas: number of gateways that the controller starts.
    """

    def __init__(self, replicas: int) -> None:
        self.own = {name: OwnGateway(name) for name in gateway_names(replicas)}
        self.followers: dict[GatewayId, Follower] = {}
        self._enough_since: float | None = None
        """Time since which enough workers are ready for a gateway to serve."""

    @property
    def were_started(self) -> bool:
        """Whether any gateway was ever started."""
        return any(gateway.num_starts for gateway in self.own.values())

    @property
    def absent(self) -> list[OwnGateway]:
        """Gateways that are to be started."""
        return [gateway for gateway in self.own.values() if gateway.phase is None]

    def adopt(self, running: Collection[str], due: float) -> None:
        """Give the gateways that an earlier controller started until `due` to come back."""
        for name in [name for name in self.own if name in running]:
            self.own[name] = OwnGateway(name, "lost", num_starts=1, due=due)

    def joined(self, follower: Follower, now: float) -> None:
        """Note that a gateway is connected and serves."""
        self.followers[follower.gateway_id] = follower
        own = self.own.get(follower.name)
        if own is not None and own.phase not in (None, "stopping"):
            own.ready(follower, now)

    def failed(self, name: str, error: str, now: float) -> None:
        """Note that the start of a gateway failed."""
        own = self.own.get(name)
        if own is not None and own.phase in ("starting", "lost"):
            own.fault("failed" if own.phase == "starting" else "lost", error, now)

    def exited(self, name: str, why: str, now: float) -> None:
        """Note that a gateway's process ended by itself."""
        own = self.own[name]
        if own.phase in ("starting", "ready", "lost"):
            own.fault("failed" if own.phase == "starting" else "lost", why, now)

    def left(self, gateway_id: GatewayId, due: float) -> None:
        """Note that a gateway's connection broke; it may come back until `due`."""
        self.followers.pop(gateway_id, None)
        for gateway in self.own.values():
            if gateway.phase == "ready" and gateway.gateway_id == gateway_id:
                gateway.enter("lost", due=due)
                gateway.detail = "its connection to the controller broke"

    def next_due(self) -> float | None:
        """Time at which `expire` or `begin_due` may have something new to do."""
        dues = [gateway.due for gateway in self.own.values()]
        if self._enough_since is not None and self.absent:
            dues.append(self._enough_since + INITIAL_POOLS_TIMEOUT_S)
        return min((due for due in dues if due is not None), default=None)

    def expire(self, now: float) -> list[str]:
        """Names of the gateways whose time is over, and that are to be stopped."""
        over = [gateway for gateway in self.own.values() if gateway.due is not None and gateway.due <= now]
        for gateway in over:
            gateway.enter("stopping")
        return [gateway.name for gateway in over]

    def begin_due(
        self, sizes: Mapping[PoolName, int], workers: Collection[Worker], now: float
    ) -> list[tuple[str, str, str]]:
        """Begin the gateways that are absent and due; returns their names and addresses, as from `begin`.

        Args:
            sizes: the desired sizes. The first start waits for a worker of each pool, and for a while for all of them;
                one that is started again serves the models that are complete.
            workers: all of them.
            now: the time.
        """
        absent, were_started = self.absent, self.were_started
        if not absent:
            return []
        can_serve = (any if were_started else all)(complete_models(sizes, workers))
        if not can_serve or not any(worker.phase == "ready" for worker in workers):
            self._enough_since = None
            return []
        if self._enough_since is None:
            self._enough_since = now
        is_full = all(num_ready(workers, pool) >= size for pool, size in sizes.items())
        if not (is_full or were_started or now >= self._enough_since + INITIAL_POOLS_TIMEOUT_S):
            return []
        begun = ((gateway.name, self.begin(gateway)) for gateway in absent)
        return [(name, *addresses) for name, addresses in begun if addresses is not None]

    def begin(self, gateway: OwnGateway) -> tuple[str, str] | None:
        """Enter `starting`, and return the addresses to listen at, empty where the process may choose. All listen at
        one address, which the first one may choose: None for others before it is known."""
        known = next((other for other in (gateway, *self.own.values()) if other.address), None)
        if known is None and gateway.name != GATEWAY:
            return None
        gateway.enter("starting")
        gateway.num_starts += 1
        return (known.address, known.http_address) if known is not None else ("", "")

    def behind(self) -> tuple[GatewayId, ...]:
        """Gateways that are to get the whole membership now."""
        found = [follower for follower in self.followers.values() if follower.needs_snapshot]
        for follower in found:
            follower.needs_snapshot = False
        return tuple(follower.gateway_id for follower in found)

    def serve(self, generation: int) -> bool:
        """Whether all connected gateways serve the models of a generation."""
        return all(follower.generation == generation for follower in self.followers.values())

    def are_done_with(self, worker_id: WorkerId, incarnation: Incarnation) -> bool:
        """Whether no gateway has requests on that draining worker. One that is not connected may have some."""
        is_lost = any(gateway.phase == "lost" for gateway in self.own.values())
        return not is_lost and all((worker_id, incarnation) in f.empty for f in self.followers.values())

    def forget_worker(self, worker_id: WorkerId) -> None:
        """Forget the reports about a worker's process, which ends."""
        for follower in self.followers.values():
            follower.empty = {key for key in follower.empty if key[0] != worker_id}

    def records(self) -> tuple[GatewayRecord, ...]:
        """Records of the gateways that the controller has begun to start, and of others that are connected."""
        own = self.own.values()
        were_started = any(gateway.phase is not None or gateway.num_starts for gateway in own)
        own_ids = {gateway.gateway_id for gateway in own}
        others = (follower for follower in self.followers.values() if follower.gateway_id not in own_ids)
        return (
            *((gateway.record() for gateway in own) if were_started else ()),
            *(follower.record() for follower in others),
        )
