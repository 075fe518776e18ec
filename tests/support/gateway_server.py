"""A real gateway on loopback, before a router that follows a script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from disagg.gateway.config import GatewayConfig, ModelSource
from disagg.gateway.server import GatewayServer
from tests.support.gateway import FINGERPRINT, MODEL_NAME, FakeRouter

LEFT_TIMEOUT_S = 60.0


def sources(folder: Path, max_model_len: int | None = None) -> tuple[ModelSource, ...]:
    """One model, of a checkpoint folder."""
    source = ModelSource(name=MODEL_NAME, path=str(folder), prefix_root=FINGERPRINT, max_model_len=max_model_len)
    return (source,)


@asynccontextmanager
async def running(
    folder: Path, router: FakeRouter, max_model_len: int | None = None, **changes: Any
) -> AsyncIterator[GatewayServer]:
    """A gateway that has stopped, and left no task, when the context ends. `changes` are of its configuration."""
    before = asyncio.all_tasks()
    config = GatewayConfig(models=sources(folder, max_model_len), **changes)
    server = GatewayServer(config, {"": router})
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0.0)
    left = [task for task in asyncio.all_tasks() - before if not task.done()]
    if left:  # a call of a client that has just closed is cancelled, and ends in the loop's next rounds
        await asyncio.wait(left, timeout=LEFT_TIMEOUT_S)
    assert [task for task in left if not task.done()] == []
