"""Predicted step times of a worker, fitted online: by the worker from all its steps, by routers from those that it
reports.

    StepModel(calibration)         starts from the steps that the worker measured at its start
        observe(sample)            each step
        coefficients               used by placement, and by steps by slack; fitted again when enough was observed

The time of a step is taken as linear: base + prefill tokens + pairs attended by them + decodes + context of these,
each times a coefficient that is never negative. A model with experts has one more: the time to read all experts, times
the share of them that so many rows are expected to choose (`proto.messages.experts_read`). Four properties matter more
than the last percent:

- The error that counts is relative: a decode step of 10 ms must be as right as a prefill step of 300. So each
  observation is divided by its own size (as the calibration predicts it: by a size that follows the worker's pace,
  what was seen before it slowed down would weigh more than what was seen since).
- A step that took 20 times as long, because the machine had something else to do, must not show; a machine that has
  become slower must. So what is far off, measured by how far off the steps usually are, weighs less (Huber, Robust
  Estimation of a Location Parameter, 1964): one such step moves hardly anything, and when all of them are far off the
  measure follows and lets them in.
- A few steps in a row that all took far longer than predicted, or far less, are no outliers but a change of the
  worker's pace: what was seen before it counts as many times as long from then on, so the next prediction is right.
  Of steps that took less, fewer are enough: a step may be long for many reasons, but it is short only where the worker
  is fast. Steps of a size that no fit has seen show the shape instead, and do not count.
- After an hour of decoding the cost of a prompt must still be right. So the observations of each kind of step (prefill,
  decode, both) fade only with steps of the same kind, and the calibration never fades. But it is soon outweighed, and
  used as a shape: where present steps take 1.2 times as long as calibrated, because the core is shared, all of it
  counts 1.2 times. A change of pace concerns calibration and steps of other kinds, too, unless some of these were seen
  meanwhile and took as long as ever: the estimate of what a worker does not do follows what it does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul
from statistics import median
from typing import NamedTuple

import msgspec

from disagg.proto.messages import StepCoefficients, StepSample, experts_read
from disagg.step_times.least_squares import FiveFactors, Moments, total

DEFAULT_COEFFICIENTS = StepCoefficients(5.0, 0.4, 1e-4, 0.5, 1e-3)
"""Coefficients for a model of 135 million parameters on one core. They are used before anything was measured; the
unknowns of the fit are multiples of them."""

LEAST_MS = 0.01
"""Least predicted time of a step, in milliseconds."""

_UNITS = DEFAULT_COEFFICIENTS[:5]
_EXPERTS_UNIT = 5.0
"""Default of the time to read all experts, in milliseconds."""
_RIDGE = 1e-6
"""Weight of the assumption that each coefficient is its default, in observations. It decides only where nothing was
measured, such as between the base and the decodes when all batches had the same size."""
_WINDOW = 64.0
"""About the number of latest steps of each kind that count."""
_PACE_PRIOR = 4.0
"""Weight of the assumption that the worker has the pace of its latest change, in observations."""
NUM_LEARNED = 16
"""Number of first steps that calibrate a worker without a calibration; also the number of hand-overs after which a link
is known."""
_LEAST_SIZE_MS, _LONGEST_MS = 1e-3, 1e9
"""Limits of a step's plausible time, in milliseconds. The lower one is also added to sizes that are divided by."""
_REFIT_SHARE, _REFIT_AT_MOST = 8, 32
"""The fit is redone after 1/8 more observations, and at the latest after 32."""
_QUICKER, _SLOWER = 1 / 1.5, 1.5
"""Ratios of measured to predicted time: a step below the first or above the second may show a change of pace."""
_SLOWER_STEPS, _FASTER_STEPS = 6, 3
"""Number of such steps of one kind in a row that show a slower or a faster pace."""
_SIZE_SEEN = 2.0
"""Steps count as known to a fit if their size is within this factor of the sizes that it has seen."""
_REFIT_OUTLIERS = 2
"""The fit is redone after this many outliers, too: steps may be of a size that no fit has seen, such as those of the
first long prompts, for which a coefficient may be wrong by any factor."""


class Outliers(msgspec.Struct, gc=False):
    """Weighs observations by how far off they are, compared with how far off they usually are. Distances are relative
    to what was predicted."""

    usual: float
    """Mean relative distance of observations from their predictions."""

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


class _Step(NamedTuple):
    """A measured step, prepared for the fit."""

    ratio: float
    """Measured over predicted time."""
    factors: tuple[float, ...]
    """Five factors, or six with experts."""
    target: float


