"""The batches of one gateway: the store as its calls use it, the runner in the background, and the quota of lines.

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

from disagg.gateway.batches.batch_quota import BatchQuota, bounds_for, quota_of
from disagg.gateway.batches.leases import is_alive, owner_of
from disagg.gateway.batches.lines import NO_MODEL
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
"""Seconds between two checks for a batch, unless a call of this gateway creates one."""
_AFTER_FAULT_S: Final = 5.0
_MAX_TENANT_UPLOADS: Final = 4
"""Maximum number of uploads of one tenant at a time. There is no limit for all tenants: bytes are reserved when an
upload begins, and its connection is one of `max_connections`."""
UPLOAD_TIMEOUT_S: Final = 600.0
"""Maximum duration of one upload, even if data keeps arriving: its bytes are reserved meanwhile."""
_EXPIRE_EVERY_S: Final = 600.0
_RETRY_S: Final = 2.0


class BatchService:
    """The connections to the batch database, the background tasks and the upload slots of a gateway.

    Args:
        options: see there.
        name: of this gateway, the same in each of its lives.
        life: of this process; another one each time.
        views: of each model and adapter that is served now, by its name: its workers and requests. It changes with
            these.
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
        self._known: set[str] = set()
        self._names: list[str] = []
        """Names of models that are or were served. Positions never change, because waiting lines refer to them."""
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
        """Run batches from now on, first those that a former process of this gateway left. `kept`: see
        `BatchRunner`."""
        runner = BatchRunner(
            self._runners_store, self._owner, self.models, answer_line, self.batch_quota, time.time, kept
        )
        running = asyncio.create_task(self._run(runner), name="batches")
        self._tasks = [running, asyncio.create_task(self._expire(), name="batch-files")]

    def models(self) -> list[str]:
        """Names of the models that are or were served. The position of a name never changes."""
        new = [name for name in self._views if name not in self._known]
        self._names += new[: NO_MODEL - len(self._names)]
        self._known.update(new)
        return self._names

    def batch_quota(self, model: int, num_running: int, num_all: int) -> BatchQuota:
        """The number of answers that may start at the model with this position in `models`, or for `lines.NO_MODEL`.

        Args:
            model: see there.
            num_running: answers to lines that run there.
            num_all: of all models.
        """
        most = self.options.max_running - num_all
        view = None if model == NO_MODEL else self._views.get(self._names[model])
        if view is None:
            return BatchQuota(max(0, most), max(0, most))
        return quota_of(
            view(),
            num_running,
            self.options.reserved_share,
            most + num_running,
            wakes_workers=self._wakes_workers,
            bounds=self._bounds,
        )

    async def stop_lines(self) -> None:
        """Cancel the running lines and release the batches, so that another gateway or the next process can claim them
        at once."""
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
        """Run `work` with the store on the store's thread. Raises what it raises."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, self._store)

    def wake(self) -> None:
        """Tell the runner that there is a new batch."""
        self._woken.set()

    @asynccontextmanager
    async def uploading(self, tenant: str, upload_id: str, num_bytes: int) -> AsyncGenerator[Path, None]:
        """Reserve space for a file of at most `num_bytes` and yield the path to write it to. At the end the path is
        deleted unless the store has taken it over.

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
        """Delete files that are too old, in an endless loop."""
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
        """Release the batches of gateways with this name whose process has ended. Gateways of other clusters on this
        machine may have the same name."""
        for owner in self._runners_store.owners():
            if owner.partition("/")[0] == self._name and not is_alive(owner):
                self._runners_store.release(owner, has_ended=True)


def _remove_stale(uploads: Path, arriving: Collection[str]) -> None:
    """Remove partial uploads of gateways that were killed. A gateway of an earlier version does not record its uploads,
    so a recently written file is left alone."""
    for path in uploads.iterdir():
        if path.name not in arriving and path.stat().st_mtime < time.time() - UPLOAD_TIMEOUT_S:
            path.unlink(missing_ok=True)
