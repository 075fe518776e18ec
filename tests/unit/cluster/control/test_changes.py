"""What becomes of each field in which two configurations differ."""

from __future__ import annotations

from typing import Any

import pytest

from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.control.changes import compare
from disagg.proto.control import FieldChange, PoolName

BOTH: tuple[PoolName, ...] = ("prefill", "decode")


def changes(before: dict[str, Any], after: dict[str, Any], *replaced: PoolName) -> list[FieldChange]:
    return compare(parse_config(before), parse_config(after), replaced)


def test_equal_configurations_have_no_changes() -> None:
    assert changes({}, {"mode": "disaggregated", "pools": {"decode": {"size": 1}}}) == []


@pytest.mark.parametrize(
    ("after", "field"),
    [
        ({"pools": {"decode": {"size": 3}}}, "pools.decode.size"),
        ({"pools": {"decode": {"max_size": 3}}}, "pools.decode.max_size"),
        ({"placement": {"policy": "round_robin"}}, "placement.policy"),
        ({"placement": {"migrations": 0}}, "placement.migrations"),
        ({"slo": {"ttft_ms": 100}}, "slo.ttft_ms"),
        ({"gateway": {"max_queued": 5}}, "gateway.max_queued"),
        ({"controller": {"drain_timeout_s": 5}}, "controller.drain_timeout_s"),
        ({"autoscaler": {"interval_s": 1}}, "autoscaler.interval_s"),
        ({"autoscaler": {"threshold": {"waiting": 9}}}, "autoscaler.threshold.waiting"),
    ],
)
def test_what_no_process_is_restarted_for(after: dict[str, Any], field: str) -> None:
    (change,) = changes({}, after)
    assert (change.field, change.how, change.detail) == (field, "in place", "")


def test_fields_of_a_pool_replace_its_workers() -> None:
    (change,) = changes({}, {"pools": {"decode": {"kv_cache_bytes": "64MiB"}}}, "decode")
    assert change == FieldChange(
        field="pools.decode.kv_cache_bytes",
        before='"auto"',
        after="67108864",
        how="replaces workers",
        detail="decode",
    )


@pytest.mark.parametrize(
    "after",
    [
        {"model": {"dtype": "float32"}},
        {"transfer": {"transport": "gloo"}},
        {"recovery": {"failpoints": True}},
        {"gateway": {"token_interval_ms": 5}},
    ],
)
def test_fields_of_all_workers_replace_all(after: dict[str, Any]) -> None:
    (change,) = changes({}, after, *BOTH)
    assert (change.how, change.detail) == ("replaces workers", "prefill, decode")


def test_another_word_for_the_same_replaces_nothing() -> None:
    (change,) = changes({}, {"pools": {"decode": {"block_size": 16}}})
    assert change.how == "in place"


def test_another_mode_exchanges_the_pools() -> None:
    after = {"mode": "elastic", "pools": {"workers": {"size": 3}, "colocated": {"size": 2}}}
    found = {each.field: each.how for each in changes({}, after, "workers", *BOTH)}
    assert found == {
        "mode": "replaces workers",
        "pools.workers.size": "in place",
        "pools.colocated.size": "no effect",
    }


@pytest.mark.parametrize(
    ("after", "field", "why"),
    [
        ({"gateway": {"host": "127.0.0.2"}}, "gateway.host", "the gateway reads it when it starts"),
        ({"gateway": {"port": 1234}}, "gateway.port", "the gateway reads it when it starts"),
        ({"network": {"encryption": "on"}}, "network.encryption", "all processes would have to change at once"),
        ({"ray": {"address": "h:1"}}, "ray.address", "the cluster would have to move"),
        ({"controller": {"port": 7}}, "controller.port", "the controller reads it when it starts"),
        ({"logging": {"level": "debug"}}, "logging.level", "processes read it when they start"),
        ({"metrics": {"num_traces": 50}}, "metrics.num_traces", "the gateway reads it when it starts"),
        ({"recovery": {"kill_after_s": 9}}, "recovery.kill_after_s", "gateway and controller read it"),
        ({"model": {"max_model_len": 9}}, "model.max_model_len", "the gateway checks prompts by it"),
        ({"model": {"name": "other"}}, "model.name", "requests use the name smollm2-135m"),
        ({"model": {"path": "/models/b"}}, "model.path", "set model.name: smollm2-135m to serve this under it"),
    ],
)
def test_what_cannot_be_changed_is_named(after: dict[str, Any], field: str, why: str) -> None:
    (change,) = changes({}, after)
    assert (change.field, change.how) == (field, "refused")
    assert why in change.detail


def test_what_a_twin_sets_is_left_to_it() -> None:
    elastic = {"mode": "elastic", "placement": {"decodes": "auto"}}
    (change,) = changes(elastic, {"mode": "elastic", "placement": {"decodes": "gather"}})
    assert (change.field, change.how) == ("placement.decodes", "refused")
    (change,) = changes({"mode": "elastic"}, {"mode": "elastic", "placement": {"decodes": "gather"}})
    assert change.how == "in place"


def test_a_new_version_has_another_path_and_the_same_name() -> None:
    before, after = ({"model": {"name": "m", "path": f"/models/{version}"}} for version in "ab")
    (change,) = changes(before, after, *BOTH)
    assert (change.field, change.how, change.detail) == ("model.path", "replaces workers", "prefill, decode")
