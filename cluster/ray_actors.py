"""The launcher with Ray; the only module that imports it. Ray places, starts and stops; no token and no KV byte goes
through it.

    start()   private Ray (or join one) -> one placement group and one actor per worker, all at once -> gateway actor
    stop()    gateway actor stops -> worker actors stop -> placement groups go -> Ray goes -> its folder goes

An actor *is* the worker process: the worker's threads run inside it, and between start and stop no actor method runs.

Security of a private Ray. Its servers listen on every interface, whatever address it is given, so the token is what
keeps others out: a client without it, or with another one, was refused when tried. By itself Ray 2.60 would turn token
authentication on for a new cluster and write a token to `~/.ray/auth_token`. We set `RAY_AUTH_MODE=token` and a random
`RAY_AUTH_TOKEN` in the environment of this process, which its children inherit, before Ray is imported: nothing is
written to the user's home, and the token dies with the cluster. What the user has set of these variables stays. The
dashboard is off; two pages of Ray's own metrics stay readable without a token. Joining a cluster, its own rules apply.
Ray's network is a trust boundary: whoever holds the token can run code.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import msgspec

from disagg.cluster.config import ClusterConfig
from disagg.cluster.errors import LaunchError
from disagg.cluster.launch import (
    GATEWAY,
    START_TIMEOUT_S,
    GatewayInfo,
    GatewayLaunch,
    LaunchPlan,
    Progress,
    check_port,
    no_progress,
    plan_launch,
)
from disagg.cluster.process_tools import (
    ProcessRef,
    available_cores,
    describe,
    end_processes,
    pin_process,
    setup_logging,
    thread_environment,
)
from disagg.engine.config import WorkerConfig
from disagg.proto.messages import WorkerInfo

if TYPE_CHECKING:
    from disagg.cluster.host import Host

SLOT: Final = "disagg_slot"
"""The resource that a worker takes on a CPU node. Workers pin themselves, so they take no `CPU` of Ray's."""

MARK: Final = "DISAGG_RAY_CLUSTER"
"""Environment variable that the processes of one private Ray are found by when it ends."""

STOP_TIMEOUT_S: Final = 10.0
OBJECT_STORE_BYTES: Final = 80 << 20
"""Close to the least that Ray accepts: nothing of ours is stored there."""
MAX_TEMP_DIR_CHARS: Final = 40
"""Ray makes socket paths of about 65 characters below it, and a Unix socket's path has at most 107."""


class HostActor:
    """The content of one actor process. Arguments and answers are JSON, so that Ray carries only bytes."""

    def __init__(self, kind: str, config: bytes, all_cores: list[int]) -> None:
        setup_logging()
        pin_process(all_cores)  # Ray's own processes sit on one core, and we inherited that
        self._host = make_host(kind, config)

    def start(self) -> bytes:
        """Blocks until it can be used; its info, or `{"error": ...}`."""
        try:
            info = self._host.start()
        except Exception as error:
            return msgspec.json.encode({"error": describe(error)})
        threading.Thread(target=self._exit_when_crashed, name="crash-watch", daemon=True).start()
        return msgspec.json.encode(info)

    def stop(self) -> None:
        """Blocks until nothing of it is left but the process."""
        self._host.stop()

    def _exit_when_crashed(self) -> None:
        self._host.crashed.wait()
        os._exit(3)


def make_host(kind: str, config: bytes) -> Host:
    """The content of an actor; only actors load it, the launching process does not."""
    if kind == GATEWAY:
        from disagg.cluster.gateway_host import GatewayHost

        return GatewayHost(msgspec.json.decode(config, type=GatewayLaunch))
    from disagg.cluster.worker_host import WorkerHost

    return WorkerHost(msgspec.json.decode(config, type=WorkerConfig))


