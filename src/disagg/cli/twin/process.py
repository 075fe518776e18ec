"""The twin as a child of the controller, which names this module (`cluster/control/twin_process.py`); its settings come
on standard input, see `children.py`."""

from __future__ import annotations

import sys

from disagg.cluster.control.twin_process import TwinSettings
from disagg.cluster.system.children import read_config, terminate_when_orphaned
from disagg.cluster.system.cores import pin_process


def main() -> int:
    """Entry point of the child process."""
    from disagg.cli.twin.command import run_twin
    from disagg.cluster.system.terminal import console

    settings = read_config(TwinSettings)
    terminate_when_orphaned()
    pin_process(settings.cores)
    try:
        run_twin(settings.address, console(), settings.api_key)
    except Exception as error:
        print(f"twin: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
