"""The gateway's public server: binds, serves the two services with health and reflection, drains and stops.

start ──> SERVING ──> stop: NOT_SERVING, no new calls ── at most grace_s ──> the rest is cancelled ──> closed
"""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from disagg.proto.errors import ConfigError
from disagg.proto.ids import RequestId
from disagg.router.api import Router
from disagg.router.gateway.admin import AdminService, Control, no_controller
from disagg.router.gateway.config import GatewayConfig
from disagg.router.gateway.decoding import DecodeRequests
from disagg.router.gateway.generation import Generator
from disagg.router.gateway.service import InferenceService
from disagg.router.gateway.tokenizer import ServedModel, load_model
from disagg.router.gateway.validate import Limits
from disagg.v1 import inference_pb2 as pb
from disagg.v1 import inference_pb2_grpc as pb_grpc

SERVICE_NAMES = tuple(service.full_name for service in pb.DESCRIPTOR.services_by_name.values())
DEFAULT_GRACE_S = 2.0
_OVERALL = ""
"""The name under which health means the whole server."""


class _Calls(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic only in the stubs
    """Knows the tasks of the running calls: `grpc.aio.Server.stop` cancels them, and returns before they have ended."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Every call passes here, in the task that it runs in."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await continuation(handler_call_details)

    async def ended(self) -> None:
        """Wait until no call runs."""
        while self._tasks:
            await asyncio.wait(self._tasks)
        await asyncio.sleep(0)  # grpc's own task of a call ends after ours


class GatewayServer:
    """One gateway. Owner of its sockets and tokenizer threads; the router is started and stopped by the caller.

    Args:
        config: see there.
        router: where requests go.
        model: what is served, instead of reading `config.model_path`.
        control: asks the controller; without it operators can look, but change nothing.

    Raises:
        ConfigError: if the model's files are missing or broken.
    """

    def __init__(
        self, config: GatewayConfig, router: Router, model: ServedModel | None = None, control: Control = no_controller
    ) -> None:
        self.config = config
        self.model = model or load_model(config.model_path, config.model_name, config.max_model_len)
        self._router = router
        self._control = control
        self._port: int | None = None
        self._calls = _Calls()
        self._health = health.aio.HealthServicer()
        self._executor: ThreadPoolExecutor | None = None
        self._server: grpc.aio.Server | None = None

    @property
    def port(self) -> int:
        """The bound port. Raises `RuntimeError` before `start`."""
        if self._port is None:
            raise RuntimeError("the gateway has not started")
        return self._port

    @property
    def address(self) -> str:
        """host:port for clients. Raises `RuntimeError` before `start`."""
        host = self.config.host
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    async def start(self, serving: bool = True) -> None:
        """Bind and listen. Health says SERVING at once, or with `serving=False` when `set_serving` is called.

        Raises:
            ConfigError: if the address cannot be bound.
        """
        config = self.config
        self._executor = ThreadPoolExecutor(config.num_tokenizer_threads, thread_name_prefix="tokenizer")
        server = grpc.aio.server(interceptors=(self._calls, DecodeRequests()), options=self._options())
        self._add_services(server, self._executor)
        try:
            host = f"[{config.host}]" if ":" in config.host else config.host
            self._port = server.add_insecure_port(f"{host}:{config.port}")
        except RuntimeError as error:
            self._executor.shutdown()
            raise ConfigError(f"gateway: cannot listen on {config.host}:{config.port}: {error}") from error
        await server.start()
        self._server = server
        await self.set_serving(serving)

    async def set_serving(self, serving: bool) -> None:
        """What health says from now on, for the server and each service."""
        values = health_pb2.HealthCheckResponse.ServingStatus
        for name in (_OVERALL, *SERVICE_NAMES):
            await self._health.set(name, values.SERVING if serving else values.NOT_SERVING)

    async def stop(self, grace_s: float = DEFAULT_GRACE_S) -> None:
        """Take no new calls, give running ones `grace_s` seconds, cancel the rest. Idempotent."""
        server, self._server = self._server, None
        if server is None or self._executor is None:
            return
        await self._health.enter_graceful_shutdown()
        await server.stop(grace_s)
        await self._calls.ended()
        self._executor.shutdown(cancel_futures=True)

    def _options(self) -> list[tuple[str, int]]:
        return [
            ("grpc.max_receive_message_length", self.config.max_message_bytes(self.model.info.max_model_len)),
            ("grpc.max_concurrent_streams", self.config.max_concurrent_streams),
            ("grpc.so_reuseport", 0),  # a second gateway on the same port is a mistake, and shall be seen
        ]

    def _add_services(self, server: grpc.aio.Server, executor: ThreadPoolExecutor) -> None:
        generator = Generator(
            self.model,
            self._router,
            Limits(self.model.info, self.config.max_prompt_bytes),
            self.config.fingerprint,
            clock=time.monotonic,
            mint_seed=lambda: secrets.randbits(64),
            executor=executor,
            inline_prompt_bytes=self.config.inline_prompt_bytes,
        )
        inference = InferenceService(generator, lambda: RequestId(uuid.uuid4().hex), time.monotonic)
        pb_grpc.add_InferenceServiceServicer_to_server(inference, server)  # type: ignore[no-untyped-call]
        admin = AdminService(self._router, self._control)
        pb_grpc.add_AdminServiceServicer_to_server(admin, server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((*SERVICE_NAMES, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
