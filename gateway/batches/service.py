"""The batches of one gateway: the store as its calls use it, the runner in the background, and the room for lines.

Two connections to the database: one of a thread that serves the calls one after the other, one of the runner.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, TypeVar

from disagg.gateway.batches.leases import is_alive, owner_of
from disagg.gateway.batches.lines import NO_MODEL
from disagg.gateway.batches.room import Room, bounds_for, room_in
from disagg.gateway.batches.runner import AnswerLine, BatchRunner
from disagg.gateway.batches.store import BatchStore
from disagg.gateway.config import BatchOptions
from disagg.gateway.private_files import make_folder
from disagg.gateway.requests.call_use import CallUse
from disagg.proto.errors import ConfigError, OverloadedError
from disagg.router.api import ClusterView

logger = logging.getLogger(__name__)

T = TypeVar("T")

_IDLE_S: Final = 1.0
"""Between two looks for a batch, where no call of this gateway made one."""
_AFTER_FAULT_S: Final = 5.0
_MAX_TENANT_UPLOADS: Final = 4
"""At a time. There is no bound for all tenants: their bytes are bounded from the beginning of each, and its connection
is one of `max_connections`."""
UPLOAD_TIMEOUT_S: Final = 600.0
"""For one file, however steadily it comes: its bytes are its tenant's meanwhile."""
_EXPIRE_EVERY_S: Final = 600.0
_RETRY_S: Final = 2.0


class BatchService:
    """Owner of the folder's connections, the tasks and the places of uploads.

    Args:
        options: see there.
        name: of this gateway, the same in each of its lives.
        life: of this process; another one each time.
        views: of each model that is served now, by its name: its workers and requests. It changes with the models.
        wakes_workers: whether a request makes a worker start where there is none.
        ttft_s, tpot_s: the configured targets of interactive requests; None where there is none.

    Raises:
        ConfigError: if the folder cannot be used.
    """

    def __init__(
        self,
        options: BatchOptions,
        name: str,
        life: str,
        views: Mapping[str, Callable[[], ClusterView]],
        *,
        wakes_workers: bool,
        ttft_s: float | None,
        tpot_s: float | None,
    ) -> None:
        self.options = options
        self._name, self._owner = name, owner_of(name, life)
        self._views = views
        self._names: list[str] = []
        """Of models that are served, or were; positions are kept with lines that wait."""
        self._bounds = bounds_for(ttft_s, tpot_s, options.max_step_ms)
        self._wakes_workers = wakes_workers
        folder = Path(options.folder)
        try:
            self._store, self._runners_store = BatchStore(folder, options), BatchStore(folder, options)
            self.uploads = folder / "uploads"
            make_folder(self.uploads)
            _remove_stale(self.uploads, self._store.uploads(time.time()))
            if orphans := self._store.remove_orphans():
                logger.info("batches: removed %d contents that no file names, such as %s", len(orphans), orphans[0])
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"gateway.batches.folder: {folder} cannot be used: {error}") from error
        self._thread = ThreadPoolExecutor(1, "batch-store")
        self._uploading: Counter[str] = Counter()
        self._woken = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, answer_line: AnswerLine, kept: Callable[[str, CallUse], None]) -> None:
        """Run batches from now on, at first those that a former life of this gateway left. `kept`: see
        `BatchRunner`."""
        runner = BatchRunner(self._runners_store, self._owner, self.models, answer_line, self.room, time.time, kept)
        running = asyncio.create_task(self._run(runner), name="batches")
        self._tasks = [running, asyncio.create_task(self._expire(), name="batch-files")]

    def models(self) -> list[str]:
        """Names of the models that are served, or were, each at its place for good."""
        self._names += [name for name in self._views if name not in self._names]
        return self._names

    def room(self, model: int, num_running: int, num_all: int) -> Room:
        """What may start at the model of that position of `models`, or of `lines.NO_MODEL`.

        Args:
            model: see there.
            num_running: answers to lines that run there.
            num_all: of all models.
        """
        most = self.options.max_running - num_all
        view = None if model == NO_MODEL else self._views.get(self._names[model])
        if view is None:
            return Room(max(0, most), max(0, most))
        return room_in(
            view(),
            num_running,
            self.options.reserved_share,
            most + num_running,
            wakes_workers=self._wakes_workers,
            bounds=self._bounds,
        )

    async def stop_lines(self) -> None:
        """End the lines that run, and let another gateway, or this one's next life, go on at once."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        with contextlib.suppress(sqlite3.Error):  # then the lease runs out
            await self.call(lambda store: store.release(self._owner))

    def close(self) -> None:
        """Close the database, once no call runs."""
        self._thread.shutdown()
        self._store.close()
        self._runners_store.close()

    async def call(self, work: Callable[[BatchStore], T]) -> T:
        """What `work` does with the store, on its thread. Raises what it raises."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, self._store)

    def wake(self) -> None:
        """There is a new batch."""
        self._woken.set()

    @asynccontextmanager
    async def uploading(self, tenant: str, upload_id: str, num_bytes: int) -> AsyncGenerator[Path, None]:
        """Inside, a file of at most `num_bytes` arrives at the path that this gives, which is gone at the end unless
        the store took it.

        Raises:
            OverloadedError: where too many of the tenant arrive.
            LimitError: if it has no room for this one.
        """
        if self._uploading[tenant] >= _MAX_TENANT_UPLOADS:
            raise OverloadedError(f"{_MAX_TENANT_UPLOADS} files of tenant {tenant} arrive already", _RETRY_S)
        self._uploading[tenant] += 1
        path, now = self.uploads / upload_id, time.time()
        try:
            await self.call(
                lambda store: store.begin_upload(upload_id, tenant, num_bytes, now, now + 2 * UPLOAD_TIMEOUT_S)
            )
            try:
                yield path
            finally:
                await asyncio.to_thread(path.unlink, missing_ok=True)  # a large one takes long
                await self.call(lambda store: store.end_upload(upload_id))
        finally:
            self._uploading[tenant] -= 1
            if not self._uploading[tenant]:
                del self._uploading[tenant]

    async def _expire(self) -> None:
        """Delete files that are too old, again and again."""
        while True:
            with contextlib.suppress(OSError, sqlite3.Error):  # The runner says what is wrong with the folder.
                if num_files := await self.call(lambda store: store.expire(time.time())):
                    days = self.options.file_days
                    logger.info("batches: deleted %d files, older than %d days (file_days)", num_files, days)
            await asyncio.sleep(_EXPIRE_EVERY_S)

    async def _run(self, runner: BatchRunner) -> None:
        is_first = True
        while True:
            try:
                if is_first:
                    await asyncio.to_thread(self._release_former)
                    is_first = False
                await runner.run()
                wait_s = _IDLE_S
            except (OSError, sqlite3.Error):
                logger.exception(
                    "batches: the folder %s failed; the next try is in %g s", self.options.folder, _AFTER_FAULT_S
                )
                wait_s = _AFTER_FAULT_S
            self._woken.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), wait_s)

    def _release_former(self) -> None:
        """Of gateways of this name whose process is gone; those of other clusters on this machine may have the name."""
        for owner in self._runners_store.owners():
            if owner.partition("/")[0] == self._name and not is_alive(owner):
                self._runners_store.release(owner, has_ended=True)


def _remove_stale(uploads: Path, arriving: Collection[str]) -> None:
    """Remove what arrived in part when its gateway was killed. An earlier version does not note what arrives at it."""
    for path in uploads.iterdir():
        if path.name not in arriving and path.stat().st_mtime < time.time() - UPLOAD_TIMEOUT_S:
            path.unlink(missing_ok=True)
