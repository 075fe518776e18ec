"""What both launchers share: the plan of a cluster, and the face of a running one."""

from __future__ import annotations

import errno
import secrets
import socket
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Self

import msgspec

from disagg.cluster.config.cluster_config import ClusterConfig, active_pools
from disagg.cluster.config.sections import NetworkConfig
from disagg.cluster.control import changes, gateways, layout
from disagg.cluster.models.catalog import FAKE_MODEL, resolve_model
from disagg.cluster.system.errors import LaunchError
from disagg.cluster.system.process_tools import available_cores
from disagg.engine.checkpoint.checkpoint import read_model_config
from disagg.engine.config import WorkerConfig
from disagg.proto.cluster_secret import NUM_BYTES, ClusterSecret
from disagg.proto.control import ControlReply, ControlRequest, ControlState, PoolName
from disagg.proto.ids import GatewayId
from disagg.proto.messages import WorkerInfo
from disagg.router.config import RouterConfig
from disagg.router.gateway.config import GatewayConfig

GATEWAY: Final = gateways.GATEWAY
"""The gateway's name among the processes of a cluster."""

START_TIMEOUT_S = 180.0
"""How long everything together may take to come up."""

Progress = Callable[[str, str], None]
"""Told (process name, what it does now): `starting`, `ready`, `stopped`."""


def no_progress(name: str, state: str) -> None:
    """For callers who do not want to know."""


CheckStop = Callable[[], None]
"""Called again and again during a start; ends it by raising."""

CHECK_STOP_INTERVAL_S = 0.05
LOG_TAIL_LINES = 15


def never_stop() -> None:
    """For callers who let every start run to its end."""


