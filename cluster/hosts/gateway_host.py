"""The gateway in this process: the composition of the public server with the router and the connection to the
controller, on one asyncio loop in a thread.

    router connects to the workers of its specification -> server listens -> hello to the controller, whose membership
    it follows from then on

Imports nothing of the engine: a gateway process loads neither torch nor transformers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from pathlib import Path

import msgspec

from disagg.cluster.control.plan import GatewaySpec
from disagg.cluster.hosts.host import Phases, StartError, run_child
from disagg.cluster.system.cores import pin_process
from disagg.cluster.system.process_tools import allow_open_files, describe, freeze_start, use_batch_scheduling
from disagg.connections.cluster_secret import ClusterSecret
from disagg.connections.shell.blocking_stream import Resolve
from disagg.connections.shell.channels import given_until
from disagg.gateway.config import ModelSource
from disagg.gateway.event_loop.loop_times import LoopTimes
from disagg.gateway.event_loop.shell.heartbeat import HeartbeatConnection
from disagg.gateway.event_loop.shell.loop_watch import LoopWatch, TimedSelector
from disagg.gateway.models.membership import ControllerLink
from disagg.gateway.models.model_changes import ModelChanges
from disagg.gateway.operators.admin_answers import counts_of
from disagg.gateway.server import GatewayServer
from disagg.proto.clock.process_clock import AwakeLoop
from disagg.proto.ids import model_of
from disagg.proto.messages import StartPhase
from disagg.router.all_routers import AllRouters
from disagg.router.config import RouterConfig
from disagg.router.shell.router_servers import RouterServers
from disagg.router.shell.server import RouterServer
from disagg.router.shell.tracing import start_tracing

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 15.0
"""Seconds that the workers, which listen already, may take to connect to the router. After that the router tries to
connect to missing ones until the controller takes them out of the membership."""

CLOSE_TIMEOUT_S = 5.0
"""Seconds that the rest of a stop may take, once no answer runs."""

SWITCH_INTERVAL_S = 0.0005
"""Seconds for which a thread that renders or tokenizes may keep the interpreter from the event loop, which needs it
after each poll of its sockets. With Python's five milliseconds, a token waits that long at each turn of the loop that
it passes."""


class GatewayHost:
    """Router and gateway on one asyncio loop in a thread of their own; they follow the controller that `resolve`
    finds."""

    def __init__(self, spec: GatewaySpec, resolve: Resolve, secret: ClusterSecret, phases: Phases = ()) -> None:
        self._phases = list(phases)
        self._began_s = time.monotonic()
        self._spec = spec
        self._resolve = resolve
        self._secret = secret
        self._ready = threading.Event()
        self.address = ""
        """host:port for clients, once it has started."""
        self.http_address = ""
        """host:port of the HTTP server, once it has started; empty where it serves none."""
        self._error: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="gateway", daemon=True)
        self.crashed = threading.Event()
        self.rejected = threading.Event()
        """Set when the controller rejected the gateway: the process should end."""

    def start(self) -> None:
        """Connect to the workers, listen, register with the controller; see `Host`."""
        self._began_s = time.monotonic()
        pin_process(self._spec.cores)
        allow_open_files()
        self._thread.start()
        self._ready.wait()
        if self._error is not None:
            self._thread.join()
            raise StartError(describe(self._error)) from self._error

    def stop(self) -> None:
        """Let running answers end, then end servers and the loop. Idempotent."""
        loop, stop = self._loop, self._stop
        if loop is not None and stop is not None and self._thread.is_alive():
            loop.call_soon_threadsafe(stop.set)
            self._thread.join(self._spec.gateway.drain_timeout_s + CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        use_batch_scheduling()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        try:
            selector = TimedSelector()
            with asyncio.Runner(loop_factory=lambda: AwakeLoop(selector)) as runner:
                runner.run(self._main(selector.times))
        except BaseException as error:
            if self._ready.is_set():
                logger.exception("the gateway crashed; its process ends and is started again")
                self.crashed.set()
            else:
                self._error = error
        finally:
            self._ready.set()

    async def _main(self, times: LoopTimes) -> None:
        spec, watch = self._spec, LoopWatch(times)
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        servers = RouterServers(
            {source.key: self._make_router(source, spec.routers[source.key]) for source in spec.gateway.models}
        )
        all_routers = AllRouters(servers.routers)
        link = ControllerLink(
            spec.gateway_id,
            self._resolve,
            servers,
            self._secret,
            spec.workers,
            name=spec.name,
            counts=(lambda: counts_of(all_routers.view())) if spec.gateway.shares_ports else None,
            load=servers.load_reports,
            load_every_s=spec.load_every_s,
        )
        heartbeats = HeartbeatConnection(spec.gateway_id, self._resolve, self._secret, watch.state, spec.name)
        try:
            gateway = await self._open(servers, link, times)
        except Exception as error:
            logger.exception("the gateway could not start")
            await link.report_failure(describe(error))
            await servers.stop()
            raise
        changes = ModelChanges(
            gateway.served,
            servers,
            spec.gateway,
            lambda *source: self._make_router(*source, is_first=False),
            link.followed,
        )
        link.on_models = changes.follow
        link.on_adapters = gateway.served.set_adapters
        try:
            freeze_start()
            self.address, self.http_address = gateway.address, gateway.http_address
            times.forget()
            watch.start()
            changes.start()
            link.start(gateway.address, os.getpid(), self.http_address, gateway.own_address, gateway.own_http_address)
            heartbeats.start()
            self._ready.set()
            await self._stop.wait()
        finally:
            await gateway.stop()
            await asyncio.to_thread(heartbeats.stop)
            await link.stop()
            await changes.stop()
            watch.stop()
            await servers.stop()

    def _make_router(self, source: ModelSource, config: RouterConfig, *, is_first: bool = True) -> RouterServer:
        """Make the router of one model. Recordings of several models are in one folder each. `is_first`: whether the
        gateway is starting, so that the router knows the model's workers from its specification."""
        spec, recording = self._spec, self._spec.recording
        if recording is not None and source.key:
            folder = str(Path(recording.folder) / source.key)
            recording = msgspec.structs.replace(recording, folder=folder)
        return RouterServer(
            config,
            spec.gateway_id,
            [info for info in spec.workers if is_first and model_of(info.worker_id) == source.key],
            self._secret,
            recording=recording,
            tracer=start_tracing(spec.gateway.tracing, source.name, spec.name),
        )

    async def _open(self, servers: RouterServers, link: ControllerLink, times: LoopTimes) -> GatewayServer:
        gateway = GatewayServer(
            self._spec.gateway,
            servers.routers,
            control=link.call,
            loop_times=times,
            autoscaler=lambda: link.autoscaler,
            waits_for_workers=self._spec.load_every_s is None,
            cluster_certificate=lambda: given_until(self._secret),
            start_phases=self._phases,
        )
        self._phase_ended("tokenizer")
        await servers.start()
        try:
            await servers.wait_until_connected(CONNECT_TIMEOUT_S)
        except TimeoutError as error:
            logger.warning("%s", error)
        self._phase_ended("connect")
        gateway.served.set_adapters(self._spec.adapters)
        await gateway.start()
        self._phase_ended("listen")
        return gateway

    def _phase_ended(self, name: str) -> None:
        began_s, self._began_s = self._began_s, time.monotonic()
        self._phases.append(StartPhase(name, self._began_s - began_s))


if __name__ == "__main__":
    sys.exit(run_child(GatewaySpec, GatewayHost))
