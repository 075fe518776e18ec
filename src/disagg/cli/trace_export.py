"""`disagg trace export`: the latest requests as a timeline in the trace-event format, which Perfetto and Chrome open.

    spans ──> one process with a track for each request
          └─> one process for each worker, and for the gateway, with as many tracks as ran side by side

Slices of one track must nest or follow each other. Spans of one request, and requests of one worker, may overlap in any
way; so each goes to the first track of its group that is free.

The format: "Trace Event Format" of the Chromium project, complete events (`ph: X`) and metadata (`ph: M`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from disagg.cli.address import reaching
from disagg.cli.explain import no_request
from disagg.cli.operations.operate import open_client
from disagg.client import Explanation
from disagg.cluster.system.children import LaunchError
from disagg.gateway.operators.admin_answers import explanation_json
from disagg.proto.errors import ConfigError

VIEWER = "https://ui.perfetto.dev"
GATEWAY = "gateway"


def run_export(address: str, file: Path, limit: int, console: Console) -> None:
    """Write the latest requests to a file.

    Raises:
        ConfigError: if the file cannot be written.
        LaunchError: if there is no gateway, or no request.
    """
    with open_client(address) as client, reaching(address):
        requests = client.requests(limit)
    if not requests:
        raise LaunchError(no_request())
    try:
        file.write_text(json.dumps(trace_of(requests)), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written ({error.strerror})") from None
    counted = "1 request" if len(requests) == 1 else f"{len(requests)} requests"
    console.print(f"{counted} in {file}; open it in {VIEWER}", highlight=False, markup=False, soft_wrap=True)


@dataclass(frozen=True, slots=True)
class Slice:
    """A bar of the timeline."""

    name: str
    start_us: float
    duration_us: float
    details: dict[str, Any]

    @property
    def end_us(self) -> float:
        """Time at which it ends, in microseconds."""
        return self.start_us + self.duration_us


@dataclass(slots=True)
class Group:
    """Tracks under one name: as many as needed so that no two slices overlap on one."""

    name: str
    pid: int
    slices: list[Slice] = field(default_factory=list)

    def events(self, first_tid: int = 1) -> list[dict[str, Any]]:
        """Trace events of its slices, by track."""
        made: list[dict[str, Any]] = []
        free_at: list[float] = []
        for piece in sorted(self.slices, key=lambda piece: (piece.start_us, -piece.duration_us)):
            lane = next((i for i, end_us in enumerate(free_at) if end_us <= piece.start_us), len(free_at))
            if lane == len(free_at):
                free_at.append(0.0)
                made.append(_metadata("thread_name", self.pid, first_tid + lane, self.name))
            free_at[lane] = piece.end_us
            made.append(
                {
                    "name": piece.name,
                    "ph": "X",
                    "pid": self.pid,
                    "tid": first_tid + lane,
                    "ts": piece.start_us,
                    "dur": piece.duration_us,
                    "args": piece.details,
                }
            )
        return made


REQUESTS_PID = 1


def trace_of(requests: Sequence[Explanation]) -> dict[str, Any]:
    """The trace of these requests; times count from the first arrival. Pure."""
    begin_s = min((request.arrived_at for request in requests), default=0.0)
    ordered = sorted(requests, key=lambda request: request.arrived_at)
    slices = {request.request_id: _slices(request, begin_s) for request in ordered}
    events = [_metadata("process_name", REQUESTS_PID, 0, "requests")]
    next_tid = 1
    for request_id, pieces in slices.items():
        made = Group(request_id, REQUESTS_PID, [piece for _, piece in pieces]).events(next_tid)
        next_tid = max([next_tid, *(event["tid"] + 1 for event in made)])
        events += made
    for pid, (name, members) in enumerate(_by_worker(slices.values()), start=REQUESTS_PID + 1):
        events += [_metadata("process_name", pid, 0, name), *Group(name, pid, members).events()]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"begin_s": begin_s}}


def _slices(request: Explanation, begin_s: float) -> list[tuple[str, Slice]]:
    """Worker (or the gateway) and slice for each span. A span that has not ended ends with the latest time in the
    record."""
    arrived_us = (request.arrived_at - begin_s) * 1e6
    last_ms = max((max(span.start_ms, span.end_ms) for span in request.spans), default=0.0)
    details = {name: value for name, value in explanation_json(request).items() if not isinstance(value, (list, dict))}
    found = []
    for span in request.spans:
        lasts = not span.HasField("end_ms")
        stop_ms = last_ms if lasts else span.end_ms
        own = {"worker": span.worker or GATEWAY, **({"lasts": True} if lasts else {}), **details}
        piece = Slice(
            span.stage,
            round(arrived_us + span.start_ms * 1000, 3),
            round(max(0.0, stop_ms - span.start_ms) * 1000, 3),
            own,
        )
        found.append((span.worker or GATEWAY, piece))
    return found


def _by_worker(slices: Iterable[Sequence[tuple[str, Slice]]]) -> list[tuple[str, list[Slice]]]:
    """Slices of the gateway first, then of the workers by name."""
    found: dict[str, list[Slice]] = {}
    for pieces in slices:
        for worker, piece in pieces:
            found.setdefault(worker, []).append(piece)
    return sorted(found.items(), key=lambda item: (item[0] != GATEWAY, item[0]))


def _metadata(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
