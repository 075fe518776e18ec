"""Charts as SVG text: enough for a report that opens anywhere, without a plotting library or a network.

Chart(series...) -> render -> <svg>...</svg>
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

Style = Literal["line", "step", "dots", "dashed"]
Point = tuple[float, float]

WIDTH, HEIGHT = 560, 320
"""Pixels, without the legend."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 32, 48
_LINE, _CHARACTER, _SWATCH = 16, 6.5, 26
"""Pixels of a legend: a line's height, a letter's width, and what a name needs besides its letters."""

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#000000")
"""Told apart also by people who see fewer colours (M. Okabe and K. Ito, 2008, in another order)."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line, or one set of dots."""

    name: str
    points: Sequence[Point]
    style: Style = "line"


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One pair of axes. Points that are not finite are left out."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    y_max: float | None = None
    """The top of the y axis; from the data when unset. The bottom is 0."""
    x_mark: float | None = None
    """A vertical line, such as a limit."""


@dataclass(frozen=True, kw_only=True)
class _Frame:
    """From data to pixels."""

    x_max: float
    y_max: float

    def x(self, value: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * value / self.x_max

    def y(self, value: float) -> float:
        return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * min(value, self.y_max) / self.y_max


def render(chart: Chart) -> str:
    """The chart as an `<svg>` element."""
    series = [
        Series(name=line.name, style=line.style, points=[p for p in line.points if all(map(math.isfinite, p))])
        for line in chart.series
    ]
    points = [point for line in series for point in line.points]
    marks = [] if chart.x_mark is None else [chart.x_mark]
    x_ticks = ticks(max([*(x for x, _ in points), *marks], default=0.0))
    y_ticks = ticks(max((y for _, y in points), default=0.0) if chart.y_max is None else chart.y_max)
    frame = _Frame(x_max=x_ticks[-1], y_max=y_ticks[-1])
    legend = _legend(series)
    height = HEIGHT + _LINE * len(legend)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="{escape(chart.title)}" font-family="sans-serif" font-size="11">',
        f'<text x="{WIDTH / 2}" y="18" text-anchor="middle" font-weight="bold">{escape(chart.title)}</text>',
        *_axes(chart, frame, x_ticks, y_ticks),
        *(_series(line, frame, COLOURS[index % len(COLOURS)]) for index, line in enumerate(series)),
        *(_mark(frame, mark) for mark in marks),
        *_legend_svg(legend),
        "</svg>",
    ]
    return "\n".join(part for part in parts if part)


def ticks(most: float, around: int = 5) -> list[float]:
    """Round numbers from 0 up to the first one at or above `most`, about `around` steps of 1, 2 or 5 times a power of
    ten; `[0, 1]` if there is nothing to show."""
    if most <= 0 or not math.isfinite(most):
        return [0.0, 1.0]
    raw = most / around
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * (1 - 1e-9))
    num_steps = math.ceil(most / step - 1e-9)
    return [float(f"{index * step:.12g}") for index in range(num_steps + 1)]


def _axes(chart: Chart, frame: _Frame, x_ticks: Sequence[float], y_ticks: Sequence[float]) -> list[str]:
    left, right, top, bottom = _LEFT, WIDTH - _RIGHT, _TOP, HEIGHT - _BOTTOM
    parts = []
    for value in y_ticks:
        y = f"{frame.y(value):.1f}"
        parts.append(f'<line x1="{left}" x2="{right}" y1="{y}" y2="{y}" stroke="#dddddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y}" dy="4" text-anchor="end">{value:g}</text>')
    for value in x_ticks:
        x = f"{frame.x(value):.1f}"
        parts.append(f'<line x1="{x}" x2="{x}" y1="{top}" y2="{bottom}" stroke="#eeeeee"/>')
        parts.append(f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{value:g}</text>')
    middle_x, middle_y = (left + right) / 2, (top + bottom) / 2
    return [
        *parts,
        f'<path d="M{left} {top}V{bottom}H{right}" fill="none" stroke="#333333"/>',
        f'<text x="{middle_x}" y="{HEIGHT - 10}" text-anchor="middle">{escape(chart.x_label)}</text>',
        f'<text x="14" y="{middle_y}" text-anchor="middle" transform="rotate(-90 14 {middle_y})">'
        f"{escape(chart.y_label)}</text>",
    ]


def _series(series: Series, frame: _Frame, colour: str) -> str:
    if not series.points:
        return ""
    pixels = [(frame.x(x), frame.y(y)) for x, y in series.points]
    if series.style == "dots":
        return "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{colour}"/>' for x, y in pixels)
    path = f"M{pixels[0][0]:.1f} {pixels[0][1]:.1f}" + "".join(
        f"H{x:.1f}V{y:.1f}" if series.style == "step" else f"L{x:.1f} {y:.1f}" for x, y in pixels[1:]
    )
    dash = ' stroke-dasharray="5 4"' if series.style == "dashed" else ""
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.6"{dash}/>'


def _mark(frame: _Frame, value: float) -> str:
    x = f"{frame.x(value):.1f}"
    return f'<line x1="{x}" x2="{x}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}" stroke="#cc0000" stroke-dasharray="2 3"/>'


def _legend(series: Sequence[Series]) -> list[list[tuple[str, str]]]:
    """Rows of (name, colour), as many names a row as fit; series without a name are left out."""
    rows: list[list[tuple[str, str]]] = []
    room = 0.0
    for index, line in enumerate(series):
        if not line.name:
            continue
        needed = _CHARACTER * len(line.name) + _SWATCH
        if needed > room:
            rows.append([])
            room = WIDTH - _LEFT - _RIGHT
        rows[-1].append((line.name, COLOURS[index % len(COLOURS)]))
        room -= needed
    return rows


def _legend_svg(rows: Sequence[Sequence[tuple[str, str]]]) -> list[str]:
    """Names in their colours, below the axes."""
    parts = []
    for number, row in enumerate(rows):
        x, y = float(_LEFT), HEIGHT + _LINE * number + 4
        for name, colour in row:
            parts.append(f'<rect x="{x:.1f}" y="{y - 9}" width="10" height="10" fill="{colour}"/>')
            parts.append(f'<text x="{x + 14:.1f}" y="{y}">{escape(name)}</text>')
            x += _CHARACTER * len(name) + _SWATCH
    return parts
