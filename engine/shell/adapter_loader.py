"""The thread that reads the adapters of a worker.

engine thread ──order──> this thread ──AdapterRead, as a command──> engine thread
event loop    ──read───> this thread ──a future──> event loop
"""

from __future__ import annotations

import concurrent.futures
import logging
import time
from collections.abc import Callable

from disagg.engine.adapters.folder import AdapterError
from disagg.engine.commands import AdapterRead
from disagg.engine.plan import LoadedAdapter, ModelRunner
from disagg.engine.shell.order_thread import OrderThread
from disagg.proto.messages import Adapter

logger = logging.getLogger(__name__)


class AdapterLoader:
    """Owner: the worker. Orders may come before `start`, and are carried out then."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._post: Callable[[AdapterRead], None] = lambda command: None
        self._thread = OrderThread("adapters")

    def start(self, post: Callable[[AdapterRead], None]) -> None:
        """Begin to carry out orders; `post` takes the answers, on this thread."""
        self._post = post
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """End after the present order; whether that was in time. What was ordered and not begun is not done."""
        return self._thread.stop(timeout_s)

    def order(self, adapter: Adapter, slot: int) -> None:
        """Read an adapter for a slot. Answer: `AdapterRead`."""
        self._thread.order(lambda: self._post(self._read(adapter, slot)))

    def read(self, adapter: Adapter) -> concurrent.futures.Future[tuple[LoadedAdapter, float]]:
        """Read an adapter for an operator; it, and the milliseconds that this took. The future raises
        `AdapterError`."""
        future: concurrent.futures.Future[tuple[LoadedAdapter, float]] = concurrent.futures.Future()

        def read() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                began = time.monotonic()
                loaded = self._runner.read_adapter(adapter)
                future.set_result((loaded, (time.monotonic() - began) * 1e3))
            except Exception as error:
                future.set_exception(error)

        self._thread.order(read)
        return future

    def _read(self, adapter: Adapter, slot: int) -> AdapterRead:
        """What is wrong with its content is wrong everywhere; another worker may have what is missing here."""
        try:
            return AdapterRead(slot, self._runner.read_adapter(adapter))
        except AdapterError as error:
            logger.warning("adapter %s cannot be loaded: %s", adapter.name, error)
            return AdapterRead(slot, None, "invalid" if error.fault == "content" else "refused", str(error))
        except Exception as error:
            logger.exception("adapter %s cannot be loaded", adapter.name)
            return AdapterRead(slot, None, "refused", f"{type(error).__name__} while it was read")
