"""The worst messages that each limit lets through, against a gateway on loopback: each is answered or refused with what
is wrong, and none makes one turn of the event loop do much work. Work is counted in calls of functions, so that the
outcome is the same on a slow machine; `tests.acceptance.bad_input.fuzz` measures time, and searches for more.
"""

from __future__ import annotations

import asyncio
import gc
import math
import selectors
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from disagg.gateway.event_loop.shell import turns
from disagg.gateway.server import GatewayServer
from tests.acceptance.bad_input.fuzz_clients import Answer, Sender
from tests.acceptance.bad_input.fuzz_messages import FAMILIES, Served, make
from tests.support.gateway import MODEL_NAME, FakeRouter
from tests.support.gateway_server import running

NUM_SHAPES = 2
"""Of each family."""
MAX_CALLS = 10_000
"""Of functions in one turn: a few milliseconds."""
MAX_MODEL_LEN = 8192
WAIT_S = 120.0


class CountedTurns(selectors.DefaultSelector):
    """Counts the calls of functions between two looks at the sockets, on the thread that looks."""

    def __init__(self) -> None:
        super().__init__()
        self.most_calls = 0
        self._num_calls = 0

    def count(self, frame: FrameType, event: str, argument: Any) -> None:
        """What `sys.setprofile` calls."""
        self._num_calls += event in ("call", "c_call")

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.most_calls = max(self.most_calls, self._num_calls)
        self._num_calls = 0
        return super().select(timeout)


class Gateway:
    """A gateway on a thread of its own, so that its clients' work is not counted."""

    def __init__(self) -> None:
        self.turns = CountedTurns()
        self.server: GatewayServer | None = None
        self._ready = threading.Event()
        self._stop = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def start(self) -> GatewayServer:
        self._thread.start()
        assert self._ready.wait(WAIT_S)
        assert self.server is not None
        return self.server

    def stop(self) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        assert self._error is None

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(self.turns)) as runner:
                runner.run(self._serve())
        except BaseException as error:
            self._error = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        router = FakeRouter([[300]])
        async with running(Path("fake"), router, http_port=0, max_model_len=MAX_MODEL_LEN) as self.server:
            sys.setprofile(self.turns.count)
            try:
                self._ready.set()
                await self._stop.wait()
            finally:
                sys.setprofile(None)


@contextmanager
def gateway() -> Iterator[Gateway]:
    it = Gateway()
    gc.collect()
    gc.disable()  # finalizers of what other tests left behind would be counted as calls of whichever turn they run in
    try:
        it.start()
        try:
            yield it
        finally:
            it.stop()
    finally:
        gc.enable()


async def answers(it: Gateway) -> dict[str, tuple[Answer, int]]:
    """By family and shape, with the most calls of a turn."""
    server = it.server
    assert server is not None
    served = Served(MODEL_NAME, server.config.max_message_bytes(MAX_MODEL_LEN))
    found = {}
    async with Sender(server.address, server.http_address) as sender:
        for name, family in FAMILIES.items():
            for shape in family.shapes[:NUM_SHAPES]:
                it.turns.most_calls = 0
                answer = await sender.send(make(name, shape, served))
                found[f"{name} {shape}"] = (answer, it.turns.most_calls)
        it.turns.most_calls = 0
        worst = [make(name, family.shapes[0], served) for name, family in FAMILIES.items()]
        for i in range(0, len(worst), 8):
            at_once = await asyncio.gather(*(sender.send(message) for message in worst[i : i + 8]))
            found |= {f"at once, {i + j}": (answer, 0) for j, answer in enumerate(at_once)}
    return found


def test_no_message_costs_much_in_one_turn_and_all_are_answered(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "SHORT_S", math.inf)  # counted work is slow, and would rest long
    with gateway() as it:
        found = asyncio.run(answers(it))
    assert {name: answer.problem for name, (answer, _) in found.items() if answer.problem} == {}
    assert {name: num_calls for name, (_, num_calls) in found.items() if num_calls > MAX_CALLS} == {}
    assert {answer.code for answer, _ in found.values()} >= {"200", "400", "OK", "INVALID_ARGUMENT"}
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []
