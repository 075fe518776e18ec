"""How many drafts a step computes: as many as give the most tokens in its time.

    chances     of each draft, that it and all before it in its sequence are accepted     Acceptance
    s(r)        milliseconds of a step of r rows                                          RowTimes
    choice      r with the largest (B + P(r - B)) / s(r)                                  choose

B are the rows without drafts, each of which gives a token, and P(j) is the sum of the j largest chances: the expected
number of accepted ones.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Hashable
from collections.abc import Sequence as Seq
from itertools import pairwise
from typing import NamedTuple, Protocol

from disagg.engine.speculation.proposer import Proposal
from disagg.proto.messages import StepSample
from disagg.step_times.step_model import LEAST_MS, StepModel

LEAST_GAIN = 1.03
"""Expected tokens a second over those without drafts, for a step to have any."""

_PRIOR = (0.13, 0.36, 0.43, 0.55, 0.6, 0.62, 0.74, 0.76, 0.82, 0.83, 0.85, 0.87, 0.88, 0.89, 0.93, 0.95)
"""Assumed chances of the token behind a match of 1 to 16 tokens, before any was seen: those of drawn chat of a small
model. Copying answers have more, which shows soon."""
_PRIOR_PLACE = 0.6
"""Assumed chance of each draft of other methods, before any was seen."""
_PRIOR_WEIGHT = 4.0
"""Number of tokens that such an assumption counts for."""
_WINDOW = 512.0
"""About the number of latest tokens behind matches of one length that count."""
_LEAST_CHANCE = 0.01
"""Chances are estimated as at least this, and as at most 1 minus this."""
_SPREAD = 0.3
"""Variance of sequences' log-odds of acceptance about those of their worker. With 0.1 to 0.5 replayed answers are
decoded fastest: what a sequence is like shows in the lengths of its matches already."""
_MEMORY = 0.99
"""Factor by which the weight of a sequence's own evidence becomes smaller with each token behind it."""
_NUM_PLACES = 16


class _Chance:
    """A running mean of outcomes, kept from 0 and 1, and its log-odds."""

    __slots__ = ("_mean", "_weight", "log_odds")

    def __init__(self, prior: float) -> None:
        self._mean = prior
        self._weight = _PRIOR_WEIGHT
        self.log_odds = math.log(prior / (1.0 - prior))

    def observe(self, outcome: float) -> None:
        if self._weight < _WINDOW:
            self._weight += 1.0
        mean = self._mean + (outcome - self._mean) / self._weight
        if mean < _LEAST_CHANCE:
            mean = _LEAST_CHANCE
        elif mean > 1.0 - _LEAST_CHANCE:
            mean = 1.0 - _LEAST_CHANCE
        self._mean = mean
        self.log_odds = math.log(mean / (1.0 - mean))


class _Shift(NamedTuple):
    """How much larger the log-odds of one sequence are than those of its worker: a normal estimate."""

    mean: float
    variance: float


_NO_SHIFT = _Shift(0.0, _SPREAD)


class Acceptance:
    """The chances of drafts, learned from what became of them.

    A match that has gone on for i tokens is a match that is longer by i. So one table by length of match has all places
    of all proposals: the chance of the draft at place i behind a match of n tokens, given that those before it were
    accepted, is that of a match of n + i. Drafts of other methods (length 0) have a chance for each place.

    A table is the mean over the sequences of a worker, and a sequence that copies accepts more. Each has a shift of its
    log-odds, which starts at 0 and follows its own outcomes by assumed density filtering (Opper, A Bayesian approach to
    on-line learning, 1998), and which fades: an answer copies for a while.

    Drafts that were proposed and not computed count, too, because their outcome shows in the tokens that came instead.
    So a text that lookup always mispredicts costs no further row, and a change shows at once.
    """

    def __init__(self) -> None:
        self._by_length = [_Chance(chance) for chance in _PRIOR]
        self._by_place = [_Chance(_PRIOR_PLACE) for _ in range(_NUM_PLACES)]
        self._shifts: dict[Hashable, _Shift] = {}

    def chances(self, sequence: Hashable, proposal: Proposal) -> list[float]:
        """For each draft the chance that it and all before it are accepted: never increasing."""
        mean = self._shifts.get(sequence, _NO_SHIFT).mean
        chance = 1.0
        chances = []
        table, first = self._table(proposal)
        last = len(table) - 1
        for place in range(first, first + len(proposal.token_ids)):
            chance /= 1.0 + math.exp(-mean - table[place if place < last else last].log_odds)
            chances.append(chance)
        return chances

    def observe(self, sequence: Hashable, proposal: Proposal, num_known: int, num_accepted: int) -> None:
        """The outcome of the first `num_known` drafts is known: `num_accepted` are what the sequence went on with."""
        mean, variance = self._shifts.get(sequence, _NO_SHIFT)
        table, first = self._table(proposal)
        last = len(table) - 1
        for place in range(min(num_known, num_accepted + 1)):
            outcome = 1.0 if place < num_accepted else 0.0
            chance = table[min(first + place, last)]
            mean *= _MEMORY
            variance = _SPREAD + (variance - _SPREAD) * _MEMORY * _MEMORY
            expected = 1.0 / (1.0 + math.exp(-mean - chance.log_odds))
            variance /= 1.0 + variance * expected * (1.0 - expected)
            mean += variance * (outcome - expected)
            chance.observe(outcome)
        self._shifts[sequence] = _Shift(mean, variance)

    def forget(self, sequence: Hashable) -> None:
        """Drop the evidence of one sequence."""
        self._shifts.pop(sequence, None)

    def _table(self, proposal: Proposal) -> tuple[list[_Chance], int]:
        """The table of a proposal, and where its first draft is in it."""
        if proposal.match_length == 0:
            return self._by_place, 0
        return self._by_length, proposal.match_length - 1


