"""A grid of ratios as text, and as a PNG of several grids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from disagg.loadtests.verdict.plots import check_installed

Row = Mapping[str, Any]
Grid = dict[tuple[float, float], Row]
LEAST, MOST = 0.7, 1.7
"""Ratios with the colours at the ends of the map; 1 is in its middle."""


def grids_of(rows: Sequence[Row]) -> dict[tuple[int, str], Grid]:
    """Rows by workers and workload, then by TTFT and TPOT limit."""
    found: dict[tuple[int, str], Grid] = {}
    for row in rows:
        found.setdefault((row["workers"], row["workload"]), {})[row["ttft_s"], row["tpot_s"]] = row
    return found


def as_text(grid: Grid, value: str) -> str:
    """A Markdown table: ratio and static shape of each cell; `-` where no static shape serves anything."""
    shape = "best_shape" if value == "over_best" else "best_last_shape"
    ttfts, tpots = _axes(grid)
    lines = ["| TPOT | " + " | ".join(f"TTFT {ttft_s:g} s" for ttft_s in ttfts) + " |", "|---" * (len(ttfts) + 1) + "|"]
    for tpot_s in tpots:
        cells = []
        for ttft_s in ttfts:
            row = grid.get((ttft_s, tpot_s))
            is_empty = row is None or row[value] is None
            cells.append("-" if row is None or is_empty else f"**{row[value]:.2f}** ({short(row[shape])})")
        lines.append(f"| {tpot_s * 1e3:g} ms | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def short(shape: str) -> str:
    """A shape's name without the number of workers."""
    return shape.partition("x1-")[2] or shape


def write_png(path: Path, rows: Sequence[Row], title: str) -> None:
    """Both ratios of each grid: over the best static shape, and over the best with hopeless prompts last. Raises
    `ConfigError` without matplotlib."""
    check_installed()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure

    grids = grids_of(rows)
    figure = Figure(figsize=(8.6, 0.5 + 2.7 * len(grids)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=10)
    norm = TwoSlopeNorm(vmin=LEAST, vcenter=1.0, vmax=MOST)
    panels = figure.subplots(len(grids), 2, squeeze=False)
    for ((workers, workload), grid), pair in zip(grids.items(), panels, strict=True):
        ttfts, tpots = _axes(grid)
        for axes, value in zip(pair, ("over_best", "over_last"), strict=True):
            values = [[_value(grid, ttft_s, tpot_s, value) for ttft_s in ttfts] for tpot_s in tpots]
            drawn = axes.imshow(values, norm=norm, cmap="RdBu", aspect="auto")
            name = "first come" if value == "over_best" else "hopeless last"
            axes.set_title(f"{workload}, {workers} workers, over {name}", fontsize=8)
            axes.set_xticks(range(len(ttfts)), [f"{ttft_s:g} s" for ttft_s in ttfts], fontsize=7)
            axes.set_yticks(range(len(tpots)), [f"{tpot_s * 1e3:g} ms" for tpot_s in tpots], fontsize=7)
            for y, line in enumerate(values):
                for x, number in enumerate(line):
                    text = "-" if number != number else f"{number:.2f}"
                    is_dark = number == number and not 0.8 < number < 1.45
                    axes.text(x, y, text, ha="center", va="center", fontsize=7, color="white" if is_dark else "black")
    figure.colorbar(drawn, ax=panels, shrink=0.5)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _axes(grid: Grid) -> tuple[list[float], list[float]]:
    return sorted({ttft_s for ttft_s, _ in grid}), sorted({tpot_s for _, tpot_s in grid})


def _value(grid: Grid, ttft_s: float, tpot_s: float, value: str) -> float:
    row = grid.get((ttft_s, tpot_s))
    return float("nan") if row is None or row[value] is None else float(row[value])
