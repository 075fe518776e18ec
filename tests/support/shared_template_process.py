"""A template that `shared_templates.py` starts, and each of its children. As `template_process.py`, but that it loads
no weights, and that each child sets up its log: they are of clusters that log differently.
"""

from __future__ import annotations

import sys

from disagg.cluster.hosts.template_process import load, serve_and_become
from disagg.cluster.templates.template import read_first
from disagg.cluster.templates.templates import TemplateStart


def main() -> int:
    """Returns the exit status."""
    start = read_first(TemplateStart)
    load(start)
    return serve_and_become(start.kind)


if __name__ == "__main__":
    sys.exit(main())
