"""Charts as SVG text, drawn by matplotlib: for HTML reports that open anywhere, without a network.

    to_svg(Chart | Bars | HeatMap) -> "<svg ...>...</svg>", to be put into a page as it is

A chart is plain data until it is drawn. Equal charts give equal text: no dates, no random ids. Text, axes and grid have
the `color` of the page around them, so that a chart can be read on a light and on a dark page; series have the colours
of Okabe and Ito (M. Okabe and K. Ito, Color Universal Design, 2008), and markers of different shapes.

matplotlib comes with the extra `load` and is imported when the first chart is drawn.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Literal

from disagg.proto.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

Style = Literal["line", "step", "dots", "dashed"]
Scale = Literal["linear", "log"]
Point = tuple[float, float]

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")
"""Colours of the series, in turn."""
MARKERS = ("o", "^", "s", "D", "v", "P", "X")
"""Markers of the series, in turn."""
COLOUR_MAP = "cividis"
"""Colour map of heat maps: its lightness rises evenly, for every kind of colour vision (J. Nunez et al., 2018)."""

SIZE_IN = (5.8, 3.4)
"""Width and height of a chart in inches of 72 points, without the legend."""
MAX_MARKED_POINTS = 40
"""A line with more points is drawn without markers."""
MAX_LABELLED_CELLS = 400
"""A heat map with more cells has no figures in them."""
MAX_CELL_NAMES = 20
"""A heat map with more columns or rows has the names of some, at equal distances."""

_LEGEND_ROW_IN, _LEGEND_ROW_LETTERS = 0.2, 72
_INK = "#010203"
"""Placeholder for the page's text colour until the text is written."""
_SETTINGS: Mapping[str, Any] = {
    "svg.fonttype": "none",  # text stays text: small, and found by a browser's search
    "text.parse_math": False,  # a name may have a $ in it
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.unicode_minus": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.2,
    "figure.constrained_layout.w_pad": 0.08,
    "figure.constrained_layout.h_pad": 0.06,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 3.5,
    **{f"{name}.color": _INK for name in ("text", "xtick", "ytick", "grid")},
    **{f"axes.{name}color": _INK for name in ("edge", "label", "title")},
}


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line, or one set of dots. Points that are not finite are left out."""

    name: str
    """Name in the legend; a series without a name is not in it."""
    points: Sequence[Point]
    style: Style = "line"
    band: Sequence[tuple[float, float]] = ()
    """Pairs of the least and the largest y at each point, such as a confidence interval; empty for none."""

    def __post_init__(self) -> None:
        if self.band and len(self.band) != len(self.points):
            raise ValueError(f"band: expected one interval for each of {len(self.points)} points; got {len(self.band)}")


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Series over one pair of axes."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    y_max: float | None = None
    """Top of the y axis; None takes it from the data. The bottom of a linear axis is 0, or the least value if that is
    below."""
    x_mark: float | None = None
    """Position of a vertical line, such as a limit."""
    y_mark: float | None = None
    """Position of a horizontal line, such as a limit."""
    x_scale: Scale = "linear"
    y_scale: Scale = "linear"


@dataclass(frozen=True, kw_only=True)
class Bars:
    """Bar chart: for each category one bar of every group, side by side."""

    title: str
    y_label: str
    categories: Sequence[str]
    groups: Mapping[str, Sequence[float | None]]
    """Heights by the group's name, one for each category; None leaves the bar out."""
    y_mark: float | None = None
    """Position of a horizontal line, such as a limit."""

    def __post_init__(self) -> None:
        for name, heights in self.groups.items():
            if len(heights) != len(self.categories):
                raise ValueError(
                    f"groups: expected {len(self.categories)} heights, one a category; {name!r} has {len(heights)}"
                )


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    """Heat map: a figure for each pair of a column and a row, as a colour."""

    title: str
    x_label: str
    y_label: str
    value_label: str
    columns: Sequence[str]
    rows: Sequence[str]
    """Names of the rows; the first one is at the bottom."""
    values: Sequence[Sequence[float | None]]
    """Values row by row; a cell of None, or one that is not finite, is empty."""

    def __post_init__(self) -> None:
        if len(self.values) != len(self.rows) or any(len(row) != len(self.columns) for row in self.values):
            shape = [len(row) for row in self.values]
            raise ValueError(f"values: expected {len(self.rows)} rows of {len(self.columns)} values; got {shape}")


