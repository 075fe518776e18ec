"""The report of a load test as one HTML file that needs nothing else: tables, and charts as inline SVG.

records and scores -> run_page; probes -> sweep_page; curves of several shapes -> comparison_page
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from disagg.loadtests.records import RequestRecord
from disagg.loadtests.verdict.comparison import Curve, invalid_points, rows
from disagg.loadtests.verdict.goodput import Outcomes, Score, Slo, evaluate, meets
from disagg.loadtests.verdict.plots import Chart, Point, Series, cdf, to_svg
from disagg.loadtests.verdict.report import (
    TextTable,
    comparison_table,
    latency_table,
    reasons_table,
    score_table,
    sweep_table,
    verdict,
)
from disagg.loadtests.verdict.search import Probe, fitted, served_rate

SLO_SCALES = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0)
"""Factors on both limits for which attainment is drawn."""

_STYLE = """
html { color-scheme: light dark; --line: #ddd; --note: #666; background: #fff; color: #222; }
@media (prefers-color-scheme: dark) { html { --line: #3a3d44; --note: #9a9da3; background: #16181d; color: #ddd; } }
body { font: 14px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 74rem; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; margin: 0.5rem 0; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: bold; padding: 0.3rem 0; }
th, td { padding: 0.15rem 0.7rem; text-align: right; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
.note { color: var(--note); font-size: 0.9em; margin-top: 0; } .charts { display: flex; flex-wrap: wrap; gap: 1rem; }
svg { border: 1px solid var(--line); max-width: 100%; height: auto; }
"""


def page(title: str, parts: Iterable[str]) -> str:
    """Make a whole HTML document from parts that are HTML already."""
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def table_html(table: TextTable) -> str:
    """HTML of a table and its note."""
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    note = f'\n<p class="note">{escape(table.note)}</p>' if table.note else ""
    return f"<table>\n<caption>{escape(table.title)}</caption>\n<tr>{head}</tr>\n{body}\n</table>{note}"


def charts_html(charts: Iterable[Chart]) -> str:
    """HTML of charts side by side, as many as fit."""
    return '<div class="charts">\n' + "\n".join(to_svg(chart) for chart in charts) + "\n</div>"


def facts_html(facts: Mapping[str, str]) -> str:
    """HTML of facts about the measurement: one line each."""
    return table_html(TextTable(title="the run", columns=("", ""), rows=[(name, text) for name, text in facts.items()]))


# ---------------------------------------------------------------- pages


def run_page(
    title: str,
    records: Sequence[RequestRecord],
    slo: Slo,
    duration_s: float,
    *,
    min_attainment: float,
    facts: Mapping[str, str] | None = None,
    more_charts: Sequence[Chart] = (),
) -> str:
    """The report of one run, with `more_charts` over time; raises as `goodput.evaluate` does."""
    score = evaluate(records, slo, duration_s)
    outcomes = Outcomes(records, duration_s)
    return page(
        title,
        [
            f"<p><strong>{escape(verdict(score, min_attainment))}</strong></p>",
            table_html(score_table({title: score})),
            table_html(latency_table(score)),
            table_html(reasons_table(score)) if score.reasons else "",
            charts_html(
                [
                    *latency_charts(records, score),
                    scale_chart("attainment over scale of the limits", {"": outcomes}, slo),
                ]
            ),
            "<h2>Over time</h2>",
            charts_html([*timeline_charts(records, slo), *more_charts]),
            facts_html(facts) if facts else "",
        ],
    )


def sweep_page(
    title: str,
    probes: Sequence[Probe],
    slo: Slo,
    min_attainment: float,
    facts: Mapping[str, str] | None = None,
) -> str:
    """The report of a search for the largest rate; raises as `search.served_rate` does."""
    served = served_rate(probes, min_attainment)
    measured = [(probe.rate_per_s, probe.attainment) for probe in sorted(probes, key=lambda probe: probe.rate_per_s)]
    curve = [(probe.rate_per_s, probe.attainment) for probe in fitted(probes)]
    attainment = Chart(
        title="attainment over rate",
        x_label="requests/s",
        y_label="share of requests within both limits",
        series=[
            Series(name="measured", points=measured, style="dots"),
            Series(name="fitted", points=curve),
            Series(name="target", points=_level(measured, min_attainment), style="dashed"),
        ],
        y_max=1.0,
        x_mark=served.rate_per_s,
    )
    goodput = goodput_chart({"goodput": [(rate, rate * share) for rate, share in measured]})
    return page(
        title,
        [
            table_html(sweep_table(probes, served, slo, min_attainment)),
            charts_html([attainment, goodput]),
            facts_html(facts) if facts else "",
        ],
    )


def comparison_page(
    title: str,
    curves: Mapping[str, Curve],
    slos: Sequence[Slo],
    *,
    min_attainment: float,
    subject: str | None = None,
    facts: Mapping[str, str] | None = None,
) -> str:
    """The report of several shapes on the same requests: one table for all limits, two charts for each of them, and
    charts over the scale of the first.

    Raises:
        ValueError: without limits, or if a curve has no point.
    """
    if not slos:
        raise ValueError("slos: a comparison needs at least one pair of limits")
    parts = [f"<p><strong>INVALID: {escape(line)}</strong></p>" for line in invalid_points(curves)]
    parts += [table_html(comparison_table(rows(curves, slos, min_attainment), min_attainment, subject))]
    for slo in slos:
        attainment = Chart(
            title=f"attainment within {slo}",
            x_label="requests/s",
            y_label="share of requests within both limits",
            series=[
                Series(name=shape, points=[(probe.rate_per_s, probe.attainment) for probe in fitted(curve.probes(slo))])
                for shape, curve in curves.items()
            ],
            y_max=1.0,
        )
        goodput = goodput_chart({shape: curve.goodput(slo) for shape, curve in curves.items()})
        parts += [f"<h2>{escape(str(slo))}</h2>", charts_html([goodput, attainment])]
    parts += ["<h2>Over the scale of the limits</h2>", charts_html(scale_charts(curves, slos[0], min_attainment))]
    return page(title, [*parts, facts_html(facts) if facts else ""])


# ---------------------------------------------------------------- charts


def latency_charts(records: Sequence[RequestRecord], score: Score) -> list[Chart]:
    """Charts of the distributions of TTFT and TPOT over all requests sent: a curve that ends below 1 shows how many
    never came."""
    ok = [record for record in records if record.status == "ok"]
    kinds = (
        ("TTFT", [record.ttft_s for record in ok], score.slo.ttft_s),
        ("TPOT", [record.tpot_s for record in ok], score.slo.tpot_s),
    )
    return [
        Chart(
            title=f"{name}: share of requests sent that had it within",
            x_label="ms",
            y_label="share of requests",
            series=[cdf("", [value * 1000 for value in values if value is not None], len(records))],
            y_max=1.0,
            x_mark=None if limit is None else limit * 1000,
        )
        for name, values, limit in kinds
    ]


def scale_chart(title: str, runs: Mapping[str, Outcomes], slo: Slo) -> Chart:
    """Chart of the attainment of each run when both limits are scaled together."""
    return Chart(
        title=title,
        x_label=f"factor on {slo}",
        y_label="share of requests within both limits",
        series=[
            Series(name=name, points=[(scale, run.attainment(slo.scaled(scale, scale))) for scale in SLO_SCALES])
            for name, run in runs.items()
        ],
        y_max=1.0,
        x_mark=1.0,
    )


def served_chart(curves: Mapping[str, Curve], slo: Slo, min_attainment: float) -> Chart:
    """Chart of the largest served rate of each shape when both limits are scaled together; 0 if no measured rate is
    served."""
    return Chart(
        title=f"largest rate with {min_attainment:.0%} within the scaled limits",
        x_label=f"factor on {slo}",
        y_label="requests/s",
        series=[
            Series(
                name=shape,
                points=[
                    (scale, 0.0 if served.bound == "none" else served.rate_per_s)
                    for scale in SLO_SCALES
                    for served in (curve.served(slo.scaled(scale, scale), min_attainment),)
                ],
            )
            for shape, curve in curves.items()
        ],
        x_mark=1.0,
    )


def scale_charts(curves: Mapping[str, Curve], slo: Slo, min_attainment: float) -> list[Chart]:
    """Charts of the shapes over the scale of the limits: the rate that they serve, and their attainment at each
    measured rate (of its first repeat)."""
    charts = [served_chart(curves, slo, min_attainment)]
    for rate in sorted({point.rate_per_s for curve in curves.values() for point in curve.points}):
        runs = {
            shape: point.outcomes
            for shape, curve in curves.items()
            for point in reversed(curve.points)
            if point.rate_per_s == rate
        }
        charts.append(scale_chart(f"attainment at {rate:g} requests/s", runs, slo))
    return charts


def goodput_chart(by_name: Mapping[str, Sequence[Point]]) -> Chart:
    """Chart of good requests per second over the offered rate; on the dashed line all of them are good."""
    most = max((rate for points in by_name.values() for rate, _ in points), default=1.0)
    return Chart(
        title="goodput over rate",
        x_label="requests/s",
        y_label="good requests/s",
        series=[
            *(Series(name=name, points=points) for name, points in by_name.items()),
            Series(name="all good", points=[(0.0, 0.0), (most, most)], style="dashed"),
        ],
    )


def timeline_charts(records: Sequence[RequestRecord], slo: Slo) -> list[Chart]:
    """Charts over the time of the run: the number of requests in flight, and each request's TTFT and longest gap."""
    good = [record for record in records if meets(record, slo)]
    missed = [record for record in records if not meets(record, slo)]
    groups = (("met", good), ("missed", missed))
    return [
        Chart(
            title="requests in flight",
            x_label="seconds from the start",
            y_label="requests",
            series=[Series(name="", points=in_flight(records), style="step")],
        ),
        Chart(
            title="TTFT over due time",
            x_label="due, seconds from the start",
            y_label="ms",
            series=[
                Series(
                    name=name, points=[(r.due_s, r.ttft_s * 1000) for r in group if r.ttft_s is not None], style="dots"
                )
                for name, group in groups
            ],
        ),
        Chart(
            title="longest gap between two tokens over due time",
            x_label="due, seconds from the start",
            y_label="ms",
            series=[
                Series(
                    name=name,
                    points=[(r.due_s, r.max_itl_s * 1000) for r in group if r.max_itl_s is not None],
                    style="dots",
                )
                for name, group in groups
            ],
        ),
    ]


def in_flight(records: Sequence[RequestRecord]) -> list[Point]:
    """Points (seconds, requests sent and not ended) at every change; requests that were not sent, or whose end is not
    known, are left out."""
    known = [record for record in records if record.end_s is not None and record.status != "dropped"]
    changes = [(record.sent_s, 1) for record in known]
    changes += [(record.end_s, -1) for record in known if record.end_s is not None]
    points: list[Point] = [(0.0, 0.0)]
    count = 0
    for time_s, change in sorted(changes, key=lambda at: (at[0], -at[1])):
        count += change
        points.append((time_s, float(count)))
    return points


def _level(points: Sequence[Point], value: float) -> list[Point]:
    """A horizontal line under all points."""
    return [(0.0, value), (max((x for x, _ in points), default=1.0), value)]
