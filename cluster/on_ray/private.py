"""A private Ray, which this process starts and ends, with its environment, cores, folder and processes.

Security. Ray replaces 127.0.0.1 by the machine's own address and its servers then listen on every interface, unless it
is told that there are no other machines, as by default on macOS and Windows. That is one variable, which Ray reads when
it is imported: a process that imported it before has Ray on all interfaces. There the token keeps others out: a client
without it, or with another one, was refused when tried. By itself Ray 2.60 would turn token authentication on for a new
cluster and write a token to `~/.ray/auth_token`. We set `RAY_AUTH_MODE=token` and a random `RAY_AUTH_TOKEN` in the
environment of this process, which its children inherit: nothing is written to the user's home. There is one token for
as long as this process runs, because Ray's client reads it only once: a second cluster of the same process has the same
one. The environment is as before once the cluster has stopped. What the user has set of these variables is honoured,
with a warning where it turns authentication off. The dashboard is off; a page of metrics of Ray's monitor stays
readable without a token. Ray's network is a trust boundary: whoever holds the token can run code.
"""

from __future__ import annotations

import functools
import os
import secrets
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from typing_extensions import override

from disagg.cluster.on_ray.session import INIT_OPTIONS, Session, be_quiet, refuse_if_connected, signals_stay_ours
from disagg.cluster.on_ray.store import SLOT
from disagg.cluster.system.children import NOT_FOR_CHILDREN, LaunchError
from disagg.cluster.system.cores import pin_unpinned
from disagg.cluster.system.process_tools import ProcessRef, end_processes
from disagg.cluster.system.temp_folders import PREFIX, TempFolder

MARK: Final = "DISAGG_RAY_CLUSTER"
"""Environment variable by which the processes of one private Ray are found when it ends."""

MAX_RAY_DIR_CHARS: Final = 43
"""Largest length of Ray's folder. Ray makes socket paths of up to 64 characters below it, and a Unix socket's path has
at most 107."""
RAY_DIR: Final = "r"
"""Name of Ray's folder inside ours. Ray opens its folder, and all below it, to every user (0777); ours stays 0700."""
MAX_TEMP_DIR_CHARS: Final = MAX_RAY_DIR_CHARS - len(f"/r12345678/{RAY_DIR}")

TOKEN_MODE: Final = "token"
GCS_RECONNECT: Final = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""Variable for the seconds that Ray's processes continue without their head's store before they end themselves; by
default a minute."""
GCS_RECONNECT_S: Final = "86400"
SEVERAL_MACHINES: Final = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Variable that tells Ray whether it has more than one machine, on any system; else its servers listen on loopback."""
OBJECT_STORE_BYTES: Final = 80 << 20
"""Size of Ray's object store, close to the least that Ray accepts: we store nothing in it."""
STOP_GRACE_S: Final = 5.0
"""Seconds that the processes of a Ray that is shut down may take before SIGKILL."""
NUM_SLOTS: Final = 4096
"""Number of slots of a private Ray: its pools may grow as far as the controller lets them."""


class PrivateEnvironment:
    """Variables that this process, and so its children, have while a private Ray runs. Owner of those that it set."""

    def __init__(self) -> None:
        self._set: list[str] = []

    def enter(self) -> None:
        """Set the variables that the user has not set."""
        values = {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_enable_metrics_collection": "0",
            "RAY_AUTH_MODE": TOKEN_MODE,
            GCS_RECONNECT: GCS_RECONNECT_S,
            SEVERAL_MACHINES: "0",
        }
        if auth_mode(os.environ) == TOKEN_MODE and "RAY_AUTH_TOKEN_PATH" not in os.environ:
            values["RAY_AUTH_TOKEN"] = _token()
        for name, value in values.items():
            if name not in os.environ:
                os.environ[name] = value
                self._set.append(name)

    def leave(self) -> None:
        """Restore the variables that `enter` has set. Idempotent."""
        for name in self._set:
            os.environ.pop(name, None)
        self._set.clear()


@functools.cache
def _token() -> str:
    """The token of every private Ray that this process starts."""
    return secrets.token_hex(32)


def auth_mode(environ: Mapping[str, str]) -> str:
    """Authentication mode of a private Ray."""
    return environ.get("RAY_AUTH_MODE", TOKEN_MODE).lower()


