"""Workers of one machine slow each other down: they share the memory's bandwidth, and one of them its core with the
gateway.

A step is delayed by a share of the time in which neighbours compute meanwhile, by kind (a step with prompt tokens is a
prefill), and by the time that the gateway takes of its worker's core. This is linear, so that the shares can be fitted
to recorded steps by least squares (`simulator/durations/recorded.py`).

    begin ... behind_s ... end    one step, whose end is postponed until it has caught up (exact engine)
    stretch, occupy               many decode steps at once, at the pace of what neighbours do now (fast engine)

Owner: the simulated cluster.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from disagg.proto.ids import WorkerId
from disagg.simulator.durations.overheads import Sharing
from disagg.simulator.world.clock import EventLoop

Kind = Literal["prefill", "decode"]
_LEAST_S = 2e-5
"""Seconds of delay below which a step counts as ended."""


class RunningStep(NamedTuple):
    """A step under way, with the total times that all workers and the gateway had computed when it began."""

    worker_id: WorkerId
    kind: Kind
    began_at: float
    alone_s: float
    """Seconds of the step without neighbours."""
    prefill_s: float
    decode_s: float
    gateway_s: float


class Machine:
    """The time that workers and gateway have computed on one machine, and the delays of steps that follow from it."""

    def __init__(self, loop: EventLoop, sharing: Sharing, gateway_neighbour: WorkerId | None) -> None:
        self._loop = loop
        self._sharing = sharing
        self._neighbour = gateway_neighbour
        self._num_busy = {"prefill": 0, "decode": 0}
        self._busy_s = {"prefill": 0.0, "decode": 0.0}
        """Seconds that all workers together have computed steps of each kind, up to `_counted_at`."""
        self._gateway_s = 0.0
        self._counted_at = 0.0
        self._kinds: dict[WorkerId, Kind] = {}
        """The kind of steps of each worker that called `occupy`."""
        self._gateway_rates: dict[WorkerId, float] = {}
        """For each of these workers: the share of the gateway's core that its messages take."""
        self._listeners: dict[WorkerId, Callable[[], None]] = {}

    # ------------------------------------------------------------ one step

    def gateway_worked(self, worker_id: WorkerId, num_tokens: int) -> None:
        """Count the gateway's time for a message of a worker with `num_tokens` tokens; for the gateway's neighbour see
        `gap_s`."""
        if worker_id != self._neighbour:
            self._gateway_s += self._message_s(num_tokens)

    def gap_s(self, worker_id: WorkerId, num_tokens: int) -> float:
        """Seconds by which a worker's next step begins later because the gateway first takes its message with
        `num_tokens` tokens: 0 except for the gateway's neighbour."""
        return self._message_s(num_tokens) if worker_id == self._neighbour else 0.0

    def begin(self, worker_id: WorkerId, kind: Kind, alone_s: float) -> RunningStep:
        """Begin a step of a worker."""
        running = self.running(worker_id, kind, alone_s)
        self._num_busy[kind] += 1
        return running

    def behind_s(self, step: RunningStep) -> float:
        """Seconds of a step that are left now; 0 if it has ended."""
        self._count()
        elapsed = self._loop.now - step.began_at
        beside = {"prefill": self._busy_s["prefill"] - step.prefill_s, "decode": self._busy_s["decode"] - step.decode_s}
        beside[step.kind] -= elapsed
        lost_s = self._sharing.lost_s(step.kind, beside["prefill"], beside["decode"])
        if step.worker_id == self._neighbour:
            lost_s += self._gateway_s - step.gateway_s
        left_s = step.alone_s + lost_s - elapsed
        return left_s if left_s > _LEAST_S else 0.0

    def end(self, step: RunningStep) -> None:
        """End a step, or that of a worker that is gone."""
        self._count()
        self._num_busy[step.kind] -= 1

    # ------------------------------------------------------------ many steps

    def listen(self, worker_id: WorkerId, changed: Callable[[], None]) -> None:
        """Call `changed` whenever another worker begins or ends to compute prompts or to decode."""
        self._listeners[worker_id] = changed

    def forget(self, worker_id: WorkerId) -> None:
        """Remove a worker that is gone."""
        self.occupy(worker_id, None)
        self._listeners.pop(worker_id, None)

    def occupy(self, worker_id: WorkerId, kind: Kind | None, num_decodes: int = 0, step_s: float = 1.0) -> None:
        """Set what a worker computes from now on: steps with prompts, decode steps of `num_decodes` sequences and about
        `step_s` each, or nothing."""
        before = self._kinds.get(worker_id)
        if worker_id != self._neighbour:
            self._gateway_rates[worker_id] = self._message_s(num_decodes) / step_s if kind == "decode" else 0.0
        if before == kind:
            return
        self._count()
        if before is not None:
            self._num_busy[before] -= 1
            del self._kinds[worker_id]
        if kind is not None:
            self._num_busy[kind] += 1
            self._kinds[worker_id] = kind
        for other, changed in self._listeners.items():
            if other != worker_id:
                changed()

    def running(self, worker_id: WorkerId, kind: Kind, alone_s: float) -> RunningStep:
        """A step of a worker that `occupy` already counts."""
        self._count()
        busy = self._busy_s
        return RunningStep(worker_id, kind, self._loop.now, alone_s, busy["prefill"], busy["decode"], self._gateway_s)

    def stretch(self, worker_id: WorkerId) -> float:
        """The factor by which neighbours lengthen a decode step, as long as they do what they do now."""
        others = dict(self._num_busy)
        if (own := self._kinds.get(worker_id)) is not None:
            others[own] -= 1
        lost = self._sharing.lost_s("decode", others["prefill"], others["decode"])
        if worker_id == self._neighbour:
            lost += sum(self._gateway_rates.values())
        return 1.0 / (1.0 - min(0.9, lost))

    # ------------------------------------------------------------ what both need

    def _message_s(self, num_tokens: int) -> float:
        return self._sharing.update_s + num_tokens * self._sharing.token_s

    def _count(self) -> None:
        passed, self._counted_at = self._loop.now - self._counted_at, self._loop.now
        if passed:
            for kind, number in self._num_busy.items():
                self._busy_s[kind] += number * passed
            self._gateway_s += passed * sum(self._gateway_rates.values())
