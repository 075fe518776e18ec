"""A cluster under `ray up` that grows and shrinks by itself, and what is killed in the middle of that.

    load      -> our autoscaler -> a worker -> a placement group -> Ray's autoscaler -> a node -> the worker serves
    less load -> our autoscaler -> the worker drains, its sequence moves -> its group goes -> idle -> the node goes

Shown with real nodes, all on this machine, and with the deterministic model, so that every token is compared:

- Two long streams fill the only decode worker, and a third one waits. A decode node comes by itself, with another id,
  and on it a worker with another process id. The third stream begins while the other two still run: it waits for the
  cold start and for nothing else. Every request with a target for its first token meets it.
- The two end, the third goes on. Its worker is drained, the stream goes on elsewhere, the node goes. None is cut.
- The controller's process is killed while a node is added, then, as the load comes again, the new node itself while its
  worker starts. In the end there are as many nodes, workers and places in Ray as the load needs, and nothing waits.
- The load ends while a node is added, and again the controller is killed: the next one takes the request back.
- Ray's store on the head is killed while a node is added: streams that run and one that waits come to their ends, `ray
  down` leaves nothing, and `ray up` brings the configured cluster.

A failpoint slows decode steps down, unless there is a file in the home of the worker's node: so streams last until the
test has seen what it waits for, and leave the processors to the nodes that start.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from disagg.client import Client
from disagg.client.types import Targets
from disagg.cluster.core.node_table import host_of
from disagg.cluster.on_ray.nodes.local_runner import NODE_MARK
from disagg.cluster.system.process_tools import ProcessRef
from disagg.engine.fake_runner import fake_generate
from tests.cluster.launching import Launch, new_launch
from tests.cluster.test_ray_up import node_ids, node_types, wait_for_workers, write_files
from tests.support.metrics import read_samples, value
from tests.support.processes import mentioning

pytestmark = [pytest.mark.ray, pytest.mark.slow]

LESS = ["decode-0", "prefill-0"]
LONG_PROMPT, LONG_ANSWER = 4800, 600
"""Of the two streams that make the load, in tokens: more than half of a worker's KV. At the pace of `SLOW_STEPS` they
last five minutes, without it some seconds."""
THIRD_ANSWER = 1200
"""Of the stream that outlasts them, at that pace, and has little KV."""
FAST = "fast"
"""A file in a node's home: while it is there, decode steps of that node are not slowed down."""
SLOW_STEPS = "engine.step=hang(ms=500,worker=decode-*)"
TTFT_TARGET_MS = 60_000.0
"""Of requests that find a place at once, on a machine that may be busy."""


def grows_by_itself(served: dict[str, Any], cluster: dict[str, Any]) -> None:
    """One or two decode workers, each with two places; a node without a worker goes after some seconds."""
    served["model"]["max_model_len"] = 8192
    served["pools"]["prefill"] |= {"min_size": 1, "max_size": 1}
    served["pools"]["decode"] |= {"min_size": 1, "max_size": 2, "max_num_seqs": 2}
    served["autoscaler"] = {
        "enabled": True,
        "policy": "threshold",
        "interval_s": 0.5,
        "down_after_s": 3.0,
        "threshold": {"kv_use": 0.5, "waiting": 8},
    }
    del served["placement"]["policy"]
    served["recovery"] = {"failpoints": True}
    cluster["idle_timeout_minutes"] = 0.1
    (start,) = cluster["worker_start_ray_commands"]
    cluster["worker_start_ray_commands"] = [f"export DISAGG_FAILPOINTS_PAUSED_BY=$HOME/{FAST}; {start}"]


class Stream:
    """An answer that is read on a thread of its own."""

    def __init__(self, address: str, first: int, prompt_tokens: int, num_tokens: int) -> None:
        self.tokens: list[int] = []
        self._address = address
        self._num_tokens = num_tokens
        self._prompt = tuple(range(first, first + prompt_tokens))
        self._errors: list[Exception] = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def is_running(self) -> bool:
        """Whether it has tokens and more are to come."""
        return 0 < len(self.tokens) < self._num_tokens and self._thread.is_alive()

    def end(self) -> None:
        """Wait for its end: whole, and every token the right one."""
        self._thread.join()
        assert self._errors == []
        assert self.tokens == fake_generate(self._prompt, self._num_tokens)

    def _read(self) -> None:
        try:
            with Client(self._address) as client:
                for delta in client.stream(
                    self._prompt, max_tokens=self._num_tokens, temperature=0.0, ignore_eos=True, timeout_s=600
                ):
                    self.tokens += delta.token_ids
        except Exception as error:
            self._errors.append(error)


