"""What we are called in Ray, and how a cluster that runs is compared with a file; without Ray."""

from __future__ import annotations

import msgspec
import pytest

from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.core.ranks import rank_name
from disagg.cluster.on_ray.controller_client import changed_sizes
from disagg.cluster.on_ray.detached import ray_address
from disagg.cluster.on_ray.store import CONTROLLER, ControllerSettings, actor_name, process_name
from disagg.cluster.system.children import LaunchError

BASE = parse_config({})


def test_names_go_there_and_back() -> None:
    assert process_name(actor_name("decode-12")) == "decode-12"
    assert process_name(actor_name(rank_name("decode-12", 3))) == "decode-12.rank-3"
    assert [process_name(name) for name in (CONTROLLER, "somebody-else", "")] == [None, None, None]


def test_settings_survive_the_way_through_ray() -> None:
    config = parse_config({"pools": {"decode": {"cores": [1, 2], "node_labels": {"disagg.role": "decode"}}}})
    settings = ControllerSettings(config=config, cores=(0, 1), is_private=False)
    assert msgspec.json.decode(msgspec.json.encode(settings), type=ControllerSettings) == settings


def test_other_sizes_are_a_change_that_a_running_cluster_can_make() -> None:
    asked = parse_config({"pools": {"prefill": {"size": 3}, "decode": {"size": 2}}})
    assert changed_sizes(BASE, asked) == {"prefill": 3, "decode": 2}
    assert changed_sizes(asked, parse_config({"pools": {"prefill": {"size": 3}}})) == {"decode": 1}
    assert changed_sizes(asked, asked) == {}


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        ({"gateway": {"port": 9000}, "pools": {"decode": {"size": 2}}}, "gateway.port"),
        (
            {"pools": {"decode": {"node_labels": {"a": "b"}}}},
            r"pools\.decode\.node_labels",
        ),
        ({"mode": "colocated"}, "mode"),
        ({"pools": {"prefill": {"tp": 2}}}, r"pools\.prefill\.tp"),
        ({"pools": {"prefill": {"pp": 2}}}, r"pools\.prefill\.pp"),
    ],
)
def test_anything_else_is_refused_by_name(raw: dict[str, object], named: str) -> None:
    with pytest.raises(LaunchError, match=rf"another configuration \({named} differ\); change it with"):
        changed_sizes(BASE, parse_config(raw))


def test_the_ray_to_join() -> None:
    in_file = parse_config({"ray": {"address": "h:1"}})
    assert [ray_address(config, asked) for config, asked in ((BASE, None), (in_file, None), (in_file, "auto"))] == [
        "auto",
        "h:1",
        "auto",
    ]
