"""The autoscaler's configuration: mistakes are named before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.control.autoscaler_runner import pool_limits
from disagg.proto.errors import ConfigError


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"autoscaler": {"enabled": True}}, "pools.prefill.max_size: autoscaler.enabled needs"),
        ({"pools": {"decode": {"min_size": 3, "max_size": 2}}}, "pools.decode.min_size: 3 is more than max_size, 2"),
        ({"pools": {"decode": {"size": 4, "max_size": 2}}}, "pools.decode.size: expected min_size to max_size, 1 to 2"),
        ({"pools": {"decode": {"max_size": 5000}}}, "pools.decode.max_size: expected at most 1024 workers; got 5000"),
        ({"autoscaler": {"policy": "guess"}}, "autoscaler.policy"),
        ({"autoscaler": {"interval_s": 0}}, "autoscaler.interval_s"),
    ],
)
def test_mistakes_name_the_field(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_config(raw)
    assert str(raised.value).startswith(message)


def test_limits_are_those_of_the_pools_of_the_mode() -> None:
    config = parse_config({"autoscaler": {"enabled": True}, "mode": "elastic", "pools": {"workers": {"max_size": 6}}})
    (pool,) = pool_limits(config).items()
    assert (pool[0], pool[1].min_size, pool[1].max_size) == ("workers", 1, 6)
