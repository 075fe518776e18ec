"""A controller on a thread of this process, with an event loop of its own, for callers that block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from disagg.cluster.control.launcher import Launcher
from disagg.cluster.control.plan import ClusterPlan
from disagg.cluster.control.plans import SavedState
from disagg.cluster.control.server import Companion, Controller
from disagg.cluster.system.children import LaunchError
from disagg.connections.cluster_secret import ClusterSecret
from disagg.proto.clock.process_clock import AwakeLoop
from disagg.proto.control import ControlReply, ControlRequest, ControlState

T = TypeVar("T")


class ControllerThread:
    """Owner of the thread and its loop. `saved`, `on_saved`: see `Controller`."""

    def __init__(
        self,
        plan: ClusterPlan,
        launcher: Launcher,
        secret: ClusterSecret,
        companion: Companion | None = None,
        *,
        saved: SavedState | None = None,
        on_saved: Callable[[SavedState], None] | None = None,
    ) -> None:
        self._plan = plan
        self._controller = Controller(
            plan,
            launcher,
            secret,
            port=plan.config.controller.port,
            saved=saved,
            companion=companion,
            on_saved=on_saved,
        )
        self._loop = AwakeLoop()
        self._thread = threading.Thread(target=self._run, name="controller", daemon=True)

    def start(self) -> str:
        """Begin to start the cluster; returns the controller's address. Raises `LaunchError` if its port is taken."""
        self._thread.start()
        try:
            return self._call(self._controller.start())
        except RuntimeError as error:
            raise LaunchError(
                f"controller.port: cannot listen on {self._plan.config.controller.port}: {error}"
            ) from None

    def stop(self) -> None:
        """End gateway, workers, controller and thread. Not to be called twice."""
        self._call(self._controller.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def state(self) -> ControlState:
        """The present state of the cluster."""
        return self._controller.state()

    def control(self, request: ControlRequest) -> ControlReply:
        """Send a request to the controller, and return its reply."""
        return self._call(self._controller.control(request))

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            pending = asyncio.all_tasks(self._loop)
            for task in pending:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()
