"""Calls are recorded once, before their clients have the end; a file that cannot be written fails none."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from disagg.gateway.auth.auth import Caller
from disagg.gateway.config import UsageOptions
from disagg.gateway.requests.call_use import CallUse
from disagg.gateway.requests.request import Call
from disagg.gateway.usage import recorder as module
from disagg.gateway.usage.counts import Counts
from disagg.gateway.usage.recorder import UsageRecorder
from disagg.gateway.usage.store import FILE
from disagg.proto.errors import ConfigError, OverloadedError, RequestCancelledError, UnavailableError
from disagg.proto.ids import RequestId

NOW = 1_764_115_200.0


@asynccontextmanager
async def recording(folder: Path, **options: Any) -> AsyncIterator[UsageRecorder]:
    recorder = UsageRecorder(UsageOptions(folder=str(folder), **{"wait_ms": 10_000.0, **options}), lambda: NOW)
    recorder.start()
    yield recorder
    await recorder.stop()


def _call(tenant: str = "a", completion: int = 5, model: str = "m") -> Call:
    call = Call(request_id=RequestId("r"), caller=Caller(tenant, False))
    call.use.model = model
    call.use.add(10, 4, completion)
    return call


async def counts_of(recorder: UsageRecorder, tenant: str = "a") -> Counts:
    rows = (await recorder.read(1, tenant, 10)).rows
    return rows[0].counts if rows else Counts()


async def test_an_answer_that_ended_is_in_the_file_and_counts_once(tmp_path: Path) -> None:
    async with recording(tmp_path) as recorder:
        call = _call()
        async with recorder.counted(call):
            await recorder.finished(call)
            assert await counts_of(recorder) == Counts(1, 0, 10, 4, 5)
        with pytest.raises(RequestCancelledError):
            async with recorder.counted(call):
                raise RequestCancelledError("left after the end")
        await asyncio.gather(*(recorder.finished(_call()) for _ in range(50)))
        assert await counts_of(recorder) == Counts(51, 0, 510, 204, 255)
        assert recorder.num_unwritten == 0
        assert 2 <= recorder.writes["ok"] <= 51
    again = UsageRecorder(UsageOptions(folder=str(tmp_path)), lambda: NOW)
    again.start()
    assert await counts_of(again) == Counts(51, 0, 510, 204, 255)
    await again.stop()


@pytest.mark.parametrize(
    ("error", "failed"),
    [(OverloadedError("busy", 1.0), 1), (ValueError("a bug"), 1), (RequestCancelledError("left"), 0)],
)
async def test_how_a_call_ends_is_counted(tmp_path: Path, error: Exception, failed: int) -> None:
    async with recording(tmp_path) as recorder:
        with pytest.raises(type(error)):
            async with recorder.counted(_call()):
                raise error
        await recorder.finished(_call("b"))
        assert await counts_of(recorder) == Counts(1, failed, 10, 4, 5)


async def test_a_call_that_is_cancelled_counts_what_was_made(tmp_path: Path) -> None:
    async with recording(tmp_path) as recorder:
        entered = asyncio.Event()

        async def answer() -> None:
            async with recorder.counted(_call()):
                entered.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(answer())
        await entered.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        recorder.add_line("b", CallUse("m", 1, 0, 1))
        await recorder.finished(_call("c"))
        assert await counts_of(recorder) == Counts(1, 0, 10, 4, 5)
        assert await counts_of(recorder, "b") == Counts(1, 0, 1, 0, 1)


async def test_a_call_whose_request_was_wrong_is_not_counted(tmp_path: Path) -> None:
    async with recording(tmp_path) as recorder:
        async with recorder.counted(_call(model="")):
            pass
        await recorder.finished(_call("b"))
        assert (await recorder.read(1, None, 10)).rows[0].key.tenant == "b"


async def test_a_locked_file_fails_no_call_and_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_BUSY_TIMEOUT_S", 0.0)
    monkeypatch.setattr(module, "_RETRY_S", 0.001)
    with caplog.at_level(logging.INFO):
        async with recording(tmp_path) as recorder:
            with closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as other:
                other.execute("BEGIN IMMEDIATE")
                for _ in range(3):
                    await recorder.finished(_call())
                await _until(lambda: recorder.writes["failed"] >= 2)
                assert recorder.num_unwritten == 3
                other.execute("ROLLBACK")
            await _until(lambda: not recorder.num_unwritten)
            assert await counts_of(recorder) == Counts(3, 0, 30, 12, 15)
    messages = [record.message for record in caplog.records]
    assert len(messages) == 2
    assert "cannot be written (database is locked)" in messages[0]
    assert "can be written again, after 0.0 s; nothing is lost" in messages[1]


async def test_a_stop_writes_what_is_left_and_says_what_it_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_BUSY_TIMEOUT_S", 0.0)
    async with recording(tmp_path, wait_ms=0) as recorder:
        await recorder.finished(_call())
    async with recording(tmp_path) as recorder:
        assert await counts_of(recorder) == Counts(1, 0, 10, 4, 5)
    with caplog.at_level(logging.ERROR), closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as other:
        async with recording(tmp_path) as recorder:
            other.execute("BEGIN IMMEDIATE")
            await recorder.finished(_call())
    assert "1 calls are not in" in caplog.records[-1].message


async def _until(is_true: Callable[[], bool]) -> None:
    while not is_true():  # noqa: ASYNC110  # a thread makes it true
        await asyncio.sleep(0)


async def test_without_a_folder_nothing_is_recorded() -> None:
    recorder = UsageRecorder(None, lambda: NOW)
    recorder.start()
    async with recorder.counted(_call()):
        pass
    recorder.add_line("a", CallUse("m"))
    assert recorder.num_unwritten == 0
    with pytest.raises(UnavailableError, match=r"set gateway\.usage"):
        await recorder.read(1, None, 1)
    await recorder.stop()


async def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"gateway\.usage\.folder: .*file cannot be used"):
        UsageRecorder(UsageOptions(folder=str(tmp_path / "file")), lambda: NOW).start()
