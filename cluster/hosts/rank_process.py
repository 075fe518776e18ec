"""`python -m disagg.cluster.hosts.rank_process`: a rank of a worker but the first, as a child process of the first.

    configuration on standard input -> load the share of the model -> join rank 0 -> do what it says, until it ends

Exit status: 0 when rank 0 said that it is over, 1 when the start failed, 3 when rank 0 was lost or this rank broke. It
has nothing that must outlive it or be tidied up, so SIGTERM just ends it. When rank 0's process is gone it goes too,
also while it is stopped or hangs: the kernel sees to that.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys

import msgspec

from disagg.cluster.system.logs import setup_logging
from disagg.cluster.system.process_tools import (
    freeze_start,
    pin_process,
    read_config,
    see_own_devices,
    terminate_when_orphaned,
)
from disagg.engine.config import WorkerConfig
from disagg.engine.parallel.factories import make_runner
from disagg.engine.parallel.follower import serve_rank
from disagg.engine.parallel.interfaces import ShardRunner
from disagg.engine.sharding.shards import Shard
from disagg.proto.cluster_secret import ClusterSecret

logger = logging.getLogger(__name__)

EXIT_START_FAILED = 1
_PR_SET_PDEATHSIG = 1


class RankStart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a rank's process reads."""

    config: WorkerConfig
    """On this rank."""
    rank: int
    leader_address: str
    """host:port where rank 0 waits for it."""
    secret: ClusterSecret
    """Of the cluster."""


def be_rank(start: RankStart) -> int:
    """Be a rank until rank 0 ends or is lost; returns the exit status."""
    config = msgspec.structs.replace(start.config, device=see_own_devices(start.config.device, 1))
    pin_process(config.cores)
    shard = Shard(start.rank, start.config.tp)
    return serve_rank(config, shard, start.leader_address, start.secret, _load)


def _load(config: WorkerConfig, shard: Shard) -> ShardRunner:
    runner = make_runner(config, shard)
    pin_process(config.cores)  # threads that libraries pinned or started otherwise
    freeze_start()
    return runner


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends. Linux only; elsewhere nothing is done."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def main() -> int:
    """The process; returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's, which tells the worker
    setup_logging(os.environ)
    try:
        start = read_config(RankStart)
        die_with_parent()
        terminate_when_orphaned()  # also sees a parent that was gone before it could be named above
        return be_rank(start)
    except Exception:
        logger.exception("could not start")
        return EXIT_START_FAILED


if __name__ == "__main__":
    sys.exit(main())
