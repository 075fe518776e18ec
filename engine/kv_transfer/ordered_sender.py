"""Keeps the order of D's messages on a pair's stream where a `ClearToSend` has to wait for its receive.

A receive is posted at once by a transport of one rank; with several it takes until the last rank has answered. P must
not get `ClearToSend` before. Nor may a later message overtake it: after an `Abort` P has nothing of the chunk any more.
So every message waits behind a receive that is not posted. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from disagg.proto.ids import AttemptKey

Chunk = tuple[AttemptKey, int]
"""An attempt and the number of its chunk."""


@dataclass(slots=True, eq=False)
class _Receive:
    chunk: Chunk
    is_posted: bool = False


class OrderedSender:
    """The messages of one pair. `send` is called with each, in order, when nothing before it waits."""

    def __init__(self, send: Callable[[Any], None]) -> None:
        self._send = send
        self._queue: deque[Any] = deque()
        """Messages and the receives that they wait for. Begins with a receive that is not posted, or is empty."""
        self._unposted: dict[Chunk, _Receive] = {}

    def __len__(self) -> int:
        return sum(not isinstance(each, _Receive) for each in self._queue)

    def send(self, message: Any) -> None:
        """Send a message after all before it."""
        if self._queue:
            self._queue.append(message)
        else:
            self._send(message)

    def wait_for(self, chunk: Chunk) -> None:
        """Hold back further messages until this chunk's receive is posted."""
        receive = self._unposted[chunk] = _Receive(chunk)
        self._queue.append(receive)

    def posted(self, chunk: Chunk) -> None:
        """Note that the chunk's receive is posted, and send what waited for it. Idempotent."""
        receive = self._unposted.pop(chunk, None)
        if receive is None:
            return
        receive.is_posted = True
        while self._queue:
            head = self._queue[0]
            if isinstance(head, _Receive):
                if not head.is_posted:
                    return
                self._queue.popleft()
            else:
                self._queue.popleft()
                self._send(head)

    def drop(self) -> None:
        """Drop the waiting messages, because the stream has ended."""
        self._queue.clear()
        self._unposted.clear()
