"""What the controller needs of whatever starts processes: Ray (`ray_launcher.py`) or this machine (`processes.py`)."""

from __future__ import annotations

from typing import Protocol

from disagg.cluster.launch import GatewayLaunch
from disagg.engine.config import WorkerConfig
from disagg.proto.ids import WorkerId


class Launcher(Protocol):
    """Starts and ends processes. Its methods may block; the controller calls them on one thread of its own."""

    restarts: bool
    """Whether a process that ends by itself is started again without being asked (Ray does that)."""

    def start_worker(self, config: WorkerConfig, controller_address: str) -> None:
        """Begin to start a worker, which registers with the controller by itself, or says there why it cannot start.

        Raises:
            LaunchError: if not even that can be begun.
        """
        ...

    def stop_worker(self, worker_id: WorkerId) -> None:
        """End a worker's process; returns when it is gone. Idempotent; unknown ids are fine."""
        ...

    def start_gateway(self, launch: GatewayLaunch, controller_address: str) -> None:
        """Begin to start the gateway, which follows the controller by itself. Raises `LaunchError`."""
        ...

    def stop_gateway(self) -> None:
        """End the gateway's process; returns when it is gone. Idempotent."""
        ...

    def exited(self) -> dict[str, str]:
        """Processes that ended by themselves and were not reported yet: name -> why, with the end of the log. Empty
        for a launcher that `restarts`."""
        ...
