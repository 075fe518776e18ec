"""Least squares with coefficients that are never negative, from sums that forget: for fits that run along with what
they predict. Pure Python: with five unknowns a call into an array library costs more than the arithmetic.

    moments.add(row, target)     of each observation only its share in the normal equations is kept
    system = prior + moments     sums of moments stand for all their observations
    system.solve(...)            the coefficients
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Row = Sequence[tuple[int, float]]
"""(index of the unknown, its factor) of all factors that are not zero, indices rising."""

_LARGEST_UNIT = 1e12
"""The weight of the newest observation at which the sums are scaled down again."""

_JITTER = 1e-11
"""Relative, on the diagonal: keeps factors of very different sizes from making the matrix indefinite by rounding."""


class Moments:
    """The normal equations of weighted observations `sum(factor * unknown) = target`.

    Args:
        window: about how many of the latest observations count; each new one takes 1/window of the weight of all the
            earlier ones. None never forgets.
    """

    __slots__ = ("_growth", "_unit", "gram", "moment", "size", "weight")

    def __init__(self, size: int, window: float | None = None) -> None:
        self.size = size
        self.gram = [[0.0] * size for _ in range(size)]
        """Upper triangle only: `gram[i][j]` for i <= j."""
        self.moment = [0.0] * size
        self.weight = 0.0
        """Of all observations. This, `gram` and `moment` are in units of the weight of the newest observation, see
        `scale`."""
        self._growth = 1.0 if window is None else window / (window - 1.0)
        self._unit = 1.0

    @property
    def scale(self) -> float:
        """What to multiply the sums with, so that the newest observation counts once."""
        return 1.0 / self._unit

    def add(self, row: Row, target: float, weight: float = 1.0) -> None:
        """Take in one observation. Instead of fading the past, which touches every sum, the new one weighs more."""
        self._unit *= self._growth
        weight *= self._unit
        self.weight += weight
        gram, moment = self.gram, self.moment
        for position, (i, factor) in enumerate(row):
            weighted = weight * factor
            moment[i] += weighted * target
            gram_i = gram[i]
            for j, other in row[position:]:
                gram_i[j] += weighted * other
        if self._unit > _LARGEST_UNIT:
            self._rescale()

    def include(self, other: Moments, share: float = 1.0, target_factor: float = 1.0) -> None:
        """Add `share` times all observations of `other`, with the weights that they have now and with their targets
        times `target_factor`."""
        factor = share * other.scale * self._unit
        self.weight += factor * other.weight
        self.moment = [
            own + factor * target_factor * target for own, target in zip(self.moment, other.moment, strict=True)
        ]
        for own_line, line in zip(self.gram, other.gram, strict=True):
            own_line[:] = [own + factor * value for own, value in zip(own_line, line, strict=True)]

    def along(self, solution: Sequence[float]) -> tuple[float, float]:
        """(x.gram.x, moment.x) for x = `solution`: the second over the first is the factor of x that fits best."""
        answers = self._answers(solution)
        squared = sum(answer * value for answer, value in zip(answers, solution, strict=True))
        return squared, sum(target * value for target, value in zip(self.moment, solution, strict=True))

    def expect(self, solution: Sequence[float]) -> None:
        """Replace all targets by what `solution` gives for them: the same knowledge, with another answer."""
        self.moment = self._answers(solution)

    def _answers(self, solution: Sequence[float]) -> list[float]:
        gram, indices = self.gram, range(self.size)
        return [sum(gram[min(i, j)][max(i, j)] * solution[j] for j in indices) for i in indices]

    def solve(self) -> list[float]:
        """The solution of least squares with no unknown negative. Every unknown must have been observed, but several
        need not be told apart."""
        full = [[self.gram[min(i, j)][max(i, j)] for j in range(self.size)] for i in range(self.size)]
        for i in range(self.size):
            full[i][i] *= 1.0 + _JITTER
        return solve_non_negative(full, self.moment)

    def _rescale(self) -> None:
        factor = self.scale
        self.gram = [[value * factor for value in line] for line in self.gram]
        self.moment = [value * factor for value in self.moment]
        self.weight *= factor
        self._unit = 1.0


def total(size: int, parts: Iterable[Moments]) -> Moments:
    """All observations of several moments together."""
    together = Moments(size)
    for part in parts:
        together.include(part)
    return together


def solve_non_negative(gram: Sequence[Sequence[float]], moment: Sequence[float]) -> list[float]:
    """x >= 0 of least `x.gram.x/2 - moment.x`, for a positive definite gram.

    Where the solution without that bound is within it, it is the answer. Else the active-set method of Lawson and
    Hanson (Solving Least Squares Problems, 1974, chapter 23), on the normal equations.

    Raises:
        ValueError: the gram matrix is not positive definite.
    """
    unbounded = solve_positive_definite(gram, moment)
    if min(unbounded) >= 0.0:
        return unbounded
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
        best = solve_positive_definite([[gram[i][j] for j in free] for i in free], [moment[i] for i in free])
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


def solve_positive_definite(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """x of `matrix.x = right`, by Cholesky's decomposition.

    Raises:
        ValueError: the matrix is not positive definite.
    """
    size = len(right)
    lower = [[0.0] * size for _ in range(size)]
    solution = list(right)
    for i in range(size):
        for j in range(i + 1):
            rest = matrix[i][j] - sum(lower[i][k] * lower[j][k] for k in range(j))
            if i > j:
                lower[i][j] = rest / lower[j][j]
            elif rest > 0.0:
                lower[i][i] = rest**0.5
            else:
                raise ValueError("the matrix is not positive definite")
        solution[i] = (solution[i] - sum(lower[i][k] * solution[k] for k in range(i))) / lower[i][i]
    for i in reversed(range(size)):
        solution[i] = (solution[i] - sum(lower[k][i] * solution[k] for k in range(i + 1, size))) / lower[i][i]
    return solution
