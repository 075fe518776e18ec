"""Puts a router and a gateway together for the benchmark, in one place, because it follows their constructors."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from disagg.connections.cluster_secret import NUM_BYTES, ClusterSecret
from disagg.gateway.config import GatewayConfig
from disagg.gateway.server import GatewayServer
from disagg.proto.ids import GatewayId
from disagg.proto.messages import WorkerInfo
from disagg.router.config import RouterConfig
from disagg.router.shell.server import RouterServer

CONNECT_TIMEOUT_S = 15.0


@asynccontextmanager
async def open_gateway(config: GatewayConfig, worker: WorkerInfo) -> AsyncIterator[tuple[str, str]]:
    """A gateway with one worker; gives its addresses for gRPC and HTTP. Admission is off, for no model predicts the
    worker's pace."""
    secret = ClusterSecret(secrets.token_bytes(NUM_BYTES))
    router = RouterServer(RouterConfig(admission=False, max_queued=4096), GatewayId("bench"), [worker], secret)
    await router.start()
    try:
        await router.wait_until_connected(CONNECT_TIMEOUT_S)
        gateway = GatewayServer(config, {"": router})
        await gateway.start()
        try:
            yield gateway.address, gateway.http_address
        finally:
            await gateway.stop(0.0)
    finally:
        await router.stop()
