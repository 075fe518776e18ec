"""Output of the load generator: one line of JSON for each request, and a file about the run beside it.

    NAME.jsonl   in the order in which requests ended
    NAME.run     `GeneratorInfo` as JSON, written last: without it the run was cut off

Which point of a campaign they belong to, and whether they are complete, is decided by the caller (recordings.py).
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from disagg.loadtests.records import RequestRecord, to_line


class GeneratorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a run by the generator."""

    target: str
    """host:port of the gateway."""
    model: str
    label: str
    window_s: float
    """Duration that the arrivals stand for, in seconds: the divisor of goodput."""
    num_planned: int
    is_complete: bool
    """Whether every planned request was due and has its record."""
    started_at: str
    """Start of the run in UTC, ISO 8601."""
    elapsed_s: float
    """Seconds from time 0 to the end of the last request."""
    ttft_slo_s: float | None
    """Targets that were sent with the requests; None if there were none."""
    tpot_slo_s: float | None
    max_in_flight: int
    request_timeout_s: float | None
    cores: list[int]
    """Cores that the generator ran on."""
    niceness: int
    versions: dict[str, str]


def info_path(records: Path) -> Path:
    """Path of the run's description: `NAME.run` beside `NAME.jsonl`."""
    return records.with_suffix(".run")


class Recorder:
    """Collects the records of one run, in memory and, with a path, on disk. Owner of the files until `finish`.

    Args:
        path: `NAME.jsonl`, which is replaced if it exists. Its folder is made.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.records: list[RequestRecord] = []
        self._path = path
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            info_path(path).unlink(missing_ok=True)
        self._file = None if path is None else path.open("wb")

    def add(self, record: RequestRecord) -> None:
        """Add one record, and write it if there is a file."""
        self.records.append(record)
        if self._file is not None:
            self._file.write(to_line(record))

    def finish(self, info: GeneratorInfo) -> None:
        """Close the records and write `NAME.run`; nothing may be added after this."""
        if self._file is None or self._path is None:
            return
        self._file.close()
        target = info_path(self._path)
        part = target.with_suffix(".run.part")
        part.write_bytes(msgspec.json.format(msgspec.json.encode(info)) + b"\n")
        part.replace(target)


def read_info(records: Path) -> GeneratorInfo:
    """Read the description of the run of `NAME.jsonl`.

    Raises:
        ValueError: naming the file, if it is not there or is no `GeneratorInfo`.
    """
    file = info_path(records)
    try:
        return msgspec.json.decode(file.read_bytes(), type=GeneratorInfo)
    except FileNotFoundError:
        raise ValueError(f"{file}: not there; the run of {records.name} was cut off") from None
    except msgspec.MsgspecError as error:
        raise ValueError(f"{file}: {error}") from None