def auth_warnings(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Warnings for a user whose environment leaves a private Ray open."""
    mode = auth_mode(environ)
    if mode == TOKEN_MODE:
        return ()
    return (
        f"RAY_AUTH_MODE={mode} is set: Ray's servers ask for no token, so whoever reaches them, and every user of this "
        "machine, can run code as you; unset it",
    )


def make_temp_dir(parent: str | None) -> TempFolder:
    """A fresh folder that only this user can enter, in `parent` or in the system's place for temporary files. Ray's
    sockets and logs are to be in its subfolder `RAY_DIR`.

    Raises:
        LaunchError: if `parent` is too long for Ray, or cannot be written.
    """
    if parent is None:
        return TempFolder(PREFIX, _short_temp_root())
    if len(str(Path(parent).absolute())) > MAX_TEMP_DIR_CHARS:
        raise LaunchError(
            f"ray.temp_dir: {parent} is too long for Ray's sockets; at most {MAX_TEMP_DIR_CHARS} characters"
        )
    try:
        Path(parent).mkdir(parents=True, exist_ok=True)
        return TempFolder("r", parent)
    except OSError as error:
        raise LaunchError(f"ray.temp_dir: cannot make a folder in {parent} ({error.strerror})") from None


def _short_temp_root() -> str | None:
    """The system's folder for temporary files, unless that is too long for Ray."""
    return None if len(tempfile.gettempdir()) <= MAX_RAY_DIR_CHARS - len(f"/disagg-12345678/{RAY_DIR}") else "/tmp"


@contextmanager
def only_what_is_used() -> Iterator[None]:
    """Keeps `ray.init` from starting processes that nothing of ours uses, and that cost half of its time: an
    autoscaler, a log monitor (`log_to_driver` is off), and a server of usage statistics in place of the dashboard.
    There is no public way."""
    import ray

    parameter, services = ray._private.parameter, ray._private.services
    params, start_api_server = parameter.RayParams, services.start_api_server
    parameter.RayParams = functools.partial(params, no_monitor=True, include_log_monitor=False)
    services.start_api_server = lambda *arguments, **options: ("", None)
    try:
        yield
    finally:
        parameter.RayParams, services.start_api_server = params, start_api_server


@contextmanager
def environment_mark(mark: str) -> Iterator[None]:
    """Give processes that are started inside a mark by which they are found, and not the operator's own secrets."""
    own = {name: os.environ.pop(name) for name in NOT_FOR_CHILDREN if name in os.environ}
    os.environ[MARK] = mark
    try:
        yield
    finally:
        del os.environ[MARK]
        os.environ.update(own)


class PrivateSession(Session):
    """Owner of a whole Ray: its processes and its folder.

    Args:
        temp_dir: parent of its folder; None for the system's place.
        cores: cores of Ray's own processes once the cluster has started (`settle`).
        num_processes: number of processes that the cluster begins with. Ray starts as many processes of Python at once
            as it has CPUs, and as many before they are asked for; no actor of ours takes a CPU.
    """

    def __init__(self, temp_dir: str | None, cores: Sequence[int], num_processes: int) -> None:
        self._asked_dir = temp_dir
        self._cores = cores
        self._num_processes = num_processes
        self._folder: TempFolder | None = None
        self._environment = PrivateEnvironment()
        self._mark = uuid.uuid4().hex
        self.is_open = False

    @override
    def open(self) -> None:
        self._folder = make_temp_dir(self._asked_dir)
        self._environment.enter()  # before Ray is imported
        import ray

        refuse_if_connected()
        with only_what_is_used(), environment_mark(self._mark), signals_stay_ours():
            ray.init(
                address="local",
                include_dashboard=False,
                num_cpus=self._num_processes,
                resources={SLOT: NUM_SLOTS},
                object_store_memory=OBJECT_STORE_BYTES,
                _temp_dir=str(self._folder.path / RAY_DIR),
                _node_ip_address="127.0.0.1",
                **INIT_OPTIONS,
            )
        self.is_open = True
        be_quiet()

    @override
    def close(self) -> None:
        family, grace_s = self.family(), 0.0
        if self.is_open:
            import ray

            self.is_open = False
            ray.shutdown()
            grace_s = STOP_GRACE_S
        self._environment.leave()
        end_processes([*family, *self.family()], grace_s)
        if self._folder is not None:
            self._folder.remove()
            self._folder = None

    def settle(self) -> None:
        """Move Ray's own processes to their cores, because the cluster has started. Workers have pinned themselves, so
        those that still run anywhere are Ray's. During the start Ray has all cores, because nothing else needs them
        yet."""
        if not self._cores:
            return
        anywhere = os.sched_getaffinity(0)
        for process in self.family():
            pin_unpinned(process.pid, anywhere, self._cores)

    @property
    @override
    def has_head(self) -> bool:
        return any(_is_store(process.pid) for process in self.family())

    def family(self) -> list[ProcessRef]:
        """All processes of this Ray."""
        return ProcessRef.family(f"{MARK}={self._mark}")


def _is_store(pid: int) -> bool:
    """Whether a process is Ray's store of the cluster's state."""
    try:
        program = Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0]
    except OSError:  # it is gone
        return False
    return program.endswith(b"/gcs_server")
