"""Which models a gateway serves, while it serves: follows what the controller says.

    a key is new   ── tokenizer (on a thread) ──> router, connected to its workers ──> requests may name it
    a key is gone  ── requests that name it are refused ──> its workers leave, answers end ──> its router ends

A model that comes back while its answers end is served again, by the router that it has.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

from disagg.gateway.config import GatewayConfig, ModelSource
from disagg.gateway.models.served_models import ServedModels, load_served
from disagg.proto.errors import ConfigError
from disagg.router.config import RouterConfig
from disagg.router.shell.router_servers import RouterServers
from disagg.router.shell.server import RouterServer

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
"""Maximum seconds that the first workers of a new model may take to connect before it is served without them."""
LOOK_S = 0.1
"""Seconds between two checks whether workers have come, or a withdrawn model has become idle."""

MakeRouter = Callable[[ModelSource, RouterConfig], RouterServer]
"""Makes a router that knows no worker yet and is not started."""


class ModelChanges:
    """Owner of the routers that it makes; on the gateway's event loop.

    Args:
        served: changed.
        servers: have the routers; changed, too.
        config: of the gateway.
        make_router: of a further model.
        followed: called with the generation whose models are served now, or could not be.
    """

    def __init__(
        self,
        served: ServedModels,
        servers: RouterServers,
        config: GatewayConfig,
        make_router: MakeRouter,
        followed: Callable[[int], None],
    ) -> None:
        self._served = served
        self._servers = servers
        self._config = config
        self._make_router = make_router
        self._followed = followed
        self._wanted: asyncio.Queue[tuple[int, dict[str, ModelSource], Mapping[str, RouterConfig]]] = asyncio.Queue()
        self._leaving: dict[str, asyncio.Task[None]] = {}
        """Tasks that wait for the end of withdrawn models, whose routers still run, by key."""
        self._ending: set[asyncio.Task[None]] = set()
        """Tasks that are stopping the router of a model."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start following the changes of models."""
        self._task = asyncio.create_task(self._run(), name="model-changes")

    async def stop(self) -> None:
        """Stop following; models and routers stay as they are. Idempotent."""
        tasks = [*self._leaving.values(), *([] if self._task is None else [self._task])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._ending, return_exceptions=True)

    def follow(self, generation: int, sources: Sequence[ModelSource], routers: Mapping[str, RouterConfig]) -> None:
        """Serve these models, and no others, from now on; returns at once."""
        self._wanted.put_nowait((generation, {source.key: source for source in sources}, routers))

    async def _run(self) -> None:
        while True:
            generation, wanted, routers = await self._wanted.get()
            for key, source in wanted.items():
                await self._safely(key, self._join(source, routers[key]))
            for key in [key for key in self._served.sources if key not in wanted and key not in self._leaving]:
                self._leave(key)
            self._followed(generation)

    async def _safely(self, key: str, change: Awaitable[None]) -> None:
        try:
            await change
        except ConfigError as error:
            logger.error("model %s cannot be served by this gateway: %s", key, error)
        except Exception:
            # A bug. The others are served on; the next settings of the controller try again.
            logger.exception("model %s cannot be served by this gateway", key)

    async def _join(self, source: ModelSource, config: RouterConfig) -> None:
        key = source.key
        if (leaving := self._leaving.get(key)) is not None:
            before = self._served.sources[key]
            if (before.name, before.path) == (source.name, source.path):
                leaving.cancel()
                del self._leaving[key]
                await self._servers.stay(key)
                self._served.restore(key)
                logger.info("model %s is served again", source.name)
                return
            await asyncio.gather(leaving, return_exceptions=True)
        if key in self._served.sources:
            return
        model = await asyncio.to_thread(load_served, source, self._config)
        router = self._make_router(source, config)
        await self._servers.add(key, router)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                while not router.view().workers:  # noqa: ASYNC110  # they come with the next messages of the controller
                    await asyncio.sleep(LOOK_S)
                await router.wait_until_connected(CONNECT_TIMEOUT_S)
        except TimeoutError:
            logger.warning("model %s is served although its workers are not connected", source.name)
        self._served.add(source, model, router)
        logger.info("model %s is served from now on", source.name)

    def _leave(self, key: str) -> None:
        self._served.withdraw(key)
        self._servers.leave(key)
        logger.info("model %s is not served any more; its running answers end", self._served.sources[key].name)
        self._leaving[key] = asyncio.create_task(self._end(key), name=f"end-of-{key}")

    async def _end(self, key: str) -> None:
        while not self._served.is_idle(key):  # noqa: ASYNC110  # for a router there is no hurry to end
            await asyncio.sleep(LOOK_S)
        self._served.remove(key)
        task = self._leaving.pop(key)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        await self._servers.remove(key)
