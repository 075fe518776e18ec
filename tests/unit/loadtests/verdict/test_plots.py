"""Charts as SVG: every series and label is there, nothing else is, and equal charts are equal texts."""

from __future__ import annotations

import importlib.util
import math
import re
import xml.etree.ElementTree as ElementTree

import pytest

from disagg.loadtests.verdict.plots import (
    MAX_LABELLED_CELLS,
    Bars,
    Chart,
    HeatMap,
    Series,
    cdf,
    check_installed,
    plain_number,
    to_svg,
)
from disagg.proto.errors import ConfigError

SVG = "{http://www.w3.org/2000/svg}"
LINE = Chart(
    title="t",
    x_label="x",
    y_label="y",
    series=[
        Series(name="a", points=[(0, 1), (1, 3), (2, 2)], band=[(0, 2), (2, 4), (1, 3)]),
        Series(name="b", points=[(0, 2), (2, 1)], style="dashed"),
        Series(name="", points=[(0, 2), (2, 1)], style="step"),
        Series(name="d", points=[(0, 2), (2, 1)], style="dots"),
    ],
    x_mark=1.0,
    y_mark=2.0,
)
BARS = Bars(title="t", y_label="y", categories=["p", "q"], groups={"a": [1, 2], "b": [None, 3]}, y_mark=2.5)
CELLS = HeatMap(
    title="t",
    x_label="x",
    y_label="y",
    value_label="v",
    columns=["1", "2"],
    rows=["3", "4"],
    values=[[7, 8], [None, 9]],
)


def parsed(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text)


def words(chart: Chart | Bars | HeatMap) -> list[str]:
    """All text of a chart but the figures at its axes."""
    texts = [node.text or "" for node in parsed(to_svg(chart)).iter(f"{SVG}text")]
    return [text for text in texts if not re.fullmatch(r"[-\d.]+", text)]


def drawn(chart: Chart | Bars | HeatMap, kind: str) -> list[str]:
    """The names of what was drawn of a kind: `series`, `band`, `bar`, `mark`."""
    found = re.findall(rf'id="c[0-9a-f]{{8}}-({kind}[-\d]*)"', to_svg(chart))
    return sorted(found)


def test_a_chart_has_its_labels_and_a_legend_of_the_series_with_a_name() -> None:
    assert words(LINE) == ["x", "y", "t", "a", "b", "d"]


def test_every_series_band_and_mark_is_drawn_once() -> None:
    assert drawn(LINE, "series") == ["series-0", "series-1", "series-2", "series-3"]
    assert drawn(LINE, "band") == ["band-0"]
    assert drawn(LINE, "mark") == ["mark", "mark"]


def test_points_that_are_not_finite_are_left_out() -> None:
    points = [(0.0, 1.0), (math.nan, 1.0), (1.0, math.inf), (2.0, 2.0)]
    kept = [(0.0, 1.0), (2.0, 2.0)]
    pictures = [
        to_svg(Chart(title="t", x_label="x", y_label="y", series=[Series(name="a", points=found)]))
        for found in (points, kept)
    ]
    without_ids = [re.sub(r"c[0-9a-f]{8}-\w+", "", text) for text in pictures]
    assert without_ids[0] == without_ids[1]


def test_a_logarithmic_axis_leaves_out_what_it_cannot_show() -> None:
    only_zero = [Series(name="a", points=[(0.0, 1.0)])]
    assert words(Chart(title="t", x_label="x", y_label="y", series=only_zero, x_scale="log"))[-1] == "t"
    assert drawn(Chart(title="t", x_label="x", y_label="y", series=only_zero, x_scale="log"), "series") == []
    both = [Series(name="a", points=[(0.0, 1.0), (10.0, 1.0), (100.0, 2.0)])]
    assert drawn(Chart(title="t", x_label="x", y_label="y", series=both, x_scale="log"), "series") == ["series-0"]


@pytest.mark.parametrize(
    ("xs", "labels"),
    [
        ((0.01, 20_000.0), {"0.01", "0.1", "1", "10", "100", "1,000", "10,000"}),
        ((2.0, 6.0), {"2", "3", "4", "5", "6"}),
    ],
)
def test_a_logarithmic_axis_has_plain_numbers(xs: tuple[float, float], labels: set[str]) -> None:
    series = [Series(name="", points=[(x, x) for x in xs])]
    for scales in ({"x_scale": "log"}, {"y_scale": "log"}):
        chart = Chart(title="t", x_label="x", y_label="y", series=series, **scales)  # type: ignore[arg-type]
        texts = {node.text or "" for node in parsed(to_svg(chart)).iter(f"{SVG}text")}
        assert labels <= texts
        assert not any("$" in text or "math" in text for text in texts)


