"""`python -m disagg.cluster.hosts.gateway_process`: the gateway and the router as a child process (`child.py`)."""

from __future__ import annotations

import sys

from disagg.cluster.control.launch import GatewayLaunch
from disagg.cluster.hosts.child import run_child
from disagg.cluster.hosts.gateway_host import GatewayHost

if __name__ == "__main__":
    sys.exit(run_child(GatewayLaunch, GatewayHost))
