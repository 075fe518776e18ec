"""The shell around the registry of adapters: has workers check them, and tells gateways.

add ──LoadAdapter──> all ready workers of the model ──one fingerprint──> saved ──> gateways serve it ──> answer
remove ──> saved ──> gateways refuse it ──> UnloadAdapter ──> answer
configuration ──> what it names is checked when workers are ready, in the background
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import msgspec

from disagg.cluster.core.adapters import Adapters, Bases
from disagg.proto.control import (
    AdapterList,
    AdapterRecord,
    AdapterRequest,
    AddAdapter,
    ControlRefused,
    ControlReply,
    ListAdapters,
)
from disagg.proto.messages import (
    Adapter,
    AdapterLoaded,
    WorkerInfo,
)

logger = logging.getLogger(__name__)

LOOK_S = 0.25
"""Seconds between two checks whether workers are ready for adapters of the configuration."""
AGAIN_S = 30.0
"""Seconds after which refused adapters of the configuration are checked again."""


class AdapterError(Exception):
    """Workers do not load an adapter, or do not agree on it."""


class AdapterWorkers(Protocol):
    """The calls of workers."""

    async def load(self, workers: Sequence[WorkerInfo], adapter: Adapter) -> AdapterLoaded:
        """Have all of these workers load it; returns what they agree on. Raises `AdapterError`."""
        ...

    async def unload(self, workers: Sequence[WorkerInfo], fingerprint: str) -> None:
        """Tell these workers that it is not needed. Failures are logged: an adapter that is not used makes room."""
        ...


class AdapterControl:
    """Owner of the registry; on the controller's loop. One request is carried out at a time.

    Args:
        adapters: the registry, with what an earlier controller saved.
        calls: of workers.
        bases: the models that are served now.
        ready: the ready workers of a model, by its key.
        save: saves the registry; returns when that is done.
        publish: tells all gateways; returns what is to be known of those that did not follow in time.
    """

    def __init__(
        self,
        adapters: Adapters,
        calls: AdapterWorkers,
        bases: Callable[[], Bases],
        ready: Callable[[str], Sequence[WorkerInfo]],
        save: Callable[[], Awaitable[None]],
        publish: Callable[[], Awaitable[Sequence[str]]],
    ) -> None:
        self.adapters = adapters
        self._calls = calls
        self._bases = bases
        self._ready = ready
        self._save = save
        self._publish = publish
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._num_changes = self._num_published = 0
        """Changes of the registry, and how many of them are saved and published."""

    def start(self) -> None:
        """Begin to check adapters of the configuration."""
        self.follow_file()
        self._task = asyncio.create_task(self._run(), name="adapters")

    async def stop(self) -> None:
        """End the checks. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def follow_file(self) -> None:
        """Take the adapters of the present configuration."""
        self._num_changes += self.adapters.follow(self._bases())

    async def control(self, request: AdapterRequest) -> ControlReply:
        """Reply to an operator's request."""
        if isinstance(request, ListAdapters):
            return self._list()
        async with self._lock:
            if isinstance(request, AddAdapter):
                return await self._add(request)
            return await self._remove(request.name)

    async def _add(self, request: AddAdapter) -> ControlReply:
        key = self.adapters.find_base(request, self._bases())
        if isinstance(key, ControlRefused):
            return key
        try:
            loaded = await self._calls.load(self._ready(key), Adapter(name=request.name, path=request.path))
        except AdapterError as error:
            return ControlRefused(field="path", message=str(error))
        key = self.adapters.find_base(request, self._bases())  # another configuration may have come meanwhile
        if isinstance(key, ControlRefused):
            return key
        known = self.adapters.get(request.name)
        is_in_file = known is not None and known.is_in_file
        folder = self._bases()[key].folder
        record = AdapterRecord(name=request.name, path=request.path, model=key, folder=folder, is_in_file=is_in_file)
        self.adapters.ready(record, loaded.fingerprint, loaded.bytes)
        logger.info("adapter %s of %s is served: %s", request.name, self._bases()[key].name, loaded.fingerprint[:12])
        return await self._changed()

    async def _remove(self, name: str) -> ControlReply:
        if (refused := self.adapters.removal_refusal(name)) is not None:
            return refused
        record = self.adapters.get(name)
        assert record is not None, "its removal was refused"
        self.adapters.remove(name)
        logger.info("adapter %s is not served any more", name)
        reply = await self._changed()
        await self._forget([record])
        return reply

    async def _changed(self) -> AdapterList:
        """Save and publish the registry, which was changed, and return it. Where that fails, it is tried again."""
        self._num_changes += 1
        return await self._publish_all()

    async def _publish_all(self) -> AdapterList:
        num_changes = self._num_changes
        await self._save()
        notes = await self._publish()
        self._num_published = max(self._num_published, num_changes)
        return self._list(notes)

    async def _forget(self, removed: Sequence[AdapterRecord]) -> None:
        """Tell workers of contents that no name stands for any more."""
        needed = {each.adapter.fingerprint for each in self.adapters.served}
        for record in removed:
            if record.served is not None and record.served.fingerprint not in needed:
                await self._calls.unload(self._ready(record.model), record.served.fingerprint)

    def _list(self, notes: Sequence[str] = ()) -> AdapterList:
        bases = self._bases()
        shown = (
            msgspec.structs.replace(record, base=bases[record.model].name if record.model in bases else "")
            for record in self.adapters.records
        )
        return AdapterList(adapters=tuple(shown), notes=tuple(notes))

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        again_at = loop.time() + AGAIN_S
        while True:
            try:
                if self._num_published < self._num_changes:
                    async with self._lock:
                        await self._publish_all()
                is_again = loop.time() >= again_at
                if is_again:
                    again_at = loop.time() + AGAIN_S
                for record in self.adapters.to_check(failed=is_again):
                    await self._check(record)
            except Exception:
                # A bug. The next turn tries again.
                logger.exception("adapters of the configuration could not be checked")
            await asyncio.sleep(LOOK_S)

    async def _check(self, record: AdapterRecord) -> None:
        workers = self._ready(record.model)
        if not workers:
            return
        async with self._lock:
            if self.adapters.get(record.name) != record:
                return
            try:
                loaded = await self._calls.load(workers, Adapter(name=record.name, path=record.path))
            except AdapterError as error:
                if self.adapters.get(record.name) == record:
                    self.adapters.failed(record, str(error))
                    logger.warning("adapter %s of the configuration cannot be served: %s", record.name, error)
                return
            if self.adapters.get(record.name) != record:
                return
            self.adapters.ready(record, loaded.fingerprint, loaded.bytes)
            logger.info("adapter %s of the configuration is served: %s", record.name, loaded.fingerprint[:12])
            await self._changed()
