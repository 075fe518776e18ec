"""The twin's decision: when settings are compared, on which requests, and whether the present one is changed.

    look(load) ── nothing due ──> None
              └── due ──> every setting replays the same requests at both rates ──> Comparison: what is chosen, and why

The 40 to 600 latest requests since the last change of the load (`changes.py`) are compared. After such a change the
comparison is repeated whenever their number has grown by half, until it is 200, and then each minute. The setting
changes only if another one is better by more than the error of the difference and one per cent, and not within a minute
of its last change unless the load has changed since.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from disagg.router.config import Decodes
from disagg.router.telemetry.recent_load import Arrival, Load
from disagg.simulator.twin.changes import find_change
from disagg.simulator.twin.comparison import HYSTERESIS, Attained, Comparison, paired
from disagg.simulator.twin.replay import mean_output, replay
from disagg.simulator.twin.settings import most_settings, settings_of

EVERY_S = 60.0
RATES = (1.0, 1.15)
"""Multiples of the measured rate at which settings are compared, so that the chosen one holds for a higher rate too."""
LEAST, ENOUGH, MOST = 40, 200, 600
"""Numbers of requests: the least of a comparison, those from which on comparisons are made by time alone, and the most
of a comparison."""
LEAD_IN = 50
"""Number of earlier requests that are replayed and not counted."""
MORE = 1.5
MOST_PROMPT_TOKENS, MOST_OUTPUT_TOKENS = 8_000_000, 1_000_000
"""Most tokens of all requests under all settings of a comparison. Fewer requests are compared if they are longer, but
not fewer than `LEAST`."""

Replay = Callable[[Load, Sequence[Arrival], int, Decodes, float], list[tuple[int, bool]]]
"""The signature of `replay.replay`."""


class _Window(NamedTuple):
    arrivals: Sequence[Arrival]
    num_lead: int

    @property
    def num_targeted(self) -> int:
        return sum(each.has_targets for each in self.arrivals[self.num_lead :])


class Twin:
    """Decides about the setting of one cluster. Keeps the times of the latest comparison and changes, but no
    requests."""

    def __init__(self, replay: Replay = replay) -> None:
        self._replay = replay
        self._since_s = -float("inf")
        """Arrival time from which on requests belong to the present load."""
        self._compared_s = -float("inf")
        self._seen_s: float | None = None
        """Time of the latest arrival in the last comparison."""
        self._num_compared = 0
        """Number of requests of the present load in the last comparison."""
        self._is_put_off = False
        """Whether another setting was better, but the last change too recent."""
        self._cause = "first comparison"
        """Why the next comparison is due at once; empty if it is not."""
        self._changed_s = -float("inf")
        """When the load or the workers changed."""
        self._switched_s = -float("inf")
        self._decodes: Decodes | None = None
        self._workers: tuple[object, ...] = ()

    def look(self, load: Load) -> Comparison | None:
        """Compare the settings if that is due; else None. To be called every few seconds. With one worker the settings
        do not differ."""
        if load.decodes is None or len(load.workers) < 2:
            return None
        now = load.now_s
        if self._decodes not in (None, load.decodes):  # changed by another caller
            self._switched_s = now
        self._decodes = load.decodes
        self._notice(load)
        window = self._window(load.arrivals, most_settings(len(load.workers)))
        number = window.num_targeted
        cause = self._due(number, now, load.arrivals[-1].at_s if load.arrivals else None)
        if cause is None:
            return None
        comparison = self._compare(load, window, cause)
        self._compared_s, self._num_compared, self._cause = now, number, ""
        self._seen_s = load.arrivals[-1].at_s
        self._is_put_off = not comparison.is_change and comparison.difference > comparison.needed
        if comparison.is_change:
            self._switched_s, self._decodes = now, comparison.chosen
        return comparison

    def _notice(self, load: Load) -> None:
        """Note a change of the load or of the workers."""
        workers = tuple(sorted(worker.size for worker in load.workers))
        if workers != self._workers:
            if self._workers:
                self._cause, self._changed_s = "the workers changed", load.now_s
            self._workers = workers
        if self._seen_s is None:
            return
        before = [each for each in load.arrivals if self._since_s <= each.at_s <= self._seen_s]
        change = find_change(before, [each for each in load.arrivals if each.at_s > self._seen_s])
        if change is not None:
            self._since_s, self._changed_s, self._cause = change.at_s, load.now_s, change.what

    def _window(self, arrivals: Sequence[Arrival], num_settings: int) -> _Window:
        """The latest requests of the present load, and some earlier ones to lead in."""
        first, num_prompt, num_output, mean = len(arrivals), 0, 0.0, mean_output(arrivals)
        while first > 0 and len(arrivals) - first < MOST + LEAD_IN:
            each = arrivals[first - 1]
            num_prompt += each.prompt_tokens
            num_output += each.output_tokens if each.is_complete else max(each.output_tokens, mean)
            is_long = num_prompt * num_settings > MOST_PROMPT_TOKENS or num_output * num_settings > MOST_OUTPUT_TOKENS
            if is_long and len(arrivals) - first >= LEAST:
                break
            first -= 1
        kept = arrivals[first:]
        num_lead = max(len(kept) - MOST, sum(each.at_s < self._since_s for each in kept), 0)
        start = max(0, num_lead - LEAD_IN)
        return _Window(kept[start:], num_lead - start)

    def _due(self, number: int, now: float, latest_s: float | None) -> str | None:
        """Why settings are to be compared now, or None. `latest_s`: when the latest request arrived."""
        if number < LEAST:
            return None
        if self._cause:
            return self._cause
        if self._num_compared < ENOUGH and number >= MORE * self._num_compared:
            return "more requests came"
        if latest_s == self._seen_s and not self._is_put_off:
            return None
        return f"{EVERY_S:.0f} s passed" if now - self._compared_s >= EVERY_S else None

    def _compare(self, load: Load, window: _Window, cause: str) -> Comparison:
        present = load.decodes
        assert present is not None
        settings = settings_of(window.arrivals, [worker.steps for worker in load.workers], present)
        met = {
            setting: [self._replay(load, window.arrivals, window.num_lead, setting, rate) for rate in RATES]
            for setting in settings
        }
        found = {
            setting: paired(_differences(met[setting], met[present])) for setting in settings if setting != present
        }
        best = max(found, key=lambda setting: found[setting][0])
        difference, error = found[best]
        chosen, reason = self._choose(present, best, difference, error, load.now_s)
        counted = window.arrivals[window.num_lead :]
        measured = [each.is_met for each in counted if each.at_s >= self._switched_s and each.is_met is not None]
        return Comparison(
            at_s=load.now_s,
            cause=cause,
            num_requests=len(met[present][0]),
            present=present,
            chosen=chosen,
            attained=tuple(
                Attained(setting, tuple(zip(RATES, map(_share, met[setting]), strict=True))) for setting in settings
            ),
            difference=difference,
            error=error,
            reason=reason,
            measured=sum(measured) / len(measured) if measured else None,
            num_measured=len(measured),
        )

    def _choose(
        self, present: Decodes, other: Decodes, difference: float, error: float, now: float
    ) -> tuple[Decodes, str]:
        if difference <= error + HYSTERESIS:
            return present, f"{other} is not better by more than the error and {HYSTERESIS:.0%}"
        left_s = self._switched_s + EVERY_S - now
        if left_s > 0 and self._changed_s <= self._switched_s:
            return present, f"{other} is better, and the setting was changed {EVERY_S - left_s:.0f} s ago"
        return other, f"{other} is better by more than the error and {HYSTERESIS:.0%}"


def _differences(other: list[list[tuple[int, bool]]], present: list[list[tuple[int, bool]]]) -> list[float]:
    """For each request, the mean over the rates of 1 where only the other setting meets its targets, -1 where only the
    present one does, else 0."""
    by_rate = [
        [int(theirs) - int(ours) for (_, theirs), (_, ours) in zip(a, b, strict=True)]
        for a, b in zip(other, present, strict=True)
    ]
    return [sum(each) / len(by_rate) for each in zip(*by_rate, strict=True)]


def _share(met: list[tuple[int, bool]]) -> float:
    return sum(is_met for _, is_met in met) / len(met)