class GatewayLaunch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a gateway process is told at start."""

    gateway: GatewayConfig
    router: RouterConfig
    gateway_id: GatewayId
    workers: tuple[WorkerInfo, ...]
    """Those that were ready when it was started; afterwards it follows the controller."""
    cores: tuple[int, ...] = ()


class Cluster(ABC):
    """A running cluster, whatever launched it; also a context manager. `stop` leaves no process behind."""

    def __init__(self, config: ClusterConfig, progress: Progress, start_timeout_s: float) -> None:
        self._plan = plan_launch(config)
        self._progress = progress
        self._start_timeout_s = start_timeout_s
        self._started: list[str] = []
        """Names of processes that progress was told of, and `stop` is to tell of."""

    @property
    def plan(self) -> LaunchPlan:
        """What is, or will be, started."""
        return self._plan

    @property
    def address(self) -> str:
        """host:port for clients; empty while there is no gateway."""
        return changes.address_of(self.state())

    @property
    def http_address(self) -> str:
        """The same of HTTP; empty also where the gateway serves none."""
        return next((g.http_address for g in self.state().gateways if g.http_address), "")

    @property
    def workers(self) -> list[WorkerInfo]:
        """The workers that can be used, in the order of their pools."""
        return [record.info for record in self.state().workers if record.phase == "ready" and record.info is not None]

    @property
    def warnings(self) -> tuple[str, ...]:
        """Dangers that a user should know of before it starts."""
        return ()

    def start(self, check_stop: CheckStop = never_stop) -> None:
        """Blocks until requests can be served; raises `LaunchError`, `ConfigError` or what `check_stop` raises, and
        then nothing is left running."""
        try:
            check_gateway(self._plan.config)
            deadline = time.monotonic() + self._start_timeout_s
            self._open(check_stop)
            self._wait_settled(deadline, check_stop)
        except BaseException:
            self.stop()
            raise

    def _wait_settled(self, deadline: float, check_stop: CheckStop) -> None:
        """Until everything is there; raises `LaunchError` at the first process that cannot start."""
        before: ControlState | None = None
        while True:
            check_stop()
            state = self.state()
            self._tell(changes.between(before, state))
            if failure := changes.failure(state):
                raise LaunchError(failure)
            if state.is_settled:
                return
            if time.monotonic() >= deadline:
                raise LaunchError(changes.late(state, self._start_timeout_s))
            before = state
            time.sleep(CHECK_STOP_INTERVAL_S)

    def _tell(self, news: Sequence[changes.Change]) -> None:
        for change in news:
            if change.what == "starting":
                self._started.append(change.name)
            if change.what in ("starting", "ready"):
                self._progress(change.name, change.what)

    @abstractmethod
    def _open(self, check_stop: CheckStop) -> None:
        """Bring up the controller, which starts the rest."""

    @abstractmethod
    def state(self) -> ControlState:
        """The cluster as its controller knows it; the last that was known while the controller is away. An empty one
        before the start. Raises `LaunchError` when the controller is gone for good."""

    @abstractmethod
    def control(self, request: ControlRequest) -> ControlReply:
        """Ask the controller. Raises `LaunchError` when it does not answer."""

    @abstractmethod
    def stop(self) -> None:
        """Gateway first, then workers, then the rest; tells progress. Idempotent."""

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
    available: tuple[int, ...]
    """The cores that workers are laid out on."""

    @property
    def cores(self) -> layout.CorePlan:
        """Of the workers that come first, and of the gateway."""
        return layout.plan_cores(self.config, self.available)

    @property
    def sizes(self) -> dict[PoolName, int]:
        """The configured size of each pool, prefill first."""
        return {name: pool.size for name, pool in active_pools(self.config)}

    @property
    def workers(self) -> list[WorkerConfig]:
        """The workers that come first, prefill workers before others."""
        return [self.worker(name, index) for name, size in self.sizes.items() for index in range(size)]

    def worker(self, pool: PoolName, index: int) -> WorkerConfig:
        """Any worker of a pool, also beyond its configured size."""
        return layout.worker_config(self.config, pool, index, self.model_path, self.available)

    def gateway(
        self, infos: Sequence[WorkerInfo], port: int | None = None, http_port: int | None = None
    ) -> GatewayLaunch:
        """What the gateway is told when these workers are there, all of one model. `port`, `http_port`: where an
        earlier life of it listened."""
        config = layout.gateway_config(self.config, self.model_path, infos)
        return GatewayLaunch(
            gateway=listening_at(config, port, http_port),
            router=layout.router_config(self.config),
            gateway_id=GatewayId(f"gateway-{uuid.uuid4().hex[:8]}"),
            workers=tuple(infos),
            cores=self.cores.gateway,
        )


def listening_at(config: GatewayConfig, port: int | None, http_port: int | None) -> GatewayConfig:
    """The same gateway at the ports that are given."""
    known = {"port": port, "http_port": http_port}
    return msgspec.structs.replace(config, **{name: value for name, value in known.items() if value is not None})


def port_of(address: str) -> int | None:
    """Of host:port; None for an empty address."""
    return int(address.rpartition(":")[2]) if address else None


def plan_launch(config: ClusterConfig) -> LaunchPlan:
    """Find the model and lay out the processes; raises `ConfigError`."""
    path = config.model.path
    model_path = FAKE_MODEL if path == FAKE_MODEL else str(resolve_model(path or config.model.served_name))
    if model_path != FAKE_MODEL and any(pool.tp > 1 for _, pool in active_pools(config)):
        layout.check_ranks(config, read_model_config(model_path))
    return LaunchPlan(config, model_path, available_cores())


def check_gateway(config: ClusterConfig) -> None:
    """Find out before models are loaded that a port of the gateway is taken, or that its keys or certificates cannot be
    used; raises `LaunchError` or `ConfigError`."""
    from disagg.router.gateway.auth.security import check_files  # loads gRPC

    gateway = config.gateway
    check_files(gateway.api_keys, gateway.tls)
    _check_port(gateway.host, gateway.port, "--port 0 takes any free one")
    if (http_port := gateway.chosen_http_port) is not None:
        _check_port(gateway.host, http_port, "set gateway.http_port; --port 0 takes any free ones")


def _check_port(host: str, port: int, advice: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            hint = f"; {advice}" if error.errno == errno.EADDRINUSE else ""
            raise LaunchError(f"gateway: cannot listen on {host}:{port} ({error.strerror}){hint}") from None


def new_secret(network: NetworkConfig) -> ClusterSecret:
    """What the processes of a new cluster know each other by, and whether they encrypt what they say."""
    return ClusterSecret(secrets.token_bytes(NUM_BYTES), encrypted=network.is_encrypted)


def with_log(reason: str, log_tail: str) -> str:
    """A reason, and the end of a log where there is one."""
    return f"{reason}; the end of its log:\n{log_tail}" if log_tail else reason
