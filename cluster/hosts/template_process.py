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
import time  # noqa: E402
from concurrent.futures import ThreadPoolExecutor, wait  # noqa: E402
from typing import Final  # noqa: E402

from disagg.cluster.hosts.host import run_child  # noqa: E402
from disagg.cluster.system.logs import setup_logging  # noqa: E402
from disagg.cluster.system.process_tools import age_s, describe  # noqa: E402
from disagg.cluster.templates.template import owner_is_gone, read_first, serve  # noqa: E402
from disagg.cluster.templates.templates import TemplateStart  # noqa: E402
from disagg.engine.config import WeightsSource  # noqa: E402

logger = logging.getLogger(__name__)

OWNER_POLL_S: Final = 0.2


def load(start: TemplateStart) -> None:
    """Import what children of this kind use."""
    if start.kind == "gateway":
        from disagg.cluster.hosts import gateway_host  # noqa: F401

        return
    from disagg.cluster.hosts import worker_host  # noqa: F401

    if not start.is_fake:
        from disagg.engine.runner import model_runner  # noqa: F401


def keep(source: WeightsSource) -> None:
    """Load weights that the children share. If that fails each child tries it itself, and reports the error. Ends this
    process when the owner ends meanwhile."""
    from disagg.engine.runner.loaded_weights import keep_weights

    began_s = time.monotonic()
    with ThreadPoolExecutor(1) as executor:
        loading = executor.submit(keep_weights, source)
        while not wait([loading], OWNER_POLL_S).done:
            if owner_is_gone():
                os._exit(0)
    if (error := loading.exception()) is None:
        logger.info("weights of %s: loaded in %.2f s", source.model_path, time.monotonic() - began_s)
    else:
        logger.warning("weights of %s: not kept: %s", source.model_path, describe(error))


def become(kind: str, loaded_s: float) -> int:
    """Run as a process of that kind, in a child; returns the exit status. `loaded_s`: time at which the template had
    loaded."""
    if kind == "gateway":
        from disagg.cluster.control.plan import GatewaySpec
        from disagg.cluster.hosts.gateway_host import GatewayHost

        return run_child(GatewaySpec, GatewayHost, loaded_s)
    from disagg.cluster.hosts.worker_host import make_host
    from disagg.engine.config import WorkerConfig

    return run_child(WorkerConfig, make_host, loaded_s)


def serve_and_become(kind: str) -> int:
    """Fork on request, when all is loaded, and in each child become its process; returns the exit status of either."""
    gc.freeze()
    loaded_s = time.monotonic()
    if serve() is None:
        return 0
    gc.enable()
    return become(kind, loaded_s)


def main() -> int:
    """Run the template, and each of its children; returns the exit status."""
    setup_logging(os.environ)
    start = read_first(TemplateStart)
    load(start)
    logger.info("code: loaded in %.2f s", age_s())
    if start.weights is not None:
        keep(start.weights)
    return serve_and_become(start.kind)


if __name__ == "__main__":
    sys.exit(main())
