"""The state of the cluster for all its watchers: fetched once, however many there are.

    latest(max_age_s) ── young enough? ──> the last one
                      └─ no ──> one call to the controller, for all that wait

A watcher costs a message in each of its intervals; how many there may be is bounded, in all and for each tenant.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Final

from disagg.gateway.auth.auth import Caller
from disagg.gateway.auth.shell.rights import may_use
from disagg.gateway.operators.admin_answers import cluster_state, with_others
from disagg.proto.control import ControlState
from disagg.proto.errors import OverloadedError
from disagg.proto.messages import StartPhase
from disagg.router.api import ClusterView
from disagg.v1 import inference_pb2 as pb

MAX_STREAMS_PER_TENANT: Final = 16
MAX_STREAMS: Final = 64
"""Maximum number of streams of all tenants together. It does not apply to admins."""
RETRY_S: Final = 5.0


class Snapshot:
    """The cluster at one moment. Makes one message for each set of rights."""

    def __init__(
        self,
        view: ClusterView,
        known: ControlState,
        start_phases: Sequence[StartPhase],
        models: Mapping[str, str],
    ) -> None:
        self._models = models
        self._start_phases = start_phases
        self.view = view
        self._known = known
        self._made: dict[tuple[bool, bool, frozenset[str] | None], pb.WatchClusterStateResponse] = {}

    def message(self, caller: Caller) -> pb.WatchClusterStateResponse:
        """The message for a caller, who must not change it."""
        rights = caller.is_admin, caller.sees_counts, self._keys(caller)
        if (made := self._made.get(rights)) is None:
            state = cluster_state(
                self.view,
                self._known,
                with_addresses=rights[0],
                with_counts=rights[1],
                models=rights[2],
                start_phases=self._start_phases,
            )
            made = self._made[rights] = pb.WatchClusterStateResponse(state=state)
        return made

    def _keys(self, caller: Caller) -> frozenset[str] | None:
        """Keys of the models that the caller may see; `None` for all, also those that this gateway does not know."""
        if caller.is_admin or caller.models is None:
            return None
        return frozenset(key for key, name in self._models.items() if may_use(caller, name))


class StateFeed:
    """Owner of the call under way, and of the number of watchers.

    Args:
        fetch: the state of the controller now.
        view: of the router, now.
        clock: monotonic seconds.
        name: of this gateway; the counts of others are added to the view.
        start_phases: of the gateway's process.
        models: by key the names of the models that this gateway has, now.
    """

    def __init__(
        self,
        fetch: Callable[[], Awaitable[ControlState]],
        view: Callable[[], ClusterView],
        clock: Callable[[], float],
        name: str = "gateway",
        start_phases: Sequence[StartPhase] = (),
        models: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self._models = models
        self._name = name
        self._start_phases = start_phases
        self._fetch = fetch
        self._view = view
        self._clock = clock
        self._last: tuple[float, Snapshot] | None = None
        self._pending: asyncio.Task[Snapshot] | None = None
        self._streams: Counter[str] = Counter()

    async def latest(self, max_age_s: float) -> Snapshot:
        """The cluster at most `max_age_s` ago, or the result of a call that another watcher started."""
        if self._pending is None:
            if self._last is not None and self._clock() - self._last[0] <= max_age_s:
                return self._last[1]
            self._pending = asyncio.create_task(self._look(), name="cluster-state")
        return await asyncio.shield(self._pending)  # a cancelled watcher does not cancel the call of the others

    async def now(self) -> Snapshot:
        """The cluster now, by a new call to the controller."""
        known = await self._fetch()
        view = with_others(self._view(), known, self._name)
        return Snapshot(view, known, self._start_phases, self._models())

    @contextmanager
    def watching(self, caller: Caller) -> Iterator[None]:
        """Count a stream while it is open. Raises `OverloadedError` if there are too many."""
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
        """Cancel the controller call that is under way."""
        if self._pending is not None:
            self._pending.cancel()
            with suppress(asyncio.CancelledError):
                await self._pending

    async def _look(self) -> Snapshot:
        try:
            found = await self.now()
            self._last = self._clock(), found
            return found
        finally:
            self._pending = None
