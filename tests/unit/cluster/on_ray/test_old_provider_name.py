"""Cluster files of before name the node providers by their former module."""

import importlib

import pytest

from disagg.cluster.on_ray.nodes.provider import LoopbackProvider, StaticSshProvider


def test_the_former_module_has_the_providers_and_warns() -> None:
    with pytest.warns(FutureWarning, match="is now disagg.cluster.on_ray.nodes.provider"):
        former = importlib.import_module("disagg.cluster.ray_node_provider")
    assert former.LoopbackProvider is LoopbackProvider
    assert former.StaticSshProvider is StaticSshProvider
