"""The launcher without Ray: workers and gateway as child processes of this one, and the controller on a thread.

    start()   controller -> workers (all at once), which register -> gateway, which follows
    stop()    SIGTERM to the gateway, then to the workers; SIGKILL for what is left after a grace

Children get their configuration on standard input and end by themselves when that closes, so that they also go when
this process is killed. Each writes its log to a file; the end of it becomes part of the reason when it ends by itself.
Only own children are ever signalled.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from typing_extensions import override

from disagg.cluster.config.cluster_config import ClusterConfig, PoolConfig
from disagg.cluster.config.core_layout import check_devices
from disagg.cluster.control.cluster import START_TIMEOUT_S, CheckStop, Cluster, Progress, no_progress
from disagg.cluster.control.launcher import Launcher
from disagg.cluster.control.plan import GatewaySpec, new_secret
from disagg.cluster.control.twin_process import TwinProcess, twin_of
from disagg.cluster.core import state_diff
from disagg.cluster.system.children import (
    LOG_TAIL_LINES,
    LaunchError,
    Process,
    describe_exit,
    end,
    last_lines,
    open_log,
    spawn,
    with_log,
)
from disagg.cluster.system.cores import num_cuda_devices
from disagg.cluster.system.logs import LoggingConfig, log_environment
from disagg.cluster.system.process_tools import thread_environment
from disagg.cluster.system.temp_folders import TempFolder
from disagg.cluster.templates.template import IS_SUPPORTED
from disagg.cluster.templates.templates import Templates
from disagg.connections.cluster_secret import ClusterSecret
from disagg.engine.config import Dtype, WorkerConfig
from disagg.engine.device_environment import nccl_shares_gpus, worker_environment
from disagg.proto.control import ControlReply, ControlRequest, ControlState
from disagg.proto.ids import WorkerId

if TYPE_CHECKING:
    from disagg.cluster.control.controller_thread import ControllerThread

STOP_TIMEOUT_S = 10.0
"""Seconds between SIGTERM and SIGKILL; for the gateway in addition to the time for its answers."""

TEMPLATE_LOADS = "its template loads torch and the weights, once for all workers"

WORKER_MODULE = "disagg.cluster.hosts.worker_host"
GATEWAY_MODULE = "disagg.cluster.hosts.gateway_host"


@dataclass(slots=True)
class Child:
    """A child process of this launcher."""

    name: str
    process: Process
    log: Path
    reported: bool = False
    """Whether `exited` has returned this child."""

    def why_ended(self) -> str:
        """Text about how it ended, with the end of its log; waits for its end."""
        return with_log(describe_exit(self.process.wait()), last_lines(self.log, LOG_TAIL_LINES))


def log_name(process: str) -> str:
    """Name of the log file: `qwen.decode-0.log` for `qwen/decode-0`."""
    return f"{process.replace('/', '.')}.log"


def start_child(
    name: str,
    module: str,
    config: msgspec.Struct,
    controller: str,
    secret: ClusterSecret,
    log_dir: Path,
    environment: Mapping[str, str],
    templates: Templates | None = None,
) -> Child:
    """Start `python -m module`, or fork the same from a template, and send it its configuration and the cluster's
    secret. An existing log of that name is continued."""
    log = log_dir / log_name(name)
    message = {"content": config, "controller": controller, "secret": secret, "ordered_s": time.monotonic()}
    with open_log(log) as output:
        forked = None
        if templates is not None and isinstance(config, WorkerConfig | GatewaySpec):
            forked = templates.fork(name, config, message, environment, output)
        return Child(name, forked or spawn(module, message, environment, output), log)


def stop_children(children: Sequence[Child], timeout_s: float = STOP_TIMEOUT_S) -> list[str]:
    """End children that still run and reap all; returns the names of those that had to be killed."""
    killed = end([child.process for child in children], timeout_s)
    return [child.name for child in children if child.process in killed]


DEFAULT_LOGGING = LoggingConfig()


class ProcessLauncher(Launcher):
    """Implements `launcher.Launcher` with child processes. Owner of them; other threads may read it."""

    restarts = False

    def __init__(
        self,
        log_dir: Path,
        secret: ClusterSecret,
        logs: LoggingConfig = DEFAULT_LOGGING,
        drain_timeout_s: float = 0.0,
        templates: Templates | None = None,
    ) -> None:
        self._log_dir = log_dir
        self._templates = templates
        self._logs = logs
        self._secret = secret
        self._drain_timeout_s = drain_timeout_s
        self._lock = threading.Lock()
        self._children: dict[str, Child] = {}
        """The latest process of each name, until it is stopped; guarded by the lock."""
        self.killed: list[str] = []
        """Names of processes that had to be killed."""

    @override
    def running(self) -> frozenset[str]:
        """Always empty: children end with their parent."""
        return frozenset()

    @override
    def start_worker(self, config: WorkerConfig, controller_address: str, pool: PoolConfig) -> None:
        own = worker_environment(config.worker_id, config.device, config.transport, os.environ)
        environment = thread_environment(config.num_threads) | own
        self._start(config.worker_id, WORKER_MODULE, config, controller_address, environment)

    @override
    def start_gateway(self, spec: GatewaySpec, controller_address: str) -> None:
        self._start(spec.name, GATEWAY_MODULE, spec, controller_address, thread_environment(1))

    @override
    def prepare_gateways(self, names: Sequence[str]) -> None:
        """Does nothing, because their template has begun to load earlier."""

    @override
    def stop_workers(self, worker_ids: Sequence[WorkerId]) -> None:
        self._stop(worker_ids)

    @override
    def stop_gateways(self, names: Sequence[str]) -> None:
        self._stop(names, STOP_TIMEOUT_S + self._drain_timeout_s)

    @override
    def keep_only(self, workers: Sequence[WorkerConfig]) -> None:
        """Ends the other templates of workers."""
        if self._templates is not None:
            self._templates.keep_only(workers)

    @override
    def kill(self, name: str, pid: int) -> None:
        with self._lock:
            child = self._children.get(name)
        if child is not None and child.process.pid == pid:
            child.process.kill()

    @override
    def exited(self) -> dict[str, str]:
        with self._lock:
            ended = [c for c in self._children.values() if not c.reported and c.process.poll() is not None]
        for child in ended:
            child.reported = True
        return {child.name: child.why_ended() for child in ended}

    @override
    def pending(self) -> dict[str, str]:
        """Always empty: a child runs at once."""
        return {}

    def has_process(self, name: str) -> bool:
        """Whether there is a process of that name."""
        with self._lock:
            return name in self._children

    def pid(self, name: str) -> int:
        """The id of the latest process of a name; raises `KeyError`."""
        with self._lock:
            return self._children[name].process.pid

    def _start(
        self,
        name: str,
        module: str,
        config: WorkerConfig | GatewaySpec,
        controller_address: str,
        environment: dict[str, str],
    ) -> None:
        try:
            child = start_child(
                name,
                module,
                config,
                controller_address,
                self._secret,
                self._log_dir,
                environment | log_environment(self._logs.level, self._logs.format, os.environ),
                self._templates,
            )
        except OSError as error:
            raise LaunchError(f"{module} cannot be run: {error}") from error
        with self._lock:
            assert name not in self._children, f"{name} was not stopped"
            self._children[name] = child

    def _stop(self, names: Sequence[str], timeout_s: float = STOP_TIMEOUT_S) -> None:
        with self._lock:
            children = [self._children[name] for name in names if name in self._children]
        self.killed += stop_children(children, timeout_s)
        with self._lock:
            for child in children:
                del self._children[child.name]


class ProcessCluster(Cluster):
    """A cluster of child processes; also a context manager. Owner of its controller, its children and its logs."""

    def __init__(
        self,
        config: ClusterConfig,
        *,
        progress: Progress = no_progress,
        log_dir: Path | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
        cpu_dtype: Dtype = "bfloat16",
    ) -> None:
        super().__init__(config, progress, start_timeout_s, cpu_dtype)
        self.secret = new_secret(config.network)
        """The secret by which its processes authenticate each other."""
        self._log_dir = log_dir
        self._own_logs: TempFolder | None = None
        """Folder of the logs, if the user gave none."""
        self._launcher: ProcessLauncher | None = None
        self._controller: ControllerThread | None = None
        self._twin: TwinProcess | None = None
        self._templates: Templates | None = None

    @property
    def twin_pid(self) -> int | None:
        """The process id of the twin, while one runs."""
        return None if self._twin is None else self._twin.pid

    @property
    def killed(self) -> list[str]:
        """Names of processes that had to be killed."""
        return self._launcher.killed if self._launcher is not None else []

    def pid(self, name: str) -> int:
        """The process id of a worker or a gateway; raises `KeyError`."""
        if self._launcher is None:
            raise KeyError(name)
        return self._launcher.pid(name)

    def _open(self, check_stop: CheckStop) -> None:
        nccl_shares = nccl_shares_gpus(os.environ)
        check_devices(self._plan.config, num_cuda_devices(os.environ), nccl_shares=nccl_shares)
        self._prepare_templates()
        from disagg.cluster.control.controller_thread import ControllerThread  # loads gRPC, while templates load

        config = self._plan.config
        self._launcher = ProcessLauncher(
            self._make_log_dir(), self.secret, config.logging, config.gateway.drain_timeout_s, self._templates
        )
        self._controller = ControllerThread(self._plan, self._launcher, self.secret, self._make_twin())
        self._controller.start()

    def _prepare_templates(self) -> None:
        """Begin to load the templates, while this process prepares the start of the first worker."""
        if self._plan.config.controller.templates and IS_SUPPORTED:
            config = self._plan.config
            self._templates = Templates(self._make_log_dir(), config.logging, len(self._plan.model_paths))
            for worker in self._plan.workers:
                self._templates.prepare(worker)
            self._templates.prepare(None)

    def _make_twin(self) -> TwinProcess | None:
        config, available = self._plan.config, self._plan.available
        self._twin = twin_of(config, self._twin_key, os.environ, available, self._make_log_dir())
        return self._twin

    def _make_log_dir(self) -> Path:
        if self._log_dir is None:
            self._own_logs = TempFolder("disagg-logs-")
            self._log_dir = self._own_logs.path
        self._log_dir.mkdir(parents=True, exist_ok=True)
        return self._log_dir

    @override
    def _waits_for(self, name: str) -> str:
        is_there = self._launcher is not None and self._launcher.has_process(name)
        return "" if is_there or self._templates is None else TEMPLATE_LOADS

    @override
    def state(self) -> ControlState:
        return self._controller.state() if self._controller is not None else state_diff.EMPTY_STATE

    @override
    def control(self, request: ControlRequest) -> ControlReply:
        if self._controller is None:
            raise LaunchError("the cluster was not started")
        return self._controller.control(request)

    @override
    def stop(self) -> None:
        controller, self._controller = self._controller, None
        if self._templates is not None:
            self._templates.close()  # first, or a start that waits for one that loads would be waited for
        if controller is not None:
            controller.stop()
        self._templates = None
        for name in self._started:
            self._progress(name, "stopped")
        self._started = []
        if self._own_logs is not None:
            self._own_logs.remove()
            self._own_logs = self._log_dir = None
