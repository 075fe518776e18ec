"""Measured kernel times, as factors on what the roofline gives: interpolated in log space, so that between and beyond
the measured sizes the roofline's shape stays.

A row that is faster than the device can be (its peak rates, see `roofline.py`) is a mistake of the measurement, and
left out. How tables get here from files is the command line's business (`src/disagg/cli/planning/perf_tables.py`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

MAX_FACTOR = 20.0
"""Limit of corrections: each factor is between one over this and this."""


class GemmTime(NamedTuple):
    """Measured time of one product `[m, k] x [k, n]`."""

    m: int
    n: int
    k: int
    seconds: float


class AttentionTime(NamedTuple):
    """Measured time of one attention call for `batch` sequences. `tokens` are those of each prompt, all of them new
    (prefill), or those that each sequence attends to (decode). Heads are those of one rank."""

    batch: int
    tokens: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    seconds: float


class AllReduceTime(NamedTuple):
    """Measured time of one all-reduce of `num_bytes` on each rank."""

    num_ranks: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class PerfTables:
    """The measurements on one device. Where a table is missing, the roofline stays uncorrected."""

    source: str = ""
    """Origin of the tables, for reports."""
    gemm: Mapping[str, Sequence[GemmTime]] = field(default_factory=dict)
    """GEMM times by dtype."""
    prefill_attention: Sequence[AttentionTime] = ()
    decode_attention: Sequence[AttentionTime] = ()
    all_reduce: Sequence[AllReduceTime] = ()
    """All-reduce times. Several rows of one size are several implementations: the fastest counts."""


@dataclass(frozen=True)
class Curve:
    """Log of a factor over the log of one size; linear between the points, constant beyond them."""

    xs: tuple[float, ...]
    ys: tuple[float, ...]

    def factor(self, size: float) -> float:
        """The factor for the roofline's time."""
        return math.exp(_interpolate(self.xs, self.ys, math.log(max(size, 1e-9))))


@dataclass(frozen=True)
class Surface:
    """Log of a factor over the logs of two sizes: a curve in the second one for each of the first."""

    xs: tuple[float, ...]
    curves: tuple[Curve, ...]

    def factor(self, first: float, second: float) -> float:
        """The factor for the roofline's time."""
        x, y = math.log(max(first, 1e-9)), math.log(max(second, 1e-9))
        at = min(max(bisect_right(self.xs, x), 1), len(self.xs) - 1)
        if len(self.xs) == 1:
            return math.exp(_interpolate(self.curves[0].xs, self.curves[0].ys, y))
        low, high = self.curves[at - 1], self.curves[at]
        share = min(1.0, max(0.0, (x - self.xs[at - 1]) / (self.xs[at] - self.xs[at - 1])))
        below, above = _interpolate(low.xs, low.ys, y), _interpolate(high.xs, high.ys, y)
        return math.exp(below + share * (above - below))


def curve_of(points: Mapping[int, float]) -> Curve | None:
    """The curve through factors by size; None without any."""
    if not points:
        return None
    sizes = sorted(points)
    return Curve(tuple(map(math.log, sizes)), tuple(math.log(points[size]) for size in sizes))


def clip(factor: float) -> float:
    """Limit a factor to at most `MAX_FACTOR` and at least one over it."""
    return min(MAX_FACTOR, max(1.0 / MAX_FACTOR, factor))


class GemmCorrections:
    """The factors of one dtype's GEMMs, on a grid of (n, k)."""

    def __init__(self, rows: Iterable[GemmTime], roofline_s: Callable[[int, int, int], float], peak: float) -> None:
        self._curves: dict[tuple[int, int], dict[int, float]] = {}
        for m, n, k, seconds in rows:
            if seconds > 2.0 * m * n * k / peak:
                self._curves.setdefault((n, k), {})[m] = clip(seconds / roofline_s(m, n, k))
        self._ns = sorted({n for n, _ in self._curves})
        self._ks = sorted({k for _, k in self._curves})

    def curve(self, n: int, k: int) -> Curve | None:
        """The factor of `[m, k] x [k, n]` over m, from up to four measured neighbours of (n, k). None where nothing was
        measured."""
        corners = [
            (self._curves[(near_n, near_k)], weight_n * weight_k)
            for near_n, weight_n in _neighbours(self._ns, n)
            for near_k, weight_k in _neighbours(self._ks, k)
            if (near_n, near_k) in self._curves and weight_n * weight_k > 0.0
        ]
        points: dict[int, float] = {}
        for m in sorted({m for factors, _ in corners for m in factors}):
            here = [(math.log(factors[m]), weight) for factors, weight in corners if m in factors]
            points[m] = math.exp(sum(log * weight for log, weight in here) / sum(weight for _, weight in here))
        return curve_of(points)


def attention_surface(
    rows: Sequence[AttentionTime],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    roofline_s: Callable[[AttentionTime], float],
    least_s: Callable[[AttentionTime], float],
) -> Surface | None:
    """The factor over (batch, tokens) from the measured heads that are most like these; None where no head of this size
    was measured."""
    kinds = {(row.num_heads, row.num_kv_heads) for row in rows if row.head_dim == head_dim}
    if not kinds:
        return None

    def distance(kind: tuple[int, int]) -> tuple[float, int, int]:
        return abs(math.log(kind[0] / num_heads)) + abs(math.log(kind[1] / num_kv_heads)), *kind

    nearest = min(kinds, key=distance)
    by_batch: dict[int, dict[int, float]] = {}
    for row in rows:
        if (row.num_heads, row.num_kv_heads) == nearest and row.head_dim == head_dim and row.seconds > least_s(row):
            by_batch.setdefault(row.batch, {})[row.tokens] = clip(row.seconds / roofline_s(row))
    curves = {batch: curve for batch in sorted(by_batch) if (curve := curve_of(by_batch[batch])) is not None}
    return Surface(tuple(map(math.log, curves)), tuple(curves.values())) if curves else None


def all_reduce_curve(
    rows: Iterable[AllReduceTime], num_ranks: int, roofline_s: Callable[[float], float]
) -> Curve | None:
    """The factor over the bytes, for exactly so many ranks; None where these were not measured."""
    best: dict[int, float] = {}
    for row in rows:
        if row.num_ranks == num_ranks and row.seconds > 0.0:
            best[row.num_bytes] = min(best.get(row.num_bytes, math.inf), row.seconds)
    return curve_of({size: clip(seconds / roofline_s(size)) for size, seconds in best.items()})


def _neighbours(sizes: Sequence[int], size: int) -> list[tuple[int, float]]:
    """The measured sizes around one, with their weights by distance in log space; the nearest alone beyond the ends."""
    if not sizes:
        return []
    at = bisect_right(sizes, size)
    if at == 0:
        return [(sizes[0], 1.0)]
    if at == len(sizes) or sizes[at - 1] == size:
        return [(sizes[at - 1], 1.0)]
    low, high = sizes[at - 1], sizes[at]
    share = math.log(size / low) / math.log(high / low)
    return [(low, 1.0 - share), (high, share)]


def _interpolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    at = bisect_right(xs, x)
    if at == 0:
        return ys[0]
    if at == len(xs):
        return ys[-1]
    share = (x - xs[at - 1]) / (xs[at] - xs[at - 1])
    return ys[at - 1] + share * (ys[at] - ys[at - 1])