class RayCluster:
    """A cluster of Ray actors; also a context manager. Owner of its actors and, where it is private, of the whole
    Ray."""

    def __init__(
        self, config: ClusterConfig, *, progress: Progress = no_progress, start_timeout_s: float = START_TIMEOUT_S
    ) -> None:
        self._plan = plan_launch(config)
        self._progress = progress
        self._start_timeout_s = start_timeout_s
        self._private = config.ray.address == "local"
        self._temp_dir: Path | None = None
        self._mark = uuid.uuid4().hex
        self._connected = False
        self._actors: dict[str, Any] = {}
        self._groups: list[Any] = []
        self._processes: dict[str, ProcessRef] = {}
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

    # ------------------------------------------------------------ start

    def start(self) -> None:
        """See `launch.Cluster`."""
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def _start(self) -> None:
        check_port(self._plan.config)
        self._progress("ray", "starting")
        self._connect()
        self._progress("ray", "ready")
        deadline = time.monotonic() + self._start_timeout_s
        for config in self._plan.workers:
            self._progress(config.worker_id, "starting")
            self._groups.append(self._place(config))
        answers = self._wait_ready([config.worker_id for config in self._plan.workers], deadline)
        self._infos = [msgspec.json.decode(answer, type=WorkerInfo) for answer in answers]
        self._progress(GATEWAY, "starting")
        self._start_gateway(self._plan.gateway(self._infos))
        self._address = msgspec.json.decode(self._wait_ready([GATEWAY], deadline)[0], type=GatewayInfo).address

    def _connect(self) -> None:
        settings: dict[str, Any] = {
            "namespace": f"disagg-{uuid.uuid4().hex[:8]}",
            "log_to_driver": False,
            "logging_level": "warning",
        }
        if not self._private:
            import ray

            ray.init(address=self._plan.config.ray.address, **settings)
            self._connected = True
            return
        self._temp_dir = self._make_temp_dir()
        set_private_environment()
        import ray

        if ray.is_initialized():
            raise LaunchError("this process is already connected to a Ray cluster")
        with _ray_on_cores(self._plan.cores.gateway), _environment_mark(self._mark):
            ray.init(
                address="local",
                include_dashboard=False,
                num_cpus=0,
                resources={SLOT: len(self._plan.workers)},
                object_store_memory=OBJECT_STORE_BYTES,
                _temp_dir=str(self._temp_dir),
                _node_ip_address="127.0.0.1",
                **settings,
            )
        self._connected = True

    def _make_temp_dir(self) -> Path:
        asked = self._plan.config.ray.temp_dir
        if asked is None:
            return Path(tempfile.mkdtemp(prefix="disagg-", dir=_short_temp_root()))
        if len(asked) > MAX_TEMP_DIR_CHARS:
            raise LaunchError(
                f"ray.temp_dir: {asked} is too long for Ray's sockets; at most {MAX_TEMP_DIR_CHARS} characters"
            )
        Path(asked).mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="r", dir=asked))

    def _place(self, config: WorkerConfig) -> Any:
        """Reserve a worker's place and start its actor there; neither has to be ready yet."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle: dict[str, float] = {"GPU": 1} if config.device != "cpu" else {SLOT: 1}
        if not self._private:  # workers listen on loopback: the same node as the gateway
            bundle[f"node:{ray.util.get_node_ip_address()}"] = 0.001
        group = ray.util.placement_group([bundle], strategy="STRICT_PACK", name=f"disagg-{config.worker_id}")
        options = {
            "num_gpus": bundle.get("GPU", 0),
            "resources": {key: amount for key, amount in bundle.items() if key != "GPU"},
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
        }
        self._start_actor(config.worker_id, "worker", config, config.num_threads, options)
        return group

    def _start_gateway(self, launch: GatewayLaunch) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._start_actor(GATEWAY, GATEWAY, launch, 1, {"scheduling_strategy": here})

    def _start_actor(
        self, name: str, kind: str, config: msgspec.Struct, num_threads: int, options: dict[str, Any]
    ) -> None:
        import ray

        actor_class = ray.remote(HostActor).options(
            name=f"disagg-{name}",
            num_cpus=0,
            max_restarts=0,
            runtime_env={"env_vars": thread_environment(num_threads)},
            **options,
        )
        self._actors[name] = actor_class.remote(kind, msgspec.json.encode(config), list(available_cores()))

    def _wait_ready(self, names: Sequence[str], deadline: float) -> list[bytes]:
        """What each actor's `start` answered; raises `LaunchError` for the first one that fails or is late."""
        import ray

        pending = {self._actors[name].start.remote(): name for name in names}
        answers: dict[str, bytes] = {}
        while pending:
            done, _ = ray.wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                raise LaunchError(self._late(list(pending.values())))
            name = pending.pop(done[0])
            answers[name] = self._answer(name, done[0])
            self._progress(name, "ready")
        return [answers[name] for name in names]

    def _answer(self, name: str, ref: Any) -> bytes:
        import ray

        try:
            answer: bytes = ray.get(ref)
        except ray.exceptions.RayError as error:
            raise LaunchError(f"{name}: its actor failed: {str(error).strip().splitlines()[-1]}") from error
        fields = msgspec.json.decode(answer)
        if "error" in fields:
            raise LaunchError(f"{name}: {fields['error']}")
        self._processes[name] = ProcessRef.of(fields["pid"])
        return answer

    def _late(self, names: list[str]) -> str:
        import ray

        text = f"{', '.join(names)}: not ready after {self._start_timeout_s:g} s"
        slots, needed = ray.cluster_resources().get(SLOT, 0), len(self._plan.workers)
        if not self._private and slots < needed:
            text += f"; the Ray cluster has {slots:g} {SLOT} for {needed} workers: start its node with --resources"
        return text

    # ------------------------------------------------------------ stop

    def lost(self) -> list[str]:
        """See `launch.Cluster`."""
        return [name for name, process in self._processes.items() if not process.is_alive()]

    def stop(self) -> None:
        """See `launch.Cluster`."""
        family = self._family()
        if self._connected:
            self._stop_actors([GATEWAY])
            self._stop_actors([name for name in self._actors if name != GATEWAY])
            self._disconnect()
        end_processes([*self._processes.values(), *family, *self._family()])
        if self._temp_dir is not None:
            shutil.rmtree(self._temp_dir, ignore_errors=True)
            self._temp_dir = None
        for name in self._processes:
            self._progress(name, "stopped")
        self._processes, self._actors, self._groups = {}, {}, []

    def _family(self) -> list[ProcessRef]:
        """The processes of a private Ray; none when it was joined."""
        return ProcessRef.family(f"{MARK}={self._mark}") if self._private else []

    def _stop_actors(self, names: list[str]) -> None:
        import ray

        actors = [self._actors.pop(name) for name in names if name in self._actors]
        ready = [name for name in names if name in self._processes]
        if ready:
            ray.wait([actor.stop.remote() for actor in actors], num_returns=len(actors), timeout=STOP_TIMEOUT_S)
        for actor in actors:
            ray.kill(actor)

    def _disconnect(self) -> None:
        import ray

        for group in self._groups:
            ray.util.remove_placement_group(group)
        ray.shutdown()
        self._connected = False

    def __enter__(self) -> RayCluster:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


def set_private_environment() -> None:
    """Settings of a private Ray, for this process and its children; what the user has set stays."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_enable_metrics_collection", "0")
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
    if os.environ["RAY_AUTH_MODE"] == "token" and "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


@contextmanager
def _environment_mark(mark: str) -> Iterator[None]:
    """What is started inside can be told from everything else on this machine."""
    os.environ[MARK] = mark
    try:
        yield
    finally:
        del os.environ[MARK]


def _short_temp_root() -> str | None:
    """The system's folder for temporary files, unless that is too long for Ray."""
    return None if len(tempfile.gettempdir()) <= MAX_TEMP_DIR_CHARS - len("/disagg-12345678") else "/tmp"


@contextmanager
def _ray_on_cores(cores: Sequence[int]) -> Iterator[None]:
    """What is started inside runs on these cores; afterwards this process has its cores and signal handlers back."""
    mine = os.sched_getaffinity(0)
    in_main_thread = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    if cores:
        pin_process(cores)
    try:
        yield
    finally:
        pin_process(mine)
        if in_main_thread:
            for number, handler in handlers.items():
                signal.signal(number, handler)
