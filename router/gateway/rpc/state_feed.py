"""The state of the cluster for everybody who watches it: asked for once, however many want to know.

    latest(max_age_s) ── young enough? ──> the last one
                      └─ no ──> one question to the controller, for all who wait

A watcher costs a message in each of its intervals; how many there may be is bounded, in all and for each tenant.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from disagg.proto.control import ControlState
from disagg.proto.errors import OverloadedError
from disagg.router.api import ClusterView
from disagg.router.gateway.auth.auth import Caller
from disagg.router.gateway.rpc.admin_answers import cluster_state
from disagg.v1 import inference_pb2 as pb

MAX_STREAMS_PER_TENANT: Final = 16
MAX_STREAMS: Final = 64
"""Of all tenants; those of admins come on top."""
RETRY_S: Final = 5.0


class Snapshot:
    """The cluster at one moment, as the messages that callers of different rights get; each is made once."""

    def __init__(self, view: ClusterView, known: ControlState) -> None:
        self._view = view
        self._known = known
        self._made: dict[tuple[bool, bool], pb.WatchClusterStateResponse] = {}

    def message(self, caller: Caller) -> pb.WatchClusterStateResponse:
        """For a caller; not to be changed."""
        rights = caller.is_admin, caller.sees_counts
        if (made := self._made.get(rights)) is None:
            state = cluster_state(self._view, self._known, with_addresses=rights[0], with_counts=rights[1])
            made = self._made[rights] = pb.WatchClusterStateResponse(state=state)
        return made


class StateFeed:
    """Owner of the question that is being asked, and of the number of watchers.

    Args:
        ask: what the controller knows now.
        view: what the router sees now.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        ask: Callable[[], Awaitable[ControlState]],
        view: Callable[[], ClusterView],
        clock: Callable[[], float],
    ) -> None:
        self._ask = ask
        self._view = view
        self._clock = clock
        self._last: tuple[float, Snapshot] | None = None
        self._asking: asyncio.Task[Snapshot] | None = None
        self._streams: Counter[str] = Counter()

    async def latest(self, max_age_s: float) -> Snapshot:
        """The cluster at most so long ago; also what was asked for by somebody else and is not answered yet."""
        if self._asking is None:
            if self._last is not None and self._clock() - self._last[0] <= max_age_s:
                return self._last[1]
            self._asking = asyncio.create_task(self._look(), name="cluster-state")
        return await asyncio.shield(self._asking)  # one who leaves does not take the answer from the others

    async def now(self) -> Snapshot:
        """The cluster now, asked for at this moment."""
        known = await self._ask()
        return Snapshot(self._view(), known)

    @contextmanager
    def watching(self, caller: Caller) -> Iterator[None]:
        """Counts a stream while it is open. Raises `OverloadedError` where there are too many."""
        tenant = caller.tenant
        if self._streams[tenant] >= MAX_STREAMS_PER_TENANT:
            raise OverloadedError(f"WatchClusterState: {MAX_STREAMS_PER_TENANT} streams of a tenant at a time", RETRY_S)
        if not caller.is_admin and self._streams.total() >= MAX_STREAMS:
            raise OverloadedError(f"WatchClusterState: {MAX_STREAMS} streams at a time", RETRY_S)
        self._streams[tenant] += 1
        try:
            yield
        finally:
            self._streams[tenant] -= 1
            if not self._streams[tenant]:
                del self._streams[tenant]

    async def close(self) -> None:
        """End a question that is being asked."""
        if self._asking is not None:
            self._asking.cancel()
            with suppress(asyncio.CancelledError):
                await self._asking

    async def _look(self) -> Snapshot:
        try:
            found = await self.now()
            self._last = self._clock(), found
            return found
        finally:
            self._asking = None
