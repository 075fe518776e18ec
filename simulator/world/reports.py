"""The load reports of a worker to the router: their times and their steps, as in `engine/shell/service.py`.

    changed ──> report, at least `report_interval_s` after the last one       unchanged for `report_idle_s` ──> report

A load is read when its report is sent; that of a real worker may be up to a step older.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from disagg.engine.core.reports import StepSampler
from disagg.proto.ids import Incarnation, WorkerId
from disagg.proto.messages import KvEvent, Load, StepSample, WorkerMetrics, WorkerReport
from disagg.simulator.world.clock import EventLoop


class Reports:
    """The report stream of one worker. `load`, `kv_events` and `metrics` say what a report carries, `send` sends it."""

    def __init__(
        self,
        loop: EventLoop,
        worker_id: WorkerId,
        incarnation: Incarnation,
        interval_s: float,
        idle_s: float | None,
        load: Callable[[], Load],
        kv_events: Callable[[], tuple[KvEvent, ...]],
        metrics: Callable[[], WorkerMetrics] | None,
        send: Callable[[WorkerReport], None],
    ) -> None:
        self._loop = loop
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._interval_s = interval_s
        self._idle_s = idle_s
        self._load = load
        self._kv_events = kv_events
        self._metrics = metrics
        self._send = send
        self._steps = StepSampler()
        self._sequence = 0
        self._last = self._sent_at = -interval_s
        self._due = math.inf
        """When the next report is sent."""
        self._planned: list[float] = []
        """When it is checked whether a report is due; the soonest time last."""
        self._has_changed = False
        self._is_stopped = False
        self._late: list[StepSample] = []
        """Samples of steps that a real worker would have reported earlier."""
        self._report_is_due = False
        """Whether the last step was added late and still needs a report, which is due when the interval is over."""

    def offer(self, step: StepSample) -> None:
        """Offer a step to the next report."""
        self._steps.offer(step)

    def add(self, step: StepSample) -> None:
        """Add a step of the idle worker to the next report."""
        self._steps.add(step)

    def add_past_step(self, step: StepSample, ended: float) -> None:
        """Offer a step that ended at `ended`, perhaps before others that have ended by now. Steps that ended before the
        last report are added to the next one, as if the reports between had been sent."""
        if self._report_is_due and ended > self._last + self._interval_s:
            self._last += self._interval_s
            self._late += self._steps.take()
        self._steps.offer(step)
        self._report_is_due = ended < self._last + self._interval_s
        if not self._report_is_due:
            self._last = ended
            self._late += self._steps.take()

    def note(self) -> None:
        """Plan a report because the load has changed."""
        if not self._has_changed and not self._is_stopped:
            self._has_changed = True
            self._plan(max(self._loop.now, self._last + self._interval_s))

    def start(self, snapshot: KvEvent) -> None:
        """Send the first report, which has all cached blocks."""
        self._report((snapshot,))

    def stop(self) -> None:
        """Send no more reports."""
        self._is_stopped = True

    def _plan(self, when: float) -> None:
        self._due = when
        if not self._planned or when < self._planned[-1]:
            self._planned.append(when)
            self._loop.at(when, self._on_due)

    def _on_due(self) -> None:
        self._planned.pop()
        if self._is_stopped or self._due == math.inf:
            return
        if self._due <= self._loop.now:
            self._due = math.inf
            self._report(self._kv_events())
        elif not self._planned or self._due < self._planned[-1]:
            self._plan(self._due)

    def force_report(self, send: Callable[[WorkerReport], None]) -> None:
        """Give `send` a report now, unless another one is on its way."""
        if not self._is_stopped and self._loop.now > self._sent_at + self._interval_s:
            self._report(self._kv_events(), send)

    def _report(self, kv_events: tuple[KvEvent, ...], send: Callable[[WorkerReport], None] | None = None) -> None:
        load = self._load()  # which may offer late steps
        self._has_changed = False
        self._last = self._sent_at = self._loop.now
        report = WorkerReport(
            worker_id=self._worker_id,
            incarnation=self._incarnation,
            sequence=self._sequence,
            load=load,
            kv_events=kv_events,
            steps=(*self._late, *self._steps.take()),
            metrics=None if self._metrics is None else self._metrics(),
        )
        self._late.clear()
        self._report_is_due = False
        self._sequence += 1
        (send or self._send)(report)
        if self._idle_s is not None:
            self._plan(self._last + self._interval_s + self._idle_s)
