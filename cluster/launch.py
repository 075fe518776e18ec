"""What both launchers share: the plan of a cluster, and the face of a running one."""

from __future__ import annotations

import errno
import socket
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import msgspec

from disagg.cluster import layout
from disagg.cluster.config import ClusterConfig
from disagg.cluster.errors import LaunchError
from disagg.cluster.models import FAKE_MODEL, resolve_model
from disagg.cluster.process_tools import available_cores
from disagg.engine.config import WorkerConfig
from disagg.proto.ids import GatewayId
from disagg.proto.messages import WorkerInfo
from disagg.router.config import RouterConfig
from disagg.router.gateway.config import GatewayConfig

GATEWAY = "gateway"
"""The gateway's name among the processes of a cluster."""

START_TIMEOUT_S = 180.0
"""How long all workers together may take to load."""

Progress = Callable[[str, str], None]
"""Told (process name, what it does now): `starting`, `ready`, `stopped`."""


def no_progress(name: str, state: str) -> None:
    """For callers who do not want to know."""


CheckStop = Callable[[], None]
"""Called again and again during a start; ends it by raising."""

CHECK_STOP_INTERVAL_S = 0.1
LOG_TAIL_LINES = 15


def never_stop() -> None:
    """For callers who let every start run to its end."""


class GatewayLaunch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a gateway process is told at start."""

    gateway: GatewayConfig
    router: RouterConfig
    gateway_id: GatewayId
    workers: tuple[WorkerInfo, ...]
    cores: tuple[int, ...] = ()


class GatewayInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway process answers once clients can come."""

    address: str
    """host:port of the public gRPC server."""
    pid: int


class Cluster(ABC):
    """A running cluster, whatever launched it; also a context manager. `stop` leaves no process behind."""

    def __init__(self, config: ClusterConfig, progress: Progress, start_timeout_s: float) -> None:
        self._plan = plan_launch(config)
        self._progress = progress
        self._start_timeout_s = start_timeout_s
        self._infos: list[WorkerInfo] = []
        self._address = ""

    @property
    def plan(self) -> LaunchPlan:
        """What is, or will be, started."""
        return self._plan

    @property
    def address(self) -> str:
        """host:port for clients."""
        return self._address

    @property
    def workers(self) -> list[WorkerInfo]:
        """The workers as they registered."""
        return self._infos

    @property
    def warnings(self) -> tuple[str, ...]:
        """Dangers that a user should know of before it starts."""
        return ()

    def start(self, check_stop: CheckStop = never_stop) -> None:
        """Blocks until requests can be served; raises `LaunchError`, `ConfigError` or what `check_stop` raises, and
        then nothing is left running."""
        try:
            check_port(self._plan.config)
            self._start(check_stop)
        except BaseException:
            self.stop()
            raise

    @abstractmethod
    def _start(self, check_stop: CheckStop) -> None:
        """Start everything, and set the workers' infos and the address."""

    @abstractmethod
    def lost(self) -> list[str]:
        """The names of processes that ended by themselves."""

    @abstractmethod
    def why_lost(self, name: str) -> str:
        """How a process of `lost` ended, as far as it can be told, with the end of its log."""

    @abstractmethod
    def stop(self) -> None:
        """Idempotent."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Everything that is known before the first process starts."""

    config: ClusterConfig
    model_path: str
    """A checkpoint folder, or `fake`."""
    cores: layout.CorePlan
    workers: list[WorkerConfig]

    def gateway(self, infos: list[WorkerInfo]) -> GatewayLaunch:
        """What the gateway is told, once the workers are there. Raises `LaunchError` if they do not run the same
        model."""
        fingerprints = {info.fingerprint for info in infos}
        if len(fingerprints) != 1:
            found = ", ".join(f"{info.worker_id} {info.fingerprint}" for info in infos)
            raise LaunchError(f"the workers do not run the same model: {found}")
        return GatewayLaunch(
            gateway=layout.gateway_config(self.config, self.model_path, infos),
            router=layout.router_config(self.config),
            gateway_id=GatewayId(f"gateway-{uuid.uuid4().hex[:8]}"),
            workers=tuple(infos),
            cores=self.cores.gateway,
        )


def plan_launch(config: ClusterConfig) -> LaunchPlan:
    """Find the model and lay out the processes; raises `ConfigError`."""
    path = config.model.path
    model_path = FAKE_MODEL if path == FAKE_MODEL else str(resolve_model(path or config.model.served_name))
    cores = layout.plan_cores(config, available_cores())
    return LaunchPlan(config, model_path, cores, layout.worker_configs(config, model_path, cores))


def check_port(config: ClusterConfig) -> None:
    """Find out before models are loaded that the gateway's port is taken; raises `LaunchError`."""
    host, port = config.gateway.host, config.gateway.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            advice = "; try --port 0 for any free port" if error.errno == errno.EADDRINUSE else ""
            raise LaunchError(f"gateway: cannot listen on {host}:{port} ({error.strerror}){advice}") from None


def with_log(reason: str, log_tail: str) -> str:
    """A reason, and the end of a log where there is one."""
    return f"{reason}; the end of its log:\n{log_tail}" if log_tail else reason


def missing_pool(plan: LaunchPlan, lost: list[str]) -> str | None:
    """The first pool that has no worker left, or the gateway; None while requests can still be served."""
    if GATEWAY in lost:
        return GATEWAY
    for role in ("prefill", "decode"):
        if all(worker.worker_id in lost for worker in plan.workers if role in worker.roles):
            return f"every {role} worker"
    return None
