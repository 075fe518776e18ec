"""Authentication of the internal services of workers and of the controller: a call without the cluster's secret is
refused before anything of it is read."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias

import grpc
from typing_extensions import override

from disagg.connections.cluster_secret import ClusterSecret

logger = logging.getLogger(__name__)

MAX_LOGGED_PEERS: Final = 1024
"""Number of hosts that are remembered, so that each is logged once; further ones are refused without a log line."""

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # generic only in the stubs


class ClusterGuard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic only in the stubs
    """Accepts calls of processes of the same cluster only; other callers get UNAUTHENTICATED, whatever the method."""

    def __init__(self, secret: ClusterSecret) -> None:
        self._secret = secret
        self._logged: set[str] = set()
        # Of the kind that reads no message: a unary one would wait for the first.
        self._refusal: Handler = grpc.stream_stream_rpc_method_handler(self._refuse)

    @override
    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        if self._secret.matches(handler_call_details.invocation_metadata or ()):
            return await continuation(handler_call_details)
        return self._refusal

    async def _refuse(self, requests: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._log(context.peer())
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "not a process of this cluster")

    def _log(self, peer: str) -> None:
        host = peer.rpartition(":")[0]
        if host not in self._logged and len(self._logged) < MAX_LOGGED_PEERS:
            self._logged.add(host)
            logger.warning("refused a call from %s without the cluster's secret (logged once for each host)", peer)
