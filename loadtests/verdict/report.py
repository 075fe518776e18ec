"""Tables of a load test: the same rows for the terminal and for the HTML report.

scores, rates, comparisons -> TextTable -> print_table (rich) or report_html.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from disagg.loadtests.verdict.comparison import Row, ratio
from disagg.loadtests.verdict.goodput import DEFAULT_MIN_ATTAINMENT, Quantiles, Reason, Score, Slo
from disagg.loadtests.verdict.search import Probe, ServedRate, fitted


@dataclass(frozen=True, kw_only=True)
class TextTable:
    """Table of texts; the first column names the row, the others are figures."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def print_table(console: Console, table: TextTable) -> None:
    """Print one table on the terminal; cells are never cut off."""
    shown = Table(title=Text(table.title), title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    for index, column in enumerate(table.columns):
        shown.add_column(Text(column), justify="left" if index == 0 else "right", no_wrap=True)
    for row in table.rows:
        shown.add_row(*map(Text, row))
    needed = console.measure(shown, options=console.options.update(width=10_000)).maximum
    width = console.width
    console.width = max(width, needed)
    console.print(shown)
    console.width = width
    if table.note:
        console.print(table.note, markup=False, highlight=False)


# ---------------------------------------------------------------- one run


def verdict(score: Score, min_attainment: float = DEFAULT_MIN_ATTAINMENT) -> str:
    """Verdict in one line: met, missed or invalid, and why."""
    if not score.is_valid:
        return f"INVALID: {'; '.join(score.invalid_reasons)}"
    word = "MET" if is_met(score, min_attainment) else "MISSED"
    return (
        f"{word}: {_percent(score.attainment)} of {score.num_due} requests met {score.slo}; "
        f"{_percent(min_attainment)} are needed"
    )


def is_met(score: Score, min_attainment: float = DEFAULT_MIN_ATTAINMENT) -> bool:
    """Whether enough requests met their limits; 27 of 30 are 90 %, in spite of rounding."""
    return score.attainment >= min_attainment - 1e-9


def score_table(scores: Mapping[str, Score]) -> TextTable:
    """Table of goodput, attainment and counts; one run in each row."""
    columns = ("run", "req/s", "goodput/s", "good", "TTFT ok", "TPOT ok", "sent", "ok", "refused", "failed", "dropped")
    return TextTable(
        title="goodput and attainment",
        columns=(*columns, "tok/s", "valid"),
        rows=[
            (
                name,
                f"{score.num_due / score.duration_s:.2f}",
                f"{score.goodput_per_s:.2f}",
                _percent(score.attainment),
                _percent(score.ttft_attainment),
                _percent(score.tpot_attainment),
                str(score.num_due),
                str(score.num_ok),
                str(score.num_refused),
                str(score.num_failed),
                str(score.num_dropped),
                f"{score.output_tokens_per_s:.1f}",
                "yes" if score.is_valid else "NO",
            )
            for name, score in scores.items()
        ],
        note="good: met both limits. Shares are of all requests sent; refused, failed and dropped ones missed.",
    )


def latency_table(score: Score, title: str = "latency in ms, of whole answers") -> TextTable:
    """Table of quantiles; one latency in each row."""
    named = (
        ("TTFT", score.ttft),
        ("TPOT", score.tpot),
        ("ITL", score.itl),
        ("E2E", score.e2e),
        ("lateness", score.lateness),
    )
    return TextTable(
        title=title,
        columns=("", "p50", "p90", "p99", "max", "count"),
        rows=[(name, *_milliseconds(values), str(values.count)) for name, values in named],
        note="Measured from the time a request was due, not from when it was sent. lateness: of all requests.",
    )


def reasons_table(score: Score) -> TextTable:
    """Table of the reasons why requests have no whole answer, with a hint at what to do about the most frequent one."""
    return TextTable(
        title="requests without a whole answer",
        columns=("reason", "status", "requests"),
        rows=[(_text_of(reason), reason.status, str(reason.count)) for reason in score.reasons],
        note=f"hint: {hint(score.reasons[0])}" if score.reasons else "",
    )


def _text_of(reason: Reason) -> str:
    return reason.text or "no message"


def hint(reason: Reason) -> str:
    """What can be changed when requests have no whole answer for this reason."""
    match reason.status:
        case "refused" if "the first token is expected after" in reason.text:
            return (
                "the cluster refuses what it expects to miss its TTFT target; lower --rate, allow more with "
                "--slo-ttft-ms, or add workers"
            )
        case "refused":
            return "the cluster or the key has no room for this load; lower --rate, or add workers"
        case "deadline":
            return "answers take longer than their deadline; lower --rate, or allow more with --request-timeout-s"
        case "dropped":
            return "more requests were in flight than the generator allows; lower --rate"
    return "the message says what failed; `disagg doctor` looks for faults of the cluster"


def _milliseconds(values: Quantiles) -> tuple[str, ...]:
    if not values.count:
        return ("-",) * 4
    return tuple(f"{value * 1000:.1f}" for value in (values.p50, values.p90, values.p99, values.max))


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %"


# ---------------------------------------------------------------- many runs


def sweep_table(probes: Sequence[Probe], served: ServedRate, slo: Slo, min_attainment: float) -> TextTable:
    """Table of the attainment over the rate, as measured and as fitted."""
    fit = {probe.rate_per_s: probe.attainment for probe in fitted(probes)}
    return TextTable(
        title=f"largest rate with {_percent(min_attainment)} within {slo}: {served} requests/s",
        columns=("req/s", "requests", "attainment", "fitted"),
        rows=[
            (
                f"{probe.rate_per_s:.3g}",
                str(probe.num_requests),
                _percent(probe.attainment),
                _percent(fit[probe.rate_per_s]),
            )
            for probe in sorted(probes, key=lambda probe: probe.rate_per_s)
        ],
        note="fitted: the nearest curve that never rises with the rate, weighted by requests.",
    )


def comparison_table(rows: Sequence[Row], min_attainment: float, subject: str | None = None) -> TextTable:
    """Table of the served rate of every shape for every pair of limits; with a subject also its ratio to the best of
    the others."""
    shapes = list(dict.fromkeys(row.shape for row in rows))
    by_slo: dict[Slo, dict[str, Row]] = {}
    for row in rows:
        by_slo.setdefault(row.slo, {})[row.shape] = row
    with_ratio = subject is not None and len(shapes) > 1
    lines = []
    for slo, found in by_slo.items():
        cells = [str(slo), *(str(found[shape].served) for shape in shapes)]
        if with_ratio and subject is not None:
            others = {shape: row.served for shape, row in found.items() if shape != subject}
            against = ratio(found[subject].served, others)
            cells += ["-", ""] if against is None else [str(against), against.against]
        lines.append(cells)
    columns = ["limits", *shapes]
    if with_ratio:
        columns += [f"{subject} over best", "best other"]
    return TextTable(
        title=f"largest rate (requests/s) with {_percent(min_attainment)} within the limits",
        columns=columns,
        rows=lines,
        note="<: not even the least measured rate was served; >=: all were. -: not determined by the measured rates.",
    )