class _Kind:
    """The steps of one kind. The latest ones are kept separately as long as they may show a change of pace."""

    __slots__ = ("_known", "last_usual", "moments", "run", "run_began", "sizes")

    def __init__(self, num_unknowns: int, known_sizes: tuple[float, float]) -> None:
        self.moments = Moments(num_unknowns, _WINDOW)
        """The observed steps, without those in `run`."""
        self.run: list[_Step] = []
        """The latest steps, where all of them took far longer than predicted, or all far less."""
        self.run_began = 0
        """Number of the first step in `run`."""
        self.last_usual = 0
        """Number of the latest step that took about as long as predicted."""
        self.sizes = self._known = known_sizes
        """Pairs (smallest, largest size): of all steps, and of those that the latest fit has seen."""

    @property
    def direction(self) -> int:
        """1 if the steps in `run` were slower than predicted, -1 if faster; 0 without any."""
        return 0 if not self.run else 1 if self.run[0].ratio > 1.0 else -1

    def knows(self, size: float) -> bool:
        """Whether a fit has seen steps of about this size."""
        least, largest = self._known
        return least / _SIZE_SEEN <= size <= largest * _SIZE_SEEN

    def fitted(self) -> None:
        """Note that a fit has seen all steps."""
        self._known = self.sizes


