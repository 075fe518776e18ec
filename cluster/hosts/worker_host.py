"""A worker in this process: the composition of the worker shell with its roles, and its line to the controller."""

from __future__ import annotations

import logging
import os
import threading

from disagg.cluster.control.register_link import RegisterLink, report_failure
from disagg.cluster.hosts.host import STOP_GRACE_S, StartError
from disagg.cluster.system.process_tools import describe, freeze_start, pin_process
from disagg.decode_worker.role import DecodeRole
from disagg.engine.config import WorkerConfig, check_kv_stays_private
from disagg.engine.faults.faulty import Failpoints
from disagg.engine.parallel.interfaces import StartRanks
from disagg.engine.shell.worker import RoleFactory, Worker
from disagg.prefill_worker.role import PrefillRole
from disagg.proto.cluster_secret import ClusterSecret
from disagg.proto.connections.blocking_stream import Resolve
from disagg.proto.ids import WorkerId
from disagg.proto.messages import RoleName

logger = logging.getLogger(__name__)

ROLE_FACTORIES: dict[RoleName, RoleFactory] = {"prefill": PrefillRole, "decode": DecodeRole}


class WorkerHost:
    """A worker with its roles, registered with the controller that `resolve` finds. With several ranks, the first of
    them: `config` is that rank's own, and `start_ranks` starts the others."""

    def __init__(
        self, config: WorkerConfig, resolve: Resolve, secret: ClusterSecret, start_ranks: StartRanks | None = None
    ) -> None:
        self._config = config
        self._resolve = resolve
        self._secret = secret
        failpoints = Failpoints.from_environment(os.environ, config.worker_id, allowed=config.failpoints)
        roles = [ROLE_FACTORIES[role] for role in config.roles]
        self._worker = Worker(config, roles, secret, start_ranks, parts=failpoints.parts())
        self.crashed = self._worker.crashed
        self.unwanted = threading.Event()
        self._link = RegisterLink(resolve, secret, self.unwanted.set, self._worker.turn_s)

    def start(self) -> None:
        """Pin, load the model, listen, register; see `Host`."""
        try:
            check_kv_stays_private(self._config)
            pin_process(self._config.cores)
            info = self._worker.start()
            pin_process(self._config.cores)  # threads that libraries pinned or started otherwise
            freeze_start()
        except Exception as error:
            logger.exception("%s could not start", self._config.worker_id)
            name = WorkerId(self._config.worker_id)
            report_failure(self._resolve, self._secret, name, describe(error), self._config.start_id)
            raise StartError(describe(error)) from error
        self._link.start(info)

    def stop(self) -> None:
        """Leave the cluster and end the worker."""
        self._link.stop()
        self._worker.stop(STOP_GRACE_S)