def check_installed() -> None:
    """Raise `ConfigError` if charts cannot be drawn, so that a command can say so before it measures for hours."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("plots need matplotlib; next: pip install 'disagg[load]'")


def to_svg(chart: Chart | Bars | HeatMap) -> str:
    """Draw the chart as an `<svg>` element.

    Raises:
        ConfigError: if matplotlib is not installed.
    """
    check_installed()
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    salt = hashlib.blake2b(repr(chart).encode(), digest_size=4).hexdigest()
    with matplotlib.rc_context(dict(_SETTINGS) | {"svg.hashsalt": salt}):
        figure = Figure(figsize=SIZE_IN, layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        axes.set_title(chart.title)
        match chart:
            case Chart():
                _draw_series(axes, chart)
            case Bars():
                _draw_bars(axes, chart)
            case HeatMap():
                _draw_cells(figure, axes, chart)
        _add_legend(figure, axes)
        out = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(out, format="svg", transparent=True, metadata=nothing)
    return _inline(out.getvalue(), chart.title, salt)


def cdf(name: str, values: Sequence[float], num_total: int | None = None) -> Series:
    """The share of all values that are at most x, as a step at each value.

    Args:
        name: name of the series.
        values: in any order.
        num_total: number that 1 stands for, if not all of them have a value: the curve then ends below 1.
    """
    total = len(values) if num_total is None else num_total
    points = [(value, (rank + 1) / total) for rank, value in enumerate(sorted(values))]
    return Series(name=name, points=points, style="step")


# ---------------------------------------------------------------- drawing


def _draw_series(axes: Axes, chart: Chart) -> None:
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.set_xscale(chart.x_scale)
    axes.set_yscale(chart.y_scale)
    for index, series in enumerate(chart.series):
        _draw_one(axes, series, index, chart)
    if not any(axes.lines):
        _say_empty(axes)
    for mark, draw in ((chart.x_mark, axes.axvline), (chart.y_mark, axes.axhline)):
        if mark is not None:
            draw(mark, color=_INK, linestyle=":", linewidth=1.2, gid="mark")
    if chart.x_scale == "linear":
        axes.set_xlim(left=min(0.0, axes.dataLim.x0) if any(axes.lines) else 0.0)
    if chart.y_scale == "linear":
        axes.set_ylim(bottom=min(0.0, axes.dataLim.y0) if any(axes.lines) else 0.0)
    if chart.y_max is not None:
        axes.set_ylim(top=chart.y_max * 1.02)  # a line at the top is seen whole
    for scale, axis in ((chart.x_scale, axes.xaxis), (chart.y_scale, axes.yaxis)):
        if scale == "log":
            _write_plain_numbers(axis)


def _write_plain_numbers(axis: Axis) -> None:
    """Write the ticks of a logarithmic axis as `0.1`, `10`, `1,000`. The labels of matplotlib are formulas, which the
    text of a page shows as they are written. Ticks between powers of ten have labels if the axis spans less than a
    factor of ten."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    least, most = sorted(axis.get_view_interval())
    axis.set_major_formatter(FuncFormatter(plain_number))
    axis.set_minor_formatter(FuncFormatter(plain_number) if most < 10 * least else NullFormatter())


def plain_number(value: float, place: object = None) -> str:
    """A number without an exponent. `place`: its position on an axis, which does not matter."""
    whole, _, part = f"{value:,.12f}".partition(".")
    part = part.rstrip("0")
    return f"{whole}.{part}" if part else whole


def _draw_one(axes: Axes, series: Series, index: int, chart: Chart) -> None:
    bands: Sequence[tuple[float, float] | None] = series.band or [None] * len(series.points)
    kept = [(point, band) for point, band in zip(series.points, bands, strict=True) if _can_be_drawn(point, chart)]
    if not kept:
        return
    xs, ys = ([point[axis] for point, _ in kept] for axis in (0, 1))
    colour = COLOURS[index % len(COLOURS)]
    is_marked = series.style == "dots" or (series.style == "line" and len(kept) <= MAX_MARKED_POINTS)
    axes.plot(
        xs,
        ys,
        color=colour,
        label=series.name or "_",
        gid=f"series-{index}",
        linestyle={"dots": "none", "dashed": "--"}.get(series.style, "-"),
        drawstyle="steps-post" if series.style == "step" else "default",
        marker=MARKERS[index % len(MARKERS)] if is_marked else "",
        alpha=0.75 if series.style == "dots" else 1.0,
        zorder=3 if series.style == "dots" else 2,
    )
    inside = [(x, *band) for (x, _), band in kept if band is not None and all(map(math.isfinite, band))]
    if inside:
        at, least, most = zip(*inside, strict=True)
        axes.fill_between(at, least, most, color=colour, alpha=0.2, linewidth=0, gid=f"band-{index}")


