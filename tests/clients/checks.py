"""What the programs that run in a client's own environment share: the standard library only."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

C = TypeVar("C")
E = TypeVar("E", bound=BaseException)


def run(
    checks: Sequence[Callable[[C, str], None]], connect: Callable[[], AbstractContextManager[C]], model: str
) -> int:
    """Run each check with a client of its own. Prints `ok NAME` for each, and a traceback for each that fails; 0 if all
    passed."""
    num_failed = 0
    for check in checks:
        with connect() as client:
            try:
                check(client, model)
            except Exception:
                num_failed += 1
                print(f"failed {check.__name__}\n{traceback.format_exc()}", flush=True)
            else:
                print(f"ok {check.__name__}", flush=True)
    return 1 if num_failed else 0


def expect(kind: type[E], call: Callable[[], object]) -> E:
    """The error of `kind` that `call` raises."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")
