"""The whole way of a cluster under `ray up`, with the files of deploy/ray: real nodes, all on this machine.

ray up -> a head, and by itself controller, gateway, a worker of two stages on two nodes and one on one -> tokens stream
disagg scale decode=2 -> Ray starts another node -> its worker serves
ray down -> nothing is left, and other people's Ray was not touched
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from disagg.client import Client
from disagg.cluster.on_ray.nodes.local_runner import NODE_MARK
from disagg.cluster.system.process_tools import ProcessRef
from disagg.engine.fake_runner import fake_generate
from disagg.proto.errors import DisaggError
from tests.cluster.launching import Launch, free_ports, new_launch, read_deploy
from tests.support.processes import mentioning
from tests.support.sockets import listening_addresses

pytestmark = pytest.mark.ray


@pytest.fixture
def launch() -> Iterator[Launch]:
    with new_launch("du") as launch:
        yield launch


@pytest.fixture
def somebody_elses_ray() -> Iterator[subprocess.Popen[bytes]]:
    """A process that `ray stop` would end: it goes by the name."""
    with subprocess.Popen(["ray::somebody-else", "600"], executable="/bin/sleep") as process:
        yield process
        process.kill()


def test_a_cluster_comes_up_serves_grows_and_goes(launch: Launch, somebody_elses_ray: subprocess.Popen[bytes]) -> None:
    gateway = f"127.0.0.1:{write_files(launch, name='loopback-stages')}"
    nodes = launch.folder / "c"
    launch.run("ray", "up", "-y", str(launch.cluster_file))
    with Client(gateway) as client:
        wait_for_workers(launch, client, ["decode-0", "prefill-0"])
        assert node_types(launch) == ["decode", "head", "prefill", "prefill"]
        assert serve(client) == ("prefill-0", "decode-0")
        first, second = stages(launch)
        os.kill(second.pid, signal.SIGSTOP)  # so that it does not see that the first one, on the other node, is gone
        first.kill()
        launch.wait_until("other processes of both stages", lambda: are_others(stages(launch), (first, second)))
        wait_for_workers(launch, client, ["decode-0", "prefill-0"])
        assert serve(client, 9) == ("prefill-0", "decode-0")

        launch.run("disagg", "scale", "decode=2", "--address", gateway)
        wait_for_workers(launch, client, ["decode-0", "decode-1", "prefill-0"])
        assert node_types(launch) == ["decode", "decode", "head", "prefill", "prefill"]
        routes = {serve(client, number) for number in range(4)}
        assert routes == {("prefill-0", "decode-0"), ("prefill-0", "decode-1")}

    processes = launch.processes()
    assert len(processes) > 10  # four ranks, gateway and controller; five nodes of Ray
    launch.run("ray", "down", "-y", str(launch.cluster_file))
    assert [process for process in processes if process.is_alive()] == []
    assert launch.processes() == []
    assert mentioning(f"{nodes}/") == []
    assert not nodes.exists()
    assert somebody_elses_ray.poll() is None


def stages(launch: Launch) -> tuple[ProcessRef, ...]:
    """The processes of the prefill worker's stages, on a node each. Of ours nothing listens but on its address; Ray's
    server in each does on all."""
    found: dict[str, ProcessRef] = {}
    for name, address in (node_id.split("@") for node_id in node_ids(launch) if node_id.startswith("prefill")):
        of_node = []
        for process in ProcessRef.family(f"{NODE_MARK}={launch.folder / 'c' / name}"):
            with suppress(FileNotFoundError):  # it has just ended
                title = Path(f"/proc/{process.pid}/cmdline").read_text()
                if (of_ray := re.match(r"ray::(HostActor|RankActor)", title)) is not None:
                    assert {host for host, _ in listening_addresses(process.pid)} <= {address, "::"}
                    of_node.append(of_ray[1])
                    found[of_ray[1]] = process
        assert len(of_node) <= 1
    return tuple(found[title] for title in sorted(found))


def are_others(now: tuple[ProcessRef, ...], before: tuple[ProcessRef, ...]) -> bool:
    return len(now) == len(before) and not {*now} & {*before} and not any(process.is_alive() for process in before)


Change = Callable[[dict[str, Any], dict[str, Any]], None]
"""Changes what is served, and the cluster file."""


def write_files(launch: Launch, change: Change = lambda served, cluster: None, name: str = "loopback") -> int:
    """The files of deploy/ray with folder and ports of ours, and the model that needs no import; the gateway's port."""
    head_port, _, gateway_port = free_ports(3)
    served = read_deploy(f"disagg-{name}.yaml")
    served |= {"model": {"path": "fake"}}
    served["placement"] = {"local_prefill": "never", "policy": "round_robin"}  # so that each decode worker has its turn
    served["gateway"]["port"] = gateway_port
    cluster = read_deploy(f"{name}.yaml")
    cluster["provider"] |= {"head_port": head_port, "dir": str(launch.folder / "c")}
    cluster["file_mounts"]["~/disagg.yaml"] = str(launch.folder / "disagg.yaml")
    cluster["setup_commands"] = []
    change(served, cluster)
    launch.write("disagg.yaml", served)
    launch.write("cluster.yaml", cluster)
    return gateway_port


def wait_for_workers(launch: Launch, client: Client, expected: list[str]) -> None:
    """Until the gateway serves with exactly these; the controller started by itself, and so do they."""

    def are_there() -> bool:
        try:
            return sorted(worker.worker_id for worker in client.cluster_state().workers) == expected
        except DisaggError:  # there is no gateway yet
            return False

    launch.wait_until(f"workers {expected}", are_there)


def node_types(launch: Launch) -> list[str]:
    """The types of the nodes that our provider has given out."""
    return sorted(node_id.partition("-")[0] for node_id in node_ids(launch))


def node_ids(launch: Launch) -> list[str]:
    """Those nodes, such as `decode-3@127.0.0.4`, in order of their creation."""
    return list(json.loads((launch.folder / "c" / "nodes.json").read_text())["nodes"])


def serve(client: Client, number: int = 0) -> tuple[str, str]:
    """Stream one answer, compare it with the only right one, and say which workers computed it."""
    prompt = tuple(range(1000 * number, 1000 * number + 64))  # no two share a prefix
    tokens: list[int] = []
    for delta in client.stream(prompt, max_tokens=24, temperature=0.0, ignore_eos=True):
        tokens += delta.token_ids
        finished = delta.finished
    assert tokens == fake_generate(prompt, 24)
    assert finished is not None
    route = client.explain(finished.request_id)
    return route.prefill_worker, route.decode_worker