class Times(Protocol):
    """What a choice knows of step times."""

    def ms(self, rows: int, context: int) -> float:
        """Milliseconds of a step of so many rows; never decreasing in them."""
        ...


_SEED_WEIGHT = 16.0
"""Number of steps that a calibrated row count counts for."""
_NEW_WEIGHT = 8.0
"""Number of steps that the estimate of a row count which was not calibrated counts for. With a smaller one, of many
counts that were measured once, the one that was fast by chance would be chosen."""
_STEPS_WINDOW = 64.0
"""About the number of latest steps of a row count that count."""
_PACE_WINDOW = 8.0
"""About the number of latest steps that the pace is of. Shorter than that of a row count, so that what all of them have
in common is taken as pace."""
_FURTHEST = 2.0
"""Factor by which a step may be off what was predicted, and count in full."""
_REFRESH = 16
"""Steps after which the curve follows, at the latest."""


class _Count:
    """The mean time of steps of one row count, without pace and context."""

    __slots__ = ("ms", "num_seen", "weight")

    def __init__(self, ms: float, weight: float) -> None:
        self.ms = ms
        self.weight = weight
        """Number of steps that it is the mean of, those counted that a calibration or an estimate stands for."""
        self.num_seen = 0


class RowTimes:
    """Milliseconds of a step of r rows without prompts.

        ms = pace * (curve(r) + context_ms * context)

    The context is the sum over the rows of the tokens that each one attends to, as in `StepSample`: drafts find the KV
    of their sequence in the processor's cache, but on a CPU the arithmetic takes most of the time (a draft takes 0.8
    times as long as a row of another sequence, one thread, AMD EPYC (Zen 4), 2026-11-27). Its coefficient is the
    calibration's.

    The curve has a running mean for each row count that was calibrated or seen, made monotone by pooling adjacent
    violators (Ayer and others, 1955), and straight lines between them. Behind the last one it has the mean slope of its
    second half, before the first one that of the calibration. The pace is that of the latest steps of any row count, so
    that counts which were not seen for long follow a machine that became slower.

    Args:
        calibration: steps that were measured at the start.
    """

    def __init__(self, calibration: Seq[StepSample]) -> None:
        times = StepModel(calibration).coefficients
        self._row_ms, self._context_ms = times.decode_ms, times.context_ms
        self._pace, self._num_observed = 1.0, 0
        self._refresh_at = 1
        self._counts: dict[int, _Count] = {}
        for sample in calibration:
            if sample.num_decodes > 0 and sample.prefill_tokens == 0:
                ms = sample.ms - self._context_ms * sample.decode_context
                count = self._counts.setdefault(sample.num_decodes, _Count(0.0, 0.0))
                count.weight += 1.0
                count.ms += (ms - count.ms) / count.weight
        if not self._counts:
            self._counts[1] = _Count(times.base_ms + self._row_ms, 1.0)
        for count in self._counts.values():
            count.weight = _SEED_WEIGHT
        self._refresh()

    def observe(self, rows: int, context: int, ms: float) -> None:
        """A step without prompts was measured; see the class for `context`."""
        if rows <= 0 or ms <= 0.0:
            return
        self._num_observed += 1
        predicted = self.ms(rows, context)
        ratio = min(max(ms / predicted, 1.0 / _FURTHEST), _FURTHEST)
        count = self._counts.get(rows)
        if count is None:
            count = self._counts[rows] = _Count(self._curve_ms(rows), _NEW_WEIGHT)
            self._refresh_at = self._num_observed
        known = count.weight / (count.weight + _SEED_WEIGHT)
        self._pace *= 1.0 + (ratio - 1.0) * known / min(_PACE_WINDOW, self._num_observed + 1.0)
        count.weight = min(_STEPS_WINDOW, count.weight + 1.0)
        count.num_seen += 1
        count.ms += (predicted * ratio / self._pace - self._context_ms * context - count.ms) / count.weight
        if self._num_observed >= self._refresh_at:
            self._refresh()
            self._refresh_at = self._num_observed + min(_REFRESH, self._num_observed)

    def ms(self, rows: int, context: int) -> float:
        """Predicted milliseconds of a step, never decreasing in its rows."""
        ms = self._pace * (self._curve_ms(rows) + self._context_ms * context)
        return ms if ms > LEAST_MS else LEAST_MS

    def _curve_ms(self, rows: int) -> float:
        num_more = rows + 1 - len(self._curve)
        return self._curve[rows] if num_more <= 0 else self._curve[-1] + self._last_slope * num_more

    def _refresh(self) -> None:
        """Draw the curve anew, from 0 rows to the most that were seen."""
        every = sorted(self._counts)
        counts = [self._counts[rows] for rows in every]
        heights = monotone([(count.ms, 1.0 + min(_STEPS_WINDOW, count.num_seen)) for count in counts])
        self._curve = [heights[0] - self._row_ms * (every[0] - rows) for rows in range(every[0] + 1)]
        for (low, low_ms), (high, high_ms) in pairwise(zip(every, heights, strict=True)):
            slope = (high_ms - low_ms) / (high - low)
            self._curve += [low_ms + slope * (rows - low) for rows in range(low + 1, high + 1)]
        self._last_slope = self._row_ms
        if len(every) > 1:
            half = every[max(0, bisect_right(every, every[-1] // 2) - 1)]
            self._last_slope = (self._curve[-1] - self._curve[half]) / (every[-1] - half)


def monotone(values: Seq[tuple[float, float]]) -> list[float]:
    """The never decreasing sequence that is nearest to these (value, weight) by weighted least squares."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in values:
        size = 1
        while pools and pools[-1][0] >= value:
            before, its_weight, its_size = pools.pop()
            value = (before * its_weight + value * weight) / (its_weight + weight)
            weight, size = weight + its_weight, size + its_size
        pools.append((value, weight, size))
    return [value for value, _, size in pools for _ in range(size)]


def choose(
    times: Times,
    num_rows: int,
    context: int,
    chances: Seq[Seq[float]],
    most_rows: int,
    least_gain: float = LEAST_GAIN,
    lengths: Seq[int] = (),
) -> list[int]:
    """How many drafts of each proposal to compute: those by which a step gives the most tokens in its time, and none
    where that is not `least_gain` times as many as without.

    Args:
        times: step times.
        num_rows: rows without drafts, each of which gives one token.
        context: tokens that they attend to.
        chances: of each proposal's drafts, that they and all before them are accepted; never increasing.
        most_rows: rows of the largest step.
        lengths: tokens that a draft of each proposal attends to; those of a mean row by default.
    """
    numbers = [0] * len(chances)
    most = most_rows - num_rows
    if most <= 0 or num_rows <= 0:
        return numbers
    plain_ms = times.ms(num_rows, context)
    plain_rate = num_rows / plain_ms
    lengths = lengths or [context // num_rows] * len(chances)
    ranked: list[tuple[float, int, int, float]] = []
    for index, (each, length) in enumerate(zip(chances, lengths, strict=True)):
        if each:
            # A draft that attends to more costs more: what counts is its chance less what this time gives without it.
            cost = plain_rate * (times.ms(num_rows, context + length) - plain_ms)
            ranked += [(cost - chance, place, index, chance) for place, chance in enumerate(each) if chance > cost]
    ranked.sort()
    best, best_rate = 0, least_gain * plain_rate
    expected = float(num_rows)
    for number, (_, _, index, chance) in enumerate(ranked[:most], 1):
        expected += chance
        context += lengths[index]
        rate = expected / times.ms(num_rows + number, context)
        if rate > best_rate:
            best, best_rate = number, rate
    for _, _, index, _ in ranked[:best]:
        numbers[index] += 1
    return numbers


def may_gain(times: Times, num_rows: int, context: int, most_drafts: int, least_gain: float = LEAST_GAIN) -> bool:
    """Whether drafts would be chosen if all of them were sure to be accepted."""
    if num_rows <= 0:
        return False
    least_rate = least_gain * num_rows / times.ms(num_rows, context)
    length = context // num_rows
    return any(
        (num_rows + number) / times.ms(num_rows + number, context + number * length) > least_rate
        for number in range(1, most_drafts + 1)
    )
