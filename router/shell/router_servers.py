"""The routers of one gateway, one for each model. All messages of a worker go to the router of its model, by the key in
its name."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from disagg.proto.autoscaling import LoadReport
from disagg.proto.ids import Incarnation, WorkerId, model_of
from disagg.proto.messages import WorkerInfo
from disagg.router.config import RouterConfig
from disagg.router.shell.server import RouterServer

logger = logging.getLogger(__name__)


class RouterServers:
    """Starts, stops and feeds the routers, by the key of their model; runs on one event loop."""

    def __init__(self, routers: Mapping[str, RouterServer]) -> None:
        self._routers = dict(routers)
        self._share_rates()
        self._on_drained: Callable[[WorkerId, Incarnation], None] = lambda worker_id, incarnation: None
        self._unused: dict[WorkerId, WorkerInfo] = {}
        """Workers of models that have no router here, or none yet."""
        self._unused_draining: dict[WorkerId, Incarnation] = {}
        """The incarnations of those workers in `_unused` that drain."""
        self._leaving: set[str] = set()
        """Keys of models whose router is to end. Their new workers are kept for the next router."""

    @property
    def routers(self) -> Mapping[str, RouterServer]:
        """The present routers by key; changes with `add` and `remove`."""
        return self._routers

    @property
    def on_drained(self) -> Callable[[WorkerId, Incarnation], None]:
        """Called when a router has nothing left on a draining worker; set by the owner of the membership."""
        return self._on_drained

    @on_drained.setter
    def on_drained(self, value: Callable[[WorkerId, Incarnation], None]) -> None:
        self._on_drained = value
        for router in self._routers.values():
            router.on_drained = value

    async def add(self, key: str, router: RouterServer) -> None:
        """Start the router of another model, and connect it to the present workers of that model; returns at once."""
        router.on_drained = self._on_drained
        if (other := next(iter(self._routers.values()), None)) is not None:
            router.join_rates(other)
        self._routers[key] = router
        self._share_rates()
        await router.start()
        await self._use(key, router)

    def leave(self, key: str) -> None:
        """Prepare for the end of a model's router. New workers may have other files under the same key, so they get
        none of its requests."""
        self._leaving.add(key)

    async def stay(self, key: str) -> None:
        """Undo `leave` for the router of a model."""
        self._leaving.discard(key)
        await self._use(key, self._routers[key])

    async def remove(self, key: str) -> None:
        """Stop the router of a model. Later workers of the model are not used."""
        self._leaving.discard(key)
        if (router := self._routers.pop(key, None)) is not None:
            self._share_rates()
            router.share_rates(())
            await router.stop()

    async def start(self) -> None:
        """Begin to connect to the workers; returns at once."""
        for router in self._routers.values():
            await router.start()

    async def wait_until_connected(self, timeout_s: float) -> None:
        """Wait until every worker that does not drain has a session. Raises `TimeoutError` with the ids of those
        without."""
        waits = (router.wait_until_connected(timeout_s) for router in self._routers.values())
        found = await asyncio.gather(*waits, return_exceptions=True)
        late = [str(error) for error in found if isinstance(error, TimeoutError)]
        if late:
            raise TimeoutError("; ".join(late))

    async def stop(self) -> None:
        """Stop all routers concurrently."""
        await asyncio.gather(*(router.stop() for router in self._routers.values()))

    async def add_worker(self, info: WorkerInfo) -> None:
        """Connect the router of its model to a worker. A worker of a model without a router is kept for a later one."""
        router = self._of(info.worker_id)
        if router is not None and model_of(info.worker_id) in self._leaving:
            await router.remove_worker(info.worker_id)
            router = None
        if router is None:
            logger.info("worker %s is of a model that this gateway does not serve yet", info.worker_id)
            self._unused[info.worker_id] = info
            self._unused_draining.pop(info.worker_id, None)
        else:
            await router.add_worker(info)

    async def remove_worker(self, worker_id: WorkerId) -> None:
        """Disconnect from a worker. Its requests are requeued at the router of its model."""
        self._unused.pop(worker_id, None)
        self._unused_draining.pop(worker_id, None)
        if (router := self._of(worker_id)) is not None:
            await router.remove_worker(worker_id)

    def drain_worker(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        """Place nothing new on that incarnation of a worker. Nothing runs on a worker that is not used."""
        router = None if worker_id in self._unused else self._of(worker_id)
        if router is None:
            self._unused_draining[worker_id] = incarnation
            self.on_drained(worker_id, incarnation)
        else:
            router.drain_worker(worker_id, incarnation)

    def resume_worker(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        """Use that incarnation of a worker again, if it is draining."""
        if self._unused_draining.get(worker_id) == incarnation:
            del self._unused_draining[worker_id]
        if (router := self._of(worker_id)) is not None:
            router.resume_worker(worker_id, incarnation)

    def expect_workers(self, in_s: Mapping[WorkerId, float]) -> None:
        """Expect these workers, in that many seconds, and no others."""
        for key, router in self._routers.items():
            router.expect_workers({name: seconds for name, seconds in in_s.items() if model_of(name) == key})

    def configure(self, configs: Mapping[str, RouterConfig]) -> None:
        """Let each router follow the configuration of its key."""
        for key, router in self._routers.items():
            if key in configs:
                router.configure(configs[key])

    def load_reports(self) -> Sequence[LoadReport]:
        """The load report of each router, for the controller's autoscalers."""
        return [router.load_report(key) for key, router in self._routers.items()]

    async def _use(self, key: str, router: RouterServer) -> None:
        """Connect a router to the workers of its model that were kept for it."""
        for worker_id in [worker_id for worker_id in self._unused if model_of(worker_id) == key]:
            await router.add_worker(self._unused.pop(worker_id))
            if (incarnation := self._unused_draining.pop(worker_id, None)) is not None:
                router.drain_worker(worker_id, incarnation)

    def _share_rates(self) -> None:
        """Let all routers share the charges, because the keys' limits per minute hold for all models together."""
        for router in self._routers.values():
            router.share_rates([other for other in self._routers.values() if other is not router])

    def _of(self, worker_id: WorkerId) -> RouterServer | None:
        return self._routers.get(model_of(worker_id))
