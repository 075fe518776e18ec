"""A template that `shared_templates.py` starts, and each of its children. As `template_process.py`, but that it loads
no weights, and that each child sets up its log: they are of clusters that log differently.
"""

from __future__ import annotations

import gc
import sys
import time

from disagg.cluster.hosts.template_process import become, load
from disagg.cluster.templates.template import read_first, serve
from disagg.cluster.templates.templates import TemplateStart


def main() -> int:
    """Returns the exit status."""
    start = read_first(TemplateStart)
    load(start)
    gc.freeze()
    loaded_s = time.monotonic()
    if serve() is None:
        return 0
    gc.enable()
    return become(start.kind, loaded_s)


if __name__ == "__main__":
    sys.exit(main())
