"""The gateway in this process: the composition of the public server with the router, on one asyncio loop in a thread.

Imports nothing of the engine: a gateway process loads neither torch nor transformers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading

from disagg.cluster.host import STOP_GRACE_S
from disagg.cluster.launch import GatewayInfo, GatewayLaunch
from disagg.cluster.process_tools import pin_process
from disagg.router.gateway.server import GatewayServer
from disagg.router.server import RouterServer

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 15.0
"""How long the workers, which listen already, may take to greet the router."""


class GatewayHost:
    """Router and gateway on one asyncio loop in a thread of their own."""

    def __init__(self, launch: GatewayLaunch) -> None:
        self._launch = launch
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._address = ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="gateway", daemon=True)
        self.crashed = threading.Event()

    def start(self) -> GatewayInfo:
        """Connect to the workers, listen; raises what went wrong."""
        pin_process(self._launch.cores)
        self._thread.start()
        self._ready.wait()
        if self._error is not None:
            self._thread.join()
            raise self._error
        return GatewayInfo(address=self._address, pid=os.getpid())

    def stop(self) -> None:
        """End streams, servers and the loop. Idempotent."""
        loop, stop = self._loop, self._stop
        if loop is not None and stop is not None and self._thread.is_alive():
            loop.call_soon_threadsafe(stop.set)
            self._thread.join(STOP_GRACE_S + 5.0)

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            if self._ready.is_set():
                logger.exception("the gateway died")
                self.crashed.set()
            self._error = error
        finally:
            self._ready.set()

    async def _main(self) -> None:
        launch = self._launch
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        router = RouterServer(launch.router, launch.gateway_id, list(launch.workers))
        await router.start()
        try:
            await router.wait_until_connected(CONNECT_TIMEOUT_S)
            gateway = GatewayServer(launch.gateway, router)
            await gateway.start()
            try:
                self._address = gateway.address
                self._ready.set()
                await self._stop.wait()
            finally:
                await gateway.stop()
        finally:
            await router.stop()
