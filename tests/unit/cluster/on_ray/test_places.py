"""Pools that are wider than the nodes of a Ray cluster are refused by name; without Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.on_ray.places import NodeKind, check_places, monitor_options, node_kinds
from disagg.proto.errors import ConfigError

LOOPBACK = Path(__file__).resolve().parents[4] / "deploy" / "ray" / "loopback.yaml"
TWO_OF_FOUR = [NodeKind({"CPU": 0}, {}), NodeKind({"GPU": 4, "CPU": 64}, {"role": "gpu"}, 2)]


def refusal(nodes: list[NodeKind], pool: dict[str, Any], device: str = "cuda") -> str:
    pools = {"prefill": pool | {"device": device}, "decode": {"device": device, "node_labels": {"role": "gpu"}}}
    try:
        check_places(parse_config({"pools": pools}), nodes)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (4, 1), (4, 2), (1, 8), (2, 4)])
def test_what_fits_is_taken(tp: int, pp: int) -> None:
    assert refusal(TWO_OF_FOUR, {"tp": tp, "pp": pp, "node_labels": {"role": "gpu"}}) == ""


def test_more_workers_than_there_are_places_for_may_wait() -> None:
    assert refusal(TWO_OF_FOUR, {"tp": 4, "size": 5}) == ""


def test_a_stage_that_no_node_holds_is_refused() -> None:
    have = "there are at most {} nodes{}, with 8 GPU, at most 4 each"
    assert refusal(TWO_OF_FOUR, {"tp": 8}) == f"pools.prefill.tp: 8 ranks need 8 GPU of one node; {have.format(3, '')}"
    assert refusal([NodeKind({"GPU": 4}, {}, 1)], {"tp": 8}) == (
        "pools.prefill.tp: 8 ranks need 8 GPU of one node; there is at most 1 node, with 4 GPU, at most 4 each"
    )
    assert refusal([NodeKind({}, {}, 2)], {}) == (
        "pools.prefill.tp: 1 rank needs 1 GPU of one node; there are at most 2 nodes, with 0 GPU, at most 0 each"
    )
    assert refusal(TWO_OF_FOUR, {"tp": 8, "pp": 2, "node_labels": {"role": "gpu"}}) == (
        f"pools.prefill.tp: 8 ranks need 8 GPU of one node; {have.format(2, ' with the labels role=gpu')}"
    )


def test_more_stages_than_the_nodes_hold_are_refused() -> None:
    assert refusal(TWO_OF_FOUR, {"tp": 3, "pp": 3}) == (
        "pools.prefill.pp: 3 stages of 3 ranks need 9 GPU, those of a stage on one node; there are at most 3 nodes, "
        "with 8 GPU, at most 4 each"
    )
    assert refusal([NodeKind({"disagg_slot": 1}, {"role": "gpu"}, 2)], {"pp": 3}, "cpu") == (
        "pools.prefill.pp: 3 stages of 1 rank need 3 disagg_slot, those of a stage on one node; there are at most 2 "
        "nodes, with 2 disagg_slot, at most 1 each"
    )


def test_labels_that_ray_gives_are_not_asked_of_kinds() -> None:
    pool = {"tp": 4, "node_labels": {"role": "gpu", "ray.io/accelerator-type": "H100"}}
    assert refusal(TWO_OF_FOUR, pool) == ""
    assert "with the labels role=cpu" in refusal(TWO_OF_FOUR, {"node_labels": {"role": "cpu"}})


def test_kinds_of_nodes_are_those_of_the_cluster_file() -> None:
    kinds = node_kinds(yaml.safe_load(LOOPBACK.read_text()))
    assert kinds is not None
    assert [(kind.resources.get("disagg_slot"), kind.count) for kind in kinds] == [(None, 1), (1, 2), (1, 2)]
    unknown: dict[str, Any] = {"available_node_types": {"local.cluster.node": {"resources": {}}}}
    assert node_kinds(unknown) is None
    assert node_kinds({}) is None


def test_there_may_be_more_nodes_of_the_heads_kind() -> None:
    resources: dict[str, Any] = {"resources": {"GPU": 4}}
    types = {"head": resources | {"max_workers": 3}, "worker": resources}
    kinds = node_kinds({"available_node_types": types, "head_node_type": "head", "max_workers": 5})
    assert kinds is not None
    assert [kind.count for kind in kinds] == [4, 5]


def test_the_autoscaler_of_this_cluster_is_found_by_its_address() -> None:
    monitor = ["python", "-u", "/ray/autoscaler/_private/monitor.py", "--gcs-address=10.0.0.1:6379"]
    others = [["bash"], [*monitor[:-1], "--gcs-address=10.0.0.1:6380", "--autoscaling-config=/other"]]
    assert monitor_options("10.0.0.1:6379", others) is None
    found = monitor_options("10.0.0.1:6379", [*others, [*monitor, "--autoscaling-config=~/mine"]])
    assert found == ["--gcs-address=10.0.0.1:6379", "--autoscaling-config=~/mine"]
