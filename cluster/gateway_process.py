"""`python -m disagg.cluster.gateway_process`: the gateway with the router core as a child process; see `child.py` for
its life."""

from __future__ import annotations

import sys

from disagg.cluster.child import run_child
from disagg.cluster.gateway_host import GatewayHost
from disagg.cluster.launch import GatewayLaunch

if __name__ == "__main__":
    sys.exit(run_child(GatewayLaunch, GatewayHost))
