"""The launcher with Ray; the only module that imports it. Ray places, starts and stops; no token and no KV byte goes
through it.

    start()   private Ray (or join one) -> one placement group and one actor per worker, all at once -> gateway actor
    stop()    gateway actor stops -> worker actors stop -> placement groups go -> Ray goes -> its folder goes

An actor *is* the worker process: the worker's threads run inside it, and between start and stop no actor method runs.

No signal may raise inside Ray: its compiled code turns the exception into another one, or crashes. A start is ended
between calls of Ray, each of which is short but `ray.init`.

How a private Ray is kept private: see `ray_private.py`. Joining a cluster, its own rules apply.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from disagg.cluster.config import ClusterConfig
from disagg.cluster.errors import LaunchError
from disagg.cluster.launch import (
    CHECK_STOP_INTERVAL_S,
    GATEWAY,
    LOG_TAIL_LINES,
    START_TIMEOUT_S,
    CheckStop,
    Cluster,
    GatewayInfo,
    GatewayLaunch,
    Progress,
    no_progress,
    with_log,
)
from disagg.cluster.process_tools import (
    ProcessRef,
    available_cores,
    describe,
    end_processes,
    last_lines,
    pin_process,
    setup_logging,
    thread_environment,
)
from disagg.cluster.ray_private import (
    MARK,
    PrivateEnvironment,
    auth_warnings,
    check_reachable,
    environment_mark,
    make_temp_dir,
    on_cores,
)
from disagg.engine.config import WorkerConfig
from disagg.proto.messages import WorkerInfo

if TYPE_CHECKING:
    from disagg.cluster.host import Host

SLOT: Final = "disagg_slot"
"""The resource that a worker takes on a CPU node. Workers pin themselves, so they take no `CPU` of Ray's."""

RAY_MARKS: Final = (":job_id:", ":actor_name:")
"""Ray's own lines in the log of an actor."""

STOP_TIMEOUT_S: Final = 10.0
OBJECT_STORE_BYTES: Final = 80 << 20
"""Close to the least that Ray accepts: nothing of ours is stored there."""
STOP_GRACE_S: Final = 5.0
"""What the processes of a Ray that was told to end get before SIGKILL."""


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


