"""Which section of a contact runs when: a pure core, (event, now) -> commands.

    phase 1   what all others depend on, one after the other
    phase 2   tests, at the same time
    phase 3   figures, each alone, by priority
    phase 4   what failed, once more: by the reference ops, where every op alone was right
    phase 5   with launches that wait for their kernels (CUDA_LAUNCH_BLOCKING=1)
    phase 6   under compute-sanitizer

What was ended at its limit, and had reported no failure until then, is not run once more: it would be ended again. A
phase begins when all of the one before have ended. Tests leave the figures their least useful times, if that is not
more than half of what is left: a test that hangs costs itself, and no figure. What can no longer be of use is not
begun.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from benchmarks.gpu.contact.sections import Section
from benchmarks.gpu.isolation import CONTEXT_LOST

FIRST_PHASE = 1
WRITING_S = 15.0
"""Kept for the last files: of the budget, not of the sections."""
USUAL_BUDGET_S = 320.0
"""Which the limits of sections are made for; a longer budget lengthens them in proportion."""
RERUN_LIMIT_S, RERUN_LEAST_S = 25.0, 8.0
MOST_RESTARTS = 5
"""Of a section that loses its context again and again."""

Mode = Literal["plain", "rest", "reference", "blocking", "memcheck"]
"""How a section runs: as planned; without what it did before its context was lost; or once more, to find out why."""
RERUN_PHASES: Mapping[Mode, int] = {"reference": 4, "blocking": 5, "memcheck": 6}


# ---------------------------------------------------------------- events and commands


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True)
class Ended:
    """A section's process, and all that it started, has ended."""

    name: str
    status: int | None
    """None: it was ended by `Kill`."""
    is_bad: bool = False
    """Whether it reported a failure."""
    wrong_ops: tuple[str, ...] = ()
    """Which ops are wrong, by the probe."""


@dataclass(frozen=True)
class Cut:
    """Whoever started the contact wants it to end now."""


Event = Tick | Ended | Cut


@dataclass(frozen=True)
class Start:
    """Run a section's process."""

    section: Section
    mode: Mode
    limit_s: float
    without: tuple[str, ...]
    """Ops that take the reference."""


@dataclass(frozen=True)
class Kill:
    """End a section's process and all that it started; `Ended` follows."""

    name: str


@dataclass(frozen=True)
class Skip:
    """A section is not run."""

    section: Section
    mode: Mode
    reason: str
    is_missing: bool = False
    """Whether the section does not exist here, which is no failure of the machine."""


@dataclass(frozen=True)
class Write:
    """Bring all files up to date."""


@dataclass(frozen=True)
class Stop:
    """Nothing runs, and nothing will."""


Command = Start | Kill | Skip | Write | Stop


# ---------------------------------------------------------------- the schedule


@dataclass(frozen=True)
class _Run:
    section: Section
    mode: Mode
    phase: int


@dataclass(frozen=True)
class _Running:
    run: _Run
    ends_at: float
    is_killed: bool = False


