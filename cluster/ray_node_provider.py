"""The former place of the node providers, for cluster files of `ray up` that name it."""

import warnings

from disagg.cluster.on_ray.nodes.provider import LoopbackProvider, StaticSshProvider

__all__ = ["LoopbackProvider", "StaticSshProvider"]

warnings.warn(
    "disagg.cluster.ray_node_provider is now disagg.cluster.on_ray.nodes.provider: "
    "write that into provider.module of the cluster file",
    FutureWarning,
    stacklevel=2,
)
