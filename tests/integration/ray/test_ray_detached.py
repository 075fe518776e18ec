"""`disagg cluster`: a permanent cluster in an existing Ray, on nodes with labels, with the deterministic model."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from disagg.client import Client, ClusterState
from disagg.cluster.control.twin_process import MODULE as TWIN_MODULE
from disagg.cluster.system.process_tools import ProcessRef
from disagg.engine.fake_runner import fake_generate
from disagg.proto.errors import DisaggError
from tests.integration.ray.ray_nodes import RayNodes, ray_nodes
from tests.support.processes import mentioning
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

PROMPT = tuple(range(40))
TIMEOUT_S = 300.0
COMMAND_TIMEOUT_S = 300.0
NODES = [
    {"resources": {"disagg_slot": 1}, "labels": {"disagg.role": "prefill"}},
    {"resources": {"disagg_slot": 1}, "labels": {"disagg.role": "decode"}},
]
HEAD, PREFILL_NODE, DECODE_NODE = 0, 1, 2
POOLS: dict[str, dict[str, object]] = {
    "prefill": {"node_labels": {"disagg.role": "prefill"}},
    "decode": {"node_labels": {"disagg.role": "decode"}},
}
CONFIG: dict[str, object] = {
    "model": {"path": "fake"},
    "transfer": {"transport": "shm"},
    "gateway": {"port": 0},
    "placement": {"local_prefill": "never"},
    "network": {"bind": "node"},
    "pools": POOLS,
}


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of ours whose path is short enough for Ray."""
    folder = Path("/tmp") / f"ds{os.getpid()}"
    folder.mkdir()
    yield folder
    assert mentioning(str(folder)) == []
    shutil.rmtree(folder)


def cluster_command(nodes: RayNodes, *arguments: str, without: str = "", **variables: str) -> tuple[int, str]:
    """Exit status and output of `disagg cluster`, run on a node."""
    environment = {name: value for name, value in {**nodes.environment, **variables}.items() if name != without}
    command = [sys.executable, "-m", "disagg.cli", "cluster", *arguments]
    done = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
    )
    return done.returncode, done.stdout


def write_config(folder: Path, **sections: Mapping[str, object]) -> str:
    file = folder / "disagg.yaml"
    file.write_text(yaml.safe_dump({**CONFIG, **sections}))
    return str(file)


def gateway_address(output: str) -> str:
    (line,) = (line for line in output.splitlines() if line.startswith("gateway: "))
    return line.removeprefix("gateway: ")


def wait_for(client: Client, is_there: Callable[[ClusterState], bool]) -> ClusterState:
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            if is_there(state := client.cluster_state()):
                return state
        except DisaggError:
            pass  # between two gateways
        assert time.monotonic() < deadline
        time.sleep(0.1)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_cluster_stands_on_the_nodes_with_its_labels(folder: Path) -> None:
    token = secrets.token_hex(32)
    with ray_nodes(folder, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "HOME": str(folder)}, NODES) as nodes:
        refusal = f"error: ray.address: the Ray cluster at {nodes.address} "
        assert cluster_command(nodes, "status", without="RAY_AUTH_TOKEN", RAY_AUTH_MODE="disabled") == (
            1,
            f"{refusal}requires a token. RAY_AUTH_MODE=disabled is set, so none was sent. Put the cluster's own into "
            "RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token\n",
        )
        status, output = cluster_command(nodes, "status", RAY_AUTH_TOKEN=secrets.token_hex(32))
        assert (status, output.startswith(f"{refusal}refused our token")) == (1, True)
        assert cluster_command(nodes, "status")[1].startswith("error: no cluster runs here")

        status, output = cluster_command(nodes, "start", "--config", write_config(folder), "--wait")
        assert status == 0, output
        with Client(gateway_address(output)) as client:
            use(nodes, client, folder)

        processes = [ProcessRef.of(pid) for pid in actors(nodes)]
        assert len(processes) == 4
        assert cluster_command(nodes, "stop") == (0, "stopped\n")
        assert [process for process in processes if process.is_alive()] == []
        lose_the_owner(nodes, folder)


@pytest.mark.slow
def test_the_controller_keeps_a_twin_running(folder: Path) -> None:
    settings: dict[str, Any] = {
        "mode": "elastic",
        "pools": {"workers": {"size": 2}},
        "placement": {"decodes": "auto"},
        "controller": {"twin": "on"},
    }
    with ray_nodes(folder, {"HOME": str(folder)}, NODES) as nodes:
        status, output = cluster_command(nodes, "start", "--config", write_config(folder, **settings), "--wait")
        assert status == 0, output
        with Client(gateway_address(output)) as client:
            wait_for_twin(client, 0.0)
            (twin,) = (ProcessRef.of(pid) for pid in twins(nodes))
            (controller,) = (
                ProcessRef.of(pid) for pid in mentioning("ray::ControllerActor") if parent_of(pid) in nodes.raylets
            )
            assert parent_of(twin.pid) == controller.pid
            # The twin ends with its controller, and Ray's next controller starts another one.
            controller.kill()
            deadline = time.monotonic() + TIMEOUT_S
            while twin.is_alive():
                assert time.monotonic() < deadline
                time.sleep(0.1)
            wait_for_twin(client, time.time())
            (twin,) = (ProcessRef.of(pid) for pid in twins(nodes))
        assert cluster_command(nodes, "stop") == (0, "stopped\n")
        assert wait_until(lambda: not twin.is_alive(), timeout_s=TIMEOUT_S)


