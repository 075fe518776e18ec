"""Which measured steps a report carries. Pure.

A report has room for a few steps, and a worker may do hundreds in its time. Were they taken as they come until the
room is full, a step that took long would be taken more often than its share: it is the likeliest to be running when a
report goes out, so that it comes first in the next one. So a step is chosen by its number alone: of all numbers a
share of 1/`stride` is good, spread evenly but not periodically (multiples of the golden ratio modulo 1), so that no
pattern of steps is in tune with it. The stride follows how many fit.
"""

from __future__ import annotations

from disagg.proto.messages import StepSample

MAX_STEPS_PER_REPORT = 4

_GOLDEN, _MODULUS = 0x9E3779B1, 1 << 32
_MAX_STRIDE = 1 << 16


class StepSampler:
    """Steps of one report stream; at most `MAX_STEPS_PER_REPORT` are held."""

    def __init__(self) -> None:
        self._steps: list[StepSample] = []
        self._num_offered = 0
        self._num_chosen = 0
        self._stride = 1

    def offer(self, step: StepSample) -> None:
        """A step was done."""
        self._num_offered += 1
        if self._num_offered * _GOLDEN % _MODULUS >= _MODULUS // self._stride:
            return
        self._num_chosen += 1
        if len(self._steps) < MAX_STEPS_PER_REPORT:
            self._steps.append(step)

    def take(self) -> tuple[StepSample, ...]:
        """The chosen steps since the last call. Where there were too many, half as many will be chosen from now on;
        where half the room is left, twice as many."""
        if self._num_chosen > MAX_STEPS_PER_REPORT:
            self._stride = min(_MAX_STRIDE, self._stride * 2)
        elif self._num_chosen * 2 < MAX_STEPS_PER_REPORT:
            self._stride = max(1, self._stride // 2)
        steps, self._steps = tuple(self._steps), []
        self._num_chosen = 0
        return steps
