"""What a process of a cluster holds: a worker (`worker_host.py`) or the gateway (`gateway_host.py`).

    host = WorkerHost(config, resolve) or GatewayHost(launch, resolve)
    host.start();  ...  host.crashed or host.unwanted?  ...;  host.stop()

Both launchers use them: the child processes of `processes.py` and the actors of `on_ray/actors.py`. A host speaks to
the controller by itself, also when it cannot start; `resolve` says where the controller is now.
"""

from __future__ import annotations

import threading
from typing import Protocol

STOP_GRACE_S = 2.0
"""What running work gets to end when a process is told to stop."""


class StartError(RuntimeError):
    """A host could not start. Its log has the reason with its traceback, and the controller was told."""


class Host(Protocol):
    """A process's content, whatever it is."""

    crashed: threading.Event
    """Set when it can no longer work: the process should end, with a fault."""
    unwanted: threading.Event
    """Set when the controller has no use for it: the process should end."""

    def start(self) -> None:
        """Blocks until it can be used. Raises `StartError`; then nothing is left but the process, which should end."""
        ...

    def stop(self) -> None:
        """Blocks until nothing of it is left."""
        ...