class Schedule:
    """Decides; owned by whoever carries its commands out."""

    def __init__(
        self,
        sections: Sequence[Section],
        *,
        now: float,
        budget_s: float,
        at_once: int,
        missing: Mapping[str, str] | None = None,
        has_memcheck: bool = False,
    ) -> None:
        """`at_once`: most sections that run at the same time; `missing`: why a section, by name, cannot be run here.

        Raises:
            ValueError: no time is left for sections, or none could run.
        """
        if budget_s <= WRITING_S:
            raise ValueError(f"budget: must be more than {WRITING_S:.0f} s, not {budget_s:g}")
        if at_once < 1:
            raise ValueError(f"at_once: must be at least 1, not {at_once}")
        self._ends_at = now + budget_s - WRITING_S
        self._stretch = max(1.0, budget_s / USUAL_BUDGET_S)
        self._at_once = at_once
        self._missing = dict(missing or {})
        self._has_memcheck = has_memcheck
        self._waiting = [_Run(section, "plain", section.phase) for section in sections]
        self._running: dict[str, _Running] = {}
        self._failed: set[str] = set()
        """Sections that did not end by themselves with status 0, or were not begun."""
        self._restarts: dict[str, int] = {}
        self._without: tuple[str, ...] = ()
        self._ops_are_right = False
        self._is_cut = False

    def handle(self, event: Event, now: float) -> list[Command]:
        """What to do; to be called for each event, and with `Tick` at least twice a second.

        Raises:
            ValueError: `Ended` of what does not run.
        """
        commands: list[Command] = []
        match event:
            case Ended():
                self._end(event)
                commands.append(Write())
            case Cut():
                self._is_cut = True
                commands += self._kill(list(self._running))
            case Tick():
                pass
        if self._is_cut:
            self._waiting.clear()
        commands += self._kill([name for name, running in self._running.items() if running.ends_at <= now])
        commands += self._begin(now)
        if not self._running and not self._waiting:
            commands.append(Stop())
        return commands

    def _kill(self, names: Sequence[str]) -> list[Command]:
        fresh = [name for name in names if not self._running[name].is_killed]
        for name in fresh:
            self._running[name] = replace(self._running[name], is_killed=True)
        return [Kill(name) for name in fresh]

    # ---------------------------------------------------------------- ends

    def _end(self, event: Ended) -> None:
        if event.name not in self._running:
            raise ValueError(f"{event.name}: it does not run")
        run = self._running.pop(event.name).run
        section, is_bad = run.section, event.is_bad or event.status not in (0, None)
        if run.mode not in ("plain", "rest"):
            return
        if event.status != 0:
            self._failed.add(section.name)
        if section.probes:
            self._without = event.wrong_ops
            self._ops_are_right = event.status == 0 and not is_bad and not event.wrong_ops
        if event.status != 0 and section.vital:
            self._waiting.clear()
        elif event.status == CONTEXT_LOST and section.tests and self._restarts.get(section.name, 0) < MOST_RESTARTS:
            self._restarts[section.name] = self._restarts.get(section.name, 0) + 1
            self._waiting.append(_Run(section, "rest", section.phase))
        if is_bad:
            self._add_reruns(section)

    def _add_reruns(self, section: Section) -> None:
        modes: list[Mode] = []
        if section.reference and self._ops_are_right:
            modes.append("reference")
        if section.rerun:
            modes += ["blocking", "memcheck"] if self._has_memcheck else ["blocking"]
        there = {(run.section.name, run.mode) for run in self._waiting}
        self._waiting += [
            _Run(section, mode, RERUN_PHASES[mode]) for mode in modes if (section.name, mode) not in there
        ]

    # ---------------------------------------------------------------- beginnings

    def _begin(self, now: float) -> list[Command]:
        commands: list[Command] = []
        while self._waiting:
            runs = [*self._waiting, *(running.run for running in self._running.values())]
            phase = min(run.phase for run in runs)
            before = len(self._waiting)
            for run in sorted(self._waiting, key=lambda run: (run.phase, run.section.priority)):
                if run.phase == phase:
                    commands += self._try(run, now)
            if len(self._waiting) == before:
                break
        return commands

    def _try(self, run: _Run, now: float) -> list[Command]:
        section = run.section
        refusal = self._refusal(run)
        if refusal is None and not self._fits(run):
            return []
        left_s = self._ends_at - now
        left_s -= min(self._kept_s(run.phase), left_s / 2)
        least_s = section.least_s if run.mode in ("plain", "rest") else min(section.least_s, RERUN_LEAST_S)
        if refusal is None and left_s < least_s:
            refusal = f"not begun: {max(left_s, 0.0):.0f} s were left, and it needs {least_s:.0f}"
        self._waiting.remove(run)
        if refusal is not None:
            if run.mode == "plain":
                self._failed.add(section.name)
            if section.vital:
                self._waiting.clear()
            return [Skip(section, run.mode, refusal, is_missing=section.name in self._missing)]
        limit_s = min(left_s, self._limit_s(run))
        self._running[section.name] = _Running(run, now + limit_s)
        return [Start(section, run.mode, limit_s, () if run.mode == "reference" else self._without)]

    def _limit_s(self, run: _Run) -> float:
        if run.mode in ("plain", "rest"):
            return run.section.limit_s * self._stretch
        return min(run.section.limit_s, RERUN_LIMIT_S) * self._stretch

    def _refusal(self, run: _Run) -> str | None:
        if run.section.name in self._missing:
            return self._missing[run.section.name]
        failed = [name for name in run.section.needs if name in self._failed]
        return f"not begun: {', '.join(failed)} failed" if failed else None

    def _fits(self, run: _Run) -> bool:
        if run.section.name in self._running:
            return False
        open_names = {waiting.section.name for waiting in self._waiting if waiting.phase <= run.phase} | set(
            self._running
        )
        if open_names.intersection(run.section.needs):
            return False
        if run.section.alone:
            return not self._running
        others = self._running.values()
        return len(others) < self._at_once and not any(other.run.section.alone for other in others)

    def _kept_s(self, phase: int) -> float:
        """For sections of later phases. What all others depend on keeps nothing for them."""
        if phase == FIRST_PHASE:
            return 0.0
        later = [run for run in self._waiting if run.mode == "plain" and run.phase > phase]
        return sum(run.section.least_s for run in later if self._refusal(run) is None)
