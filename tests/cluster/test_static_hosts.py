"""`ray up` with hosts that are there already: Ray's own ssh runner, and our provider on both machines.

`ssh` and `rsync` are programs of ours, for which a host is a folder of this machine (`pretended_ssh.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.launching import Launch, free_ports, new_launch, read_deploy
from tests.cluster.pretended_ssh import HOSTS, host_processes, write_programs

pytestmark = pytest.mark.ray

HEAD, PREFILL, DECODE, SPARE = (f"127.0.1.{number}" for number in (1, 2, 3, 4))
CONTROL_PATHS = Path("/tmp"), "ray_ssh_*"
"""Folders that Ray makes for ssh's connections, and leaves."""
RAY_START = (
    "export RAY_AUTH_MODE=token; ray start --node-ip-address=$PRETENDED_IP --temp-dir=$HOME/r --min-worker-port=0"
    " --max-worker-port=0 --dashboard-agent-listen-port=0 --include-log-monitor=false --object-store-memory=80000000"
    " --disable-usage-stats"
)


@pytest.fixture
def control_paths() -> Iterator[None]:
    folder, pattern = CONTROL_PATHS
    before = set(folder.glob(pattern))
    yield
    for made in set(folder.glob(pattern)) - before:
        for empty in (*made.iterdir(), made):
            empty.rmdir()


@pytest.fixture
def launch(control_paths: None) -> Iterator[Launch]:
    with new_launch("ds") as launch:
        programs = write_programs(launch.folder)
        launch.environment[HOSTS] = str(launch.folder / "h")
        launch.environment["PATH"] = f"{programs}:{launch.environment['PATH']}"
        yield launch


def test_static_hosts_become_nodes_of_their_type_and_are_given_back(launch: Launch) -> None:
    write_files(launch)
    hosts = launch.folder / "h"
    launch.run("ray", "up", "-y", str(launch.cluster_file))
    launch.wait_until("three nodes", lambda: statuses(launch) == {"head": 1, "prefill": 1, "decode": 1})
    assert sorted(taken(hosts / HEAD / ".disagg")) == [HEAD, PREFILL, DECODE]  # what the head knows
    assert taken(launch.folder / "home" / ".disagg") == [HEAD]  # what the launching machine knows
    for host in (HEAD, PREFILL, DECODE):
        assert (hosts / host / "started").read_text() == f"{host}\n"
        assert (hosts / host / ".ray" / "auth_token").stat().st_mode & 0o777 == 0o600
        assert host_processes(hosts, host)
    assert not host_processes(hosts, SPARE)

    launch.run("ray", "down", "-y", str(launch.cluster_file))
    assert launch.processes() == []
    assert taken(launch.folder / "home" / ".disagg") == []


def write_files(launch: Launch) -> None:
    """onprem.yaml for hosts that share this machine's ports, with Ray alone on them."""
    head_port, client_port = free_ports(2)
    key = launch.folder / "key"
    key.write_text("no key is needed\n")
    cluster = read_deploy("onprem.yaml")
    cluster["provider"]["hosts"] = {"head": [HEAD], "prefill": [PREFILL], "decode": [DECODE, SPARE]}
    cluster["auth"]["ssh_private_key"] = str(key)
    for node_type in ("prefill", "decode"):
        cluster["available_node_types"][node_type] |= {"min_workers": 1, "max_workers": 1}
    cluster["file_mounts"] = {"~/.ray/auth_token": "~/.ray/auth_token"}
    cluster["setup_commands"] = [
        f"echo 'export PATH={launch.environment['PATH']}' > ~/.bashrc",
        "chmod 600 ~/.ray/auth_token && echo $PRETENDED_IP > ~/started",
    ]
    cluster["head_start_ray_commands"][1:] = [
        f"export AUTOSCALER_UPDATE_INTERVAL_S=1; {RAY_START} --head --port={head_port} --include-dashboard=false"
        f" --ray-client-server-port={client_port} --autoscaling-config=~/ray_bootstrap_config.yaml"
    ]
    cluster["worker_start_ray_commands"][1:] = [f"{RAY_START} --address=$RAY_HEAD_IP:{head_port}"]
    launch.write("cluster.yaml", cluster)


def statuses(launch: Launch) -> dict[str, int]:
    """Nodes that are up, by type, as the head's provider has it."""
    found: dict[str, int] = {}
    for node in table(launch.folder / "h" / HEAD / ".disagg")["nodes"].values():
        if node["tags"]["ray-node-status"] == "up-to-date" or node["tags"]["ray-node-type"] == "head":
            node_type = node["tags"]["ray-user-node-type"]
            found[node_type] = found.get(node_type, 0) + 1
    return found


def taken(folder: Path) -> list[str]:
    return [node["host"] for node in table(folder)["nodes"].values()]


def table(folder: Path) -> dict[str, Any]:
    file = folder / "ray" / "disagg" / "nodes.json"
    content: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"nodes": {}}
    return content
