"""The actor of the controller, with its launcher."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading

import msgspec

from disagg.cluster.config.memory import machine_memory
from disagg.cluster.control.plan import plan_cluster
from disagg.cluster.control.plans import SavedState
from disagg.cluster.control.server import Controller
from disagg.cluster.control.twin_process import twin_of
from disagg.cluster.on_ray import store as ray_store
from disagg.cluster.on_ray.host_actor import EXIT_CRASHED, LOOPBACK, record_start, was_restarted
from disagg.cluster.on_ray.launcher import RayLauncher
from disagg.cluster.on_ray.own_node import node_address
from disagg.cluster.on_ray.store import CONTROLLER, ControllerAnswer, ControllerSettings
from disagg.cluster.system.children import LaunchError
from disagg.cluster.system.cores import pin_process
from disagg.cluster.system.logs import log_environment, setup_logging
from disagg.cluster.system.process_tools import describe
from disagg.proto.clock.process_clock import AwakeLoop

logger = logging.getLogger(__name__)


class ControllerActor:
    """The controller with its launcher, on an asyncio loop in a thread of its own.

    A first process that cannot start returns the error by `answer` and waits to be killed. A later one ends, and Ray
    starts it again.
    """

    def __init__(self, settings: bytes) -> None:
        self._settings = msgspec.json.decode(settings, type=ControllerSettings)
        logs = self._settings.config.logging
        setup_logging(log_environment(logs.level, logs.format, os.environ))
        pin_process(self._settings.cores)
        self._answer: ControllerAnswer | None = None
        self._answered = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="controller", daemon=True)
        self._thread.start()

    def answer(self) -> bytes:
        """The answer of the actor, a `ControllerAnswer` as JSON, once it listens or has failed."""
        self._answered.wait()
        return msgspec.json.encode(self._answer)

    def stop(self) -> None:
        """End gateway, workers and the controller; returns when they are gone."""
        loop, stop = self._loop, self._stop
        if loop is not None and stop is not None and self._thread.is_alive():
            loop.call_soon_threadsafe(stop.set)
            self._thread.join()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=AwakeLoop) as runner:
                runner.run(self._main())
        except Exception as error:
            logger.exception("the controller crashed; workers and gateway serve on")
            if self._answered.is_set() or was_restarted():
                os._exit(EXIT_CRASHED)
            text = str(error) if isinstance(error, LaunchError) else describe(error)
            self._set_answer(ControllerAnswer(error=text, pid=os.getpid()))

    async def _main(self) -> None:
        settings = self._settings
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        await asyncio.sleep(record_start(CONTROLLER))
        saved = ray_store.load(ray_store.DESIRED, SavedState)
        config = settings.config if saved is None else saved.present
        memory_bytes = machine_memory() if settings.is_private else None
        plan = plan_cluster(config, cpu_dtype=settings.cpu_dtype, memory_bytes=memory_bytes)
        pin_process(plan.cores.gateway if settings.is_private else ())
        controller = Controller(
            plan,
            RayLauncher(settings),
            ray_store.cluster_secret(),
            node_address() if settings.config.network.bind == "node" else LOOPBACK,
            settings.config.controller.port,
            companion=twin_of(settings.config, settings.twin_key, os.environ, plan.available),
            saved=saved,
            on_saved=functools.partial(ray_store.save, ray_store.DESIRED),
        )
        try:
            address = await self._listen(controller)
            ray_store.save(ray_store.CONTROLLER_ADDRESS, address)
            self._set_answer(ControllerAnswer(address=address, pid=os.getpid()))
            await self._stop.wait()
        finally:
            await controller.stop()

    async def _listen(self, controller: Controller) -> str:
        try:
            return await controller.start()
        except RuntimeError as error:  # of gRPC
            port = self._settings.config.controller.port
            raise LaunchError(f"controller.port: cannot listen on {port}: {error}") from None

    def _set_answer(self, answer: ControllerAnswer) -> None:
        self._answer = answer
        self._answered.set()
