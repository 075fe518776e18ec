"""The files of a contact, at most seven. Each is complete at any time: it is written under another name and renamed.

rows.jsonl      every finding, a line as it comes
summary.txt     what is printed at the end
report.json     all findings with where they come from, and the page made of them, report.md
logs.tgz        output of the sections and of the processes that they started
traces.tgz      for chrome://tracing or Perfetto
cubins.txz      kernels that were compiled here, to be carried next time
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from benchmarks.gpu.report import CheckReport, Row, as_json, as_markdown

FILES = ("rows.jsonl", "summary.txt", "report.json", "report.md", "logs.tgz", "traces.tgz", "cubins.txz")
MOST_LOG_BYTES = 1 << 20
"""Maximum bytes of a log that are kept, from its end."""
MOST_BYTES = 15 << 20
"""Of an archive as it is written; what is larger comes without its largest files."""
KERNEL_SUFFIXES = (".cubin", ".json", ".so")
TRACE_SUFFIX = ".trace.json"


class Output:
    """A folder with the files. Owner of the folder."""

    def __init__(self, folder: Path, logs: Path, kernels: Path | None) -> None:
        """`logs`: folder of logs and traces; `kernels`: Triton's cache."""
        self._folder, self._logs, self._kernels = folder, logs, kernels
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            (folder / name).unlink(missing_ok=True)
        self._known = set(_kernel_files(kernels))
        self._packed: list[Path] = []
        (folder / "rows.jsonl").touch()

    def add(self, rows: Sequence[Row]) -> None:
        """Append findings."""
        if rows:
            with (self._folder / "rows.jsonl").open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(asdict(row)) + "\n" for row in rows))

    def write(self, report: CheckReport, summary: str) -> None:
        """Bring all other files up to date, what is read first first."""
        self._place("summary.txt", (summary + "\n").encode())
        self._place("report.json", as_json(report).encode())
        self._place("report.md", as_markdown(report).encode())
        found = sorted(path for path in self._logs.iterdir() if path.is_file())
        traces = [path for path in found if path.name.endswith(TRACE_SUFFIX)]
        self._place("logs.tgz", _archive(self._logs, [path for path in found if path not in traces], "gz"))
        if traces:
            self._place("traces.tgz", _archive(self._logs, traces, "gz"))
        fresh = [path for path in _kernel_files(self._kernels) if path not in self._known]
        if self._kernels is not None and fresh != self._packed:
            self._place("cubins.txz", _archive(self._kernels, fresh, "xz"))
            self._packed = fresh

    def _place(self, name: str, content: bytes) -> None:
        temporary = self._folder / f".{name}.new"
        temporary.write_bytes(content)
        temporary.replace(self._folder / name)


def _kernel_files(folder: Path | None) -> list[Path]:
    if folder is None or not folder.is_dir():
        return []
    return sorted(path for path in folder.rglob("*") if path.suffix in KERNEL_SUFFIXES)


def _archive(folder: Path, paths: Sequence[Path], kind: Literal["gz", "xz"]) -> bytes:
    """The files with their names from `folder`, without the largest ones where they would be too many bytes."""
    chosen = sorted(paths, key=_size)
    while True:
        packed = _packed(folder, chosen, kind)
        if len(packed) <= MOST_BYTES or not chosen:
            return packed
        chosen.pop()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _packed(folder: Path, paths: Iterable[Path], kind: Literal["gz", "xz"]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for path in paths:
            try:
                content = path.read_bytes()
            except OSError:
                continue  # of a process that runs and has replaced it
            if kind == "gz" and not path.name.endswith(TRACE_SUFFIX):
                content = content[-MOST_LOG_BYTES:]
            member = tarfile.TarInfo(str(path.relative_to(folder)))
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    content = stream.getvalue()
    # Fast ones: a section waits for it.
    return gzip.compress(content, compresslevel=1) if kind == "gz" else lzma.compress(content, preset=0)
