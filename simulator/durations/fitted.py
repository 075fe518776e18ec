"""Step times fitted from recorded steps: the router's own linear fit, and one that is piecewise linear in the sizes.

    fit(samples) -> StepTimes        the one of both that predicts better what it has not seen
    fit(samples, expert_share=k / E) of a model with experts: both have a term for those that a step reads

On a CPU a step is not linear in its batch: products of one row are bound by memory, those of 32 by arithmetic, and a
kernel is chosen by the number of rows. So the second fit has a slope for each range of rows, prompt tokens and
decodes. None is negative: more work never takes less time. Both minimize the relative error, as in
`step_times/step_model.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from disagg.proto.errors import ConfigError
from disagg.proto.messages import StepSample, experts_read
from disagg.step_times.interface import StepTimes, StepWork
from disagg.step_times.least_squares import Moments
from disagg.step_times.step_model import LEAST_MS, StepModel

MIN_SAMPLES = 8
NUM_FOLDS = 5
"""Number of parts of the cross-validation."""
ROW_KNOTS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 1024)
"""Numbers of rows of a step at which the slope may change: each matrix is multiplied with all rows."""
DECODE_KNOTS = (0, 8, 32)
PREFILL_KNOTS = (0, 32, 256)
_RIDGE = 1e-6
"""Weight of the assumption that all unknowns are 0, in observations. It decides where nothing was measured."""


def work_of(sample: StepSample) -> StepWork:
    """The work of a recorded step. Recordings do not have the number of prompts: one is assumed, if any."""
    return StepWork(
        sample.prefill_tokens,
        sample.prefill_attended,
        sample.num_decodes,
        sample.decode_context,
        1 if sample.prefill_tokens else 0,
    )


class LinearStepTimes:
    """The router's fit: base, prompt tokens, attended pairs, decodes and their context, each with one coefficient, and
    experts by the share of them that the rows of a step read."""

    name = "linear"

    def __init__(self, samples: Sequence[StepSample], expert_share: float = 0.0) -> None:
        self._model = StepModel(samples, expert_share)
        self.coefficients = self._model.coefficients

    def step_s(self, work: StepWork) -> float:
        """Seconds of one engine step."""
        return max(LEAST_MS, self.coefficients.ms_of(*work[:4])) * 1e-3


class PiecewiseStepTimes:
    """Piecewise linear in the rows of a step, its prompt tokens and its decodes; linear in attended pairs and context,
    and in the share of experts that the rows read."""

    name = "piecewise"

    def __init__(self, samples: Sequence[StepSample], expert_share: float = 0.0) -> None:
        self._expert_share = expert_share
        rows = [features(work_of(sample), expert_share) for sample in samples]
        size = len(features(StepWork(0, 0, 0, 0), expert_share))
        # Unknowns are counted in what the largest step has of each, so that none is lost to rounding.
        self._units = [max((row[i] for row in rows), default=0.0) or 1.0 for i in range(size)]
        moments = Moments(size)
        for row, sample in zip(rows, samples, strict=True):
            scaled = [(i, value / self._units[i] / sample.ms) for i, value in enumerate(row) if value]
            moments.add(scaled, 1.0)
        for i in range(size):
            moments.add([(i, 1.0 / max(sample.ms for sample in samples))], 0.0, _RIDGE)
        self._slopes = [value / unit for value, unit in zip(moments.solve(), self._units, strict=True)]

    def step_s(self, work: StepWork) -> float:
        """Seconds of one engine step."""
        values = features(work, self._expert_share)
        ms = sum([slope * value for slope, value in zip(self._slopes, values, strict=True) if value])
        return max(LEAST_MS, ms) * 1e-3


def features(work: StepWork, expert_share: float = 0.0) -> list[float]:
    """The terms of the piecewise fit: 1, then the work in each range, then attended pairs and context, and the share of
    experts that are read."""
    rows = work.prefill_tokens + work.num_decodes
    return [
        1.0,
        *_ramps(rows, ROW_KNOTS),
        *_ramps(work.prefill_tokens, PREFILL_KNOTS),
        *_ramps(work.num_decodes, DECODE_KNOTS),
        float(work.prefill_attended),
        float(work.decode_context),
        *([experts_read(expert_share, rows)] if expert_share else []),
    ]


def _ramps(value: float, knots: Sequence[int]) -> list[float]:
    """The part of `value` in each range between knots; the last range is open."""
    inner = [float(min(max(value - low, 0.0), high - low)) for low, high in pairwise(knots)]
    return [*inner, max(0.0, float(value - knots[-1]))]


class Fit(Protocol):
    """A kind of fit."""

    def __call__(self, samples: Sequence[StepSample], expert_share: float = 0.0, /) -> StepTimes:
        """Step times from recorded steps, of a model of whose experts a token chooses this share."""
        ...


FITS: dict[str, Fit] = {"linear": LinearStepTimes, "piecewise": PiecewiseStepTimes}


@dataclass(frozen=True, kw_only=True)
class Error:
    """Errors of predictions, relative to the measured times."""

    median: float
    p90: float
    worst: float
    mean: float


def error_of(times: StepTimes, samples: Sequence[StepSample]) -> Error:
    """The errors of the predictions for these steps."""
    return _error([_distance(times, sample) for sample in samples])


def held_out_error(fit: Fit, samples: Sequence[StepSample], expert_share: float = 0.0) -> Error:
    """The errors of a fit for steps that it was not made from: each of `NUM_FOLDS` parts is predicted by a fit of the
    others. Every fifth step is in the same part."""
    distances: list[float] = []
    for start in range(min(NUM_FOLDS, len(samples))):
        times = fit([sample for at, sample in enumerate(samples) if at % NUM_FOLDS != start], expert_share)
        distances += [_distance(times, sample) for sample in samples[start::NUM_FOLDS]]
    return _error(distances)


def _distance(times: StepTimes, sample: StepSample) -> float:
    return abs(times.step_s(work_of(sample)) * 1e3 / sample.ms - 1.0)


def _error(distances: list[float]) -> Error:
    off = sorted(distances)
    return Error(
        median=off[(len(off) - 1) // 2],
        p90=off[min(len(off) - 1, (9 * len(off)) // 10)],
        worst=off[-1],
        mean=sum(off) / len(off),
    )


def fit(samples: Sequence[StepSample], name: str = "auto", expert_share: float = 0.0) -> StepTimes:
    """Step times from recorded steps; `auto` takes the fit with the least mean held-out error. `expert_share`: share of
    the model's experts that a token chooses; 0 without experts.

    Raises:
        ConfigError: too few steps, or no such fit.
    """
    if len(samples) < MIN_SAMPLES:
        raise ConfigError(f"step times: {len(samples)} recorded steps are too few; at least {MIN_SAMPLES} are needed")
    if name == "auto":
        name = min(FITS, key=lambda each: held_out_error(FITS[each], samples, expert_share).mean)
    if name not in FITS:
        raise ConfigError(f"step times: there is no fit {name!r}; there is auto, {', '.join(FITS)}")
    return FITS[name](samples, expert_share)