def _can_be_drawn(point: Point, chart: Chart) -> bool:
    scales = (chart.x_scale, chart.y_scale)
    return all(
        math.isfinite(value) and (scale == "linear" or value > 0) for value, scale in zip(point, scales, strict=True)
    )


def _draw_bars(axes: Axes, chart: Bars) -> None:
    axes.set_ylabel(chart.y_label)
    axes.grid(visible=False, axis="x")
    axes.set_xticks(range(len(chart.categories)), chart.categories)
    width = 0.8 / max(1, len(chart.groups))
    num_drawn = 0
    for index, (name, heights) in enumerate(chart.groups.items()):
        left = width * (index - (len(chart.groups) - 1) / 2)
        found = [
            (at + left, height) for at, height in enumerate(heights) if height is not None and math.isfinite(height)
        ]
        colour = COLOURS[index % len(COLOURS)]
        bars = axes.bar([x for x, _ in found], [y for _, y in found], width, color=colour, label=name or "_")
        for bar in bars:
            bar.set_gid(f"bar-{num_drawn}")
            num_drawn += 1
    if not num_drawn:
        _say_empty(axes)
    if chart.y_mark is not None:
        axes.axhline(chart.y_mark, color=_INK, linestyle=":", linewidth=1.2, gid="mark")


def _draw_cells(figure: Figure, axes: Axes, chart: HeatMap) -> None:
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.grid(visible=False)
    found = [
        (x, y, value)
        for y, row in enumerate(chart.values)
        for x, value in enumerate(row)
        if value is not None and math.isfinite(value)
    ]
    if not found:
        _say_empty(axes)
        return
    cells = [[math.nan if value is None else value for value in row] for row in chart.values]
    drawn = axes.pcolormesh(cells, cmap=COLOUR_MAP, gid="cells", edgecolors="none")
    for names, set_ticks in ((chart.columns, axes.set_xticks), (chart.rows, axes.set_yticks)):
        shown = range(0, len(names), math.ceil(len(names) / MAX_CELL_NAMES))
        set_ticks([index + 0.5 for index in shown], [names[index] for index in shown])
    scale = figure.colorbar(drawn, ax=axes, label=chart.value_label)
    scale.solids.set_rasterized(False)
    if len(found) <= MAX_LABELLED_CELLS:
        least, most = min(value for _, _, value in found), max(value for _, _, value in found)
        for x, y, value in found:
            ink = "black" if value - least > 0.55 * (most - least) else "white"
            axes.text(x + 0.5, y + 0.5, f"{value:.3g}", ha="center", va="center", fontsize=8, color=ink)


def _say_empty(axes: Axes) -> None:
    axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", va="center", fontsize=11)


def _add_legend(figure: Figure, axes: Axes) -> None:
    """Add the names below the axes, as many in a row as fit; the figure grows by their rows."""
    handles, names = axes.get_legend_handles_labels()
    if not names:
        return
    num_columns = max(1, min(len(names), _LEGEND_ROW_LETTERS // (max(map(len, names)) + 6)))
    num_rows = math.ceil(len(names) / num_columns)
    figure.set_size_inches(SIZE_IN[0], SIZE_IN[1] + _LEGEND_ROW_IN * num_rows)
    figure.legend(handles, names, loc="outside lower center", ncols=num_columns)


def _inline(document: str, title: str, salt: str) -> str:
    """Extract the element from a whole SVG document, with the page's colour, and ids that no other chart of a page
    has."""
    element = document[document.index("<svg") :].rstrip()
    element = re.sub(
        r"<defs>\s*<style.*?</style>\s*</defs>", "", element, count=1, flags=re.DOTALL
    )  # would be the page's
    element = element.replace(_INK, "currentColor")
    element = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>c{salt}-", element)
    return element.replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" stroke-linejoin="round" ', 1)
