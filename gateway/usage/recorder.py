"""Records what calls used: sums in memory, written by a thread as soon as there are some, many calls at a time.

    call ── ends ──> Pending ──> one write at a time ──> the file
              └── its client gets the end once its entry is written, or after `wait_s` at the latest

A file that is locked, or a disk that is full, fails no call: what could not be written is kept and tried again, and no
call waits for it meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from disagg.gateway.config import UsageOptions
from disagg.gateway.requests.call_use import CallUse
from disagg.gateway.requests.request import Call
from disagg.gateway.usage.counts import NO_USAGE, Page, Pending, day_of
from disagg.gateway.usage.store import UsageStore
from disagg.proto.errors import ConfigError, DisaggError, RequestCancelledError, UnavailableError

logger = logging.getLogger(__name__)

_BUSY_TIMEOUT_S: Final = 2.0
_RETRY_S: Final = 1.0


class UsageRecorder:
    """Owner of the file's connections, one for a thread that writes and one for a thread that reads, and of the sums
    that are not written. Its methods belong on the event loop.

    Args:
        options: see there; None records nothing.
        wall_clock: seconds since the epoch.
    """

    def __init__(self, options: UsageOptions | None, wall_clock: Callable[[], float]) -> None:
        self._options = options
        self._wall_clock = wall_clock
        self._pending = Pending()
        self._woken = asyncio.Event()
        self._written = asyncio.Event()
        """Set when the write of the calls that are pending now has ended; each batch has its own event."""
        self._writing = 0
        """Number of calls of the batch that is being written."""
        self._failing_since: float | None = None
        self._stopping = False
        self._task: asyncio.Task[None] | None = None
        self.writes: Counter[str] = Counter(ok=0, failed=0)
        """Number of transactions by outcome, `ok` or `failed`."""
        self._reading = threading.Lock()

    @property
    def num_unwritten(self) -> int:
        """Number of calls that are counted but not in the file yet."""
        return self._pending.num_requests + self._writing

    def start(self) -> None:
        """Open the file, and write from now on. Raises `ConfigError` if it cannot be used."""
        options = self._options
        if options is None:
            return
        try:
            folder = Path(options.folder)
            self._store = UsageStore(folder, options.retention_days, _BUSY_TIMEOUT_S)
            self._readers_store = UsageStore(folder, options.retention_days, _BUSY_TIMEOUT_S)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"gateway.usage.folder: {options.folder} cannot be used: {error}") from error
        self._thread = ThreadPoolExecutor(1, "usage-writer")
        self._task = asyncio.create_task(self._run(), name="usage")

    async def stop(self) -> None:
        """Write what is left, with one try, and close the file. Idempotent."""
        if self._task is None:
            return
        task, self._task = self._task, None
        self._stopping = True
        self._woken.set()
        await task
        if left := self._pending.num_requests:
            logger.error("usage: %d calls are not in %s, which cannot be written; they are lost", left, self._place)
        self._thread.shutdown()
        self._store.close()
        with self._reading:
            self._readers_store.close()

    @asynccontextmanager
    async def counted(self, call: Call) -> AsyncGenerator[None, None]:
        """Record the call that is answered inside when it ends. It counts as failed unless `finished` was called before
        or its client left. Raises what is raised inside, once the entry is written."""
        try:
            yield
        except asyncio.CancelledError:
            self._end(call, failed=False, is_open=True)
            raise
        except DisaggError as error:
            has_left = isinstance(error, RequestCancelledError)
            if self._end(call, failed=not has_left, is_open=True) and not has_left:
                await self._settle()
            raise
        except Exception:
            self._end(call, failed=True, is_open=True)
            raise
        else:
            await self.finished(call)

    async def finished(self, call: Call) -> None:
        """Record a call whose answer is complete, and return when its end may be sent. Later ends of the call change
        nothing."""
        if self._end(call, failed=False, is_open=False):
            await self._settle()

    def add_line(self, tenant: str, use: CallUse) -> None:
        """Record a line of a batch whose answer is stored."""
        self._add(tenant, use, failed=use.failed, is_open=False)

    async def read(self, days: int, tenant: str | None, limit: int) -> Page:
        """The recorded usage of the last `days` days, of a tenant or of all, at most `limit` rows. Raises
        `UnavailableError` if none is recorded or the file cannot be read."""
        if self._task is None:
            raise UnavailableError("this gateway keeps no usage; set gateway.usage in its configuration", NO_USAGE)
        now = self._wall_clock()

        def read() -> Page:
            with self._reading:
                return self._readers_store.read(days, tenant, limit, now)

        try:
            return await asyncio.to_thread(read)
        except sqlite3.Error as error:
            raise UnavailableError(f"the usage cannot be read now: {error}", NO_USAGE) from error

    # ---------------------------------------------------------------- inside

    def _end(self, call: Call, *, failed: bool, is_open: bool) -> bool:
        """Record a call unless it was recorded before. Returns whether it was recorded now."""
        if call.use.is_recorded:
            return False
        call.use.is_recorded = True
        return self._add(call.caller.tenant, call.use, failed=failed, is_open=is_open)

    def _add(self, tenant: str, use: CallUse, *, failed: bool, is_open: bool) -> bool:
        if self._options is None or not use.model:
            return False
        self._pending.add(tenant, day_of(self._wall_clock()), use, failed=failed, is_open=is_open)
        self._woken.set()
        return True

    async def _settle(self) -> None:
        """Wait until the pending calls are written, at most `wait_ms`."""
        options = self._options
        if options is None or self._failing_since is not None or self._task is None or not options.wait_ms:
            return
        try:
            async with asyncio.timeout(options.wait_ms / 1000):
                await self._written.wait()
        except TimeoutError:
            self._fails("a write takes long")

    async def _run(self) -> None:
        while True:
            await self._woken.wait()
            self._woken.clear()
            is_last = self._stopping
            if self._pending.num_requests:
                await self._write()
            if is_last:
                return
            if self._pending.num_requests:  # that failed, or came meanwhile
                if self._failing_since is not None:
                    await self._pause()
                self._woken.set()

    async def _write(self) -> None:
        batch, self._written, written = self._pending.take(), asyncio.Event(), self._written
        self._writing = batch.num_requests
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._thread, self._store.write, batch, self._wall_clock())
        except Exception as error:
            if not isinstance(error, (OSError, sqlite3.Error)):
                logger.exception("usage: a write failed by a bug")
            self.writes["failed"] += 1
            self._pending.put_back(batch)
            self._fails(str(error))
        else:
            self.writes["ok"] += 1
            self._works()
        finally:
            self._writing = 0
            written.set()

    async def _pause(self) -> None:
        """Wait before the next try; a stop does not wait for it."""
        deadline = asyncio.get_running_loop().time() + _RETRY_S
        while not self._stopping and (left_s := deadline - asyncio.get_running_loop().time()) > 0:
            self._woken.clear()
            try:
                async with asyncio.timeout(left_s):
                    await self._woken.wait()
            except TimeoutError:
                return

    def _fails(self, why: str) -> None:
        if self._failing_since is None:
            self._failing_since = self._wall_clock()
            logger.error(
                "usage: %s cannot be written (%s); calls go on and are counted in memory, the next try is in %g s",
                self._place,
                why,
                _RETRY_S,
            )

    def _works(self) -> None:
        if self._failing_since is not None:
            since_s = self._wall_clock() - self._failing_since
            self._failing_since = None
            logger.info("usage: %s can be written again, after %.1f s; nothing is lost", self._place, since_s)

    @property
    def _place(self) -> str:
        return "" if self._options is None else self._options.folder
