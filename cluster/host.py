"""What a process of a cluster holds: a worker (`worker_host.py`) or the gateway (`gateway_host.py`).

    host = WorkerHost(config) or GatewayHost(launch);  host.start() -> info;  ...  host.crashed?  ...;  host.stop()

Both launchers use them: the child processes of `processes.py` and the actors of `ray_actors.py`.
"""

from __future__ import annotations

import threading
from typing import Protocol

from disagg.cluster.launch import GatewayInfo
from disagg.proto.messages import WorkerInfo

STOP_GRACE_S = 2.0
"""What running work gets to end when a process is told to stop."""


class Host(Protocol):
    """A process's content, whatever it is."""

    crashed: threading.Event
    """Set when it can no longer work: the process should end."""

    def start(self) -> WorkerInfo | GatewayInfo:
        """Blocks until it can be used."""
        ...

    def stop(self) -> None:
        """Blocks until nothing of it is left."""
        ...
