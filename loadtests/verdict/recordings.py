"""Recordings on disk: a folder of measured points, so that hours of load tests can stop and continue.

    begin(point) -> KEY.jsonl, one record a line ... finish(info) -> KEY.json

The side file is written last, in one piece: a point with a side file is complete and is not measured again. The key is
a hash of everything that shapes the outcome and was chosen beforehand (cluster, workload, arrivals with rate and seed,
repeat); a change of any of them is another point. What is written once is scored later, for as many limits as one
likes.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from disagg.loadtests.records import RequestRecord, read_file
from disagg.loadtests.workload.arrivals import ArrivalConfig
from disagg.loadtests.workload.workload import WorkloadConfig


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of one measurement."""

    shape: str
    """Name of the cluster's shape, for people."""
    shape_config: dict[str, Any]
    """The cluster's whole configuration, as values of JSON."""
    workload: WorkloadConfig
    arrivals: ArrivalConfig
    repeat: int = 0
    """Number of the measurement of this shape at this rate, from 0."""

    def key(self) -> str:
        """Name of its files without their endings; equal for equal measurements."""
        canonical = msgspec.json.encode(self, order="deterministic")
        digest = hashlib.blake2b(canonical, digest_size=8).hexdigest()
        rate = "trace" if self.arrivals.rate_per_s is None else f"{self.arrivals.rate_per_s:g}"
        shape = re.sub(r"[^A-Za-z0-9.]+", "-", self.shape).strip("-") or "shape"
        return f"{shape}_{rate}_{self.repeat}_{digest}"


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Description of one complete run: the side file of its records."""

    point: Point
    duration_s: float
    """Duration that the arrivals stand for, in seconds: the divisor of goodput."""
    num_requests: int
    """Number of requests that were due, each with one record."""
    started_at: str = ""
    """Date and time of the start, ISO 8601."""
    commit: str = ""
    command: str = ""
    versions: dict[str, str] = {}
    """Versions of the packages that matter for speed."""


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A run and its records."""

    info: RunInfo
    records: list[RequestRecord]

    @property
    def rate_per_s(self) -> float:
        """Rate of the arrivals in requests per second."""
        return self.info.point.arrivals.rate_per_s or self.info.num_requests / self.info.duration_s


def records_path(directory: Path, point: Point) -> Path:
    """Path of a point's records, whether they exist or not."""
    return directory / f"{point.key()}.jsonl"


def begin(directory: Path, point: Point) -> Path:
    """Mark the point as incomplete until `finish`; returns the path of its records, which are deleted if they exist."""
    directory.mkdir(parents=True, exist_ok=True)
    records = records_path(directory, point)
    records.with_suffix(".json").unlink(missing_ok=True)
    records.unlink(missing_ok=True)
    return records


def finish(directory: Path, info: RunInfo) -> None:
    """Mark a point as complete; ValueError if the number of its records is not that of its requests."""
    records = records_path(directory, info.point)
    _read_records(records, info)
    side = records.with_suffix(".json")
    part = side.with_suffix(".json.part")
    part.write_bytes(msgspec.json.format(msgspec.json.encode(info), indent=2) + b"\n")
    part.replace(side)


def load(directory: Path, point: Point) -> Recording | None:
    """Load the recording of a point; None if it is not complete.

    Raises:
        ValueError: naming the file, if there is a side file and the records do not match it.
    """
    side = records_path(directory, point).with_suffix(".json")
    return _load(side) if side.exists() else None


def load_all(directory: Path) -> list[Recording]:
    """Load all complete points of a folder, by the names of their files. Raises `ValueError` as `load` does."""
    return [_load(side) for side in sorted(directory.glob("*.json"))]


def _load(side: Path) -> Recording:
    try:
        info = msgspec.json.decode(side.read_bytes(), type=RunInfo)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{side}: {error}") from None
    records = side.with_suffix(".jsonl")
    return Recording(info=info, records=_read_records(records, info))


def _read_records(path: Path, info: RunInfo) -> list[RequestRecord]:
    records = read_file(path) if path.exists() else []
    indices = sorted(record.index for record in records)
    if indices != list(range(info.num_requests)):
        raise ValueError(
            f"{path}: expected one record for each of {info.num_requests} requests; got {len(records)} records "
            f"of {len(set(indices))} requests"
        )
    return records
