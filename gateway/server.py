"""The gateway's public servers, gRPC and HTTP: bind, serve the models, drain and stop together.

start ──> SERVING ──> stop: NOT_SERVING, no new answers ── at most grace_s ──> the rest is cancelled ──> closed

While answers end, both ports still listen, so that probes see a process that is alive and not ready. Ports that several
gateways share are closed at once instead: the others take what comes, and probes use the HTTP port of its own.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import Callable, Mapping, Sequence

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from disagg.connections.addresses import is_loopback, join_address
from disagg.gateway.app import HttpApp
from disagg.gateway.auth.audit import Audit
from disagg.gateway.auth.shell.tls import ServerTls
from disagg.gateway.batches.batch_handlers import Batches
from disagg.gateway.batches.file_handlers import Files
from disagg.gateway.batches.line_answers import LineAnswers
from disagg.gateway.batches.service import BatchService
from disagg.gateway.calls import Calls
from disagg.gateway.config import GatewayConfig, GatewayOptions, serves_page
from disagg.gateway.event_loop.fair_order import FairOrder
from disagg.gateway.event_loop.loop_times import LoopTimes
from disagg.gateway.event_loop.shell.offload import Offload
from disagg.gateway.event_loop.shell.turns import LoopTurns
from disagg.gateway.guardrails.shell.guardrails import Guardrails
from disagg.gateway.http.body_budget import BodyBudget
from disagg.gateway.http.shell.exchange import BodyLimits
from disagg.gateway.http.shell.protocol import ConnectionLimits
from disagg.gateway.http.shell.server import HttpServer
from disagg.gateway.http.shell.unfinished import UnfinishedBodies
from disagg.gateway.http.sites import Sites
from disagg.gateway.metrics.registry import GatewayMetrics
from disagg.gateway.models.pair_check import PairCheckers
from disagg.gateway.models.served_models import ServedModels
from disagg.gateway.openai.shell.completions import Completions
from disagg.gateway.openai.shell.information import Information
from disagg.gateway.operators.shell.adapters import AdapterHandlers
from disagg.gateway.operators.shell.admin import AdminService, Control, no_controller
from disagg.gateway.operators.shell.page import Page
from disagg.gateway.operators.shell.probes import Probes
from disagg.gateway.readiness import Readiness
from disagg.gateway.requests.refusals import Refusals
from disagg.gateway.rpc.shell.decoding import DecodeRequests
from disagg.gateway.rpc.shell.health import Health
from disagg.gateway.rpc.shell.interceptors import Authenticate, RunningCalls
from disagg.gateway.rpc.shell.service import InferenceService
from disagg.gateway.rpc.watch_places import WatchPlaces
from disagg.gateway.security import secure
from disagg.gateway.text.tokenizer import ServedModel
from disagg.gateway.usage.handler import UsageHandler
from disagg.gateway.usage.recorder import UsageRecorder
from disagg.proto.autoscaling import AutoscalerState
from disagg.proto.clock.process_clock import process_clock
from disagg.proto.errors import ConfigError
from disagg.proto.ids import RequestId
from disagg.proto.messages import StartPhase
from disagg.proto.services import NO_COMPRESSION
from disagg.router.api import Router, TenantLimits
from disagg.v1 import inference_pb2 as pb
from disagg.v1 import inference_pb2_grpc as pb_grpc

logger = logging.getLogger(__name__)

SERVICE_NAMES = tuple(service.full_name for service in pb.DESCRIPTOR.services_by_name.values())
CLOSE_GRACE_S = 0.5
"""For calls that are no answers, once the answers have ended."""
_MAX_OWN_CONNECTIONS = 256
"""HTTP connections at a time at the port that only this gateway has, beside the others."""
_OVERALL = ""
"""The service name of the health of the whole server."""


class GatewayServer:
    """One gateway. Owner of its sockets and tokenizer threads; the routers are started and stopped by the caller.

    Args:
        config: see there.
        routers: where requests go, by the keys of `config.models`.
        control: calls the controller; without it operators can view, but change nothing.
        loop_times: of the event loop, for the metrics; `None` where they are not measured.
        autoscaler: what the controller's decided last, for the metrics; `None` where there is none.
        waits_for_workers: see `Readiness`.
        cluster_certificate: when the one given for the cluster's processes expires, in seconds since the epoch.
        start_phases: of this process, to be shown; the list may still grow.

    Raises:
        ConfigError: if the model's files, the keys or the certificates are missing or broken.
    """

    def __init__(
        self,
        config: GatewayConfig,
        routers: Mapping[str, Router],
        control: Control = no_controller,
        loop_times: LoopTimes | None = None,
        autoscaler: Callable[[], AutoscalerState | None] = lambda: None,
        waits_for_workers: bool = True,
        cluster_certificate: Callable[[], float | None] = lambda: None,
        start_phases: Sequence[StartPhase] = (),
    ) -> None:
        self.config = config
        self._start_phases = start_phases
        self.served = ServedModels(config, routers, _mint_id)
        """Models may come and go once it has started."""
        self._refusals = Refusals(process_clock().now)
        self._guardrails = Guardrails(config.guardrails, refusals=self._refusals) if config.guardrails else None
        self._all = self.served.all
        self._longest_context = self.served.longest_context
        """At the start: the server's limits of messages stay."""
        self._control = control
        self._security = secure(config, self._limits_changed)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._metrics = GatewayMetrics(
            self.served.views,
            vllm_aliases=config.vllm_aliases,
            loop_times=loop_times,
            autoscaler=autoscaler,
            certificates=lambda: self._expiries(cluster_certificate()),
            name=config.name,
            shows_workers=config.shows_workers,
            start_phases=start_phases,
        )
        self._usage = UsageRecorder(config.usage, time.time)
        self._metrics.usage = self._usage
        self._readiness = Readiness(self._all.view, waits_for_workers=waits_for_workers)
        self._audit = Audit(self._metrics.count_refusal, process_clock().now)
        self._admin: AdminService | None = None
        self._page: Page | None = None
        self._history: asyncio.Task[None] | None = None
        """Keeps the history of the page."""
        self._port: int | None = None
        self._http_port: int | None = None
        self._calls = RunningCalls()
        undecoded_bytes = config.max_undecoded_bytes
        self._decode_turns = LoopTurns(FairOrder(undecoded_bytes, undecoded_bytes // 2, what="messages"))
        largest_bytes = config.max_message_bytes(self._longest_context)
        self._unfinished = UnfinishedBodies(BodyBudget(max(config.max_unfinished_bytes, largest_bytes)))
        watches = config.max_keyless_watches
        self._health = Health(WatchPlaces(watches, max(1, watches // 4)))
        self._batches: BatchService | None = None
        self._waits_for_workers = waits_for_workers
        self._offload: Offload | None = None
        self._server: grpc.aio.Server | None = None
        self._http: HttpServer | None = None
        self._own_http: HttpServer | None = None
        self._own_port: int | None = None
        self._own_http_port: int | None = None

    @property
    def models(self) -> Mapping[str, ServedModel]:
        """What is known of each model, by key."""
        return self.served.loaded

    @property
    def port(self) -> int:
        """The bound port. Raises `RuntimeError` before `start`."""
        if self._port is None:
            raise RuntimeError("the gateway has not started")
        return self._port

    @property
    def address(self) -> str:
        """host:port for clients. Raises `RuntimeError` before `start`."""
        return self._address(self.port)

    @property
    def http_address(self) -> str:
        """The same of HTTP; empty where it serves none."""
        return "" if self._http_port is None else self._address(self._http_port)

    @property
    def own_address(self) -> str:
        """host:port where only this gateway listens; empty where it shares its port with no other."""
        return "" if self._own_port is None else self._address(self._own_port)

    @property
    def own_http_address(self) -> str:
        """The same of HTTP."""
        return "" if self._own_http_port is None else self._address(self._own_http_port)

    async def start(self, serving: bool = True) -> None:
        """Bind and listen. Health is SERVING at once, or with `serving=False` when `set_serving` is called.

        Raises:
            ConfigError: if the address cannot be bound.
        """
        config, port = self.config, self.config.port
        self._loop = asyncio.get_running_loop()
        self._offload = Offload(
            config.num_tokenizer_threads,
            inline_bytes=config.inline_prompt_bytes,
            max_bytes=config.max_tokenizing_bytes,
            max_tenant_bytes=config.max_tenant_tokenizing_bytes,
        )
        self._metrics.offload = self._offload
        self._usage.start()
        self._metrics.guardrails = self._guardrails
        models = self.served.begin(self._offload, self._guardrails)
        calls = Calls(models, self._metrics, self._readiness, self._usage, _mint_id, self._refusals)
        interceptors = (
            self._calls,
            Authenticate(self._security.authenticator, self._audit),
            DecodeRequests(self._decode_turns, config.max_body_values(self._longest_context)),
        )
        if config.batches is not None and config.http_port is not None:
            self._batches = BatchService(
                config.batches,
                config.name,
                _mint_id(),
                self.served.batch_views,
                wakes_workers=not self._waits_for_workers,
                ttft_s=config.ttft_target_s,
                tpot_s=config.tpot_target_s,
            )
        server = grpc.aio.server(interceptors=interceptors, options=self._options())
        self._add_services(server, calls)
        try:
            self._port = _listen(server, self._address(config.port), self._security.tls)
            if config.shares_ports:
                self._own_port = _listen(server, self._address(0), self._security.tls)
            if config.http_port is not None:
                port = config.http_port
                self._http = self._make_http(calls, config.max_connections)
                self._http_port = await self._http.start(config.host, port, shares_port=config.shares_ports)
                if config.shares_ports:
                    port = config.own_http_port
                    self._own_http = self._make_http(calls, min(config.max_connections, _MAX_OWN_CONNECTIONS))
                    self._own_http_port = await self._own_http.start(config.host, port)
        except (RuntimeError, OSError) as error:
            await server.start()  # gRPC closes the ports of no server that was not started
            await server.stop(None)
            await self._stop_http(0.0)
            self._offload.close()
            self.served.close()
            await self._usage.stop()
            if self._batches is not None:
                self._batches.close()
            raise ConfigError(f"gateway: cannot listen on {config.host}:{port}: {error}") from error
        await server.start()
        self._server = server
        self._security.watch.start()
        if self._page is not None and self._http is not None:
            self._history = asyncio.create_task(self._page.keep_history(), name="page-history")
        if self._batches is not None:
            completions = _make_completions(calls, self._body_limits())
            lines = LineAnswers(completions, self._security.authenticator, _mint_id)
            self._batches.start(lines, self._usage.add_line)
        await self.set_serving(serving)

    async def set_serving(self, serving: bool) -> None:
        """Set the health of the server and each service."""
        values = health_pb2.HealthCheckResponse.ServingStatus
        for name in (_OVERALL, *SERVICE_NAMES):
            await self._health.set(name, values.SERVING if serving else values.NOT_SERVING)

    async def stop(self, grace_s: float | None = None) -> None:
        """Take no new requests, give running answers `grace_s` seconds (`drain_timeout_s` of the configuration without
        it), cancel the rest. Idempotent."""
        server, self._server = self._server, None
        if server is None or self._offload is None:
            return
        deadline = time.monotonic() + (self.config.drain_timeout_s if grace_s is None else grace_s)
        num_running = self._readiness.begin_drain()
        await self._health.enter_graceful_shutdown()
        leaving = self._leave(server, deadline) if self.config.shares_ports else None
        batches, self._batches = self._batches, None
        if batches is not None:
            await batches.stop_lines()
        if num_running:
            logger.info("draining: %d calls still run, for at most %g s", num_running, deadline - time.monotonic())
        if left := await self._readiness.wait_ended(max(0.0, deadline - time.monotonic())):
            logger.info("%d calls still run and are cut off", left)
        rest_s = min(CLOSE_GRACE_S, max(0.0, deadline - time.monotonic()))
        # Each once: gRPC crashes where two stops of a server overlap.
        await asyncio.gather(
            server.stop(rest_s) if leaving is None else self._left(leaving, rest_s), self._stop_http(rest_s)
        )
        await self._calls.ended()
        if batches is not None:
            batches.close()
        await self._usage.stop()
        if self._history is not None:
            self._history.cancel()
            await asyncio.wait([self._history])
        if self._admin is not None:
            await self._admin.close()
        if self._guardrails is not None:
            await self._guardrails.close()
        await asyncio.to_thread(self._security.watch.stop)
        self._offload.close()
        self.served.close()

    def _leave(self, server: grpc.aio.Server, deadline: float) -> asyncio.Task[None]:
        """Close the ports that other gateways share, so that the kernel gives them all new connections. gRPC tells its
        clients to connect anew for further calls; HTTP connections close as they are idle. What runs goes on."""
        left_s = max(0.0, deadline - time.monotonic())

        async def leave() -> None:
            await asyncio.gather(server.stop(left_s), *([] if self._http is None else [self._http.stop(left_s)]))

        return asyncio.create_task(leave(), name="leave-shared-ports")

    async def _left(self, leaving: asyncio.Task[None], grace_s: float) -> None:
        """No answer runs any more; calls that are none, such as a watched health, get `grace_s` seconds."""
        await asyncio.wait([leaving], timeout=grace_s)
        self._calls.cancel()
        await leaving

    async def _stop_http(self, grace_s: float) -> None:
        servers = [http for http in (self._http, self._own_http) if http is not None]
        await asyncio.gather(*(http.stop(grace_s) for http in servers))

    def _expiries(self, of_cluster: float | None) -> dict[str, float]:
        tls = self._security.tls
        found = {"gateway": None if tls is None else tls.expires_at, "cluster": of_cluster}
        return {name: at for name, at in found.items() if at is not None}

    def _limits_changed(self, limits: Mapping[str, TenantLimits]) -> None:
        """On the thread that watches files, between `start` and `stop`."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._all.set_limits, limits)

    def _options(self) -> list[tuple[str, int]]:
        return [
            ("grpc.max_receive_message_length", self.config.max_message_bytes(self._longest_context)),
            ("grpc.max_concurrent_streams", self.config.max_concurrent_streams),
            ("grpc.max_allowed_incoming_connections", self.config.max_grpc_connections),
            # TLS and the first frame of HTTP/2 together: a silent connection ends.
            ("grpc.server_handshake_timeout_ms", round(self.config.grpc_handshake_timeout_s * 1000)),
            # Clients connect again by themselves.
            ("grpc.max_connection_idle_ms", round(self.config.idle_timeout_s * 1000)),
            NO_COMPRESSION,
            # Unless several gateways are configured, a second one on the same port is a mistake, and shall be seen.
            ("grpc.so_reuseport", int(self.config.shares_ports)),
        ]

    def _address(self, port: int) -> str:
        return join_address(self.config.host, port)

    def _body_limits(self) -> BodyLimits:
        config = self.config
        return BodyLimits(
            max_bytes=config.max_message_bytes(self._longest_context),
            timeout_s=config.read_timeout_s,
            max_values=config.max_body_values(self._longest_context),
            turns=self._decode_turns,
            unfinished=self._unfinished,
        )

    def _make_http(self, calls: Calls, max_connections: int) -> HttpServer:
        config, limits, batches = self.config, self._body_limits(), self._batches
        app = HttpApp(
            _make_completions(calls, limits),
            Information(calls.models, limits, created=int(time.time())),
            Probes(self._readiness, self._metrics),
            self._security.authenticator,
            _mint_id,
            _mint_trace_bits,
            self._audit,
            sites_of(config),
            self._readiness,
            self._page,
            files=None if batches is None else Files(batches, config.read_timeout_s),
            batches=None if batches is None else Batches(batches, limits),
            usage=UsageHandler(self._usage),
            adapters=AdapterHandlers(self._control, limits, self._audit),
        )
        tls = self._security.tls
        connections = ConnectionLimits(
            max_connections=max_connections,
            idle_timeout_s=config.idle_timeout_s,
            head_timeout_s=config.read_timeout_s,
            write_timeout_s=config.write_timeout_s,
        )
        return HttpServer(app, connections, process_clock().now, tls.http if tls is not None else None)

    def _add_services(self, server: grpc.aio.Server, calls: Calls) -> None:
        models = calls.models
        inference = InferenceService(
            calls, _mint_id, process_clock().now, _mint_trace_bits, write_timeout_s=self.config.write_timeout_s
        )
        pb_grpc.add_InferenceServiceServicer_to_server(inference, server)  # type: ignore[no-untyped-call]
        self._admin = AdminService(
            self._all,
            self._control,
            PairCheckers(self.served.pair_checkers),
            self._security.rights,
            audit=self._audit,
            start_phases=self._start_phases,
            name=self.config.name,
            models=lambda: models.names,
            model_names=self.served.names,
            usage=self._usage,
            refusals=self._refusals,
            has_peers=self.config.shares_ports,
        )
        if serves_page(self.config):
            self._page = Page(self._admin, lambda: models.names, process_clock().now, time.time, self._usage)
        pb_grpc.add_AdminServiceServicer_to_server(self._admin, server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((*SERVICE_NAMES, health.SERVICE_NAME, reflection.SERVICE_NAME), server)


def sites_of(config: GatewayOptions) -> Sites:
    """Which web sites' pages may call a gateway of this configuration."""
    has_certificates = config.tls is not None and config.tls.client_ca is not None
    has_no_keys = config.api_keys is None and not has_certificates
    return Sites(
        checks_host=has_no_keys and (is_loopback(config.host) or bool(config.allowed_hosts)),
        takes_addresses=not is_loopback(config.host),
        checks_origin=config.api_keys is None or has_certificates,
        hosts=tuple(name.lower() for name in config.allowed_hosts),
        origins=tuple(origin.lower().rstrip("/") for origin in config.allowed_origins),
    )


def _make_completions(calls: Calls, limits: BodyLimits) -> Completions:
    return Completions(calls, limits, process_clock().now, time.time)


def _listen(server: grpc.aio.Server, address: str, tls: ServerTls | None) -> int:
    """The bound port. Raises `RuntimeError`."""
    return server.add_insecure_port(address) if tls is None else server.add_secure_port(address, tls.grpc)


def _mint_id() -> RequestId:
    return RequestId(uuid.uuid4().hex)


def _mint_trace_bits() -> int:
    return secrets.randbits(192)
