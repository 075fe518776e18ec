"""Where the load generator writes: one line of JSON for each request, and beside it how the run went.

    NAME.jsonl   in the order in which requests ended
    NAME.run     `GeneratorInfo` as JSON, written last: without it the run was cut off

Which point of a campaign they belong to, and whether they are complete, is decided by the caller (recordings.py).
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from disagg.loadtests.records import RequestRecord, to_line


class GeneratorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """How a run went, as the generator saw it."""

    target: str
    """host:port of the gateway."""
    model: str
    label: str
    window_s: float
    """The time that the arrivals stand for: what goodput divides by."""
    num_planned: int
    is_complete: bool
    """Every planned request was due and has its record."""
    started_at: str
    """UTC, ISO 8601."""
    elapsed_s: float
    """From time 0 to the end of the last request."""
    ttft_slo_s: float | None
    """Targets that were sent with the requests; None where there were none."""
    tpot_slo_s: float | None
    max_in_flight: int
    request_timeout_s: float | None
    cores: list[int]
    """That the generator ran on."""
    niceness: int
    versions: dict[str, str]


def info_path(records: Path) -> Path:
    """`NAME.run` of `NAME.jsonl`."""
    return records.with_suffix(".run")


class Recorder:
    """Collects the records of one run, in memory and, with a path, on disk. Owner of the files until `finish`.

    Args:
        path: `NAME.jsonl`; what stood there is replaced. Its folder is made.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.records: list[RequestRecord] = []
        self._path = path
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            info_path(path).unlink(missing_ok=True)
        self._file = None if path is None else path.open("wb")

    def add(self, record: RequestRecord) -> None:
        """Take one record."""
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
    """How the run of `NAME.jsonl` went.

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
