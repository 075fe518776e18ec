"""How long KV takes between the device cache of a worker and its tiers: host memory and files."""

from __future__ import annotations

from typing import Annotated

import msgspec

BytesPerS = Annotated[float, msgspec.Meta(gt=0)]


class TierTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The times of each worker's tiers. No step of the worker runs during a copy; files are read and written beside its
    steps, one after the other."""

    host_bytes_per_s: BytesPerS = 1e10
    """Rate of copies between the device cache and host memory."""
    disk_bytes_per_s: BytesPerS = 1e9
    """Rate of files that are read and written, with their checksums. What is read is copied from host memory then."""
    disk_latency_s: Annotated[float, msgspec.Meta(ge=0, le=10)] = 1e-4
    """Additional seconds of each file."""

    def copy_s(self, num_bytes: int) -> float:
        """Seconds of a copy between the device cache and host memory."""
        return num_bytes / self.host_bytes_per_s

    def file_s(self, num_bytes: int) -> float:
        """Seconds to read or write one file."""
        return self.disk_latency_s + num_bytes / self.disk_bytes_per_s


DEFAULT_TIER_TIMES = TierTimes()
