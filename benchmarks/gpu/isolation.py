"""What to do once a device gives the same error for every later call: the context of the process cannot be used again.

Benchmarks. `timing.attempt` does all of it for measurements that have names: after a fatal error the process replaces
itself by one with the same command line and `--not` with the names of those that were tried, this one included. So a
measurement that loses the context costs itself; what is prepared before is prepared again. A program that makes its
measurements in another way does the same by

    if name not in isolation.left_out():
        try:
            measure()
        except Exception as error:
            rows.failed(name, error)
            isolation.go_on(name, error)      # does not return where the error is fatal
        isolation.tried(name)

and has to be started as a module or a file, and to take `--not NAME...`, as `timing.parse` does. `Watch` does the same
for a measurement that hangs.

Tests: `tests/gpu/conftest.py` ends the process with `CONTEXT_LOST` after the test that lost it; pytest-xdist starts
another one, which goes on with the next test.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

CONTEXT_LOST = 86
"""Exit status of a process that has ended itself for that reason."""
OPTION = "--not"

_tried: list[str] = []


def left_out(arguments: Sequence[str] | None = None) -> tuple[str, ...]:
    """The names behind every `--not` of a command line, up to the next option; of ours where none is given."""
    found: list[str] = []
    is_behind = False
    for argument in sys.argv[1:] if arguments is None else arguments:
        if argument.startswith("--"):
            is_behind = argument == OPTION
        elif is_behind:
            found.append(argument)
    return tuple(found)


def tried(name: str) -> None:
    """This measurement needs not be made again in a process that replaces this one."""
    _tried.append(name)


def is_fatal(error: BaseException) -> bool:
    """Whether every later call on the device fails, too (`disagg.engine.plan.is_fatal`)."""
    from disagg.engine import plan

    return plan.is_fatal(error)


def go_on(name: str, error: BaseException, replace: Callable[[Sequence[str]], object] | None = None) -> None:
    """Replace this process by one that does without `name`, and without what was tried, if `error` is fatal."""
    if is_fatal(error):
        go_on_without(name, replace)


def go_on_without(name: str, replace: Callable[[Sequence[str]], object] | None = None) -> None:
    """Replace this process by one that does without `name`, and without what was tried. `replace` takes the command."""
    command = [*sys.orig_argv, OPTION, *dict.fromkeys([*_tried, name])]
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    (replace or _execute)(command)


def _execute(command: Sequence[str]) -> None:
    os.execv(sys.executable, [sys.executable, *command[1:]])


class Watch:
    """`with Watch(name, limit_s, told):` a measurement that takes longer is told and left out: `told()` is called on
    another thread, and the process is replaced, whatever the device does."""

    def __init__(
        self,
        name: str,
        limit_s: float,
        told: Callable[[], object],
        replace: Callable[[Sequence[str]], object] | None = None,
    ) -> None:
        self._timer = threading.Timer(limit_s, self._end)
        self._timer.daemon = True
        self._name, self._told, self._replace = name, told, replace

    def _end(self) -> None:
        self._told()
        go_on_without(self._name, self._replace)

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._timer.cancel()
