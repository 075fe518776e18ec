"""Least squares with coefficients that are never negative, from sums that forget: for fits that run along with what
they predict. Pure Python: with five unknowns a call into an array library costs more than the arithmetic.

    moments.add(row, target)     of each observation only its share in the normal equations is kept
    system = prior + moments     sums of moments stand for all their observations
    system.solve(...)            the coefficients

Sums and solutions for two and for five unknowns (`add_two`, `add_five`, `solve_two`, `solve_five`, and the fit of a
pair in `router/workers/cost_model.py`) are written out. What general code costs in their place, measured with the
systems of `python -m benchmarks.router --workers 16 --blocks 20000`, where a request takes 100 us to place and 230 us
in all (2026-11-27, commit bc8c671a, AMD EPYC (Zen 4), processor time):

- One solver of any size by cyclic coordinate descent needs 159 sweeps and 373 us for five unknowns in the median, where
  `solve_five` takes 2.9 us. For two unknowns it is not within a factor of ten of the solution after 3,000 sweeps: the
  transfers of a pair have nearly one size, so that only the prior tells latency and time per byte apart.
- Elimination and the active-set method for any size take 10 us instead of 2.9, and 21 instead of 2.0: with 0.4 and 0.7
  fits a request 16 us, most of it in its placement.
- `add` instead of `add_two` and `add_five` leaves placements a second as they are (0.998) but whole requests at 0.964
  (100 pairs of 300 requests, in turns).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from operator import mul

import msgspec

Row = Sequence[tuple[int, float]]
"""(index of the unknown, its factor) of all factors that are not zero, indices rising."""
FiveFactors = tuple[float, float, float, float, float]
"""The factors of five unknowns, in their order."""

_LARGEST_UNIT = 1e12
"""The weight of the newest observation at which the sums are scaled down again."""

_JITTER = 1e-11
"""Relative, on the diagonal: keeps factors of very different sizes from making the matrix indefinite by rounding."""


class Moments(msgspec.Struct, gc=False):
    """The normal equations of weighted observations `sum(factor * unknown) = target`.

    There may be one for each pair of workers, so the garbage collector does not track it, nor its sums, which are
    tuples of numbers for that reason.
    """

    size: int
    """Number of unknown coefficients."""
    window: float | None = None
    """About how many of the latest observations count; each new one takes 1/window of the weight of all the earlier
    ones. None never forgets."""
    weight: float = 0.0
    """The sum of the weights of all observations. This, `gram` and `moment` are in units of the weight of the newest
    observation, see `scale`."""
    gram: tuple[float, ...] = ()
    """The upper triangle, line by line: (i, j), i <= j, is at `_starts(size)[i] + j`."""
    moment: tuple[float, ...] = ()
    unit: float = 1.0

    def __post_init__(self) -> None:
        self.gram = (0.0,) * (self.size * (self.size + 1) // 2)
        self.moment = (0.0,) * self.size

    @property
    def scale(self) -> float:
        """The factor for the sums with which the newest observation counts once."""
        return 1.0 / self.unit

    def add(self, row: Row, target: float, weight: float = 1.0) -> None:
        """Add one observation. Instead of fading the past, which touches every sum, the new one weighs more."""
        if self.window is not None:
            self.unit *= self.window / (self.window - 1.0)
        weight *= self.unit
        self.weight += weight
        gram, moment, starts = list(self.gram), list(self.moment), _starts(self.size)
        for position, (i, factor) in enumerate(row):
            weighted = weight * factor
            moment[i] += weighted * target
            start = starts[i]
            for j, other in row[position:]:
                gram[start + j] += weighted * other
        self.gram, self.moment = tuple(gram), tuple(moment)
        if self.unit > _LARGEST_UNIT:
            self._rescale()

    def add_two(self, first: float, second: float, target: float, weight: float) -> None:
        """`add` for two unknowns, to the last bit, written out: routers add every hand-over twice."""
        if self.window is not None:
            self.unit *= self.window / (self.window - 1.0)
        weight *= self.unit
        self.weight += weight
        (a, b, c), (p, q) = self.gram, self.moment
        u, v = weight * first, weight * second
        self.gram, self.moment = (a + u * first, b + u * second, c + v * second), (p + u * target, q + v * target)
        if self.unit > _LARGEST_UNIT:
            self._rescale()

    def add_five(self, factors: FiveFactors, target: float, weight: float) -> None:
        """`add` for five unknowns, to the last bit. The sums are written out, because a router adds all steps that
        workers report."""
        if self.window is not None:
            self.unit *= self.window / (self.window - 1.0)
        weight *= self.unit
        self.weight += weight
        a, b, c, d, e = factors
        u, v, w, x, y = weight * a, weight * b, weight * c, weight * d, weight * e
        aa, ab, ac, ad, ae, bb, bc, bd, be, cc, cd, ce, dd, de, ee = self.gram
        self.gram = (
            aa + u * a, ab + u * b, ac + u * c, ad + u * d, ae + u * e,
            bb + v * b, bc + v * c, bd + v * d, be + v * e,
            cc + w * c, cd + w * d, ce + w * e,
            dd + x * d, de + x * e,
            ee + y * e,
        )  # fmt: skip
        at, bt, ct, dt, et = self.moment
        self.moment = (at + u * target, bt + v * target, ct + w * target, dt + x * target, et + y * target)
        if self.unit > _LARGEST_UNIT:
            self._rescale()

    def include(self, other: Moments, share: float = 1.0, target_factor: float = 1.0) -> None:
        """Add `share` times all observations of `other`, with the weights that they have now and with their targets
        times `target_factor`."""
        factor = share * other.scale * self.unit
        self.weight += factor * other.weight
        self.gram = tuple([own + factor * value for own, value in zip(self.gram, other.gram, strict=True)])
        factor *= target_factor
        self.moment = tuple([own + factor * value for own, value in zip(self.moment, other.moment, strict=True)])

    def stretch(self, factor: float) -> None:
        """Multiply the targets of all observations."""
        self.moment = tuple([value * factor for value in self.moment])

    def along(self, solution: Sequence[float]) -> tuple[float, float]:
        """(x.gram.x, moment.x) for x = `solution`: the second over the first is the factor of x that fits best."""
        squared = sum(map(mul, self._answers(solution), solution))
        return squared, sum(map(mul, self.moment, solution))

    def expect(self, solution: Sequence[float]) -> None:
        """Replace all targets by what `solution` gives for them: the same knowledge, with another answer."""
        self.moment = tuple(self._answers(solution))

    def _answers(self, solution: Sequence[float]) -> list[float]:
        gram, size = self.gram, self.size
        answers = [0.0] * size
        at = 0
        for i, value in enumerate(solution):
            answer = answers[i] + gram[at] * value
            at += 1
            for j in range(i + 1, size):
                answer += gram[at] * solution[j]
                answers[j] += gram[at] * value
                at += 1
            answers[i] = answer
        return answers

    def solve(self) -> list[float]:
        """The solution of least squares with no unknown negative. Every unknown must have been observed, but several
        need not be distinguishable."""
        if self.size == 5:
            unbounded = solve_five(self.gram, self.moment)
        else:
            lines = [[*line, target] for line, target in zip(self._lines(), self.moment, strict=True)]
            unbounded = solve_triangle(lines)
        if min(unbounded) >= 0.0:
            return unbounded
        lines = self._lines()
        full = [[lines[min(i, j)][abs(i - j)] for j in range(self.size)] for i in range(self.size)]
        return _solve_bounded(full, self.moment)

    def _lines(self) -> list[list[float]]:
        """The upper triangle, each line from its diagonal on, ready to be solved."""
        gram = list(self.gram)
        lines = [gram[start + i : start + self.size] for i, start in enumerate(_starts(self.size))]
        for line in lines:
            line[0] *= 1.0 + _JITTER
        return lines

    def _rescale(self) -> None:
        factor = self.scale
        self.gram = tuple([value * factor for value in self.gram])
        self.moment = tuple([value * factor for value in self.moment])
        self.weight *= factor
        self.unit = 1.0


@cache
def _starts(size: int) -> tuple[int, ...]:
    """Where the lines of an upper triangle begin in a list, less the column in which they begin."""
    return tuple(i * (2 * size - i - 1) // 2 for i in range(size))


def total(size: int, parts: Iterable[Moments]) -> Moments:
    """All observations of several moments together."""
    together = Moments(size)
    for part in parts:
        together.include(part)
    return together


def solve_two(gram: Sequence[float], moment: Sequence[float]) -> tuple[float, float] | None:
    """What `Moments.solve` gives for two unknowns, to the last bit; None in the few cases that take more steps."""
    (a, b, c), (p, q) = gram, moment
    a, c = a * (1.0 + _JITTER), c * (1.0 + _JITTER)
    if not a > 0.0:
        return None
    share = b / a
    pivot = c - share * b
    if not pivot > 0.0:
        return None
    second = (q - share * p) / pivot
    first = (p - b * second) / a
    if first >= 0.0 and second >= 0.0:
        return first, second
    return _solve_on_edge((a, b, c), moment)


def _solve_on_edge(gram: Sequence[float], moment: Sequence[float]) -> tuple[float, float] | None:
    """`_solve_bounded` for two unknowns of which one at least is 0; None where it takes more steps than these."""
    (a, b, c), (p, q) = gram, moment
    tolerance = 1e-12 * max(abs(p), abs(q))
    first_is_steepest = p >= q
    steepest, other, diagonal, other_diagonal = (p, q, a, c) if first_is_steepest else (q, p, c, a)
    if steepest <= tolerance:
        return 0.0, 0.0
    value = steepest / diagonal
    if not value > 0.0:
        return None
    if other - b * value <= tolerance:
        return (value, 0.0) if first_is_steepest else (0.0, value)
    # The other one rises too, and pushes the steepest to 0.
    share = b / diagonal
    pivot = other_diagonal - share * b
    if not pivot > 0.0:
        return None
    other_value = (other - share * steepest) / pivot
    alone = other / other_diagonal
    if (
        not other_value > 0.0
        or (steepest - b * other_value) / diagonal > 0.0
        or not alone > 0.0
        or steepest - b * alone > tolerance
    ):
        return None
    return (0.0, alone) if first_is_steepest else (alone, 0.0)


def solve_five(gram: Sequence[float], moment: Sequence[float]) -> list[float]:
    """`solve_triangle` for five unknowns, to the last bit, written out: a step model is fitted at every few reports.

    Raises:
        ValueError: the matrix is not positive definite.
    """
    aa, ab, ac, ad, ae, bb, bc, bd, be, cc, cd, ce, dd, de, ee = gram
    at, bt, ct, dt, et = moment
    more = 1.0 + _JITTER
    aa, bb, cc, dd, ee = aa * more, bb * more, cc * more, dd * more, ee * more
    _check_pivot(aa)
    b, c, d, e = ab / aa, ac / aa, ad / aa, ae / aa
    bb, bc, bd, be, bt = bb - b * ab, bc - b * ac, bd - b * ad, be - b * ae, bt - b * at
    cc, cd, ce, ct = cc - c * ac, cd - c * ad, ce - c * ae, ct - c * at
    dd, de, dt = dd - d * ad, de - d * ae, dt - d * at
    ee, et = ee - e * ae, et - e * at
    _check_pivot(bb)
    c, d, e = bc / bb, bd / bb, be / bb
    cc, cd, ce, ct = cc - c * bc, cd - c * bd, ce - c * be, ct - c * bt
    dd, de, dt = dd - d * bd, de - d * be, dt - d * bt
    ee, et = ee - e * be, et - e * bt
    _check_pivot(cc)
    d, e = cd / cc, ce / cc
    dd, de, dt = dd - d * cd, de - d * ce, dt - d * ct
    ee, et = ee - e * ce, et - e * ct
    _check_pivot(dd)
    e = de / dd
    ee, et = ee - e * de, et - e * dt
    _check_pivot(ee)
    e = et / ee
    d = (dt - de * e) / dd
    c = (ct - (ce * e + cd * d)) / cc
    b = (bt - (be * e + bd * d + bc * c)) / bb
    a = (at - (ae * e + ad * d + ac * c + ab * b)) / aa
    return [a, b, c, d, e]


def _check_pivot(pivot: float) -> None:
    if not pivot > 0.0:
        raise ValueError("the matrix is not positive definite")


def _solve_bounded(gram: Sequence[Sequence[float]], moment: Sequence[float]) -> list[float]:
    """x >= 0 of least `x.gram.x/2 - moment.x`, for a positive definite gram, by the active-set method of Lawson and
    Hanson (Solving Least Squares Problems, 1974, chapter 23), on the normal equations."""
    size = len(moment)
    solution = [0.0] * size
    free: list[int] = []
    tolerance = 1e-12 * max(map(abs, moment))
    for _ in range(3 * size):
        slopes = {i: moment[i] - sum(gram[i][j] * solution[j] for j in free) for i in range(size) if i not in free}
        steepest = max(slopes, key=slopes.__getitem__, default=None)
        if steepest is None or slopes[steepest] <= tolerance:
            break
        free.append(steepest)
        _descend(gram, moment, solution, free)
    return solution


def _descend(gram: Sequence[Sequence[float]], moment: Sequence[float], solution: list[float], free: list[int]) -> None:
    """Move `solution` to the best point in which only the `free` unknowns are not zero, and drop from these what would
    turn negative on the way."""
    while free:
        best = solve_triangle([[*[gram[i][j] for j in free[at:]], moment[i]] for at, i in enumerate(free)])
        if min(best) > 0.0:
            for i, value in zip(free, best, strict=True):
                solution[i] = value
            return
        reach = {i: _share_until_zero(solution[i], value) for i, value in zip(free, best, strict=True) if value <= 0.0}
        step = min(reach.values())
        for i, value in zip(free, best, strict=True):
            solution[i] += step * (value - solution[i])
        for i in (i for i in reach if reach[i] <= step):
            solution[i] = 0.0
            free.remove(i)


def _share_until_zero(start: float, end: float) -> float:
    """At which share of the way from `start` >= 0 to `end` <= 0 zero is met."""
    return start / (start - end) if start > 0.0 else 0.0


def solve_triangle(lines: list[list[float]]) -> list[float]:
    """Gauss's elimination without pivots, which a positive definite matrix does not need, on its upper triangle:
    `lines[i]` is the matrix from the diagonal on, and the right side. Overwrites `lines`.

    Raises:
        ValueError: the matrix is not positive definite.
    """
    size = len(lines)
    for i, line in enumerate(lines):
        pivot = line[0]
        _check_pivot(pivot)
        for j in range(1, size - i):
            share, lower = line[j] / pivot, lines[i + j]
            for at, above in enumerate(line[j:]):
                lower[at] -= share * above
    found: list[float] = []  # the last unknown first
    for line in reversed(lines):
        rest = line[-1] - sum(map(mul, line[-2:0:-1], found))
        found.append(rest / line[0])
    return found[::-1]
