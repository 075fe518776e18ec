"""Writes a recording of the router's events: a queue of encoded entries, and a thread that writes them to a file.

The event loop only appends to the queue. Where the disk is too slow, or the file would become too large, the recording
ends there, with its reason as the last entry: a gap would make the rest worthless. The router continues to serve.
"""

from __future__ import annotations

import logging
import os
import platform
import threading
import time
from collections import deque
from pathlib import Path
from typing import Final

from disagg import __version__
from disagg.proto.ids import GatewayId
from disagg.router.config import RecordingOptions, RouterConfig
from disagg.router.recording.entries import Ended, EndReason, Header, encode
from disagg.router.recording.recording_file import file_start, pack_frame

logger = logging.getLogger(__name__)

SUFFIX: Final = ".events"
MAX_WAITING_BYTES: Final = 32 << 20
"""Most bytes of entries that wait to be written."""
WRITE_EVERY_S: Final = 0.1
_FRAME_BYTES: Final = 256 << 10
"""Most bytes of a frame's entries, unpacked; a larger entry has a frame of its own."""
_CLOSE_TIMEOUT_S: Final = 5.0
_MODE: Final = 0o600


def start_recording(
    options: RecordingOptions, config: RouterConfig, gateway_id: GatewayId, clock: float
) -> Recorder | None:
    """A recorder into a new file. None, with a line in the log, if that is impossible. `clock`: the router's time."""
    folder = Path(options.folder)
    header = Header(
        config=config,
        gateway_id=gateway_id,
        disagg=__version__,
        python=platform.python_version(),
        clock=clock,
        epoch_s=time.time(),
    )
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        max_bytes = options.max_bytes - sum(file.stat().st_size for file in folder.glob(f"*{SUFFIX}"))
        if max_bytes <= len(file_start(header)):
            logger.warning("events are not recorded: the recordings in %s have %d bytes", folder, options.max_bytes)
            return None
        file = folder / f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(header.epoch_s))}-{gateway_id}{SUFFIX}"
        recorder = Recorder(file, max_bytes, header)
    except OSError as error:
        logger.warning("events are not recorded: %s", error)
        return None
    logger.info("recording events into %s", file)
    return recorder


class Recorder:
    """One recording. Implements `recorded_core.Sink`; used on one event loop.

    Args:
        file: the file to create, for its owner only.
        max_bytes: the most bytes of the file.
        header: the first record.

    Raises (at construction):
        OSError: if the file is there already, or cannot be written.
    """

    def __init__(self, file: Path, max_bytes: int, header: Header) -> None:
        self.file = file
        self._max_bytes = max_bytes
        self._descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE)
        self._num_bytes = 0
        self._write(file_start(header))
        self._entries: deque[bytes] = deque()
        self._is_open = True
        self._put_bytes = 0
        """Bytes of all entries so far; written by `put` only."""
        self._taken_bytes = 0
        """Bytes of the entries that the thread has taken; written by the thread only."""
        self._why: EndReason | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Whether entries are still taken."""
        return self._is_open

    def put(self, entry: bytes) -> None:
        """Queue an encoded entry to be written; does nothing once the recording has ended."""
        if not self._is_open:
            return
        self._put_bytes += len(entry)
        if self._put_bytes - self._taken_bytes > MAX_WAITING_BYTES:
            self._end("too_slow")
            logger.warning("%s: the disk is too slow; what follows is not recorded", self.file)
            return
        self._entries.append(entry)

    def fail(self, error: Exception) -> None:
        """End the recording here, because an entry could not be made."""
        self._end("failed")
        logger.error("%s: an event cannot be recorded; what follows is not recorded", self.file, exc_info=error)

    def close(self) -> None:
        """Write the queued entries, and end the file. Idempotent; waits for at most `_CLOSE_TIMEOUT_S` seconds."""
        self._end("stopped")
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _end(self, why: EndReason) -> None:
        if self._is_open:
            self._is_open, self._why = False, why
            self._stop.set()

    # ---------------------------------------------------------------- on the thread

    def _run(self) -> None:
        try:
            is_last = False
            while not is_last:
                is_last = self._stop.wait(WRITE_EVERY_S)
                while self._entries:
                    if not self._write_frame():
                        return
            assert self._why is not None, "set before the thread is stopped"
            self._write(_last_frame(self._why))
        except OSError as error:
            self._is_open = False
            self._entries.clear()
            logger.warning("%s: %s; what follows is not recorded", self.file, error)
        finally:
            os.close(self._descriptor)

    def _write_frame(self) -> bool:
        """Write the next entries. If they do not fit, end the file and return False."""
        taken: list[bytes] = []
        size = 0
        while self._entries and (not taken or size + len(self._entries[0]) <= _FRAME_BYTES):
            taken.append(self._entries.popleft())
            size += len(taken[-1])
        frame = pack_frame(taken)
        self._taken_bytes += size
        last = _last_frame("full")
        if self._num_bytes + len(frame) + len(last) > self._max_bytes:
            self._is_open = False
            self._entries.clear()
            self._write(last)
            logger.warning("%s has its %d bytes; what follows is not recorded", self.file, self._max_bytes)
            return False
        self._write(frame)
        return True

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._descriptor, view) :]
        self._num_bytes += len(data)


def _last_frame(why: EndReason) -> bytes:
    return pack_frame([encode(Ended(why))])
