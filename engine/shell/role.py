"""The interface between a worker and its roles (prefill, decode).

A worker owns the engine thread, the server and the sessions with gateways; a role owns its attempts. All calls come on
the asyncio thread. After each call that may have produced something for a gateway the worker flushes the outbox.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from disagg.connections.cluster_secret import ClusterSecret
from disagg.engine.commands import Command, Event, FetchOrdered
from disagg.engine.config import WorkerConfig
from disagg.engine.core.outbox import Outbox
from disagg.engine.parallel.interfaces import Followers
from disagg.engine.plan import Buffer
from disagg.engine.shell.parts import WorkerParts
from disagg.proto.ids import AttemptKey, GatewayId
from disagg.proto.messages import Dispatch, Migrate, PeerRef, RoleName, TransferCount, WorkerInfo


class RoleContext(Protocol):
    """What a role may use of its worker."""

    config: WorkerConfig
    cluster_secret: ClusterSecret
    """Secret for calls to other workers."""
    outbox: Outbox
    parts: WorkerParts
    """What pairs are made of."""

    @property
    def followers(self) -> Followers:
        """The other ranks of this worker, which pairs need."""
        ...

    @property
    def info(self) -> WorkerInfo:
        """What the worker registers; complete once the server is bound."""
        ...

    def post(self, command: Command) -> None:
        """Queue a command for the engine."""
        ...

    def new_staging(self, nbytes: int) -> Buffer:
        """A staging buffer of the kind that the runner gathers into and scatters from."""
        ...

    @property
    def digests(self) -> bool:
        """Whether the device computes digests of KV that goes through memory of the host, see `PairHello.digests`."""
        ...

    def now(self) -> float:
        """This process's monotonic clock."""
        ...

    def call_soon(self, callback: Callable[..., None], *args: Any) -> None:
        """Run `callback(*args)` on the asyncio thread and flush the outbox afterwards. Any thread."""
        ...

    def flush(self) -> None:
        """Send what the outbox holds."""
        ...


class Role(Protocol):
    """One role of a worker."""

    name: RoleName

    async def start(self) -> None:
        """Called once the server is bound."""
        ...

    async def stop(self) -> None:
        """Give up all attempts, end all tasks and threads of the role."""
        ...

    def handlers(self) -> list[Any]:
        """Generic gRPC handlers that the role adds to the worker's server."""
        ...

    def takes(self, dispatch: Dispatch) -> bool:
        """Whether this role runs such a dispatch."""
        ...

    def dispatch(self, dispatch: Dispatch) -> None:
        """Run an attempt on this worker."""
        ...

    def connect(self, peer: PeerRef) -> None:
        """A decode worker joined; a role that hands over to it prepares for that."""
        ...

    def fetch(self, order: FetchOrdered) -> None:
        """Get the KV of a prefix from another worker; for the role that receives."""
        ...

    def migrate(self, message: Migrate, gateway_id: GatewayId) -> None:
        """Move an attempt that decodes on this worker to another one; for the role that sends."""
        ...

    def cancel_migration(self, key: AttemptKey, gateway_id: GatewayId) -> None:
        """Have it stay here, if that is still possible."""
        ...

    def cancel(self, key: AttemptKey) -> None:
        """Stop an attempt in whatever phase it is; also one that this role does not have (yet)."""
        ...

    def owns(self, key: AttemptKey) -> bool:
        """Whether the attempt is this role's, so that its engine events belong here."""
        ...

    def on_event(self, event: Event) -> None:
        """An engine event about one of this role's attempts, which another role may have, too: a sequence that moves.
        One that only concerns the other role is ignored."""
        ...

    @property
    def num_served_fetches(self) -> int:
        """Fetches of other workers for which it gave KV, since the start."""
        ...

    def transfers(self) -> list[TransferCount]:
        """What it sent to each decode worker since the start."""
        ...

    def tick(self, now: float) -> None:
        """Do periodic work; called at every heartbeat."""
        ...

    def keys_of_gateway(self, gateway_id: str) -> list[AttemptKey]:
        """The attempts that belong to a gateway, for the sweep when it is lost."""
        ...

    def holdings(self) -> dict[str, int]:
        """Counts of what the role holds; all zero when idle."""
        ...
