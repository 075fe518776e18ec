"""The twin as a child of `disagg up`: started, started again with back-off when it ended, and ended.

python -m disagg.cli.twin.process     the child; its address comes on standard input, see `children.py`
"""

from __future__ import annotations

import os
import sys
from typing import IO

import msgspec

from disagg.cluster.config.cluster_config import ClusterConfig
from disagg.cluster.control.backoff import next_start
from disagg.cluster.system.children import (
    Process,
    describe_exit,
    end,
    read_config,
    spawn,
    terminate_when_orphaned,
)
from disagg.cluster.system.process_tools import thread_environment

KEY_VARIABLE = "DISAGG_API_KEY"
STOP_S = 5.0


class TwinSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the child is sent."""

    address: str


class TwinProcess:
    """Owner of one child process.

    Args:
        address: of the gateway.
        now: on a monotonic clock, as for `tick`.
        output: where the child writes; as this process without.
    """

    def __init__(self, address: str, now: float, output: IO[bytes] | None = None) -> None:
        self._settings = TwinSettings(address=address)
        self._output = output
        self._process: Process | None = None
        self._started_s = 0.0
        self._due_s = now
        self._num_faults = 0

    @property
    def pid(self) -> int | None:
        """Of the child that runs."""
        return None if self._process is None else self._process.pid

    def tick(self, now: float) -> str | None:
        """Start it when that is due; to be called again and again. What is to be shown, where it ended."""
        process = self._process
        if process is None:
            if now >= self._due_s:
                self._start(now)
            return None
        status = process.poll()
        if status is None:
            return None
        self._process = None
        end([process], 0.0)
        self._num_faults, pause_s = next_start(self._num_faults, now - self._started_s)
        self._due_s = now + pause_s
        return (
            f"the twin ended ({describe_exit(status)}) and starts again in {pause_s:g} s; until then the present "
            "setting of placement.decodes stays"
        )

    def stop(self) -> None:
        """End it. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            end([process], STOP_S)

    def _start(self, now: float) -> None:
        self._started_s = now
        key = {name: value for name, value in os.environ.items() if name == KEY_VARIABLE}
        environment = {**thread_environment(1), **key}
        self._process = spawn("disagg.cli.twin.process", self._settings, environment, self._output)


def is_wanted(config: ClusterConfig) -> bool:
    """Whether a twin is to choose."""
    return config.placement.decodes == "auto"


def missing_key(config: ClusterConfig) -> str:
    """Why no twin can be started; empty where one can."""
    if config.gateway.api_keys is None or os.environ.get(KEY_VARIABLE):
        return ""
    return (
        f"placement.decodes: auto needs the key of an admin in {KEY_VARIABLE} for its twin; without, answers decode "
        "with spread. Next: disagg twin, from a terminal that has the key"
    )


def main() -> int:
    """The child."""
    from disagg.cli.twin.command import run_twin
    from disagg.cluster.system.terminal import console

    settings = read_config(TwinSettings)
    terminate_when_orphaned()
    try:
        run_twin(settings.address, console())
    except Exception as error:
        print(f"twin: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