class StepModel:
    """The step times of one worker. A worker without calibration is calibrated by its first steps; before these it has
    the default coefficients. Impossible observations (no time, or nothing computed) are ignored: they come from
    another process. `expert_share`: share of the model's experts that a token chooses; 0 without experts.
    """

    __slots__ = (
        "_calibrated_sizes",
        "_coefficients",
        "_expert_share",
        "_experts_multiple",
        "_experts_start",
        "_kinds",
        "_measured",
        "_multiples",
        "_num_observed",
        "_num_outliers",
        "_num_to_learn",
        "_num_unknowns",
        "_outliers",
        "_pace",
        "_prior",
        "_refit_at",
        "_start",
    )

    def __init__(self, calibration: Sequence[StepSample], expert_share: float = 0.0) -> None:
        measured = [sample for sample in calibration if _is_measured(sample)]
        self._expert_share = expert_share
        self._num_unknowns = len(_UNITS) + (expert_share > 0.0)
        self._calibrated_sizes = (math.inf, 0.0)
        """The smallest and the largest size of a step in the calibration."""
        self._measured = Moments(self._num_unknowns)
        """The observations of the calibration."""
        self._kinds: dict[tuple[bool, bool], _Kind] = {}
        self._pace = 1.0
        """Present over calibrated step time, by the changes of pace so far."""
        self._outliers = Outliers(usual=0.1)
        self._num_observed = 0
        self._num_outliers = 0
        """Number of outliers since the latest fit."""
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
        if self._expert_share:
            read = self._read_of(sample)
            size, predicted = size + read * self._experts_start[0], predicted + read * self._experts_multiple[0]
        kind = self._kinds.get((sample.prefill_tokens > 0, sample.num_decodes > 0)) or self._new_kind(sample)
        least, largest = kind.sizes
        is_new_size = not least <= size <= largest
        factors: tuple[float, ...] = (base / size, tokens / size, pairs / size, decodes / size, context / size)
        if self._expert_share:
            factors += (read / size,)
        ratio = ms / predicted
        if _QUICKER <= ratio <= _SLOWER:
            kind.last_usual = self._num_observed
            if kind.run:
                self._end_run(kind)
        elif kind.knows(size):
            self._take_far_off(kind, _Step(ratio, factors, ms / size))
            return
        if is_new_size:
            kind.sizes = min(least, size), max(largest, size)
        self._add(kind, ratio, factors, ms / size)

    def _add(self, kind: _Kind, ratio: float, factors: tuple[float, ...], target: float) -> None:
        weight = self._outliers.weight(abs(ratio - 1.0))
        if weight < 1.0:
            self._num_outliers += 1
            if self._num_outliers >= _REFIT_OUTLIERS:
                self._refit_at = self._num_observed
        if len(factors) == 5:
            kind.moments.add_five(factors, target, weight)
        else:
            kind.moments.add(tuple(enumerate(factors)), target, weight)

    def _end_run(self, kind: _Kind, factor: float = 1.0) -> None:
        """Take in the steps that might show a change of pace, by how far off they are beside the present pace: `factor`
        times as long as predicted. A step during which the pace changed fits neither."""
        for step in kind.run:
            self._add(kind, step.ratio / factor, step.factors, step.target)
        kind.run.clear()

    def _take_far_off(self, kind: _Kind, step: _Step) -> None:
        """Another step that takes far longer than predicted, or far less. Enough of them are a change of pace: that of
        all steps, unless some of another kind that were measured meanwhile took as long as ever."""
        is_slower = step.ratio > 1.0
        if kind.run and kind.direction != (1 if is_slower else -1):
            self._end_run(kind)
        if not kind.run:
            kind.run_began = self._num_observed
        kind.run.append(step)
        if len(kind.run) < (_SLOWER_STEPS if is_slower else _FASTER_STEPS):
            return
        # Of a worker that is quicker the quickest step: too high an estimate would keep it from being used, and so
        # would not be corrected; one that is too low is.
        ratios, direction = [each.ratio for each in kind.run], kind.direction
        factor = median(ratios) if is_slower else min(ratios)
        others = [other for other in self._kinds.values() if other is not kind]
        changed = [kind]
        if all(other.last_usual < kind.run_began and other.direction in (0, direction) for other in others):
            self._pace *= factor
            changed += others
        for each in changed:
            each.moments.stretch(factor)
            self._end_run(each, factor)
        self._fit()

    @property
    def coefficients(self) -> StepCoefficients:
        """The coefficients of the latest fit, which is redone here when it is due."""
        if self._num_observed >= self._refit_at:
            self._fit()
        return self._coefficients

    def _new_kind(self, sample: StepSample) -> _Kind:
        kind = _Kind(self._num_unknowns, self._calibrated_sizes)
        self._kinds[sample.prefill_tokens > 0, sample.num_decodes > 0] = kind
        return kind

    def _calibrate(self, samples: Sequence[StepSample]) -> None:
        """Add samples to the calibration, and fit its coefficients. What was not measured has its default, scaled to
        the pace of what was."""
        for sample in samples:
            self._measured.add([(i, factor / sample.ms) for i, factor in enumerate(self._all_factors(sample))], 1.0)
        number = self._num_unknowns
        pace = _pace(self._measured, [1.0] * number, prior_weight=_RIDGE)
        self._prior = total(number, (self._measured, ridge(number, pace)))
        start = self._prior.solve()
        self._start, self._experts_start = tuple(start[:5]), tuple(start[5:])
        for sample in samples:
            least, largest = self._calibrated_sizes
            size = sum(map(mul, self._all_factors(sample), start))
            self._calibrated_sizes = min(least, size), max(largest, size)
        self._prior.expect(start)

    def _fit(self) -> None:
        system = total(self._num_unknowns, (kind.moments for kind in self._kinds.values()))
        pace = _pace(system, self._start + self._experts_start, prior_weight=_PACE_PRIOR, expected=self._pace)
        system.include(self._prior, target_factor=pace)
        multiples = system.solve()
        self._multiples, self._experts_multiple = tuple(multiples[:5]), tuple(multiples[5:])
        base_ms, *others = map(mul, multiples, (*_UNITS, _EXPERTS_UNIT))
        self._coefficients = StepCoefficients(max(LEAST_MS, base_ms), *others)
        if self._expert_share:
            self._coefficients = self._coefficients._replace(expert_share=self._expert_share)
        self._refit_at = next_fit(self._num_observed)
        self._num_outliers = 0
        for kind in self._kinds.values():
            kind.fitted()

    def _all_factors(self, sample: StepSample) -> tuple[float, ...]:
        factors = _factors_of(sample)
        return (*factors, self._read_of(sample)) if self._expert_share else factors

    def _read_of(self, sample: StepSample) -> float:
        """The factor of the experts that a step reads, as those of `_factors_of`."""
        return _EXPERTS_UNIT * experts_read(self._expert_share, sample.prefill_tokens + sample.num_decodes)


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


def _pace(observed: Moments, start: Sequence[float], *, prior_weight: float, expected: float = 1.0) -> float:
    """How many times as long as `start` predicts the observed steps take, by least squares; `expected` where none was
    seen."""
    predicted, seen = observed.along(start)
    return (seen + prior_weight * expected) / (predicted + prior_weight)


def _factors_of(sample: StepSample) -> FiveFactors:
    """The factors of the multiples of the default coefficients, in milliseconds."""
    base, token, pair, decode, context = _UNITS
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
    """The number of observations at which a fit that was made with `num_observed` is redone."""
    return num_observed + max(1, min(_REFIT_AT_MOST, num_observed // _REFIT_SHARE))
