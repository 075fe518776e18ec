"""What the controller needs of a launcher: Ray (`on_ray/launcher.py`) or this machine (`hosts/processes.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from disagg.cluster.control.launch import GatewayLaunch
from disagg.engine.config import WorkerConfig
from disagg.proto.ids import WorkerId


class Launcher(Protocol):
    """Starts and ends processes. Its methods may block; the controller calls them on one thread of its own, one after
    the other. The name of a worker's process is its id, that of the gateway's is `launch.GATEWAY`."""

    restarts: bool
    """Whether a process that ends by itself is started again without being asked (Ray does that)."""

    def running(self) -> frozenset[str]:
        """The names of processes that an earlier controller of this cluster left running. Called once, first."""
        ...

    def start_worker(self, config: WorkerConfig, controller_address: str) -> None:
        """Begin to start a worker, which registers with the controller by itself, or says there why it cannot start.

        Raises:
            LaunchError: if not even that can be begun.
        """
        ...

    def stop_workers(self, worker_ids: Sequence[WorkerId]) -> None:
        """End the processes of these workers, side by side; returns when they are gone. Idempotent; unknown ids and
        processes that ended already are fine."""
        ...

    def start_gateway(self, launch: GatewayLaunch, controller_address: str) -> None:
        """Begin to start the gateway, which follows the controller by itself, or says there why it cannot start. Raises
        `LaunchError`."""
        ...

    def stop_gateway(self) -> None:
        """End the gateway's process; returns when it is gone. Idempotent."""
        ...

    def kill(self, name: str, pid: int) -> None:
        """End a process that hangs, at once and by force, if its present life still has that process id; else do
        nothing. Unlike the others it is called on any thread, at any time."""
        ...

    def exited(self) -> dict[str, str]:
        """Processes that ended by themselves, are not coming back, and were not reported yet: name -> why, with the
        end of the log."""
        ...

    def pending(self) -> dict[str, str]:
        """Processes that were begun and cannot run yet: name -> what they wait for, for people to read."""
        ...
