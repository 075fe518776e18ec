"""The order of what D says on a pair's stream, where a `ClearToSend` has to wait for its receive.

A receive is posted at once by a transport of one rank; with several it takes until the last rank has said so. P must
not hear `ClearToSend` before. Nor may what was said later overtake it: after an `Abort` P knows nothing of the chunk.
So everything waits in line behind a receive that is not posted. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from disagg.proto.handover import ReceiverToSender
from disagg.proto.ids import AttemptKey

Chunk = tuple[AttemptKey, int]
"""An attempt and the number of its chunk."""


@dataclass(slots=True, eq=False)
class _Receive:
    chunk: Chunk
    is_posted: bool = False


class Clearance:
    """The line of one pair. `send` takes what may be said, in order."""

    def __init__(self, send: Callable[[ReceiverToSender], None]) -> None:
        self._send = send
        self._line: deque[_Receive | ReceiverToSender] = deque()
        """Begins with a receive that is not posted, unless it is empty."""
        self._unposted: dict[Chunk, _Receive] = {}

    def __len__(self) -> int:
        return sum(not isinstance(each, _Receive) for each in self._line)

    def say(self, message: ReceiverToSender) -> None:
        """Say this after all before it."""
        if self._line:
            self._line.append(message)
        else:
            self._send(message)

    def wait_for(self, chunk: Chunk) -> None:
        """Say nothing more before this chunk's receive is posted."""
        receive = self._unposted[chunk] = _Receive(chunk)
        self._line.append(receive)

    def posted(self, chunk: Chunk) -> None:
        """Its receive is posted. Idempotent."""
        receive = self._unposted.pop(chunk, None)
        if receive is None:
            return
        receive.is_posted = True
        while self._line:
            head = self._line[0]
            if isinstance(head, _Receive):
                if not head.is_posted:
                    return
                self._line.popleft()
            else:
                self._line.popleft()
                self._send(head)

    def drop(self) -> None:
        """The stream has ended: nobody hears what is left."""
        self._line.clear()
        self._unposted.clear()
