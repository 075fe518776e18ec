"""The gateways in the observed state: those that the controller starts, and all that follow. Pure.

absent ──StartGateway──> starting ──joined──> ready ──left, exited──> lost ──due──> stopping ──> absent
                            └──> failed ──due──────────────────────────────────────────^
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field

from disagg.cluster.control.backoff import next_start
from disagg.proto.control import GatewayPhase, GatewayRecord
from disagg.proto.ids import GatewayId, Incarnation, WorkerId

GATEWAY = "gateway"
"""The name of the first gateway that the controller starts, among the launcher's processes."""


def gateway_names(replicas: int) -> tuple[str, ...]:
    """Of the gateways that the controller starts: `gateway`, `gateway-1`, `gateway-2` ..."""
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
"""Phase -> those that may follow; None is absent."""


_NOT_KNOWN = GatewayId("")


@dataclass(slots=True)
class Follower:
    """A gateway that follows the membership."""

    gateway_id: GatewayId
    address: str
    pid: int
    http_address: str = ""
    name: str = GATEWAY
    own_address: str = ""
    own_http_address: str = ""
    empty: set[tuple[WorkerId, Incarnation]] = field(default_factory=set)
    """Draining workers on which none of its requests runs any more."""
    needs_snapshot: bool = True
    """Whether it is to get the whole membership: it got none yet, or missed a change."""

    def record(self) -> GatewayRecord:
        """For the cluster state that `disagg status` shows."""
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
    """Kept after its end: the next process listens there."""
    http_address: str = ""
    """As `address`."""
    own_address: str = ""
    own_http_address: str = ""
    pid: int = 0
    num_starts: int = 0
    num_faults: int = 0
    detail: str = ""
    due: float | None = None
    """When a lost or failed one is started anew."""
    ready_since: float = 0.0

    def enter(self, phase: GatewayPhase | None, *, due: float | None = None) -> None:
        """Enter `phase`; raises `ValueError` where the table forbids it, and changes nothing."""
        if phase not in TRANSITIONS[self.phase]:
            raise ValueError(f"{self.name}: {self.phase} -> {phase}")
        self.phase, self.due = phase, due

    def ready(self, follower: Follower, now: float) -> None:
        """It serves and follows."""
        self.enter("ready")
        self.gateway_id, self.pid = follower.gateway_id, follower.pid
        self.address, self.http_address = follower.address, follower.http_address
        self.own_address, self.own_http_address = follower.own_address, follower.own_http_address
        self.ready_since = now

    def fault(self, phase: GatewayPhase, why: str, now: float) -> None:
        """Its process failed; it is started again after a pause."""
        ready_for_s = now - self.ready_since if self.phase in ("ready", "lost") else None
        num_faults, pause_s = next_start(self.num_faults, ready_for_s)
        self.enter(phase, due=now + pause_s)
        self.num_faults, self.detail = num_faults, why

    def record(self) -> GatewayRecord:
        """For the cluster state that `disagg status` shows."""
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


def records(own: Collection[OwnGateway], followers: Collection[Follower]) -> tuple[GatewayRecord, ...]:
    """Those that the controller starts, once it has begun to, and others that follow."""
    were_started = any(gateway.phase is not None or gateway.num_starts for gateway in own)
    own_ids = {gateway.gateway_id for gateway in own}
    others = (follower for follower in followers if follower.gateway_id not in own_ids)
    return (
        *((gateway.record() for gateway in own) if were_started else ()),
        *(follower.record() for follower in others),
    )
