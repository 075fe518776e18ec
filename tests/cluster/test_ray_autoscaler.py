"""A cluster under `ray up` that grows and shrinks by itself.

load -> our autoscaler -> a worker -> Ray's autoscaler -> a node, and back
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from disagg.client import Client
from disagg.v1 import inference_pb2 as pb
from tests.cluster.launching import Launch, new_launch
from tests.cluster.test_ray_up import node_types, serve, wait_for_workers, write_files
from tests.integration.test_scaling import endless_streams
from tests.support.processes import mentioning

pytestmark = pytest.mark.ray

NUM_STREAMS = 12
"""Three times what one decode worker takes at a time."""
AUTOSCALER = {
    "enabled": True,
    "policy": "threshold",
    "interval_s": 0.5,
    "down_after_s": 3.0,
    "threshold": {"waiting": 1},
}
LESS, MORE = ["decode-0", "prefill-0"], ["decode-0", "decode-1", "prefill-0"]


@pytest.fixture
def launch() -> Iterator[Launch]:
    with new_launch("da") as launch:
        yield launch


def grows_by_itself(served: dict[str, object], cluster: dict[str, object]) -> None:
    """One or two decode workers, by load; a node without a worker goes after some seconds."""
    pools: dict[str, dict[str, object]] = served["pools"]  # type: ignore[assignment]
    pools["prefill"] |= {"size": 1, "max_size": 1}
    pools["decode"] |= {"size": 1, "max_size": 2, "max_num_seqs": 4}
    served["autoscaler"] = AUTOSCALER
    cluster["idle_timeout_minutes"] = 0.1


def test_load_adds_a_decode_node_and_its_end_removes_it(launch: Launch) -> None:
    gateway = f"127.0.0.1:{write_files(launch, grows_by_itself)}"
    launch.run("ray", "up", "-y", str(launch.cluster_file))
    with Client(gateway) as client:
        wait_for_workers(launch, client, LESS)
        assert node_types(launch) == ["decode", "head", "prefill"]
        assert serve(client) == ("prefill-0", "decode-0")
        with endless_streams(gateway, NUM_STREAMS) as wait_for_all:
            launch.wait_until("two decode workers that serve", lambda: num_ready(client, "decode") == 2)
            wait_for_workers(launch, client, MORE)
            assert node_types(launch) == ["decode", "decode", "head", "prefill"]
            launch.wait_until("streams on decode-1", lambda: num_sequences(client, "decode-1") > 0)
            wait_for_all()
        wait_for_workers(launch, client, LESS)
        launch.wait_until("the node to go", lambda: node_types(launch) == ["decode", "head", "prefill"])
        assert serve(client, 1) == ("prefill-0", "decode-0")
        pool = pool_decision(client, "decode")
        assert (pool.size, pool.wanted) == (1, 1)
        assert pool.reason
        assert pool.change
    end(launch)


def num_sequences(client: Client, worker_id: str) -> int:
    """Of a worker now; 0 where there is none of that name."""
    return sum(worker.sequences for worker in client.cluster_state().workers if worker.worker_id == worker_id)


def num_ready(client: Client, pool_name: str) -> int:
    """Workers of a pool that can be used."""
    return sum(pool.ready for pool in client.cluster_state().pools if pool.name == pool_name)


def pool_decision(client: Client, name: str) -> pb.ScalingDecision:
    """What the autoscaler decided last of a pool."""
    (found,) = [pool for pool in client.cluster_state().autoscaler.pools if pool.pool == name]
    return found


def end(launch: Launch) -> None:
    """`ray down`, after which nothing is left."""
    launch.run("ray", "down", "-y", str(launch.cluster_file))
    assert launch.processes() == []
    assert mentioning(f"{launch.folder / 'c'}/") == []
    assert not (launch.folder / "c").exists()
