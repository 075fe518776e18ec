"""A worker in this process: the composition of the worker shell with its roles, and its connection to the controller.

`python -m disagg.cluster.hosts.worker_host` is one worker as a child process; it starts the other ranks of the worker,
if there are any, as children of its own.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Collection

import msgspec

from disagg.cluster.control.controller_link import RegisterLink, StageReports, report_failure
from disagg.cluster.core.ranks import rank_config
from disagg.cluster.hosts.host import STOP_GRACE_S, Phases, StartError, run_child
from disagg.cluster.hosts.rank_process import rank_processes
from disagg.cluster.system.cores import pin_process, see_own_devices
from disagg.cluster.system.process_tools import describe, freeze_start, give_way
from disagg.connections.cluster_secret import ClusterSecret
from disagg.connections.shell.blocking_stream import Resolve
from disagg.decode_worker.role import DecodeRole
from disagg.engine.checkpoint.checkpoint import is_pooled
from disagg.engine.config import WorkerConfig, check_kv_stays_private
from disagg.engine.faults.faulty import Failpoints
from disagg.engine.kv_transfer.transports.nixl_agent import check_installed
from disagg.engine.parallel.interfaces import StartRanks
from disagg.engine.shell.worker import RoleFactory, Worker
from disagg.engine.start_stages import WORDS
from disagg.prefill_worker.pooled import PooledRole
from disagg.prefill_worker.role import PrefillRole
from disagg.proto.control import WorkerHeartbeat
from disagg.proto.ids import WorkerId
from disagg.proto.messages import RoleName

logger = logging.getLogger(__name__)


def role_factories(roles: Collection[RoleName], *, fetches: bool = False) -> list[RoleFactory]:
    """Factories of a worker's roles. Each worker can send KV: one that only decodes does so when a sequence moves to
    another worker. One that fetches prefixes can receive, too."""
    return [PooledRole, PrefillRole, DecodeRole] if "decode" in roles or fetches else [PooledRole, PrefillRole]


class WorkerHost:
    """A worker with its roles, registered with the controller that `resolve` finds. With several ranks it is the first
    of them: `config` is that rank's own, and `start_ranks` starts the others. `phases`: phases of its start so far."""

    def __init__(
        self,
        config: WorkerConfig,
        resolve: Resolve,
        secret: ClusterSecret,
        start_ranks: StartRanks | None = None,
        phases: Phases = (),
    ) -> None:
        self._config = config
        self._resolve = resolve
        self._secret = secret
        failpoints = Failpoints.from_environment(os.environ, config.worker_id, allowed=config.failpoints)
        roles = role_factories(config.roles, fetches=config.fetch)
        self._worker = Worker(config, roles, secret, start_ranks, parts=failpoints.parts())
        self._worker.stages.add(phases)
        self.crashed = self._worker.crashed
        self.rejected = threading.Event()
        self._link = RegisterLink(resolve, secret, self.rejected.set, self._heartbeat, self._worker.forget_tenants)

    def start(self) -> None:
        """Pin, load the model, listen, register; see `Host`."""
        name = WorkerId(self._config.worker_id)
        reports = StageReports(self._resolve, self._secret, name, self._config.start_id)
        self._worker.stages.on_stage = lambda stage: reports(WORDS[stage])
        try:
            check_kv_stays_private(self._config)
            check_installed(self._config.transport)
            pin_process(self._config.cores)
            if self._config.device == "cpu" and not self._config.is_fake and is_pooled(self._config.model_path):
                give_way()  # nobody waits for each of its tokens
            info = self._worker.start()
            pin_process(self._config.cores)  # threads that libraries pinned or started otherwise
            freeze_start()
        except Exception as error:
            logger.exception("%s could not start", self._config.worker_id)
            report_failure(self._resolve, self._secret, name, describe(error), self._config.start_id)
            raise StartError(describe(error)) from error
        finally:
            reports.close()
        self._link.start(info)

    def _heartbeat(self) -> WorkerHeartbeat:
        worker = self._worker
        return WorkerHeartbeat(turn_s=worker.turn_s(), expected_s=worker.expected_s(), doing=worker.doing())

    def stop(self) -> None:
        """Leave the cluster and end the worker."""
        self._link.stop()
        self._worker.stop(STOP_GRACE_S)


def make_host(config: WorkerConfig, resolve: Resolve, secret: ClusterSecret, phases: Phases = ()) -> WorkerHost:
    """Make the worker of this configuration, in this process and in one more for each further rank."""
    config = msgspec.structs.replace(config, device=see_own_devices(config.device, config.num_ranks))
    start_ranks = rank_processes(config, secret) if config.num_ranks > 1 else None
    return WorkerHost(rank_config(config, 0, sees_all_devices=True), resolve, secret, start_ranks, phases)


if __name__ == "__main__":
    sys.exit(run_child(WorkerConfig, make_host))
