"""The controller's calls of workers about adapters: load one and say what it is, and let one go."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import grpc.aio
from typing_extensions import override

from disagg.cluster.control.adapters import AdapterError, AdapterWorkers
from disagg.connections.cluster_secret import ClusterSecret
from disagg.connections.shell.channels import open_channel
from disagg.proto.messages import (
    Adapter,
    AdapterLoaded,
    AdapterUnloaded,
    LoadAdapter,
    UnloadAdapter,
    WorkerInfo,
    decoder,
    encode,
)
from disagg.proto.services import LOAD_ADAPTER, UNLOAD_ADAPTER

logger = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 60.0
"""Seconds that a worker may take to check and load an adapter."""
UNLOAD_TIMEOUT_S = 5.0
MAX_DETAIL_CHARS = 1000
MAX_NAMED = 4
"""Most workers with the same reason that an error names."""


class AdapterCalls(AdapterWorkers):
    """Implements `AdapterWorkers` by gRPC; all workers at the same time."""

    def __init__(self, secret: ClusterSecret) -> None:
        self._secret = secret

    @override
    async def load(self, workers: Sequence[WorkerInfo], adapter: Adapter) -> AdapterLoaded:
        if not workers:
            raise AdapterError("no worker of its model is ready to check it; try again when one is")
        message = encode(LoadAdapter(adapter=adapter))
        calls = (self._call(info, LOAD_ADAPTER, message, LOAD_TIMEOUT_S) for info in workers)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        found: dict[str, AdapterLoaded] = {}
        problems: dict[str, list[str]] = {}
        for info, answer in zip(workers, answers, strict=True):
            if isinstance(answer, grpc.aio.AioRpcError):
                problems.setdefault(answer.details() or answer.code().name, []).append(info.worker_id)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                found[info.worker_id] = decoder(AdapterLoaded).decode(answer)
        if problems:
            told = (f"{', '.join(sorted(ids)[:MAX_NAMED])}: {why}" for why, ids in problems.items())
            raise AdapterError("; ".join(told)[:MAX_DETAIL_CHARS])
        if len({loaded.fingerprint for loaded in found.values()}) > 1:
            each = ", ".join(f"{name} {loaded.fingerprint[:12]}" for name, loaded in sorted(found.items())[:8])
            raise AdapterError(f"workers find different contents at {adapter.path}: {each}")
        return next(iter(found.values()))

    @override
    async def unload(self, workers: Sequence[WorkerInfo], fingerprint: str) -> None:
        message = encode(UnloadAdapter(fingerprint=fingerprint))
        calls = (self._call(info, UNLOAD_ADAPTER, message, UNLOAD_TIMEOUT_S) for info in workers)
        for info, answer in zip(workers, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(answer, BaseException):
                logger.info("%s could not be told that an adapter was removed: %r", info.worker_id, answer)
            else:
                decoder(AdapterUnloaded).decode(answer)

    async def _call(self, info: WorkerInfo, method: str, message: bytes, timeout_s: float) -> bytes:
        async with open_channel(info.address, self._secret) as channel:
            call = channel.unary_unary(method, None, None)
            answer: bytes = await call(message, timeout=timeout_s, metadata=self._secret.metadata)
            return answer
