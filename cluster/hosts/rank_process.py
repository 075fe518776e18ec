"""The ranks of a worker but the first, as child processes of the first, where Ray does not start them.

    rank 0      rank_processes(config) -> spawn(`python -m ...hosts.rank_process`) ...... RankProcesses.stop()
    follower    configuration on standard input -> load the share of the model -> join rank 0 -> serve it until it ends

Exit status of a follower: 0 when rank 0 ended in order, 1 when the start failed, 3 when rank 0 was lost or this rank
broke. It has nothing that must outlive it or be tidied up, so SIGTERM just ends it. When rank 0's process is gone it
goes too, also while it is stopped or hangs: the kernel sees to that. Followers share rank 0's log, so that its end,
which becomes the reason when the worker fails, has their lines too.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping

import msgspec
from typing_extensions import override

from disagg.cluster.core.ranks import rank_config, rank_name
from disagg.cluster.system.children import Process, describe_exit, end, read_config, spawn, terminate_when_orphaned
from disagg.cluster.system.cores import pin_process, see_own_devices
from disagg.cluster.system.logs import setup_logging
from disagg.cluster.system.process_tools import freeze_start
from disagg.connections.cluster_secret import ClusterSecret
from disagg.engine.config import WorkerConfig
from disagg.engine.parallel.factories import make_runner
from disagg.engine.parallel.follower import serve_rank
from disagg.engine.parallel.interfaces import Ranks, ShardRunner, StartRanks
from disagg.engine.sharding.shards import Shard

logger = logging.getLogger(__name__)

MODULE = "disagg.cluster.hosts.rank_process"
LEAVE_TIMEOUT_S = 2.0
"""Seconds that followers may take to end by themselves once rank 0 has stopped them, or has ended."""
STOP_TIMEOUT_S = 2.0
"""Seconds between SIGTERM and SIGKILL."""
EXPECTED = (0, -signal.SIGTERM)
EXIT_START_FAILED = 1
_PR_SET_PDEATHSIG = 1


class RankStart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Message to a rank's process on its standard input."""

    config: WorkerConfig
    """Configuration of the worker, for this rank."""
    rank: int
    """Its number among the ranks of all stages."""
    leader_address: str
    """host:port where rank 0 waits for this rank."""
    secret: ClusterSecret
    """Secret of the cluster."""


def be_rank(start: RankStart) -> int:
    """Be a rank until rank 0 ends or is lost; returns the exit status."""
    config = msgspec.structs.replace(start.config, device=see_own_devices(start.config.device, 1))
    pin_process(config.cores)
    shard = Shard.of_number(start.rank, config.tp, config.pp)
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


class RankProcesses(Ranks):
    """Implements `interfaces.Ranks`. Owner of the processes."""

    def __init__(self, processes: Mapping[str, Process]) -> None:
        self._processes = dict(processes)

    @override
    def stop(self) -> None:
        """Logs how those followers ended that were not stopped."""
        deadline = time.monotonic() + LEAVE_TIMEOUT_S
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                break
        end(list(self._processes.values()), STOP_TIMEOUT_S)
        for name, process in self._processes.items():
            status = process.wait()
            if status not in EXPECTED:
                logger.error("%s ended: %s", name, describe_exit(status))
        self._processes.clear()


def rank_processes(config: WorkerConfig, secret: ClusterSecret) -> StartRanks:
    """Make the function that starts the followers of a worker with this configuration, the whole worker's, as children
    of this process. It is to be called on a thread that runs as long as the worker: they end with it."""

    def start(leader_address: str) -> RankProcesses:
        processes: dict[str, Process] = {}
        try:
            for rank in range(1, config.num_ranks):
                own = rank_config(config, rank, sees_all_devices=True)
                message = RankStart(config=own, rank=rank, leader_address=leader_address, secret=secret)
                processes[rank_name(config.worker_id, rank)] = spawn(MODULE, message)
        except OSError:
            RankProcesses(processes).stop()
            raise
        return RankProcesses(processes)

    return start


def main() -> int:
    """Entry point of the process; returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the launcher, which stops the worker
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
