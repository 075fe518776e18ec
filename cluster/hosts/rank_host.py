"""The followers of a worker as child processes of rank 0, where Ray does not start them.

They share rank 0's log, so that the end of it, which becomes the reason when the worker fails, has theirs too.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import time
from collections.abc import Mapping

from disagg.cluster.hosts.rank_process import RankStart
from disagg.cluster.hosts.ranks import rank_config, rank_name
from disagg.cluster.system.process_tools import describe_exit
from disagg.cluster.system.spawn import Process, end, spawn
from disagg.engine.config import WorkerConfig
from disagg.engine.parallel.interfaces import StartRanks
from disagg.proto.cluster_secret import ClusterSecret

logger = logging.getLogger(__name__)

MODULE = "disagg.cluster.hosts.rank_process"
LEAVE_TIMEOUT_S = 2.0
"""What followers get to end by themselves: rank 0 has told them, or is gone."""
STOP_TIMEOUT_S = 2.0
"""What they get after SIGTERM, before SIGKILL."""
EXPECTED = (0, -signal.SIGTERM)


class RankProcesses:
    """Implements `link.Ranks`. Owner of the processes."""

    def __init__(self, processes: Mapping[str, Process]) -> None:
        self._processes = dict(processes)

    def stop(self) -> None:
        """See `link.Ranks`. Tells the log how those ended that were not told to."""
        deadline = time.monotonic() + LEAVE_TIMEOUT_S
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                break
        end(list(self._processes.values()), STOP_TIMEOUT_S)
        for name, process in self._processes.items():
            if process.returncode not in EXPECTED:
                logger.error("%s: %s", name, describe_exit(process.returncode))
        self._processes.clear()


def rank_processes(config: WorkerConfig, secret: ClusterSecret) -> StartRanks:
    """What starts the followers of a worker with this configuration, the whole worker's, as children of this process.

    To be called on a thread that lives as long as the worker: they die with it.
    """

    def start(leader_address: str) -> RankProcesses:
        processes: dict[str, Process] = {}
        try:
            for rank in range(1, config.tp):
                own = rank_config(config, rank, sees_all_devices=True)
                message = RankStart(config=own, rank=rank, leader_address=leader_address, secret=secret)
                processes[rank_name(config.worker_id, rank)] = spawn(MODULE, message)
        except OSError:
            RankProcesses(processes).stop()
            raise
        return RankProcesses(processes)

    return start
