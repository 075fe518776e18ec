"""Our node providers for `ray up`: existing machines, reached by ssh, and one machine in place of many.

    ray up    (launching machine)  bootstrap_config -> create_node(head) -> set-up commands on the head
    monitor   (on the head)        create_node(workers) -> set-up commands on each; terminate_node when not needed
    ray down  (launching machine)  terminate_node(head, then workers) until none is left

Ray's own provider for existing machines refuses node types, and so labels and pools. These two are named in a cluster
file as `provider: {type: external, module: disagg.cluster.on_ray.nodes.provider.StaticSshProvider}`. Ray calls their
methods from several threads and from both machines. Their state is a `NodeTable` in a file (`TableFile`), which
`ray up`, the head's autoscaler and `ray down` change: every change holds a lock on a file beside it and replaces the
table in one step, so that readers see all of it or nothing.

`StaticSshProvider` (hosts by node type in `provider.hosts`): a node is a host with a running Ray. The launching machine
has the head only; so `ray down` ends Ray on every host of the pools, used or not: the hosts belong to the cluster.

`LoopbackProvider`: a node is a set of processes on this machine, with a home folder of its own, found by a mark in
their environment. It never runs `ray stop`, which ends every Ray of this machine, other people's included.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec
from ray.autoscaler.node_launch_exception import NodeLaunchException
from ray.autoscaler.node_provider import NodeProvider
from ray.autoscaler.tags import NODE_KIND_HEAD, NODE_KIND_WORKER, TAG_RAY_NODE_KIND, TAG_RAY_USER_NODE_TYPE
from typing_extensions import override

from disagg.cluster.core.node_table import Node, NodeTable, host_of, make_node_id
from disagg.cluster.on_ray.nodes.local_runner import NODE_MARK, LocalCommandRunner, LocalNode
from disagg.cluster.on_ray.private import MAX_RAY_DIR_CHARS
from disagg.cluster.system.process_tools import ProcessRef, end_processes
from disagg.proto.errors import ConfigError


class TableFile:
    """Owner of `nodes.json` and `lock` in one folder, which only this user may read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = folder / "nodes.json"

    def read(self) -> NodeTable:
        """The table; an empty one where there is no file."""
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=NodeTable)
        except FileNotFoundError:
            return NodeTable()

    def change(self, edit: Callable[[NodeTable], NodeTable]) -> NodeTable:
        """Replace the table by what `edit` makes of it, and return that. What `edit` raises changes nothing.

        Raises:
            ConfigError: if the folder is another user's, who could then read and change what is below it.
        """
        with self._locked():
            table = edit(self.read())
            new = self._file.with_suffix(".new")
            new.write_bytes(msgspec.json.encode(table))
            new.replace(self._file)
            return table

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._folder.stat().st_uid != os.geteuid():
            raise ConfigError(f"{self._folder}: belongs to another user; choose another folder")
        with (self._folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


logger = logging.getLogger(__name__)

Config = dict[str, Any]
"""A parsed cluster file, or a section of it."""

LOOPBACK_HOSTS: Final = tuple(f"127.0.0.{number}" for number in range(2, 255))
"""Addresses that only this machine reaches, one for each node: Ray replaces 127.0.0.1 by a public one."""
STOP_GRACE_S: Final = 3.0
STOP_CONNECT_TIMEOUT_S: Final = 10
MAX_PARALLEL_STOPS: Final = 16


class TableProvider(NodeProvider, ABC):  # type: ignore[misc]  # Ray has no types
    """Base of both providers: all answers come from the table."""

    def __init__(self, provider_config: Config, cluster_name: str) -> None:
        super().__init__(provider_config, cluster_name)
        self._table = TableFile(self.folder())

    @abstractmethod
    def folder(self) -> Path:
        """The folder that holds the provider's table."""

    @override
    def non_terminated_nodes(self, tag_filters: Mapping[str, str]) -> list[str]:
        return self._table.read().matching(tag_filters)

    @override
    def is_running(self, node_id: str) -> bool:
        return node_id in self._table.read().nodes

    @override
    def is_terminated(self, node_id: str) -> bool:
        return not self.is_running(node_id)

    @override
    def node_tags(self, node_id: str) -> dict[str, str]:
        """Tags of a node; empty for one that is gone."""
        node = self._table.read().nodes.get(node_id)
        return {} if node is None else dict(node.tags)

    @override
    def set_node_tags(self, node_id: str, tags: Mapping[str, str]) -> None:
        self._table.change(lambda table: table.tag(node_id, tags))

    @override
    def external_ip(self, node_id: str) -> str:
        return self.internal_ip(node_id)

    @override
    def internal_ip(self, node_id: str) -> str:
        return socket.gethostbyname(host_of(node_id))

    def create_node(self, node_config: Config, tags: Mapping[str, str], count: int) -> None:
        """Take `count` hosts of the type in `tags`; the updater of Ray sets them up.

        Raises:
            NodeLaunchException: if there are not as many; none is taken then.
        """
        self._table.change(lambda table: self._take(table, tags, count))

    def _take(self, table: NodeTable, tags: Mapping[str, str], count: int) -> NodeTable:
        node_type = tags[TAG_RAY_USER_NODE_TYPE]
        if tags[TAG_RAY_NODE_KIND] == NODE_KIND_HEAD:
            table = table.begin(uuid.uuid4().hex)
        hosts = self.free_hosts(table, node_type)
        if len(hosts) < count:
            raise NodeLaunchException(
                "NoFreeHost", f"{count} nodes of type {node_type} are requested, and {len(hosts)} hosts are free", None
            )
        for host in hosts[:count]:
            table, _ = table.add(node_type, host, tags)
        return table

    @abstractmethod
    def free_hosts(self, table: NodeTable, node_type: str) -> Sequence[str]:
        """Hosts on which a node of this type can be created."""

    def prepare_for_head_node(self, cluster_config: Config) -> Config:
        """Add the head and its generation to the cluster file: the autoscaler on the head has no record of them."""
        table = self._table.read()
        (head,) = table.matching({TAG_RAY_NODE_KIND: NODE_KIND_HEAD})
        head_record = {"generation": table.generation, "id": head, "tags": table.nodes[head].tags}
        cluster_config["provider"] = {**cluster_config["provider"], "head": head_record}
        return cluster_config

    @override
    def terminate_node(self, node_id: str) -> None:
        self.terminate_nodes([node_id])


# ---------------------------------------------------------------- hosts reached by ssh


class StaticSshProvider(TableProvider):
    """Provider of existing hosts. Owner of the record of which hosts are nodes."""

    def __init__(self, provider_config: Config, cluster_name: str) -> None:
        super().__init__(provider_config, cluster_name)
        self._hosts: dict[str, list[str]] = read_hosts(provider_config)
        head = provider_config.get("head")
        if head is not None:  # we are the autoscaler on the head
            self._table.change(lambda table: with_head(table, head))

    def folder(self) -> Path:
        """`provider.state_dir`, or a folder in the user's home."""
        given = self.provider_config.get("state_dir", "~/.disagg/ray")
        return Path(str(given)).expanduser() / str(self.cluster_name)

    def free_hosts(self, table: NodeTable, node_type: str) -> Sequence[str]:
        """Hosts of the pool that have no node."""
        return table.free(self._hosts.get(node_type, []))

    def nodes_for_teardown(self, tag_filters: Mapping[str, str]) -> list[str]:
        """The nodes in the table and, for workers, also every other host of the pools that was not ended yet: only
        the head's table has all nodes."""
        table = self._table.read()
        listed = table.matching(tag_filters)
        if tag_filters.get(TAG_RAY_NODE_KIND) != NODE_KIND_WORKER or not table.generation:
            return listed
        head_type = self.provider_config.get("head_node_type")
        others = (
            make_node_id(node_type, 0, host)
            for node_type, hosts in self._hosts.items()
            for host in table.free(hosts)
            if node_type != head_type and host not in table.ended_hosts
        )
        return [*listed, *others]

    def terminate_nodes(self, node_ids: list[str]) -> None:
        """End Ray on these hosts. A host that cannot be reached is skipped, with a warning."""
        with ThreadPoolExecutor(max_workers=MAX_PARALLEL_STOPS) as executor:
            list(executor.map(self._stop_ray, node_ids))
        self._table.change(lambda table: table.remove(*node_ids))

    def _stop_ray(self, node_id: str) -> None:
        runner = self.get_command_runner(
            f"{node_id}: ", node_id, self.provider_config.get("auth", {}), self.cluster_name, subprocess, True
        )
        try:
            runner.run(self.provider_config.get("stop_command", "ray stop"), timeout=STOP_CONNECT_TIMEOUT_S)
        except Exception as error:  # Ray's runner raises what it likes, and the other hosts have to be ended too
            logger.warning("%s: Ray could not be ended there: %s", node_id, error)

    def prepare_for_head_node(self, cluster_config: Config) -> Config:
        """Also add how the head reaches the others: Ray has put its own key there, and removed the proxy."""
        cluster_config = super().prepare_for_head_node(cluster_config)
        cluster_config["provider"]["auth"] = dict(cluster_config["auth"])
        return cluster_config

    @staticmethod
    def bootstrap_config(cluster_config: Config) -> Config:
        """Check `provider.hosts`, and record the settings that `terminate_nodes` needs; raises `ConfigError`."""
        provider = {**cluster_config["provider"], "head_node_type": cluster_config["head_node_type"]}
        provider["auth"] = dict(cluster_config["auth"])
        if "ssh_user" not in provider["auth"]:
            raise ConfigError("auth.ssh_user: missing")
        check_sizes(read_hosts(provider), cluster_config)
        return {**cluster_config, "provider": provider}


def read_hosts(provider: Config) -> dict[str, list[str]]:
    """`provider.hosts`: node type -> host names; raises `ConfigError`."""
    hosts = provider.get("hosts")
    if not isinstance(hosts, dict):
        raise ConfigError("provider.hosts: expected a mapping of node types to lists of hosts")
    seen: set[str] = set()
    for node_type, names in hosts.items():
        if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
            raise ConfigError(f"provider.hosts.{node_type}: expected a list of host names or addresses; got {names!r}")
        for name in names:
            if name in seen:
                raise ConfigError(f"provider.hosts.{node_type}: {name} is written twice; a host is one node")
            seen.add(name)
    return hosts


def check_sizes(hosts: Mapping[str, Sequence[str]], cluster_config: Config) -> None:
    """Raises `ConfigError` if a node type may need more hosts than it has."""
    for node_type, settings in cluster_config["available_node_types"].items():
        is_head = node_type == cluster_config["head_node_type"]
        most = 1 if is_head else settings.get("max_workers", 0)
        if len(hosts.get(node_type, [])) < most:
            what = "the head" if is_head else f"available_node_types.{node_type}.max_workers: {most}"
            raise ConfigError(f"provider.hosts.{node_type}: {len(hosts.get(node_type, []))} hosts for {what}")


def with_head(table: NodeTable, head: Config) -> NodeTable:
    """The table of the head's autoscaler, including the head; nodes of an earlier cluster are forgotten."""
    if table.generation == head["generation"]:
        return table
    node = Node(host=host_of(head["id"]), tags=head["tags"])
    return table.begin(head["generation"]).put(head["id"], node, num_created=1)


# ---------------------------------------------------------------- one machine that plays many


class LoopbackProvider(TableProvider):
    """Nodes that are processes on this machine. Owner of them, and of `provider.dir` with all that they write."""

    def folder(self) -> Path:
        """`provider.dir`, or a folder of this user in the system's place for temporary files."""
        given = self.provider_config.get("dir")
        return Path(str(given)).expanduser() if given else _default_folder(self.cluster_name)

    def free_hosts(self, table: NodeTable, node_type: str) -> Sequence[str]:
        """This machine, with a further address for each node."""
        return table.free(LOOPBACK_HOSTS)

    def create_node(self, node_config: Config, tags: Mapping[str, str], count: int) -> None:
        """Add nodes, and give each its home. A new head starts a new cluster: nodes of an earlier one are ended."""
        if tags[TAG_RAY_NODE_KIND] == NODE_KIND_HEAD and (earlier := self.non_terminated_nodes({})):
            self.terminate_nodes(earlier)
        super().create_node(node_config, tags, count)
        for node_id in self.non_terminated_nodes({}):
            self._home(node_id).mkdir(mode=0o700, exist_ok=True)

    def terminate_nodes(self, node_ids: list[str]) -> None:
        """End all processes of these nodes and remove their files; with the last node, the whole folder."""
        self._end_processes([f"{NODE_MARK}={self._home(node_id)}" for node_id in node_ids])
        for node_id in node_ids:
            for folder in (self._home(node_id), self._ray_dir(node_id)):
                shutil.rmtree(folder, ignore_errors=True)
        if not self._table.change(lambda table: table.remove(*node_ids)).nodes:
            shutil.rmtree(self.folder(), ignore_errors=True)

    def _end_processes(self, marks: list[str]) -> None:
        """Send SIGTERM, and SIGKILL after a while; processes that were started meanwhile are looked for once more at
        the end."""
        family = [process for mark in marks for process in ProcessRef.family(mark)]
        for process in family:
            if process.is_alive():
                with suppress(ProcessLookupError):  # it ended in between
                    os.kill(process.pid, signal.SIGTERM)
        end_processes(family, STOP_GRACE_S)
        end_processes([process for mark in marks for process in ProcessRef.family(mark)], grace_s=0)

    def _home(self, node_id: str) -> Path:
        """Home of a node, such as `decode-3`, below our folder."""
        return self.folder() / node_id.partition("@")[0]

    def _ray_dir(self, node_id: str) -> Path:
        """Folder of a node's Ray, such as `r3`: short, and one for each node, because two that start at once in one
        folder take the same sockets."""
        return self.folder() / f"r{self._home(node_id).name.rpartition('-')[2]}"

    def get_command_runner(self, log_prefix: str, node_id: str, *_: object, **__: object) -> LocalCommandRunner:
        """Commands of a node run on this machine, in its home."""
        node = LocalNode(
            node_id=node_id,
            ip=host_of(node_id),
            home=self._home(node_id),
            ray_dir=self._ray_dir(node_id),
            head_ip=LOOPBACK_HOSTS[0],  # the first node
            head_port=self.provider_config["head_port"],
        )
        return LocalCommandRunner(node)

    @staticmethod
    def bootstrap_config(cluster_config: Config) -> Config:
        """Fix the folder, because the head has another home; raises `ConfigError`."""
        provider = dict(cluster_config["provider"])
        if not isinstance(provider.get("head_port"), int):
            raise ConfigError("provider.head_port: expected the port for Ray's head")
        folder = LoopbackProvider(provider, cluster_config["cluster_name"]).folder().absolute()
        most = MAX_RAY_DIR_CHARS - len("/r999")
        if len(str(folder)) > most:
            raise ConfigError(f"provider.dir: {folder} is too long for Ray's sockets; at most {most} characters")
        return {**cluster_config, "provider": {**provider, "dir": str(folder)}}


def _default_folder(cluster_name: str) -> Path:
    """Default folder: a short path that is the same for every call of one user."""
    return Path(tempfile.gettempdir()) / f"disagg-{os.getuid()}-{cluster_name}"
