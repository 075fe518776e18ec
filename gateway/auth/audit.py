"""The audit log: one line for each refused caller and each change of the cluster, on the logger `disagg.audit`.

    refused a call over grpc from ipv4:10.0.0.7:40312: unknown key
    scale decode=2 by tenant ops from ipv4:10.0.0.7:40312: done

No line has a key or a part of one. Lines about refusals are limited, so that refused callers cannot fill the disk: the
next one has the number of omitted ones. Changes need an admin's key, and each has its line.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from disagg.gateway.auth.auth import Caller, Reason
from disagg.proto.errors import DisaggError, PermissionDeniedError

logger = logging.getLogger("disagg.audit")
logger.setLevel(logging.INFO)  # whatever the other loggers show

BURST_LINES: Final = 20
LINES_PER_S: Final = 0.5
MAX_SHOWN_CHARS: Final = 200
"""Characters of a caller's text that the log shows."""
_WORDS: Final[dict[Reason, str]] = {
    "missing": "no key",
    "malformed": "no `Bearer KEY`",
    "unknown": "unknown key",
    "certificate": "unknown certificate",
    "expired": "expired key",
}


class LineBudget:
    """How many lines may be written: some at once, then a few in a while.

    Args:
        burst: lines at once.
        per_s: lines a second after that.
    """

    def __init__(self, burst: float, per_s: float) -> None:
        self._burst = burst
        self._per_s = per_s
        self._left = burst
        self._at: float | None = None
        self._num_left_out = 0

    def take(self, now: float) -> int | None:
        """None where no line may be written; otherwise how many were omitted since the last one."""
        if self._at is not None:
            self._left = min(self._burst, self._left + (now - self._at) * self._per_s)
        self._at = now
        if self._left < 1:
            self._num_left_out += 1
            return None
        self._left -= 1
        left_out, self._num_left_out = self._num_left_out, 0
        return left_out


class Audit:
    """Of one gateway.

    Args:
        count: called for every refused key, with the protocol and the reason.
        clock: monotonic seconds.
    """

    def __init__(self, count: Callable[[str, str], None], clock: Callable[[], float]) -> None:
        self._count = count
        self._clock = clock
        self._budget = LineBudget(BURST_LINES, LINES_PER_S)

    def refused(self, protocol: str, reason: Reason, peer: str) -> None:
        """A call came without a key that is known."""
        self._count(protocol, reason)
        self._limited(f"refused a call over {protocol} from {shown(peer)}: {_WORDS[reason]}")

    @contextmanager
    def change(self, what: str, caller: Caller, peer: str) -> Iterator[None]:
        """Logs what is tried inside, and its outcome."""
        who = f"tenant {caller.tenant}" if caller.tenant else "a caller without a key"
        line = f"{shown(what)} by {who} from {shown(peer)}"
        try:
            yield
        except PermissionDeniedError:
            self._limited(f"{line}: not allowed")
            raise
        except DisaggError as error:
            logger.warning("%s: %s", line, shown(str(error)))
            raise
        except BaseException as error:
            logger.warning("%s: %s", line, type(error).__name__)
            raise
        logger.info("%s: done", line)

    def _limited(self, line: str) -> None:
        left_out = self._budget.take(self._clock())
        if left_out is not None:
            logger.warning("%s%s", line, f" ({left_out} such lines omitted before)" if left_out else "")


def shown(text: str) -> str:
    """What a caller wrote, fit for one line of a log."""
    clipped = text[:MAX_SHOWN_CHARS]
    return clipped if clipped.isprintable() else ascii(clipped)[1:-1]
