"""A template of workers or of gateways: loads their code, and for workers the model's weights, and forks them.

    first message -> modules -> weights -> serve(): each child runs as `worker_host.py` or `gateway_host.py` does

Nothing that it runs may leave a thread behind. Without torch for gateways and for workers of the `fake` model.
"""

from __future__ import annotations

import gc

gc.disable()  # a quarter of the time of loading torch were collections that find nothing

import logging  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402

from disagg.cluster.hosts.host import run_child  # noqa: E402
from disagg.cluster.hosts.templates import TemplateStart  # noqa: E402
from disagg.cluster.system.logs import setup_logging  # noqa: E402
from disagg.cluster.system.templates import read_first, serve  # noqa: E402

logger = logging.getLogger(__name__)


def load(start: TemplateStart) -> None:
    """Import what children of this kind use."""
    if start.kind == "gateway":
        from disagg.cluster.hosts import gateway_host  # noqa: F401

        return
    from disagg.cluster.hosts import worker_host  # noqa: F401

    if not start.is_fake:
        from disagg.engine.runner import model_runner  # noqa: F401


def become(kind: str) -> int:
    """Be that process, in a child; returns the exit status."""
    if kind == "gateway":
        from disagg.cluster.control.plan import GatewaySpec
        from disagg.cluster.hosts.gateway_host import GatewayHost

        return run_child(GatewaySpec, GatewayHost)
    from disagg.cluster.hosts.worker_host import make_host
    from disagg.engine.config import WorkerConfig

    return run_child(WorkerConfig, make_host)


def main() -> int:
    """The template, and each of its children; returns the exit status."""
    setup_logging(os.environ)
    start = read_first(TemplateStart)
    load(start)
    gc.freeze()
    if serve() is None:
        return 0
    gc.enable()
    return become(start.kind)


if __name__ == "__main__":
    sys.exit(main())
