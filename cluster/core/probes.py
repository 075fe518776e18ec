"""The probes of new workers: when, with which partner, and the results. Pure.

    registered ──> waits for a partner ──> a tiny request runs ──> ready
                     ^                       ├─ refused for want of room: again after a pause
                     └─ again, elsewhere ────┴─ failed ── `MAX_TRIES` times ──> failed

A prefill worker is probed with a decode worker, a decode worker with a prefill worker: prefill, hand-over and decode. A
worker with both roles is probed alone; an elastic one with another one where there is one, once in each role. Partners
are ready workers, or, where none is ready, another one that is new: then the probe is of both.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from disagg.proto.ids import Incarnation, WorkerId, join_name, model_of
from disagg.proto.messages import RoleName, WorkerInfo

MAX_TRIES = 3
"""Number of failed probes after which a worker counts as failed."""
RETRY_S = 0.5
PARTNER_WAIT_S = 5.0
"""Seconds that a decode worker waits for a prefill worker before it is probed alone: it can compute prompts, too."""
ROOM_WAIT_S = 30.0
"""Seconds that partners may have no room for a probe, or that a prefill worker waits while no decode worker fits it,
such as the first one of a new model in a rollout. Then it is used without a probe: nothing speaks against it."""
MAX_PROBES = 16
"""Largest number of probes at a time."""


class Probe(NamedTuple):
    """A tiny request for a pair, or for one worker alone."""

    number: int
    prefill: WorkerInfo | None
    """The prefill worker; None where `decode` computes the prompt, too."""
    decode: WorkerInfo

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        """Workers that compute it."""
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)


class Verdict(NamedTuple):
    """Result for a new worker."""

    worker_id: WorkerId
    is_ready: bool
    why: str = ""
    """Reason of the failure, or why it is ready without a probe."""


@dataclass(slots=True)
class _Trial:
    """A new worker that is being probed."""

    info: WorkerInfo
    since: float
    left: set[RoleName]
    """Roles in which it is still to be probed."""
    running: int | None = None
    """Number of its running probe, or None."""
    retry_at: float = -math.inf
    num_failed: int = 0
    avoided: set[WorkerId] = field(default_factory=set)
    """Partners with which a probe failed."""
    doing: str = ""
    alone_at: float = math.inf
    """Time from which on it no longer waits for a partner."""


class Probes:
    """Owner of the new workers and their running probes."""

    def __init__(self) -> None:
        self._trials: dict[WorkerId, _Trial] = {}
        self._running: dict[int, Probe] = {}
        self._num_probes = 0

    def add(self, info: WorkerInfo, now: float) -> None:
        """Add a new process of a worker that listens. Further registrations of the same process change nothing."""
        known = self._trials.get(info.worker_id)
        if known is None or known.info.incarnation != info.incarnation:
            self._trials[info.worker_id] = _Trial(info, now, set(info.roles))

    def forget(self, worker_id: WorkerId) -> None:
        """Forget a worker that has ended or will be ended. The result of its probe is ignored."""
        self._trials.pop(worker_id, None)

    def doing(self, worker_id: WorkerId) -> str:
        """What a new worker waits for, for operators; empty for any other worker."""
        trial = self._trials.get(worker_id)
        return "" if trial is None else trial.doing

    def next_due(self) -> float | None:
        """Time at which `begin` may have something new to do."""
        if len(self._running) >= MAX_PROBES:
            return None
        waiting = [trial for trial in self._trials.values() if trial.running is None]
        dues = [trial.retry_at for trial in waiting]
        dues += [max(trial.retry_at, trial.alone_at) for trial in waiting]
        return min((due for due in dues if math.isfinite(due)), default=None)

    def begin(
        self, ready: Sequence[WorkerInfo], pools: Collection[str], now: float
    ) -> tuple[list[Probe], list[Verdict]]:
        """The probes that begin now, and workers that cannot be probed.

        Args:
            ready: the workers that are ready.
            pools: the pools that are to have workers; their kinds are named after the roles.
            now: the time.
        """
        probes: list[Probe] = []
        verdicts: list[Verdict] = []
        for trial in list(self._trials.values()):
            if trial.running is not None or trial.retry_at > now or len(self._running) >= MAX_PROBES:
                continue
            partner = self._partner(trial, ready)
            trial.alone_at = math.inf if partner is not None else _alone_at(trial, ready, pools)
            if partner is not None:
                probes.append(self._start(trial, partner))
            elif now < trial.alone_at:
                other = "prefill" if "decode" in trial.info.roles else "decode"
                trial.retry_at, trial.doing = -math.inf, f"waits for a {other} worker, to be probed with it"
            elif "decode" in trial.info.roles:
                probes.append(self._start(trial, None))
            else:
                self.forget(trial.info.worker_id)
                verdicts.append(Verdict(trial.info.worker_id, True, "there is no decode worker to probe it with"))
        return probes, verdicts

    def ended(
        self, number: int, error: str, is_refusal: bool, present: Collection[Incarnation], now: float
    ) -> list[Verdict]:
        """Handle the end of a probe.

        Args:
            number: its number.
            error: reason of the failure; empty for success.
            is_refusal: whether it failed only because a worker had no room.
            present: the processes that are ready, or new. A probe with any other process proves nothing.
            now: the time.
        """
        probe = self._running.pop(number, None)
        if probe is None:
            return []
        trials = [trial for trial in self._trials.values() if trial.running == number]
        is_void = any(info.incarnation not in present for info in probe.workers)
        verdicts = [self._judge(trial, probe, error, is_refusal or is_void, now) for trial in trials]
        return [verdict for verdict in verdicts if verdict is not None]

    def _judge(self, trial: _Trial, probe: Probe, error: str, is_void: bool, now: float) -> Verdict | None:
        trial.running = None
        worker_id = trial.info.worker_id
        if not error:
            if probe.prefill is None:
                trial.left.clear()
            else:
                trial.left.discard("decode" if probe.decode.worker_id == worker_id else "prefill")
            verdict = None if trial.left else Verdict(worker_id, True)
        else:
            trial.retry_at = now + RETRY_S
            others = [info.worker_id for info in probe.workers if info.worker_id != worker_id]
            what = f"probe with {others[0]}" if others else "probe"
            trial.num_failed += not is_void
            trial.avoided.update(others)
            trial.doing = f"its {what} failed and is tried again: {error}"
            verdict = None
            if trial.num_failed >= MAX_TRIES:
                verdict = Verdict(worker_id, False, f"{trial.num_failed} probes of it failed; the last {what}: {error}")
            elif is_void and now >= trial.since + ROOM_WAIT_S:
                verdict = Verdict(worker_id, True, f"it could not be probed for {ROOM_WAIT_S:g} s: {error}")
        if verdict is not None:
            self.forget(worker_id)
        return verdict

    def _start(self, trial: _Trial, partner: WorkerInfo | None) -> Probe:
        self._num_probes += 1
        number, info = self._num_probes, trial.info
        if partner is None:
            probe = Probe(number, None, info)
        elif "decode" in trial.left:
            probe = Probe(number, partner, info)
        else:
            probe = Probe(number, info, partner)
        self._running[number] = probe
        for each in probe.workers:
            if (new := self._trials.get(each.worker_id)) is not None and new.running is None:
                new.running = number
                with_whom = [other.worker_id for other in probe.workers if other is not each]
                new.doing = f"is probed with {with_whom[0]}" if with_whom else "is probed"
        return probe

    def _partner(self, trial: _Trial, ready: Iterable[WorkerInfo]) -> WorkerInfo | None:
        """A worker that it could form a pair with: preferably one with which no probe has failed, that is ready, and
        that is in few probes."""
        if len(trial.info.roles) == 2 and not trial.info.is_elastic:
            return None
        role: RoleName = "prefill" if "decode" in trial.left else "decode"
        new = [other.info for other in self._trials.values() if other is not trial and other.running is None]
        candidates = [
            (info.worker_id in trial.avoided, is_new, self._num_running(info.worker_id), info)
            for infos, is_new in ((ready, False), (new, True))
            for info in infos
            if role in info.roles and _fit(info, trial.info)
        ]
        return min(candidates, key=lambda candidate: candidate[:3])[3] if candidates else None

    def _num_running(self, worker_id: WorkerId) -> int:
        return sum(worker_id == info.worker_id for probe in self._running.values() for info in probe.workers)


def _alone_at(trial: _Trial, ready: Iterable[WorkerInfo], pools: Collection[str]) -> float:
    """Time from which on a worker without a partner no longer waits for one: infinity if one that fits will come."""
    info, model = trial.info, model_of(trial.info.worker_id)
    if len(info.roles) == 2:
        return -math.inf
    if info.roles == ("decode",):
        return trial.since + PARTNER_WAIT_S if join_name(model, "prefill") in pools else -math.inf
    if join_name(model, "decode") not in pools:
        return -math.inf
    # A rollout may replace this one first, and go on to decode workers only when it is ready.
    is_first = any("decode" in other.roles and model_of(other.worker_id) == model for other in ready)
    return trial.since + ROOM_WAIT_S if is_first else math.inf


def _fit(one: WorkerInfo, other: WorkerInfo) -> bool:
    """Whether two workers could form a pair, if their roles differ."""
    return (
        one.is_elastic == other.is_elastic
        and len(one.roles) == len(other.roles)
        and model_of(one.worker_id) == model_of(other.worker_id)
        and (one.fingerprint, one.kv_layout) == (other.fingerprint, other.kv_layout)
    )
