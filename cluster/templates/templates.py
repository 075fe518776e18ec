"""The templates of a cluster on this host: one for each kind of process that is started, gateways or workers of one
model and device.

    prepare(config)   begins to load, and returns
    fork(config)      a child of the template that fits; one that is missing or gone is started first

Where a template cannot be had or does not fork, it is killed, and the caller starts the process without, which takes
longer and is else the same. One that ends before it has forked anything is not tried again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, Literal

import msgspec

from disagg.cluster.system.children import open_log
from disagg.cluster.system.cores import num_memory_nodes
from disagg.cluster.system.logs import LoggingConfig, log_environment
from disagg.cluster.system.process_tools import thread_environment
from disagg.cluster.templates.template import ForkedProcess, ForkRequest, Template
from disagg.engine.config import WeightsSource, WorkerConfig
from disagg.engine.device_environment import device_environment

if TYPE_CHECKING:
    from disagg.cluster.control.plan import GatewaySpec  # not for templates of workers, which import this

logger = logging.getLogger(__name__)

MODULE: Final = "disagg.cluster.hosts.template_process"
MAX_TEMPLATES: Final = 3
"""Largest number of templates in addition to one for each model. Each holds the code, and on CPU the weights, that its
children share; beyond that the oldest one ends. On machines whose cores are nearer to one part of the memory than to
another, each worker has weights of its own, near to it."""


class TemplateStart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Message to a template on its standard input."""

    kind: Literal["worker", "gateway"]
    is_fake: bool = False
    """Whether its workers run the `fake` model."""
    weights: WeightsSource | None = None
    """Weights that it loads and its children share; None where each child loads its own."""


CUDA_CHECK: Final = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Variable with which torch does not initialize CUDA when it is asked for a GPU; a forked process could not use it
then."""

_Key = tuple[TemplateStart, str, int]
"""What a template loads, for which device, and after how many restarts for new code."""


class Templates:
    """Owner of the templates. Any thread, one at a time, except for `close`. `num_models`: number of the cluster's
    models."""

    def __init__(self, log_dir: Path, logs: LoggingConfig, num_models: int = 1) -> None:
        self._most = num_models + MAX_TEMPLATES
        self._log_dir = log_dir
        self._logs = logs
        self._running: dict[_Key, Template] = {}
        """Running templates in the order of their start."""
        self._useful: set[_Key] = set()
        """Keys of the running templates that have forked."""
        self._broken: set[_Key] = set()
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the running templates."""
        return [template.pid for template in self._running.values() if template.is_running]

    def prepare(self, config: WorkerConfig | None) -> None:
        """Begin to load what a worker of this configuration needs, or a gateway if it is None; returns at once."""
        self._find(config)

    def fork(
        self,
        name: str,
        config: WorkerConfig | GatewaySpec,
        message: object,
        environment: Mapping[str, str],
        output: IO[bytes],
    ) -> ForkedProcess | None:
        """Fork a process of this configuration; None, and a warning, if no template can make it. `message` is sent to
        it."""
        template = self._find(config)
        if template is None:
            return None
        key = _key(config)
        try:
            process = template.fork(ForkRequest(name=name, environment=dict(environment)), message, output)
        except OSError as error:
            if not self._closed:
                then = "the next process gets a new one" if key in self._useful else "no other one is tried"
                logger.warning("%s is started without its template: %s; it is killed, and %s", name, error, then)
            self._give_up(key)
            return None
        self._useful.add(key)
        return process

    def keep_only(self, workers: Iterable[WorkerConfig]) -> None:
        """End the templates of other workers. Those of gateways stay, which may have forked one that still runs."""
        kept = {_key(config) for config in workers}
        self._most = max(self._most, len(kept) + MAX_TEMPLATES)
        for key in [key for key in self._running if key[0].kind == "worker" and key not in kept]:
            self._end(key)

    def close(self) -> None:
        """End all templates at once; their children live on, and nothing more is forked. On any thread. Idempotent."""
        self._closed = True
        for template in list(self._running.values()):
            template.close()

    def _give_up(self, key: _Key) -> None:
        if key not in self._useful:
            self._broken.add(key)
        self._end(key)

    def _end(self, key: _Key) -> None:
        self._running.pop(key).close()
        self._useful.discard(key)

    def _find(self, config: WorkerConfig | GatewaySpec | None) -> Template | None:
        if self._closed:
            return None
        key = _key(config)
        template = self._running.get(key)
        if template is not None and template.is_running:
            return template
        if template is not None:
            self._give_up(key)
        if key in self._broken:
            return None
        while len(self._running) >= self._most:
            self._end(next(iter(self._running)))
        start, device, _ = key
        environment = thread_environment(1) | device_environment(device)
        environment |= CUDA_CHECK if device == "cpu" else {}
        environment |= log_environment(self._logs.level, self._logs.format, os.environ)
        try:
            with open_log(self._log_dir / f"template-{start.kind}.log") as output:
                self._running[key] = Template(MODULE, start, environment, output)
        except OSError as error:
            logger.warning("no template of a %s: %s", start.kind, error)
            self._broken.add(key)
        return self._unless_closed(key)

    def _unless_closed(self, key: _Key) -> Template | None:
        """The template that was just started; it is ended if all were closed meanwhile."""
        if self._closed and key in self._running:
            self._end(key)
        return self._running.get(key)


def _key(config: WorkerConfig | GatewaySpec | None) -> _Key:
    restarts = 0 if config is None else config.restarts
    if not isinstance(config, WorkerConfig):
        return TemplateStart(kind="gateway"), "cpu", restarts
    device = config.device.partition(":")[0]
    shares = device == "cpu" and config.num_ranks == 1 and not config.is_fake and num_memory_nodes() == 1
    weights = config.weights if shares else None
    return TemplateStart(kind="worker", is_fake=config.is_fake, weights=weights), device, restarts