class RayCluster(Cluster):
    """A cluster of Ray actors; also a context manager. Owner of its actors and, where it is private, of the whole
    Ray."""

    def __init__(
        self, config: ClusterConfig, *, progress: Progress = no_progress, start_timeout_s: float = START_TIMEOUT_S
    ) -> None:
        super().__init__(config, progress, start_timeout_s)
        self._private = config.ray.address == "local"
        self._temp_dir: Path | None = None
        self._environment = PrivateEnvironment()
        self._mark = uuid.uuid4().hex
        self._connected = False
        self._actors: dict[str, Any] = {}
        self._groups: list[Any] = []
        self._processes: dict[str, ProcessRef] = {}

    @property
    def warnings(self) -> tuple[str, ...]:
        """See `launch.Cluster`."""
        return auth_warnings(os.environ) if self._private else ()

    # ------------------------------------------------------------ start

    def _start(self, check_stop: CheckStop) -> None:
        self._progress("ray", "starting")
        self._connect(check_stop)
        check_stop()
        self._progress("ray", "ready")
        deadline = time.monotonic() + self._start_timeout_s
        for config in self._plan.workers:
            self._progress(config.worker_id, "starting")
            self._groups.append(self._place(config))
        answers = self._wait_ready([config.worker_id for config in self._plan.workers], deadline, check_stop)
        self._infos = [msgspec.json.decode(answer, type=WorkerInfo) for answer in answers]
        self._progress(GATEWAY, "starting")
        self._start_gateway(self._plan.gateway(self._infos))
        (answer,) = self._wait_ready([GATEWAY], deadline, check_stop)
        self._address = msgspec.json.decode(answer, type=GatewayInfo).address

    def _connect(self, check_stop: CheckStop) -> None:
        settings: dict[str, Any] = {
            "namespace": f"disagg-{uuid.uuid4().hex[:8]}",
            "log_to_driver": False,
            "logging_level": "warning",
        }
        if self._private:  # before Ray is imported
            self._temp_dir = make_temp_dir(self._plan.config.ray.temp_dir)
            self._environment.enter()
        else:
            check_reachable(self._plan.config.ray.address)
        import ray

        check_stop()
        if ray.is_initialized():
            raise LaunchError("this process is already connected to a Ray cluster")
        if not self._private:
            with _signals_stay_ours():
                ray.init(address=self._plan.config.ray.address, **settings)
            self._connected = True
            self._check_slots()
            return
        with on_cores(self._plan.cores.gateway), environment_mark(self._mark), _signals_stay_ours():
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

    def _wait_ready(self, names: Sequence[str], deadline: float, check_stop: CheckStop) -> list[bytes]:
        """What each actor's `start` answered; raises `LaunchError` for the first one that fails or is late."""
        import ray

        pending = {self._actors[name].start.remote(): name for name in names}
        answers: dict[str, bytes] = {}
        while pending:
            check_stop()
            done, _ = ray.wait(list(pending), timeout=CHECK_STOP_INTERVAL_S)
            for ref in done:
                name = pending.pop(ref)
                answers[name] = self._answer(name, ref)
                self._progress(name, "ready")
            if pending and time.monotonic() >= deadline:
                raise LaunchError(self._late(list(pending.values())))
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

    def _check_slots(self) -> None:
        """Raises `LaunchError` if a cluster that was joined has no place for the workers on CPU."""
        import ray

        needed = sum(config.device == "cpu" for config in self._plan.workers)
        slots = ray.available_resources().get(SLOT, 0)
        if slots < needed:
            raise LaunchError(
                f"ray.address: that cluster has {slots:g} free {SLOT} for {needed} workers; start its node with "
                f"--resources='{{\"{SLOT}\": {needed}}}'"
            )

    def _late(self, names: list[str]) -> str:
        return f"{', '.join(names)}: not ready after {self._start_timeout_s:g} s"

    # ------------------------------------------------------------ stop

    def lost(self) -> list[str]:
        """See `launch.Cluster`."""
        return [name for name, process in self._processes.items() if not process.is_alive()]

    def why_lost(self, name: str) -> str:
        """See `launch.Cluster`."""
        if self._temp_dir is None:
            return "its process ended; its log is with Ray's"
        logs = self._temp_dir.glob(f"session_latest/logs/worker-*-{self._processes[name].pid}.err")
        lines = [line for log in logs for line in last_lines(log, LOG_TAIL_LINES).splitlines()]
        return with_log("its process ended", "\n".join(line for line in lines if not line.startswith(RAY_MARKS)))

    def stop(self) -> None:
        """See `launch.Cluster`."""
        family, grace_s = self._family(), 0.0
        if self._connected:
            self._stop_actors([GATEWAY])
            self._stop_actors([name for name in self._actors if name != GATEWAY])
            self._disconnect()
            grace_s = STOP_GRACE_S
        self._environment.leave()
        end_processes([*self._processes.values(), *family, *self._family()], grace_s)
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

        actors = {name: self._actors.pop(name) for name in names if name in self._actors}
        stops = [actor.stop.remote() for name, actor in actors.items() if name in self._processes]
        if stops:  # the others are still starting, and would answer only after that
            ray.wait(stops, num_returns=len(stops), timeout=STOP_TIMEOUT_S)
        for actor in actors.values():
            ray.kill(actor)

    def _disconnect(self) -> None:
        import ray

        for group in self._groups:
            ray.util.remove_placement_group(group)
        ray.shutdown()
        self._connected = False


@contextmanager
def _signals_stay_ours() -> Iterator[None]:
    """Keeps `ray.init` from taking part in the signals of this process.

    By itself it exits in the middle of what it does at a SIGTERM, leaves a handler behind that prints a stack, and
    starts its servers in our process group, where `timeout` or a service manager ends them under our hands: Ray's
    client then aborts this process. There is no public way to tell it not to.
    """
    import ray

    services, utils = ray._private.services, ray._private.utils
    popen, set_handler = services.ConsolePopen, utils.set_sigterm_handler
    services.ConsolePopen = functools.partial(popen, start_new_session=True)
    utils.set_sigterm_handler = lambda handler: None
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        services.ConsolePopen, utils.set_sigterm_handler = popen, set_handler
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)
