"""Templates that all clusters and workers of a test process share, so that none of them imports torch and our code
anew (ADR 55).

    SharedTemplates.fork(config) ─> a child of this process's template of gateways, of workers, or of fake workers
                                    its own templates, as `Templates` has them: where weights are worth sharing, or
                                    the environment differs in what is read while code is loaded

A template starts at its first use, and ends with the test process. It loads no weights: each child reads its own tiny
checkpoint.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from typing_extensions import override

from disagg.cluster.control.plan import GatewaySpec
from disagg.cluster.system.children import child_environment
from disagg.cluster.system.process_tools import thread_environment
from disagg.cluster.templates.template import IS_SUPPORTED, ForkedProcess, ForkRequest, Template
from disagg.cluster.templates.templates import CUDA_CHECK, Templates, TemplateStart
from disagg.engine.config import WorkerConfig
from disagg.engine.faults.faulty import FAILPOINTS_VARIABLE, PAUSE_VARIABLE
from tests.support.leftovers import LASTING_PIDS

MODULE = "tests.support.shared_template_process"
MOST_WEIGHTS_BYTES = 16 << 20
"""A checkpoint that is larger is loaded once for all workers of its cluster."""
READ_LATE = ("DISAGG_HOME", FAILPOINTS_VARIABLE, PAUSE_VARIABLE)
"""Variables that processes read when they start, not when they load code; a child has those of the test."""
IRRELEVANT = "PYTEST_"
"""Prefix of variables that only tests read."""


class _Shared:
    """The templates of this process. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[TemplateStart, tuple[Template, dict[str, str]]] = {}
        """Templates, and the environment of each."""

    def prepare(self, start: TemplateStart) -> None:
        """Begin to load."""
        with self._lock:
            self._find(start)

    def fork(
        self, start: TemplateStart, request: ForkRequest, message: object, output: IO[bytes]
    ) -> ForkedProcess | None:
        """Fork a child; None where the environment has changed too much."""
        with self._lock:
            template, environment = self._find(start)
            if environment != _relevant_environment():
                return None
            return template.fork(request, message, output)

    def close(self) -> None:
        """End all; the next use starts new ones."""
        with self._lock:
            for template, _ in self._running.values():
                LASTING_PIDS.discard(template.pid)
                template.close()
            self._running.clear()

    def _find(self, start: TemplateStart) -> tuple[Template, dict[str, str]]:
        found = self._running.get(start)
        if found is not None and found[0].is_running:
            return found
        if found is not None:
            LASTING_PIDS.discard(found[0].pid)
        without = dict.fromkeys(READ_LATE, "")
        with tempfile.TemporaryFile() as output:
            template = Template(MODULE, start, thread_environment(1) | CUDA_CHECK | without, output)
        LASTING_PIDS.add(template.pid)
        self._running[start] = template, _relevant_environment()
        return self._running[start]


SHARED = _Shared()


class SharedTemplates(Templates):
    """In place of the `Templates` of a cluster."""

    @override
    def prepare(self, config: WorkerConfig | None) -> None:
        if (start := _shared_start(config)) is None:
            super().prepare(config)
        else:
            SHARED.prepare(start)

    @override
    def fork(
        self,
        name: str,
        config: WorkerConfig | GatewaySpec,
        message: object,
        environment: Mapping[str, str],
        output: IO[bytes],
    ) -> ForkedProcess | None:
        start = _shared_start(config)
        if start is not None:
            late = {variable: os.environ.get(variable, "") for variable in READ_LATE}
            request = ForkRequest(name=name, environment=late | dict(environment))
            if (forked := SHARED.fork(start, request, message, output)) is not None:
                return forked
        return super().fork(name, config, message, environment, output)


def _shared_start(config: WorkerConfig | GatewaySpec | None) -> TemplateStart | None:
    """The template that this process has for such children, if it has one. Every transport but `shm` needs torch, also
    with the fake model."""
    if not IS_SUPPORTED:
        return None
    if not isinstance(config, WorkerConfig):
        return TemplateStart(kind="gateway")
    if config.device != "cpu" or _size(Path(config.model_path)) > MOST_WEIGHTS_BYTES:
        return None
    return TemplateStart(kind="worker", is_fake=config.is_fake and config.transport == "shm")


def _size(checkpoint: Path) -> int:
    """Bytes of a folder or a file; 0 where there is none, which the worker has to say."""
    files = checkpoint.iterdir() if checkpoint.is_dir() else [checkpoint]
    return sum(file.stat().st_size for file in files if file.is_file())


def _relevant_environment() -> dict[str, str]:
    return {
        name: value
        for name, value in child_environment(os.environ).items()
        if name not in READ_LATE and not name.startswith(IRRELEVANT)
    }
