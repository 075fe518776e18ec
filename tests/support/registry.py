"""In place of the controller, for tests of single worker processes: accepts every worker that registers."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import grpc

from disagg.proto.control import WorkerFailed, WorkerRejected, WorkerStarting, WorkerToController, WorkerWelcome
from disagg.proto.messages import WorkerInfo, decoder, encode
from disagg.proto.services import CONTROLLER_SERVICE, REGISTER, SERVER_OPTIONS, service_and_method
from tests.support.secret import SECRET

MAX_WORKERS = 16


class Registry:
    """Listens on `host` while it is open (port 0: on any free one); a context manager. At most `MAX_WORKERS` may be
    registered at a time."""

    def __init__(self, port: int = 0, host: str = "127.0.0.1") -> None:
        self._changed = threading.Condition()
        self._infos: dict[str, WorkerInfo] = {}
        self._errors: dict[str, str] = {}
        self._dismissed: set[str] = set()
        self._closed = False
        self._executor = ThreadPoolExecutor(MAX_WORKERS + 1, thread_name_prefix="registry")
        self._server = grpc.server(self._executor, options=SERVER_OPTIONS)
        methods = {service_and_method(REGISTER)[1]: grpc.stream_stream_rpc_method_handler(self._register)}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(CONTROLLER_SERVICE, methods),))
        self.address = f"{host}:{self._server.add_insecure_port(f'{host}:{port}')}"

    def __enter__(self) -> Self:
        # All threads start now: one that the second stream of a worker starts in a later test would be its leftover.
        started = threading.Barrier(MAX_WORKERS + 2)
        for _ in range(MAX_WORKERS + 1):
            self._executor.submit(started.wait)
        started.wait()
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._server.stop(None).wait()
        self._executor.shutdown()

    def wait(self, names: Sequence[str], timeout_s: float = 60.0) -> list[WorkerInfo]:
        """What these workers registered; an `AssertionError` if one failed or is late."""
        with self._changed:
            self._changed.wait_for(lambda: self._errors or all(name in self._infos for name in names), timeout_s)
            assert not self._errors, self._errors
            return [self._infos[name] for name in names]

    def forget(self, name: str) -> None:
        """Wait again for that worker: another incarnation of it is to come."""
        with self._changed:
            self._infos.pop(name, None)

    def wait_error(self, name: str, timeout_s: float = 60.0) -> str:
        """Why that worker could not start."""
        with self._changed:
            self._changed.wait_for(lambda: name in self._errors, timeout_s)
            return self._errors[name]

    def dismiss(self, name: str) -> None:
        """Reject that worker."""
        with self._changed:
            self._dismissed.add(name)
            self._changed.notify_all()

    def _register(self, frames: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        assert SECRET.matches(context.invocation_metadata())
        message: Any = decoder(WorkerToController).decode(next(frames))
        with self._changed:
            if isinstance(message, WorkerFailed):
                self._errors[message.worker_id] = message.error
                self._changed.notify_all()
                return
            if isinstance(message, WorkerStarting):
                return
            name = message.info.worker_id
            self._infos[name] = message.info
            self._changed.notify_all()
        yield encode(WorkerWelcome())
        context.add_callback(self._wake)
        with self._changed:
            self._changed.wait_for(lambda: self._closed or name in self._dismissed or not context.is_active())
        if name in self._dismissed:
            yield encode(WorkerRejected(reason="the test says so"))

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