class Cluster:
    """One with a worker in each pool."""

    def __init__(self, launch: Launch, address: str) -> None:
        self.launch = launch
        self.address = address
        self.client = Client(address)
        head_port = yaml.safe_load(launch.cluster_file.read_text())["provider"]["head_port"]
        self.ray_address = f"127.0.0.2:{head_port}"
        self.num_probes = 0
        self._num_streams = 0

    def wait(self, what: str, condition: Callable[[], bool]) -> None:
        self.launch.wait_until(what, condition)

    def stream(self, prompt_tokens: int, num_tokens: int) -> Stream:
        """One more, with no prefix of another."""
        self._num_streams += 1
        return Stream(self.address, 5000 * self._num_streams % 20_000 + self._num_streams, prompt_tokens, num_tokens)

    def probe(self) -> str:
        """Serve a short request with a target for its first token; the worker that decoded it."""
        first = 26_000 + 64 * self.num_probes
        self.num_probes += 1
        prompt = tuple(range(first, first + 64))
        targets = Targets(ttft_ms=TTFT_TARGET_MS)
        answer = self.client.generate(prompt, max_tokens=4, temperature=0.0, ignore_eos=True, targets=targets)
        assert list(answer.token_ids) == fake_generate(prompt, 4)
        return self.client.explain(answer.request_id).decode_worker

    def targets_met(self) -> tuple[float, float]:
        """Requests that met their target for the first token, and others that had one."""
        page = httpx.get(f"http://{self.client.cluster_state().http_address}/metrics").content
        met, missed = (
            value(read_samples(page), "disagg_slo_requests_total", slo="ttft", met=met) for met in ("true", "false")
        )
        return met, missed

    def home(self, node_id: str) -> Path:
        """The folder of a node."""
        return self.launch.folder / "c" / node_id.partition("@")[0]

    def speed_up(self, *node_ids: str) -> None:
        """Let streams on these nodes come to their ends."""
        for node_id in node_ids:
            (self.home(node_id) / FAST).touch()

    def decode_nodes(self) -> list[str]:
        """Ids of the nodes for decode workers, in order of their creation."""
        return [node_id for node_id in node_ids(self.launch) if node_id.startswith("decode-")]

    def workers(self) -> dict[str, tuple[str, int, str]]:
        """Worker -> phase, process id, address of its node."""
        workers = self.client.cluster_state().workers
        return {each.worker_id: (each.phase, each.pid, each.address.rpartition(":")[0]) for each in workers}

    def processes(self, title: str) -> list[ProcessRef]:
        """Those of this cluster with that in their command line."""
        return [process for process in self.launch.processes() if title in command_line(process)]

    def has_in_ray(self, workers: int) -> bool:
        """Whether just so many workers have a place and a process in Ray, and no resource and no node is waited for."""
        status = self.launch.read("ray", "status", "--address", self.ray_address)
        return (
            re.findall(r"(\S+)/(\S+) disagg_slot", status) == [(f"{workers}.0", f"{workers}.0")]
            and "(no pending nodes)" in status
            and "(no resource demands)" in status
            and len(self.processes("ray::HostActor")) == workers + 1  # and the gateway
        )


def command_line(process: ProcessRef) -> str:
    """Empty for one that is gone."""
    try:
        return Path(f"/proc/{process.pid}/cmdline").read_text()
    except OSError:
        return ""


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with new_launch("da") as launch:
        launch.environment["DISAGG_FAILPOINTS"] = SLOW_STEPS
        cluster = Cluster(launch, f"127.0.0.1:{write_files(launch, grows_by_itself)}")
        come_up(cluster)
        yield cluster
        go(cluster)
        cluster.client.close()


def come_up(cluster: Cluster) -> None:
    """`ray up`, until all workers serve."""
    cluster.launch.run("ray", "up", "-y", str(cluster.launch.cluster_file))
    wait_for_workers(cluster.launch, cluster.client, LESS)
    assert node_types(cluster.launch) == ["decode", "head", "prefill"]


def go(cluster: Cluster) -> None:
    """`ray down`, after which nothing is left."""
    launch = cluster.launch
    launch.run("ray", "down", "-y", str(launch.cluster_file))
    assert launch.processes() == []
    assert mentioning(f"{launch.folder / 'c'}/") == []
    assert not (launch.folder / "c").exists()


