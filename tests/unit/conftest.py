"""Unit tests touch nothing outside their process: no Ray, no network, no GPU, no waiting."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import hypothesis
import pytest

from disagg.gateway.event_loop.shell import turns

os.environ["TRITON_INTERPRET"] = "1"
"""Triton reads this when it is imported, which transformers does: so here, before any test's imports."""

hypothesis.settings.register_profile("unit", deadline=None)  # by default an example of 200 ms fails: a timing assert
hypothesis.settings.load_profile("unit")

REAL_TIME_SLEEP = time.sleep
REAL_ASYNCIO_SLEEP = asyncio.sleep

BANNED = {
    "ray": ("init",),
    "grpc": ("server", "insecure_channel", "secure_channel"),
    "grpc.aio": ("server", "insecure_channel", "secure_channel"),
    "torch.cuda": ("_lazy_init",),
    "torch.distributed": ("init_process_group", "TCPStore"),
}
"""Doors to the world outside, by module; patched where the module is loaded."""


def _forbid(what: str) -> Callable[..., NoReturn]:
    def forbidden(*args: object, **kwargs: object) -> NoReturn:
        raise AssertionError(f"a unit test must not use {what}; it belongs into tests/integration")

    return forbidden


def _only_unix_sockets(method: str) -> Callable[..., Any]:
    real = getattr(socket.socket, method)

    def guarded(self: socket.socket, address: object) -> Any:
        if self.family != socket.AF_UNIX:
            raise AssertionError(f"a unit test must not use socket.{method}({address!r})")
        return real(self, address)

    return guarded


def _sleep(seconds: float) -> None:
    if seconds > 0:
        raise AssertionError(f"a unit test must not sleep ({seconds} s); pass the time in")
    REAL_TIME_SLEEP(0)


async def _asyncio_sleep(delay: float, result: object = None) -> object:
    if delay > 0:
        raise AssertionError(f"a unit test must not sleep ({delay} s); pass the time in")
    return await REAL_ASYNCIO_SLEEP(0, result)


@pytest.fixture(autouse=True)
def closed_world(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module, names in BANNED.items():
        for name in names:
            if hasattr(sys.modules.get(module), name):
                monkeypatch.setattr(sys.modules[module], name, _forbid(f"{module}.{name}"))
    for method in ("connect", "connect_ex", "bind"):
        monkeypatch.setattr(socket.socket, method, _only_unix_sockets(method))
    monkeypatch.setattr(time, "sleep", _sleep)
    monkeypatch.setattr(asyncio, "sleep", _asyncio_sleep)
    monkeypatch.setattr(turns, "SHORT_S", math.inf)  # else a slow machine would rest after work
    monkeypatch.setattr(turns, "MESSAGE_S", 0.0)
    monkeypatch.setattr(turns, "BYTE_S", 0.0)
    yield
    ray = sys.modules.get("ray")
    assert ray is None or not ray.is_initialized(), "a unit test started Ray"