@pytest.mark.slow
def test_the_workers_of_a_node_leave_it(folder: Path) -> None:
    """As the hook of a pod that ends does: Ray places nothing on the node any more, and what is there is drained. All
    nodes here have one address, so all workers are asked; the only one of a pool stays."""
    nodes_of_decode = [{"resources": {"disagg_slot": 1}, "labels": {"disagg.role": "decode"}} for _ in range(3)]
    with ray_nodes(folder, {"HOME": str(folder)}, [NODES[0], *nodes_of_decode]) as nodes:
        pools = {**POOLS, "decode": {**POOLS["decode"], "size": 2}}
        status, output = cluster_command(nodes, "start", "--config", write_config(folder, pools=pools), "--wait")
        assert status == 0, output
        with Client(gateway_address(output)) as client:
            before = {worker.worker_id: worker for worker in client.cluster_state().workers}
            left = parent_of(before["decode-0"].pid)
            drain = ["drain-node", "--node-id", node_of(nodes, before["decode-0"].pid)]
            reason = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "it goes"]
            run_ray(nodes, *drain, *reason, "--deadline-remaining-seconds", "110")
            status, output = cluster_command(nodes, "leave", "--deadline", "30s")
            assert status == 0, output
            assert output.endswith("left: decode-0\n")
            stay = [line.partition(":")[0] for line in output.splitlines()[:-1]]
            assert stay == ["prefill-0 stays", "decode-1 stays"]
            state = wait_for(client, lambda state: all(worker.phase == "ready" for worker in state.workers))
            after = {worker.worker_id: worker for worker in state.workers}
            assert parent_of(after["decode-0"].pid) != left
            assert {name for name in before if before[name].pid != after[name].pid} == {"decode-0"}
            answer = client.generate(PROMPT, max_tokens=20, temperature=0.0, ignore_eos=True)
            assert list(answer.token_ids) == fake_generate(PROMPT, 20)
        assert cluster_command(nodes, "stop") == (0, "stopped\n")
        assert cluster_command(nodes, "leave") == (0, "nothing is running\n")


def run_ray(nodes: RayNodes, *arguments: str) -> str:
    """The output of `ray`, on a node."""
    command = [str(Path(sys.executable).with_name("ray")), *arguments, "--address", nodes.address]
    return subprocess.run(
        command, env=nodes.environment, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=True
    ).stdout


def node_of(nodes: RayNodes, pid: int) -> str:
    """The id of the Ray node that an actor's process is on."""
    code = (
        "import ray, sys; from ray._private.state import actors; ray.init(sys.argv[1], logging_level='error')\n"
        "print(*[i['Address']['NodeID'] for i in actors().values() if i['Pid'] == int(sys.argv[2])])"
    )
    command = [sys.executable, "-c", code, nodes.address, str(pid)]
    done = subprocess.run(
        command, env=nodes.environment, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=True
    )
    return done.stdout.split()[-1]


def wait_for_twin(client: Client, after_s: float) -> None:
    """Until a twin has read the load after that time."""
    deadline = time.monotonic() + TIMEOUT_S
    while client.shape().load_read <= after_s:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def twins(nodes: RayNodes) -> list[int]:
    return [pid for pid in mentioning(TWIN_MODULE) if parent_of(parent_of(pid)) in nodes.raylets]


def use(nodes: RayNodes, client: Client, folder: Path) -> None:
    workers = {worker.worker_id: worker for worker in client.cluster_state().workers}
    places = {name: nodes.raylets.index(parent_of(worker.pid)) for name, worker in workers.items()}
    assert places == {"prefill-0": PREFILL_NODE, "decode-0": DECODE_NODE}
    assert {worker.address.rpartition(":")[0] for worker in workers.values()} == {nodes.host}
    answer = client.generate(PROMPT, max_tokens=20, temperature=0.0, ignore_eos=True)
    assert list(answer.token_ids) == fake_generate(PROMPT, 20)

    assert cluster_command(nodes, "start", "--config", write_config(folder))[1].startswith("runs already\n")
    other = write_config(folder, placement={"policy": "random"})
    assert "placement.local_prefill, placement.policy differ" in cluster_command(nodes, "start", "--config", other)[1]
    larger = write_config(folder, pools={**POOLS, "decode": {**POOLS["decode"], "size": 2}})
    status, output = cluster_command(nodes, "start", "--config", larger)
    assert (status, output.startswith("runs already; sizes are now decode=2\n")) == (0, True)
    waiting = "waits for a Ray node with 1 disagg_slot and the labels disagg.role=decode"
    state = wait_for(client, lambda state: any(worker.detail == waiting for worker in state.workers))
    assert [worker.worker_id for worker in state.workers if worker.detail] == ["decode-1"]
    assert f"decode-1: {waiting}\n" in cluster_command(nodes, "status")[1]


def lose_the_owner(nodes: RayNodes, folder: Path) -> None:
    """A cluster that belongs to a process ends soon after it, also when that could end nothing itself."""
    command = [sys.executable, "-m", "disagg.cli", "up", "--config", write_config(folder, ray={"address": "auto"})]
    with subprocess.Popen(command, env=nodes.environment, stdout=subprocess.PIPE, text=True) as up:
        assert up.stdout is not None
        assert any("Ctrl-C stops" in line for line in up.stdout)
        processes = [ProcessRef.of(pid) for pid in actors(nodes)]
        assert len(processes) == 4
        status, output = cluster_command(nodes, "start", "--config", write_config(folder))
        assert (status, "another configuration (ray.address differ)" in output) == (1, True)
        up.kill()
    deadline = time.monotonic() + TIMEOUT_S
    while [process for process in processes if process.is_alive()]:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert cluster_command(nodes, "stop") == (0, "nothing was running\n")


def actors(nodes: RayNodes) -> list[int]:
    """Our actors' processes."""
    titles = ("ray::HostActor", "ray::ControllerActor")
    return [pid for title in titles for pid in mentioning(title) if parent_of(pid) in nodes.raylets]
