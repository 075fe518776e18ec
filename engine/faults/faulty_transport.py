"""A byte channel with injected faults, around any other one.

fail      the connection breaks: this operation and all that follow are answered not ok, and no byte of them moves
corrupt   one bit differs between what was sent and what came
delay     the answer comes late; the bytes do not
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from typing_extensions import override

from disagg.engine.failpoints import Failpoint
from disagg.engine.kv_transfer.transport import Done, PairTransport, Posted, Received, ignore_posted
from disagg.engine.plan import Buffer

BROKEN = "broken by a failpoint"

Fired = Callable[[str], Failpoint | None]
"""Point -> the fault that falls on this opportunity, if any."""


class FaultyTransport(PairTransport):
    """A `PairTransport` that may fail or delay operations, or corrupt their payloads."""

    def __init__(self, inner: PairTransport, fired: Fired) -> None:
        self._inner = inner
        self._fired = fired
        self._lock = threading.Lock()
        self._late: set[_Late] = set()
        """Answers that are held back; guarded by the lock."""
        self._closed = False
        self._is_broken = False
        """Bytes that went on behind those of a failed operation would end in its receive."""

    @property
    @override
    def name(self) -> str:
        return self._inner.name

    @override
    def send(self, buffer: Buffer, nbytes: int, done: Done) -> None:
        fault = self._fired("transport.send")
        match self._action(fault):
            case "fail":
                done(False, BROKEN)
            case "corrupt":
                _flip_a_bit(buffer, nbytes // 2)  # the slot is gathered anew before its next use
                self._inner.send(buffer, nbytes, done)
            case "delay":
                assert fault is not None
                self._inner.send(buffer, nbytes, self._later(done, fault.ms / 1000))
            case _:
                self._inner.send(buffer, nbytes, done)

    @override
    def recv(self, buffer: Buffer, nbytes: int, done: Received, posted: Posted = ignore_posted) -> None:
        fault = self._fired("transport.receive")
        match self._action(fault):
            case "fail":
                done(False, BROKEN, 0)
            case "corrupt":
                self._inner.recv(buffer, nbytes, _corrupting(buffer, nbytes, done), posted)
            case "delay":
                assert fault is not None
                self._inner.recv(buffer, nbytes, self._later(done, fault.ms / 1000), posted)
            case _:
                self._inner.recv(buffer, nbytes, done, posted)

    @override
    def skip_checksums(self) -> None:
        self._inner.skip_checksums()

    @override
    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._inner.close()
        with self._lock:
            late, self._late = self._late, set()
        for each in late:
            each.give_now()

    def _action(self, fault: Failpoint | None) -> str:
        """What falls on an operation: its own fault, or the failure of one before it."""
        action = "" if fault is None else fault.action
        self._is_broken |= action == "fail"
        return "fail" if self._is_broken else action

    def _later(self, done: Callable[..., None], delay_s: float) -> Callable[..., None]:
        def answer(*result: Any) -> None:
            late = _Late(lambda: done(*result), delay_s, self._forget)
            with self._lock:
                if not self._closed:
                    self._late.add(late)
                    late.start()
                    return
            late.give_now()

        return answer

    def _forget(self, late: _Late) -> None:
        with self._lock:
            self._late.discard(late)


class _Late:
    """An answer that a timer gives, or `close` before it."""

    def __init__(self, give: Callable[[], None], delay_s: float, on_given: Callable[[_Late], None]) -> None:
        self._give = give
        self._on_given = on_given
        self._once = threading.Lock()
        self._timer = threading.Timer(delay_s, self._due)
        self._timer.daemon = True

    def start(self) -> None:
        """Start the timer of the delay."""
        self._timer.start()

    def give_now(self) -> None:
        """Give it, unless it was given, and end the timer."""
        self._timer.cancel()
        if self._once.acquire(blocking=False):
            self._give()

    def _due(self) -> None:
        if self._once.acquire(blocking=False):
            self._give()
        self._on_given(self)


def _corrupting(buffer: Buffer, nbytes: int, done: Received) -> Received:
    """One bit of what came is another, and so is the checksum."""

    def answer(ok: bool, error: str, checksum: int) -> None:
        if ok:
            _flip_a_bit(buffer, nbytes // 2)
        done(ok, error, checksum ^ 1 if ok else checksum)

    return answer


def _flip_a_bit(buffer: Buffer, index: int) -> None:
    """In the part of this process, where a buffer is spread over several."""
    local: Any = getattr(buffer, "local", buffer)
    local[min(index, len(local) - 1)] ^= 0x10
