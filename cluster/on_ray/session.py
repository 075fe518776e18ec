"""This process's connection to Ray: to a private one that it starts and ends, or to a cluster that it joins.

    PrivateSession   folder, environment, ray.init("local") ......... close: Ray ends, its processes, its folder
    JoinedSession    token, one question to the cluster, ray.init(address) ......... close: we leave it

No signal may raise inside Ray: its compiled code turns the exception into another one, or crashes. A start is ended
between calls of Ray, each of which is short but `ray.init`.

How a private Ray is kept private: see `private.py`. Joining a cluster, its own rules apply.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

from disagg.cluster.on_ray.auth import check_accepted, prepare_token
from disagg.cluster.on_ray.names import SLOT
from disagg.cluster.on_ray.private import (
    MARK,
    RAY_DIR,
    PrivateEnvironment,
    check_reachable,
    environment_mark,
    make_temp_dir,
    on_cores,
)
from disagg.cluster.on_ray.store import NAMESPACE
from disagg.cluster.system.errors import LaunchError
from disagg.cluster.system.process_tools import ProcessRef, end_processes

OBJECT_STORE_BYTES: Final = 80 << 20
"""Close to the least that Ray accepts: nothing of ours is stored there."""
STOP_GRACE_S: Final = 5.0
"""What the processes of a Ray that was told to end get before SIGKILL."""
NUM_SLOTS: Final = 4096
"""Of a private Ray: its pools may grow as far as the controller lets them."""
CLIENT_SCHEME: Final = "ray://"
AUTO: Final = "auto"
"""The Ray cluster that this machine is a node of."""

_SETTINGS: Final[dict[str, Any]] = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": "warning"}


class Session(Protocol):
    """A connection to Ray."""

    def open(self) -> None:
        """Connect; blocks, without being told of signals. Raises `LaunchError`."""
        ...

    def close(self) -> None:
        """Leave nothing of ours behind in this process, nor of what `open` started. Idempotent."""
        ...

    @property
    def is_open(self) -> bool:
        """Whether Ray can be called."""
        ...

    @property
    def has_head(self) -> bool:
        """Whether Ray's head can do what it is asked. Calls to one whose store was killed wait for it, for a day."""
        ...


class PrivateSession:
    """Owner of a whole Ray: its processes and its folder.

    Args:
        temp_dir: where its folder goes; None for the system's place.
        cores: what Ray's own processes run on.
    """

    def __init__(self, temp_dir: str | None, cores: Sequence[int]) -> None:
        self._asked_dir = temp_dir
        self._cores = cores
        self._folder: Path | None = None
        self._environment = PrivateEnvironment()
        self._mark = uuid.uuid4().hex
        self.is_open = False

    def open(self) -> None:
        """See `Session`."""
        self._folder = make_temp_dir(self._asked_dir)
        self._environment.enter()  # before Ray is imported
        import ray

        refuse_if_connected()
        with on_cores(self._cores), environment_mark(self._mark), signals_stay_ours():
            ray.init(
                address="local",
                include_dashboard=False,
                num_cpus=0,
                resources={SLOT: NUM_SLOTS},
                object_store_memory=OBJECT_STORE_BYTES,
                _temp_dir=str(self._folder / RAY_DIR),
                _node_ip_address="127.0.0.1",
                **_SETTINGS,
            )
        self.is_open = True
        be_quiet()

    def close(self) -> None:
        """See `Session`."""
        family, grace_s = self.family(), 0.0
        if self.is_open:
            import ray

            self.is_open = False
            ray.shutdown()
            grace_s = STOP_GRACE_S
        self._environment.leave()
        end_processes([*family, *self.family()], grace_s)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    @property
    def has_head(self) -> bool:
        """See `Session`."""
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


class JoinedSession:
    """A driver in somebody's Ray cluster.

    Args:
        address: host:port of its head, or `auto` for the one that this machine is a node of.
    """

    def __init__(self, address: str) -> None:
        self._asked = address
        self.is_open = False
        self.has_head = True  # somebody else's, who keeps it

    def open(self) -> None:
        """See `Session`."""
        if self._asked.startswith(CLIENT_SCHEME):
            raise LaunchError(
                f"ray.address: {self._asked} is for Ray's client; run this on a node of the cluster, with auto"
            )
        prepare_token()  # before Ray is imported
        if self._asked != AUTO:
            check_reachable(self._asked)
        import ray

        refuse_if_connected()
        address = find_cluster(self._asked)
        check_accepted(address)
        try:
            with signals_stay_ours():
                ray.init(address=address, **_SETTINGS)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise LaunchError(f"ray.address: cannot join {address} ({' '.join(str(error).split())})") from None
        self.is_open = True
        be_quiet()

    def close(self) -> None:
        """See `Session`."""
        if self.is_open:
            import ray

            self.is_open = False
            ray.shutdown()


def find_cluster(address: str) -> str:
    """host:port of a cluster's head. For `auto`: what `RAY_ADDRESS` says, or where this machine last became a node.
    Ray's own `auto` takes any Ray process of the machine first, such as that of a private cluster.

    Raises:
        LaunchError: where there is none.
    """
    from ray._private.services import canonicalize_bootstrap_address, find_bootstrap_address

    if address == AUTO:
        address = os.environ.get("RAY_ADDRESS") or find_bootstrap_address(None) or AUTO
    try:
        found = canonicalize_bootstrap_address(address)
    except (ConnectionError, RuntimeError, ValueError) as error:
        if address != AUTO:
            raise LaunchError(f"ray.address: {address}: {' '.join(str(error).split())}") from None
        found = None
    if found is None:
        raise LaunchError(
            "ray.address: this machine is no node of a running Ray cluster; --ray-address or RAY_ADDRESS names one"
        )
    return str(found)


def refuse_if_connected() -> None:
    """Raises `LaunchError` where this process is in a Ray cluster already."""
    import ray

    if ray.is_initialized():
        raise LaunchError("this process is already connected to a Ray cluster")


def be_quiet() -> None:
    """Do not print what Ray's nodes publish, such as a page about each process that died: the controller says it. For
    the life of this process; there is no public way."""
    from ray._private import worker

    worker.print_to_stdstream = lambda *arguments, **options: None


@contextmanager
def signals_stay_ours() -> Iterator[None]:
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
