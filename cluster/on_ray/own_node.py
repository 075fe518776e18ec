"""What a rank's configuration has of the node that Ray chose for it: cores, and the address that it listens on.

The ranks of a worker may be on several nodes, so each of them asks its own.
"""

from __future__ import annotations

import logging

import msgspec

from disagg.cluster.on_ray.store import ProcessSettings, RankSettings
from disagg.cluster.system.cores import CoreClaims, available_cores, shared_folder
from disagg.engine.config import WorkerConfig

logger = logging.getLogger(__name__)


class OwnNode:
    """Owner of this process's claims of cores, which end with the process."""

    def __init__(self, settings: ProcessSettings | RankSettings) -> None:
        self._settings = settings
        self._claims: CoreClaims | None = None

    def configured(self, config: WorkerConfig) -> WorkerConfig:
        """A rank's configuration on this node."""
        if self._settings.claim_cores:
            config = msgspec.structs.replace(config, cores=self._claim_cores(config.worker_id))
        if self._settings.bind_node:
            config = msgspec.structs.replace(config, host=node_address())
        return config

    def _claim_cores(self, worker: str) -> tuple[int, ...]:
        try:
            self._claims = CoreClaims(shared_folder())
            return self._claims.take(self._settings.claim_cores, available_cores())
        except OSError as error:
            logger.warning("%s is not pinned: %s", worker, error)
            return ()


def node_address() -> str:
    """This node's address in the Ray cluster."""
    import ray

    return str(ray.util.get_node_ip_address())


def node_id() -> str:
    """Ray's id of this node."""
    import ray

    return str(ray.get_runtime_context().get_node_id())
