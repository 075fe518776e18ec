"""A template for tests: its children do what their message says."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import msgspec

from disagg.cluster.system.children import read_config
from disagg.cluster.templates.template import owner_is_gone, read_first, serve

MODULE = "tests.support.template_program"


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """What the template reads."""

    threads: int = 0
    """That it leaves running."""
    fails: bool = False
    loads_until_owner_is_gone: bool = False


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What a child reads."""

    write: str = ""
    """A variable of the environment, to be written to its output."""
    sleep: bool = False
    """Until it gets a signal."""
    status: int = 0


def main() -> int:
    """The template, and each of its children."""
    start = read_first(Start)
    if start.fails:
        raise RuntimeError("this template does not load")
    for _ in range(start.threads):
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    while start.loads_until_owner_is_gone:
        if owner_is_gone():
            return 0
        time.sleep(0.01)
    request = serve()
    if request is None:
        return 0
    order = read_config(Order)
    if order.write:
        descriptors = sorted(int(name) for name in os.listdir("/proc/self/fd"))  # noqa: PTH208 - as numbers
        ids = f"{os.getsid(0) == os.getpid()} {descriptors[:-1]}"  # the last one is of the listing
        print(f"{request.name} {os.environ.get(order.write)} {ids}", flush=True)
    if order.sleep:
        signal.pause()
    return order.status


if __name__ == "__main__":
    sys.exit(main())
