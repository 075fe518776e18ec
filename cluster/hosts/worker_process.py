"""`python -m disagg.cluster.hosts.worker_process`: one worker as a child process (`child.py`).

It starts the other ranks of the worker, if there are any, as children of its own.
"""

from __future__ import annotations

import sys

import msgspec

from disagg.cluster.hosts.child import run_child
from disagg.cluster.hosts.rank_host import rank_processes
from disagg.cluster.hosts.ranks import rank_config
from disagg.cluster.hosts.worker_host import WorkerHost
from disagg.cluster.system.process_tools import see_own_devices
from disagg.engine.config import WorkerConfig
from disagg.proto.cluster_secret import ClusterSecret
from disagg.proto.connections.blocking_stream import Resolve


def make_host(config: WorkerConfig, resolve: Resolve, secret: ClusterSecret) -> WorkerHost:
    """The worker of this configuration, in this process and as many more as it has ranks."""
    config = msgspec.structs.replace(config, device=see_own_devices(config.device, config.tp))
    start_ranks = rank_processes(config, secret) if config.tp > 1 else None
    return WorkerHost(rank_config(config, 0, sees_all_devices=True), resolve, secret, start_ranks)


if __name__ == "__main__":
    sys.exit(run_child(WorkerConfig, make_host))
