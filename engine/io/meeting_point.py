"""Where the members of a process group exchange what they need to connect to each other, such as their addresses.

    one process   point = MeetingPoint(host, secret)                   gives `point.address` to the others
    each member   store = join_meeting(address, secret, name, rank, timeout_s)      a `torch.distributed.Store`
    each member   makes its process group of the store, and closes it

Torch's own TCPStore has no password: whoever reaches its port reads and writes every group's entries. Here each member
proves first that it knows the cluster's secret (`handshake.py`), and sees the entries of its own group only. The
meeting point forwards each entry to the other members; they keep them, and wait for those that are missing.
"""

from __future__ import annotations

import datetime
import logging
import secrets
import threading
import time
from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
import torch.distributed

from disagg.engine.io.handshake import NONCE_BYTES, answer, closed_after
from disagg.engine.io.line import Line, LineError, connect
from disagg.engine.io.listener import AuthenticatedListener
from disagg.proto.cluster_secret import ClusterSecret
from disagg.proto.messages import Message, decoder

logger = logging.getLogger(__name__)

MAX_KEY_CHARS: Final = 256
MAX_VALUE_BYTES: Final = 64 << 10
MAX_ENTRIES: Final = 1024
"""Of one group. Gloo makes one for each member, of 170 bytes for two members."""
_MAX_FRAME_BYTES: Final = MAX_VALUE_BYTES + 4096


class Entry(Message, frozen=True, kw_only=True, tag=True):
    """One entry of a group's store: from the member that sets it, then to the others."""

    key: Annotated[str, msgspec.Meta(max_length=MAX_KEY_CHARS)]
    value: Annotated[bytes, msgspec.Meta(max_length=MAX_VALUE_BYTES)]


class _Meeting:
    """The members of one group that are connected, and their entries."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.lines: dict[int, Line] = {}
        self.entries: list[Entry] = []


class MeetingPoint:
    """The listening side. A group's entries are forgotten when its last member has left.

    Args:
        host: the address to listen on; nothing else is listened on.

    Raises:
        OSError: if it cannot listen there.
    """

    def __init__(self, host: str, secret: ClusterSecret) -> None:
        self._lock = threading.Lock()
        self._meetings: dict[str, _Meeting] = {}
        self._taken: set[tuple[str, int]] = set()
        self._listener = AuthenticatedListener(host, secret, "meeting", self._take, self._serve)
        self.address = self._listener.address

    @property
    def is_open(self) -> bool:
        """Whether it still listens."""
        return self._listener.is_open

    def close(self) -> None:
        """Listen no more, and end the lines of all members. Idempotent."""
        self._listener.close()
        with self._lock:
            meetings = list(self._meetings.values())
        for meeting in meetings:
            with meeting.lock:
                lines = list(meeting.lines.values())
            for line in lines:
                line.close()
        self._listener.join()

    def _take(self, name: str, rank: int) -> bool:
        with self._lock:
            if (name, rank) in self._taken or not self._listener.is_open:
                return False
            self._taken.add((name, rank))
            return True

    def _serve(self, name: str, rank: int, line: Line) -> None:
        with self._lock:
            meeting = self._meetings.setdefault(name, _Meeting())
            with meeting.lock:
                meeting.lines[rank] = line
        try:
            with meeting.lock:
                for entry in meeting.entries:
                    line.send(entry)
            if self._listener.is_open:  # else `close` may not have seen this line
                _forward_all(meeting, rank, line)
        except (LineError, msgspec.MsgspecError) as error:
            logger.warning("%s: rank %d left %r: %s", self.address, rank, name, error)
        finally:
            with self._lock, meeting.lock:
                del meeting.lines[rank]
                self._taken.discard((name, rank))
                if not meeting.lines:
                    del self._meetings[name]
            line.close()


def _forward_all(meeting: _Meeting, rank: int, line: Line) -> None:
    """Until the member leaves. LineError or MsgspecError where it breaks the rules."""
    while (frame := line.receive(_MAX_FRAME_BYTES)) is not None:
        entry = decoder(Entry).decode(frame)
        with meeting.lock:
            if len(meeting.entries) >= MAX_ENTRIES:
                raise LineError(f"a group has at most {MAX_ENTRIES} entries")
            meeting.entries.append(entry)
            for other, other_line in meeting.lines.items():
                if other != rank:
                    _send_or_drop(other_line, entry)


def _send_or_drop(line: Line, entry: Entry) -> None:
    try:
        line.send(entry)
    except LineError:
        line.close()  # its own thread notices


_dist: Any = torch.distributed
"""Untyped: torch's stubs lack it."""


class MemberStore(_dist.Store):  # type: ignore[misc]  # see above
    """One member's store, as torch's process groups use it: `set`, `get`, `wait` and `check` of entries that are never
    changed. Thread-safe, but a member that waits holds up the others of this store."""

    def __init__(self, line: Line, timeout_s: float) -> None:
        super().__init__()
        self._line = line
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._entries: dict[str, bytes] = {}
        self._closed = False

    def set(self, key: str, value: str | bytes) -> None:
        """Give an entry to all members; after `close`, to no other one. RuntimeError if they cannot be reached."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        with self._lock:
            self._entries[key] = data
            if not self._closed:
                self._line.send(Entry(key=key, value=data))

    def get(self, key: str) -> bytes:
        """An entry; waits for it as `wait` does."""
        self.wait([key])
        return self._entries[key]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of them have come; does not read what is on its way."""
        return all(key in self._entries for key in keys)

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        """Until all of them have come.

        Raises:
            RuntimeError: they do not come in time, or the meeting point is gone.
        """
        seconds = self._timeout_s if timeout is None else timeout.total_seconds()
        with self._lock:
            missing = {key for key in keys if key not in self._entries}
            if not missing:
                return
            since = time.monotonic()
            try:
                with closed_after(self._line, seconds):
                    while missing:
                        missing.discard(self._receive())
            except LineError as error:
                waited_s = time.monotonic() - since
                why = f": {error}" if waited_s < seconds else ""
                raise RuntimeError(f"{sorted(missing)} did not come in {waited_s:.1f} s{why}") from error

    def _receive(self) -> str:
        frame = self._line.receive(_MAX_FRAME_BYTES)
        if frame is None:
            raise LineError("the meeting point was closed")
        try:
            entry = decoder(Entry).decode(frame)
        except msgspec.MsgspecError as error:
            raise LineError(f"not an entry: {error}") from error
        self._entries[entry.key] = entry.value
        return entry.key

    def close(self) -> None:
        """Leave the meeting point. What came can still be read. Idempotent."""
        self._closed = True
        self._line.close()


def join_meeting(address: str, secret: ClusterSecret, name: str, rank: int, timeout_s: float) -> MemberStore:
    """Become member `rank` of the group `name`, whose members meet at `address`.

    Raises:
        RuntimeError: there is no meeting point, or it does not know the secret, or refuses.
    """
    line = connect(address, timeout_s)
    try:
        answer(line, secret, "meeting", name, rank, secrets.token_bytes(NONCE_BYTES))
    except BaseException:
        line.close()
        raise
    return MemberStore(line, timeout_s)
