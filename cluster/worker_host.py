"""A worker in this process: the composition of the worker shell with its roles."""

from __future__ import annotations

from disagg.cluster.host import STOP_GRACE_S
from disagg.cluster.process_tools import pin_process
from disagg.decode_worker.role import DecodeRole
from disagg.engine.config import WorkerConfig
from disagg.engine.worker import RoleFactory, Worker
from disagg.prefill_worker.role import PrefillRole
from disagg.proto.messages import RoleName, WorkerInfo

ROLE_FACTORIES: dict[RoleName, RoleFactory] = {"prefill": PrefillRole, "decode": DecodeRole}


class WorkerHost:
    """A worker with its roles."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._worker = Worker(config, [ROLE_FACTORIES[role] for role in config.roles])
        self.crashed = self._worker.crashed

    def start(self) -> WorkerInfo:
        """Pin, load the model, listen."""
        pin_process(self._config.cores)
        info = self._worker.start()
        pin_process(self._config.cores)  # threads that libraries pinned or started otherwise
        return info

    def stop(self) -> None:
        """End the worker."""
        self._worker.stop(STOP_GRACE_S)
