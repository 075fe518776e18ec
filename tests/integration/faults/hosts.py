"""Two hosts on one machine: network namespaces with a link between them that can be cut. Needs root and `ip`.

    this namespace ──── link ──── P's        10.n.1.1, 10.n.1.2
           └────────── link ──── D's        10.n.2.1, 10.n.2.2
                  P's ── link ── D's        10.n.3.1, 10.n.3.2: the one that is cut

Each host has one address that its workers bind, 10.n.9.1 and 10.n.9.2; this namespace is 10.n.9.9. So the gateway of a
test, which runs here, reaches both also while they do not reach each other. Names and n come from the process id.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from disagg.cluster.hosts.processes import WORKER_MODULE, Child, start_child, stop_children
from disagg.cluster.system.process_tools import thread_environment
from disagg.engine.config import WorkerConfig
from disagg.proto.messages import WorkerInfo
from tests.support.registry import Registry
from tests.support.secret import SECRET

START_TIMEOUT_S = 60.0
_CLONE_NEWNET = 0x40000000
T = TypeVar("T")


def why_not_here() -> str:
    """Why this machine cannot pretend to be several hosts; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need the program ip (Debian: iproute2)"
    name = f"disagg-try-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"network namespaces cannot be made: {tried.stderr.strip()}"
    _ip("netns", "del", name)
    return ""


def _ip(*arguments: str, host: str | None = None) -> None:
    inside = [] if host is None else ["-n", host]
    done = subprocess.run(["ip", *inside, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join([*inside, *arguments])}: {done.stderr.strip()}"


class TwoHosts:
    """The namespaces `prefill` and `decode`. Use `two_hosts`, which takes them away again."""

    def __init__(self) -> None:
        number = os.getpid()
        self._net = f"10.{100 + number % 100}"
        self.names = {"prefill": f"disagg-p-{number}", "decode": f"disagg-d-{number}"}
        self.address = {"prefill": f"{self._net}.9.1", "decode": f"{self._net}.9.2"}
        """What the workers of a host bind."""
        self.own_address = f"{self._net}.9.9"
        """Of this namespace."""
        self._links = {role: f"dg{role[0]}{number}" for role in self.names}
        """Each host's end of the link to this namespace is called `home`, of the link between them `across`."""

    def make(self) -> None:
        """Make namespaces, links and routes."""
        for number, (role, name) in enumerate(self.names.items(), start=1):
            _ip("netns", "add", name)
            _ip("link", "set", "lo", "up", host=name)
            _ip("address", "add", f"{self.address[role]}/32", "dev", "lo", host=name)
            _ip("link", "add", self._links[role], "type", "veth", "peer", "name", "home", "netns", name)
            _ip("address", "add", f"{self._net}.{number}.1/30", "dev", self._links[role])
            _ip("link", "set", self._links[role], "up")
            _ip("address", "add", f"{self._net}.{number}.2/30", "dev", "home", host=name)
            _ip("link", "set", "home", "up", host=name)
            _ip("route", "add", f"{self.own_address}/32", "via", f"{self._net}.{number}.1", host=name)
            _ip("route", "add", f"{self.address[role]}/32", "via", f"{self._net}.{number}.2")
        _ip("address", "add", f"{self.own_address}/32", "dev", self._links["prefill"])
        prefill, decode = self.names.values()
        _ip("link", "add", "across", "netns", prefill, "type", "veth", "peer", "name", "across", "netns", decode)
        for number, name in enumerate(self.names.values(), start=1):
            _ip("address", "add", f"{self._net}.3.{number}/30", "dev", "across", host=name)
        self.mend()

    def cut(self, role: str) -> None:
        """Take the link between the hosts down at this one's end: it gets errors for the other, while what the other
        sends vanishes."""
        _ip("link", "set", "across", "down", host=self.names[role])

    def mend(self) -> None:
        """Bring the link up, with the routes that went down with it."""
        for name in self.names.values():
            _ip("link", "set", "across", "up", host=name)
        for role, other, gateway in (("prefill", "decode", 2), ("decode", "prefill", 1)):
            route = f"{self.address[other]}/32", "via", f"{self._net}.3.{gateway}"
            _ip("route", "replace", *route, host=self.names[role])

    def remove(self) -> None:
        """Take away what there is of it. A namespace takes its links with it, but not at once."""
        for link in self._links.values():
            if Path("/sys/class/net", link).exists():
                _ip("link", "del", link)
        for name in self.names.values():
            if Path("/run/netns", name).exists():
                _ip("netns", "del", name)

    def on_host(self, role: str, function: Callable[[], T]) -> T:
        """The result of `function()`, called on a thread in a host's namespace; child processes are there, too."""
        results: list[T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                _enter(self.names[role])
                results.append(function())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, name=f"on-{role}")
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return results[0]


def _enter(name: str) -> None:
    """Put the calling thread into a namespace."""
    descriptor = os.open(f"/run/netns/{name}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {name}")
    finally:
        os.close(descriptor)


@contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Two hosts, which are gone afterwards, whatever happened."""
    hosts = TwoHosts()
    try:
        hosts.make()
        yield hosts
    finally:
        hosts.remove()


@contextmanager
def workers_on(hosts: TwoHosts, configs: Mapping[str, WorkerConfig]) -> Iterator[list[WorkerInfo]]:
    """A worker on each host, by role; every one must end by itself at SIGTERM."""
    children: list[Child] = []
    with tempfile.TemporaryDirectory() as logs, Registry(host=hosts.own_address) as registry:

        def start(config: WorkerConfig) -> Child:
            environment = thread_environment(1)
            name = config.worker_id
            return start_child(name, WORKER_MODULE, config, registry.address, SECRET, Path(logs), environment)

        try:
            for role, config in configs.items():
                children.append(hosts.on_host(role, lambda config=config: start(config)))  # type: ignore[misc]
            yield registry.wait([config.worker_id for config in configs.values()], START_TIMEOUT_S)
        finally:
            killed = stop_children(children)
            problems = [
                line for child in children for line in child.log.read_text().splitlines() if "Traceback" in line
            ]
    assert not killed
    assert not problems
