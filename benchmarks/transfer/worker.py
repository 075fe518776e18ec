"""A worker that notes when its engine did what, for `transfer.py`: the real one, with an engine core that writes times
down. `python -m benchmarks.transfer.worker` takes the place of `disagg.cluster.hosts.worker_host`.

Noted are the times of all steps, of token 0 on a prefill worker, of the order to join on a decode worker, and of the
first step with a joined sequence. They are on CLOCK_MONOTONIC, which all processes of a machine share. At its end the
worker writes them to the folder that the environment variable names, one file a worker.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
from typing_extensions import override

from disagg.cluster.hosts import worker_host
from disagg.cluster.hosts.host import Phases, run_child
from disagg.cluster.hosts.worker_host import WorkerHost
from disagg.connections.cluster_secret import ClusterSecret
from disagg.connections.shell.blocking_stream import Resolve
from disagg.engine.commands import Command, Event, Join, PrefillComputed
from disagg.engine.config import WorkerConfig
from disagg.engine.core.engine_core import EngineCore
from disagg.engine.shell import worker

FOLDER_VARIABLE = "DISAGG_BENCHMARK_TIMELINES"


class Timeline(msgspec.Struct, kw_only=True):
    """What one worker noted; seconds on CLOCK_MONOTONIC. Requests by their id: each is tried once here."""

    steps: list[tuple[float, float]] = []
    """Begin and end of each step that computed something."""
    computed: dict[str, float] = {}
    """When a prefill worker had token 0."""
    join_ordered: dict[str, float] = {}
    """When the engine of a decode worker got the command to join; all KV and the commit are there."""
    first_step: dict[str, float] = {}
    """When its first step on a decode worker began."""


class NotingCore(EngineCore):
    """An engine core that keeps a timeline."""

    timeline: Timeline

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.timeline = _timelines[0] if _timelines else Timeline()
        _timelines[:] = [self.timeline]
        self._joining: set[str] = set()

    @override
    def handle(self, command: Command, now: float) -> list[Event]:
        """`now` is when the command was posted."""
        if isinstance(command, Join):
            self.timeline.join_ordered[command.key.request_id] = now
            self._joining.add(command.key.request_id)
        return super().handle(command, now)

    @override
    def run_step(self) -> list[Event]:
        events = super().run_step()
        ended = time.monotonic()
        if self.last_plan.entries:
            self.timeline.steps.append((self.last_began, ended))
        for event in events:
            if isinstance(event, PrefillComputed):
                self.timeline.computed[event.key.request_id] = ended
        if self._joining:
            self._note_first_steps(self.last_began)
        return events

    def _note_first_steps(self, began: float) -> None:
        for entry in self.last_plan.entries:
            request_id = entry.sequence.key.request_id
            if request_id in self._joining:
                self._joining.discard(request_id)
                self.timeline.first_step[request_id] = began


_timelines: list[Timeline] = []
"""The timelines of this process's only core."""
_worker_ids: list[str] = []


def make_host(config: WorkerConfig, resolve: Resolve, secret: ClusterSecret, phases: Phases = ()) -> WorkerHost:
    """The usual worker."""
    _worker_ids.append(config.worker_id)
    return worker_host.make_host(config, resolve, secret, phases)


def main() -> int:
    """Be a worker; write the timeline when it has ended."""
    worker.EngineCore = NotingCore  # type: ignore[attr-defined]  # the worker makes its core by this name
    status = run_child(WorkerConfig, make_host)
    for worker_id, timeline in zip(_worker_ids, _timelines, strict=False):
        file = Path(os.environ[FOLDER_VARIABLE]) / f"{worker_id}.json"
        file.write_bytes(msgspec.json.encode(timeline))
    return status


if __name__ == "__main__":
    sys.exit(main())