def test_nodes_follow_the_load_also_where_controller_node_or_store_are_killed(cluster: Cluster) -> None:
    grow_and_shrink(cluster)
    grow_and_shrink(cluster, kill_controller)
    grow_and_shrink(cluster, kill_new_node)
    end_the_load_early(cluster)
    assert cluster.targets_met() == (cluster.num_probes, 0)
    lose_the_store(cluster)


def grow_and_shrink(cluster: Cluster, disturb: Callable[[Cluster], None] = lambda cluster: None) -> None:
    """Load comes and goes; `disturb` is called when a second decode node is there and its worker does not serve."""
    before, nodes = cluster.workers(), cluster.decode_nodes()
    assert cluster.probe() == "decode-0"

    *long, third = start_load(cluster)
    assert third.tokens == []
    disturb(cluster)
    cluster.wait("the third stream to begin", third.is_running)
    assert all(stream.is_running() for stream in long)
    workers = cluster.workers()
    phase, pid, address = workers.pop("decode-1")
    assert workers == before
    assert phase == "ready"
    assert pid not in {pid for _, pid, _ in before.values()}
    old_node, new_node = cluster.decode_nodes()
    assert [old_node] == nodes
    assert host_of(new_node) == address
    assert {cluster.probe() for _ in range(2)} == {"decode-1"}
    cluster.wait("three workers in Ray", lambda: cluster.has_in_ray(3))
    assert all(stream.is_running() for stream in long)

    cluster.speed_up(old_node)
    for stream in long:
        stream.end()
    (cluster.home(old_node) / FAST).unlink()
    assert third.is_running()
    wait_for_workers(cluster.launch, cluster.client, LESS)
    cluster.wait("the node to go", lambda: cluster.decode_nodes() == nodes)
    assert cluster.probe() == "decode-0"
    assert third.is_running()
    cluster.speed_up(old_node)
    third.end()
    (cluster.home(old_node) / FAST).unlink()
    assert cluster.workers() == before
    cluster.wait("two workers in Ray", lambda: cluster.has_in_ray(2))


def end_the_load_early(cluster: Cluster) -> None:
    """While a node is added, with a controller that did not ask for it."""
    before, nodes = cluster.workers(), cluster.decode_nodes()
    streams = start_load(cluster)
    kill_controller(cluster)
    cluster.speed_up(*cluster.decode_nodes())
    for stream in streams:
        stream.end()
    (cluster.home(nodes[0]) / FAST).unlink()
    wait_for_workers(cluster.launch, cluster.client, LESS)
    cluster.wait("the node to go", lambda: cluster.decode_nodes() == nodes)
    cluster.wait("two workers in Ray", lambda: cluster.has_in_ray(2))
    assert cluster.workers() == before


def lose_the_store(cluster: Cluster) -> None:
    """While a node is added. What was there serves on; a new cluster takes its place."""
    streams = start_load(cluster)
    (store,) = cluster.processes("gcs_server")
    store.kill()
    cluster.speed_up(*cluster.decode_nodes())
    for stream in streams:
        stream.end()
    go(cluster)
    come_up(cluster)
    assert cluster.probe() == "decode-0"


def start_load(cluster: Cluster) -> tuple[Stream, Stream, Stream]:
    """Two streams that run on decode-0 and fill it, and one that waits; returns when a second decode node is there."""
    first, second = (cluster.stream(LONG_PROMPT, LONG_ANSWER) for _ in range(2))
    cluster.wait("the places of decode-0 to be taken", lambda: first.is_running() and second.is_running())
    third = cluster.stream(64, THIRD_ANSWER)
    cluster.wait("a second decode node", lambda: len(cluster.decode_nodes()) == 2)
    return first, second, third


def kill_controller(cluster: Cluster) -> None:
    """Its actor's process; returns when there is another one."""
    (before,) = cluster.processes("ray::ControllerActor")
    before.kill()
    cluster.wait("another controller", lambda: any(p != before for p in cluster.processes("ray::ControllerActor")))


def kill_new_node(cluster: Cluster) -> None:
    """All of its processes, once its worker has one; returns when there is another node in its place."""
    node_id = cluster.decode_nodes()[-1]
    mark = f"{NODE_MARK}={cluster.home(node_id)}"
    cluster.wait("its worker's process", lambda: any("HostActor" in command_line(p) for p in ProcessRef.family(mark)))
    for process in ProcessRef.family(mark):
        process.kill()

    def is_replaced() -> bool:
        nodes = cluster.decode_nodes()
        return len(nodes) == 2 and node_id not in nodes

    cluster.wait("another node", is_replaced)
