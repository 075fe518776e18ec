"""Predicted step times of a worker, fitted online: by the worker from all its steps, by routers from those that it
reports.

    StepModel(calibration)         starts from the steps that the worker measured at its start
        observe(sample)            each step
        coefficients               used by placement, and by steps by slack; fitted again when enough was observed

The time of a step is taken as linear: base + prefill tokens + pairs attended by them + decodes + context of these,
each times a coefficient that is never negative. Three properties matter more than the last percent:

- The error that counts is relative: a decode step of 10 ms must be as right as a prefill step of 300. So each
  observation is divided by its own size (as the calibration predicts it: by a size that follows the worker's pace,
  what was seen before it slowed down would weigh more than what was seen since).
- A step that took 20 times as long, because the machine had something else to do, must not show; a machine that has
  become slower must. So what is far off, measured by how far off the steps usually are, weighs less (Huber, Robust
  Estimation of a Location Parameter, 1964): one such step moves hardly anything, and when all of them are far off the
  measure follows and lets them in.
- After an hour of decoding the cost of a prompt must still be right. So the observations of each kind of step (prefill,
  decode, both) fade only with steps of the same kind, and the calibration never fades. But it is soon outweighed, and
  used as a shape: where present steps take 1.2 times as long as calibrated, because the core is shared, all of it
  counts 1.2 times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from disagg.proto.messages import StepSample
from disagg.proto.step_times.least_squares import FiveFactors, Moments, total


class StepCoefficients(NamedTuple):
    """Step time = base + prefill tokens, attended pairs, decodes and decode context times these, in milliseconds."""

    base_ms: float
    prefill_token_ms: float
    attended_ms: float
    decode_ms: float
    context_ms: float

    def step_ms(self, sample: StepSample) -> float:
        """Of what the sample computes."""
        prompts = sample.prefill_tokens * self.prefill_token_ms + sample.prefill_attended * self.attended_ms
        return self.base_ms + prompts + sample.num_decodes * self.decode_ms + sample.decode_context * self.context_ms

    def prompt_ms(self, start: int, num_tokens: int) -> float:
        """What prompt tokens [start, start + num_tokens) add to a step."""
        return num_tokens * (self.prefill_token_ms + (start + (num_tokens + 1) / 2) * self.attended_ms)

    def num_tokens(self, start: int, room_ms: float) -> float:
        """The most tokens of a prompt, from `start` on, that add at most `room_ms`: a whole number, or infinite."""
        if room_ms <= 0.0:
            return 0
        linear = self.prefill_token_ms + (start + 0.5) * self.attended_ms
        divisor = linear + math.sqrt(linear * linear + 2.0 * self.attended_ms * room_ms)
        fits = 2.0 * room_ms / divisor if divisor > 0.0 else math.inf
        return math.floor(fits * (1.0 + 1e-12)) if fits < 1e18 else math.inf


DEFAULT_COEFFICIENTS = StepCoefficients(5.0, 0.4, 1e-4, 0.5, 1e-3)
"""Of a model of 135 million parameters on one core: used before anything was measured, and the scale of the fit, whose
unknowns are multiples of these."""

LEAST_MS = 0.01
"""No step is predicted to be shorter."""

_NUM_UNKNOWNS = len(DEFAULT_COEFFICIENTS)
_RIDGE = 1e-6
"""Weight of the assumption that each coefficient is its default, in observations. It decides only where nothing was
measured, such as between the base and the decodes when all batches had the same size."""
_WINDOW = 64.0
"""Steps of each kind that count."""
_PACE_PRIOR = 4.0
"""Weight of the assumption that the worker is as fast as it was at its start, in observations."""
NUM_LEARNED = 16
"""First steps that stand for the calibration of a worker without one, or hand-overs by which a link is known."""
_LEAST_SIZE_MS, _LONGEST_MS = 1e-3, 1e9
"""What a step can take; the former is also added to sizes that are divided by."""
_REFIT_SHARE, _REFIT_AT_MOST = 8, 32
"""The fit is redone after 1/8 more observations, and at the latest after 32."""
_REFIT_OUTLIERS = 2
"""Or after so many outliers: steps may be of a size that no fit has seen, such as those of the first long prompts, for
which a coefficient may be wrong by any factor."""


class Outliers(msgspec.Struct, gc=False):
    """Weighs observations by how far off they are, compared with how far off they usually are. Distances are relative
    to what was predicted."""

    usual: float
    """The mean distance."""

    def weight(self, distance: float) -> float:
        """1 within four usual distances, less beyond."""
        limit = 4.0 * self.usual
        if limit < 0.05:
            limit = 0.05
        if distance <= limit:
            self.usual += (distance - self.usual) / 32.0
            return 1.0
        self.usual += (limit - self.usual) / 32.0
        return limit / distance


class StepModel:
    """The step times of one worker. A worker without calibration is calibrated by its first steps; before these it has
    the default coefficients. Impossible observations (no time, or nothing computed) are ignored: they come from
    another process.
    """

    __slots__ = (
        "_coefficients",
        "_kinds",
        "_measured",
        "_multiples",
        "_num_observed",
        "_num_outliers",
        "_num_to_learn",
        "_outliers",
        "_prior",
        "_refit_at",
        "_start",
    )

    def __init__(self, calibration: Sequence[StepSample]) -> None:
        measured = [sample for sample in calibration if _is_measured(sample)]
        self._measured = Moments(_NUM_UNKNOWNS)
        """The calibration."""
        self._kinds: dict[tuple[bool, bool], Moments] = {}
        self._outliers = Outliers(usual=0.1)
        self._num_observed = 0
        self._num_outliers = 0
        """Since the latest fit."""
        self._num_to_learn = 0 if measured else NUM_LEARNED
        self._calibrate(measured)
        self._fit()

    def observe(self, sample: StepSample) -> None:
        """Observe one measured step."""
        if not _is_measured(sample):
            return
        self._num_observed += 1
        if self._num_to_learn > 0:
            self._num_to_learn -= 1
            self._calibrate([sample])
            return
        ms, (base, tokens, pairs, decodes, context) = sample.ms, _factors_of(sample)
        a, b, c, d, e = self._start
        size = _LEAST_SIZE_MS + base * a + tokens * b + pairs * c + decodes * d + context * e
        a, b, c, d, e = self._multiples
        predicted = _LEAST_SIZE_MS + base * a + tokens * b + pairs * c + decodes * d + context * e
        kind = (sample.prefill_tokens > 0, sample.num_decodes > 0)
        moments = self._kinds.get(kind)
        if moments is None:
            moments = self._kinds[kind] = Moments(_NUM_UNKNOWNS, _WINDOW)
        weight = self._outliers.weight(abs(ms - predicted) / predicted)
        if weight < 1.0:
            self._num_outliers += 1
            if self._num_outliers >= _REFIT_OUTLIERS:
                self._refit_at = self._num_observed
        scaled = (base / size, tokens / size, pairs / size, decodes / size, context / size)
        moments.add_five(scaled, ms / size, weight)

    @property
    def coefficients(self) -> StepCoefficients:
        """Of the latest fit, which is redone here when it is due."""
        if self._num_observed >= self._refit_at:
            self._fit()
        return self._coefficients

    def _calibrate(self, samples: Sequence[StepSample]) -> None:
        """Add samples to the calibration, and fit its coefficients. What was not measured has its default, scaled to
        the pace of what was."""
        for sample in samples:
            self._measured.add([(i, factor / sample.ms) for i, factor in enumerate(_factors_of(sample))], 1.0)
        pace = _pace(self._measured, [1.0] * _NUM_UNKNOWNS, prior_weight=_RIDGE)
        self._prior = total(_NUM_UNKNOWNS, (self._measured, ridge(_NUM_UNKNOWNS, pace)))
        self._start = tuple(self._prior.solve())
        self._prior.expect(self._start)

    def _fit(self) -> None:
        system = total(_NUM_UNKNOWNS, self._kinds.values())
        pace = _pace(system, self._start, prior_weight=_PACE_PRIOR)
        system.include(self._prior, target_factor=pace)
        self._multiples = tuple(system.solve())
        fitted = [multiple * unit for multiple, unit in zip(self._multiples, DEFAULT_COEFFICIENTS, strict=True)]
        self._coefficients = StepCoefficients(max(LEAST_MS, fitted[0]), *fitted[1:])
        self._refit_at = next_fit(self._num_observed)
        self._num_outliers = 0


def _is_measured(sample: StepSample) -> bool:
    if not _LEAST_SIZE_MS <= sample.ms < _LONGEST_MS or sample.prefill_attended < 0 or sample.decode_context < 0:
        return False
    return sample.prefill_tokens > 0 or sample.num_decodes > 0


def ridge(size: int, multiple: float) -> Moments:
    """The assumption that all coefficients are `multiple` times their default."""
    ridge = Moments(size)
    for i in range(size):
        ridge.add([(i, 1.0)], multiple, _RIDGE)
    return ridge


def _pace(observed: Moments, start: Sequence[float], *, prior_weight: float) -> float:
    """How many times as long as `start` predicts the observed steps take, by least squares; 1 where none was seen."""
    expected, seen = observed.along(start)
    return (seen + prior_weight) / (expected + prior_weight)


def _factors_of(sample: StepSample) -> FiveFactors:
    """The factors of the multiples of the default coefficients, in milliseconds."""
    base, token, pair, decode, context = DEFAULT_COEFFICIENTS
    num_tokens, num_decodes = sample.prefill_tokens, sample.num_decodes
    has_prompts, has_decodes = num_tokens > 0, num_decodes > 0
    return (
        base,
        num_tokens * token if has_prompts else 0.0,
        sample.prefill_attended * pair if has_prompts else 0.0,
        num_decodes * decode if has_decodes else 0.0,
        sample.decode_context * context if has_decodes else 0.0,
    )


def next_fit(num_observed: int) -> int:
    """At how many observations a fit that was made with `num_observed` is made again."""
    return num_observed + max(1, min(_REFIT_AT_MOST, num_observed // _REFIT_SHARE))
