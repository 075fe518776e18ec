"""Whether the files of a disk tier are read and written, and when its folder is scanned. Pure.

    not read ──scanned──> on ──failed, or no answer for long──> off ──scanned──> on
                          on ──full──> only read ──a file was written, or scanned──> on

A folder that fails (removed, broken) is not used, and scanned again after a while: what is in it is not known any more.
One that takes no files (full, read only) is read like before, and a write is tried after a while. One that does not
answer is scanned when it answers again.
"""

from __future__ import annotations

import logging
import math

_log = logging.getLogger(__name__)

TRIED_AGAIN_S = 30.0
"""Time after which a folder that failed is scanned again, and one that was full is written to."""
SCANNED_AGAIN_S = 60.0
"""Time after which a folder is scanned again, to which others write, or is looked at, whether it is still there."""
SILENT_S = 10.0
"""Time without an answer, while one is due, after which a folder is not used."""
SILENT_SCAN_S = 60.0
"""Time without an answer while it is scanned."""


class Folder:
    """Owner: the tier store.

    Args:
        is_there: whether there is a disk tier.
        is_watched: whether it is scanned or looked at again while it is good.
    """

    def __init__(self, *, is_there: bool, is_watched: bool) -> None:
        self._is_there = is_there
        self._is_watched = is_watched
        self._off_reason = "the folder was not read yet" if is_there else ""
        self._full_reason = ""
        self._full_until = -math.inf
        self._failed_with = ""
        """The reason that was logged last; empty once the folder was good after that."""
        self._scan_at = -math.inf if is_there else math.inf
        self._is_scanning = False
        self._needs_whole = self._scans_whole = True
        """Nothing is known of the folder any more, so the next scan, or the one under way, has to tell all of it."""
        self._is_silent = False
        """It was turned off because it did not answer."""
        self._num_open = 0
        """Orders without an answer."""
        self._silent_since = math.inf
        """When the last answer came, or the first order after it; infinite where none is due."""

    # ------------------------------------------------------------ what may be done

    @property
    def is_on(self) -> bool:
        """Whether files are read."""
        return self._is_there and not self._off_reason

    def takes_files(self, now: float) -> bool:
        """Whether files are written, or one may be tried."""
        return self.is_on and now >= self._full_until

    @property
    def off_reason(self) -> str:
        """Why the folder is not used, or not written to; empty where it is."""
        return self._off_reason or (self._full_reason and f"no file is written: {self._full_reason}")

    @property
    def due_at(self) -> float:
        """When `look` has something to do; infinite for never."""
        return min(self._scan_at, self._silent_at)

    @property
    def scans_whole(self) -> bool:
        """Whether the scan that was ordered last is to tell all files, not only those that were not told."""
        return self._scans_whole

    def may_scan(self, now: float) -> bool:
        """Whether to order a scan now; it counts as ordered then."""
        if not self._is_there or self._is_scanning or now < self._scan_at:
            return False
        self._scan_at, self._is_scanning = math.inf, True
        self._scans_whole = self._needs_whole
        self.ordered(now)
        return True

    def became_silent(self, now: float, wall_s: float) -> bool:
        """Whether the folder is not used from now on, because it does not answer. `wall_s`: time of day, in seconds
        since the epoch. It is scanned when it answers again."""
        if now < self._silent_at:
            return False
        minutes, seconds = divmod(int(wall_s - (now - self._silent_since)) % 86_400, 60)
        since = f"{minutes // 60:02}:{minutes % 60:02}:{seconds:02}"
        self._off_reason, self._is_silent = f"no answer since {since} UTC", True
        self._needs_whole = True
        _log.warning("the disk tier of the KV is off: %s; it is on again when the disk answers", self._off_reason)
        self._scan_at = now
        return True

    @property
    def _silent_at(self) -> float:
        """When it counts as silent, if no answer comes."""
        if self._is_silent:
            return math.inf
        return self._silent_since + (SILENT_SCAN_S if self._is_scanning else SILENT_S)

    # ------------------------------------------------------------ what happens

    def scan_later(self, now: float) -> None:
        """Something is to be tried again with the next scan."""
        self._scan_at = min(self._scan_at, now + TRIED_AGAIN_S)

    def ordered(self, now: float) -> None:
        """Something was ordered that will be answered."""
        if not self._num_open:
            self._silent_since = now
        self._num_open += 1

    def answered(self, now: float) -> None:
        """An answer came, whatever it says."""
        self._num_open -= 1
        self._silent_since = now if self._num_open else math.inf

    def scanned(self, now: float) -> bool:
        """The folder was read, or looked at. Returns False where it had to be dropped meanwhile: what a look tells then
        is not all, so the folder stays off until it was scanned anew."""
        if self._needs_whole and not self._scans_whole:
            self._is_scanning, self._scan_at = False, now
            return False
        self._needs_whole = False
        if self._is_silent:
            _log.info("the disk tier of the KV is on again, the disk answers")
        self._is_scanning = self._is_silent = False
        self._off_reason = ""
        self._scan_at = now + SCANNED_AGAIN_S if self._is_watched else math.inf
        return True

    def wrote(self) -> None:
        """A file was written."""
        self._full_reason, self._full_until = "", -math.inf
        if self._failed_with:
            _log.info("the disk tier of the KV is on again, a file was written to it")
            self._failed_with = ""

    def failed(self, reason: str, now: float, *, of_scan: bool = False) -> None:
        """The folder cannot be used. `of_scan`: this is the answer to a scan."""
        if reason != self._failed_with:
            _log.warning("the disk tier of the KV is off: %s; it is tried again every %.0f s", reason, TRIED_AGAIN_S)
        self._off_reason = self._failed_with = reason
        self._needs_whole = True
        self._is_silent = False
        self._is_scanning = self._is_scanning and not of_scan
        self._scan_at = now + TRIED_AGAIN_S

    def full(self, reason: str, now: float) -> None:
        """A file could not be written, or deleted, and those that are there can be read. A full disk is full again at
        each try, and is logged once."""
        if reason != self._failed_with:
            text = "no file of KV is written to the disk tier: %s; it is tried again every %.0f s"
            _log.warning(text, reason, TRIED_AGAIN_S)
        self._full_reason = self._failed_with = reason
        self._full_until = now + TRIED_AGAIN_S
