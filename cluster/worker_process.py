"""`python -m disagg.cluster.worker_process`: one worker as a child process; see `child.py` for its life."""

from __future__ import annotations

import sys

from disagg.cluster.child import run_child
from disagg.cluster.worker_host import WorkerHost
from disagg.engine.config import WorkerConfig

if __name__ == "__main__":
    sys.exit(run_child(WorkerConfig, WorkerHost))