@pytest.mark.parametrize(
    ("value", "text"), [(1e-6, "0.000001"), (0.25, "0.25"), (3.0, "3"), (1e6, "1,000,000"), (30.0, "30")]
)
def test_a_plain_number(value: float, text: str) -> None:
    assert plain_number(value) == text


def test_bars_stand_for_every_height_that_is_there() -> None:
    assert drawn(BARS, "bar") == ["bar-0", "bar-1", "bar-2"]
    assert words(BARS) == ["p", "q", "y", "t", "a", "b"]
    assert drawn(BARS, "mark") == ["mark"]


def test_a_heat_map_writes_each_figure_into_its_cell() -> None:
    texts = [node.text for node in parsed(to_svg(CELLS)).iter(f"{SVG}text")]
    assert [text for text in texts if text in ("7", "8", "9")][:3] == ["7", "8", "9"]
    assert {"x", "y", "v", "t"} <= set(words(CELLS))
    assert not list(parsed(to_svg(CELLS)).iter(f"{SVG}image"))


def test_a_heat_map_of_many_cells_has_no_figures_in_them_and_few_names() -> None:
    num_columns = MAX_LABELLED_CELLS + 1
    names = [f"c{index}" for index in range(num_columns)]
    values = [[index + 0.123 for index in range(num_columns)]]
    large = HeatMap(title="t", x_label="x", y_label="y", value_label="v", columns=names, rows=["r"], values=values)
    texts = [node.text for node in parsed(to_svg(large)).iter(f"{SVG}text")]
    assert "0.123" not in texts
    assert [text for text in texts if text in names] == [f"c{index}" for index in range(0, num_columns, 21)]


@pytest.mark.parametrize(
    "chart",
    [
        Chart(title="t", x_label="x", y_label="y", series=[]),
        Chart(title="t", x_label="x", y_label="y", series=[Series(name="a", points=[])], y_max=1.0, x_mark=1.0),
        Bars(title="t", y_label="y", categories=[], groups={}),
        Bars(title="t", y_label="y", categories=["p"], groups={"a": [None]}),
        HeatMap(title="t", x_label="x", y_label="y", value_label="v", columns=[], rows=[], values=[]),
        HeatMap(title="t", x_label="x", y_label="y", value_label="v", columns=["1"], rows=["2"], values=[[None]]),
    ],
)
def test_a_chart_without_data_says_so(chart: Chart | Bars | HeatMap) -> None:
    assert "no data" in words(chart)


def test_names_are_escaped_and_dollars_are_no_formulas() -> None:
    series = [Series(name="<s> & $x_1$", points=[(1, 1)])]
    chart = Chart(title='<&"> $y$', x_label="a<b", y_label="c&d", series=series)
    assert words(chart) == ["a<b", "c&d", '<&"> $y$', "<s> & $x_1$"]
    assert parsed(to_svg(chart)).get("aria-label") == '<&"> $y$'


def test_equal_charts_are_equal_texts_and_different_ones_share_no_id() -> None:
    assert to_svg(LINE) == to_svg(LINE)
    first, second = ({node.get("id") for node in parsed(to_svg(chart)).iter()} - {None} for chart in (LINE, BARS))
    assert first
    assert first & second == set()


def test_a_chart_takes_its_ink_from_the_page_and_loads_nothing() -> None:
    for chart in (LINE, BARS, CELLS):
        text = to_svg(chart)
        assert text.startswith("<svg ")
        assert text.endswith("</svg>")
        assert "fill: currentColor" in text
        assert "#010203" not in text
        assert re.findall(r"https?://[^\"]*", text) == ["http://www.w3.org/1999/xlink", "http://www.w3.org/2000/svg"]
        assert "<style" not in text
        assert "<metadata" not in text


def test_a_distribution_ends_below_one_when_some_have_no_value() -> None:
    assert cdf("a", [0.2, 0.1], 4) == Series(name="a", points=[(0.1, 0.25), (0.2, 0.5)], style="step")
    assert cdf("a", [3, 1]).points == [(1, 0.5), (3, 1.0)]
    assert cdf("a", []).points == []


def test_data_of_the_wrong_shape_is_refused_by_its_field() -> None:
    with pytest.raises(ValueError, match=r"^band: expected one interval for each of 1 points; got 2"):
        Series(name="a", points=[(0, 0)], band=[(0, 1), (0, 1)])
    with pytest.raises(ValueError, match=r"^groups: expected 2 heights, one a category; 'a' has 1"):
        Bars(title="t", y_label="y", categories=["p", "q"], groups={"a": [1]})
    with pytest.raises(ValueError, match=r"^values: expected 1 rows of 2 values; got \[1\]"):
        HeatMap(title="t", x_label="x", y_label="y", value_label="v", columns=["1", "2"], rows=["r"], values=[[1]])


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for draw in (check_installed, lambda: to_svg(LINE)):
        with pytest.raises(ConfigError, match=r"^plots need matplotlib; next: pip install 'disagg\[load\]'"):
            draw()
