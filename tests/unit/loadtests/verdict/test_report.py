"""Reports: the cells of the tables, what the terminal shows, and pages that are well-formed and need nothing else."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ElementTree
from collections import Counter

import pytest
from rich.console import Console

from disagg.loadtests.campaign.report import print_run
from disagg.loadtests.records import RequestRecord, Status
from disagg.loadtests.verdict.comparison import curves, rows
from disagg.loadtests.verdict.goodput import Reason, Slo, evaluate
from disagg.loadtests.verdict.report import (
    TextTable,
    comparison_table,
    hint,
    is_met,
    latency_table,
    print_table,
    reasons_table,
    score_table,
    sweep_table,
    verdict,
)
from disagg.loadtests.verdict.report_html import (
    comparison_page,
    in_flight,
    latency_charts,
    run_page,
    scale_charts,
    sweep_page,
)
from disagg.loadtests.verdict.search import Probe, served_rate
from tests.support.load_records import record, recording

XLINK = "{http://www.w3.org/1999/xlink}href"
SLO = Slo(ttft_s=1.0, tpot_s=0.25)
RUN = [record(0, 0.5, 0.25, 3), record(1, 0.25, 0.25, 3), record(2, 2.0, 0.5, 3), record(3, None, status="refused")]
PROBES = [
    Probe(rate_per_s=1.0, attainment=1.0, num_requests=300),
    Probe(rate_per_s=2.0, attainment=0.5, num_requests=300),
    Probe(rate_per_s=1.5, attainment=0.95, num_requests=300),
]


# ---------------------------------------------------------------- tables


def test_a_run_has_one_row_of_goodput() -> None:
    table = score_table({"run": evaluate(RUN, SLO, 4.0)})
    cells = dict(zip(table.columns, table.rows[0], strict=True))
    assert cells == {
        "run": "run",
        "req/s": "1.00",
        "goodput/s": "0.50",
        "good": "50.0 %",
        "TTFT ok": "50.0 %",
        "TPOT ok": "50.0 %",
        "sent": "4",
        "ok": "3",
        "refused": "1",
        "failed": "0",
        "dropped": "0",
        "tok/s": "1.8",
        "valid": "yes",
    }


def test_latencies_are_in_milliseconds_and_missing_ones_a_dash() -> None:
    table = latency_table(evaluate([record(0, 0.5), record(1, None, status="failed")], SLO, 1.0))
    assert {row[0]: tuple(row[1:]) for row in table.rows} == {
        "TTFT": ("500.0", "500.0", "500.0", "500.0", "1"),
        "TPOT": ("-", "-", "-", "-", "0"),
        "ITL": ("-", "-", "-", "-", "0"),
        "E2E": ("500.0", "500.0", "500.0", "500.0", "1"),
        "lateness": ("0.0", "0.0", "0.0", "0.0", "2"),
    }


def test_the_verdict_says_met_missed_or_invalid() -> None:
    score = evaluate(RUN, SLO, 4.0)
    assert verdict(score, 0.5) == "MET: 50.0 % of 4 requests met TTFT 1000 ms, TPOT 250 ms; 50.0 % are needed"
    assert verdict(score, 0.6).startswith("MISSED: 50.0 % of 4 requests")
    late = evaluate([record(0, lateness_s=0.1)], SLO, 1.0)
    assert verdict(late, 0.5) == "INVALID: the generator was late: p99 100.0 ms, at most 5 ms is allowed"
    nine_of_ten = evaluate([record(index, 0.5 if index < 9 else 2.0) for index in range(10)], SLO, 1.0)
    assert is_met(nine_of_ten, 0.9)
    assert not is_met(nine_of_ten, 0.91)


def test_a_sweep_shows_measured_and_fitted_attainment_by_rate() -> None:
    table = sweep_table(PROBES, served_rate(PROBES), SLO, 0.9)
    assert table.title == "largest rate with 90.0 % within TTFT 1000 ms, TPOT 250 ms: 1.56 requests/s"
    assert table.rows == [
        ("1", "300", "100.0 %", "100.0 %"),
        ("1.5", "300", "95.0 %", "95.0 %"),
        ("2", "300", "50.0 %", "50.0 %"),
    ]


def test_a_comparison_shows_every_shape_and_the_ratio_over_the_best_other() -> None:
    by_shape = curves(
        [
            *(recording("1p1d", rate, good) for rate, good in ((1.0, 10), (4.0, 8))),
            *(recording("wide", rate, good) for rate, good in ((1.0, 10), (4.0, 0))),
            *(recording("narrow", rate, good) for rate, good in ((1.0, 5), (4.0, 0))),
        ]
    )
    found = rows(by_shape, [Slo(ttft_s=1.0), Slo(ttft_s=9.0)], 0.9)
    table = comparison_table(found, 0.9, "1p1d")
    assert table.columns == ["limits", "1p1d", "wide", "narrow", "1p1d over best", "best other"]
    assert table.rows == [
        ["TTFT 1000 ms", "2.5", "1.3", "< 1", "1.92x", "wide"],
        ["TTFT 9000 ms", ">= 4", ">= 4", ">= 4", "-", ""],
    ]
    assert comparison_table(found, 0.9).columns == ["limits", "1p1d", "wide", "narrow"]


def test_the_terminal_shows_cells_whole_and_as_they_are() -> None:
    out = io.StringIO()
    console = Console(file=out, width=20)
    print_table(
        console, TextTable(title="t", columns=("name", "n"), rows=[("a" * 40 + " [red]", "1")], note="[b] note")
    )
    assert "a" * 40 + " [red]" in out.getvalue()
    assert "[b] note" in out.getvalue()


# ---------------------------------------------------------------- charts


def parsed(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text)


def test_shapes_are_drawn_over_the_scale_of_the_limits() -> None:
    by_shape = curves([recording("a", 1.0, 10), recording("a", 4.0, 8), recording("b", 1.0, 5), recording("b", 4.0, 0)])
    served, at_one, at_four = scale_charts(by_shape, Slo(ttft_s=1.0), 0.9)
    assert [(line.name, line.points[3]) for line in served.series] == [("a", (1.0, 2.5)), ("b", (1.0, 0.0))]
    assert [line.points[0] for line in served.series] == [(0.25, 0.0), (0.25, 0.0)]
    assert [line.points[3] for line in at_one.series] == [(1.0, 1.0), (1.0, 0.5)]
    assert [line.points[3] for line in at_four.series] == [(1.0, 0.8), (1.0, 0.0)]


def test_requests_in_flight_are_counted_at_every_change() -> None:
    run = [record(0, 1.5), record(1, 1.0), record(2, 0.0), record(3, None, status="dropped")]
    assert in_flight(run) == [(0.0, 0.0), (0.0, 1.0), (1.0, 2.0), (1.5, 1.0), (2.0, 2.0), (2.0, 1.0), (2.0, 0.0)]


def test_a_distribution_is_over_all_requests_sent() -> None:
    ttft, tpot = latency_charts(RUN, evaluate(RUN, SLO, 4.0))
    assert (ttft.x_mark, tpot.x_mark) == (1000.0, 250.0)
    assert ttft.series[0].points == [(250.0, 0.25), (500.0, 0.5), (2000.0, 0.75)]
    assert tpot.series[0].points == [(250.0, 0.25), (250.0, 0.5), (500.0, 0.75)]


# ---------------------------------------------------------------- pages


def check_page(text: str, title: str, num_charts: int) -> str:
    """A well-formed page that loads nothing from elsewhere and has each id once; returns its visible text."""
    assert text.startswith("<!doctype html>\n")
    root = parsed(text.removeprefix("<!doctype html>\n").replace('<meta charset="utf-8">', ""))
    assert [node.text for node in root.iter("title")] == [title]
    assert len(list(root.iter("{http://www.w3.org/2000/svg}svg"))) == num_charts
    assert not [node for node in root.iter() if {"src", "href"} & set(node.keys())]
    assert not [node for node in root.iter() if node.tag.rpartition("}")[2] in ("script", "link", "img", "image")]
    assert [used for node in root.iter() if not (used := node.get(XLINK, "#")).startswith("#")] == []
    ids = Counter(node.get("id") for node in root.iter() if node.get("id"))
    assert [name for name, count in ids.items() if count > 1] == []
    return "\n".join(root.itertext())


def test_the_page_of_a_run() -> None:
    text = run_page("<run> & co", RUN, SLO, 4.0, min_attainment=0.9, facts={"commit": "<abc>"})
    shown = check_page(text, "<run> & co", num_charts=6)
    assert "MISSED: 50.0 % of 4 requests met TTFT 1000 ms, TPOT 250 ms; 90.0 % are needed" in shown
    assert "<abc>" in shown


LATE = "RESOURCE_EXHAUSTED: the first token is expected after {} s, the target is 1 s"
NOTHING = [
    record(0, None, status="failed", error="UNAVAILABLE: socket closed"),
    record(1, None, status="refused", error=LATE.format("36.5")),
    record(2, None, status="refused", error=LATE.format("7")),
]


def test_reasons_are_counted_without_their_numbers_and_the_first_one_has_a_hint() -> None:
    table = reasons_table(evaluate(NOTHING, SLO, 1.0))
    assert table.rows == [
        (LATE.format("36.5"), "refused", "2"),
        ("UNAVAILABLE: socket closed", "failed", "1"),
    ]
    assert table.note == (
        "hint: the cluster refuses what it expects to miss its TTFT target; lower --rate, allow more with "
        "--slo-ttft-ms, or add workers"
    )
    assert evaluate([record(0, 0.5)], SLO, 1.0).reasons == ()
    assert evaluate(NOTHING, SLO, 1.0).main_reason == f"; 2 refused: {LATE.format('36.5')}"
    assert evaluate([record(0, 0.5)], SLO, 1.0).main_reason == ""


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ("refused", "has no room for this load; lower --rate"),
        ("deadline", "--request-timeout-s"),
        ("dropped", "more requests were in flight than the generator allows"),
        ("failed", "the message says what failed"),
    ],
)
def test_each_status_has_a_hint(status: Status, words: str) -> None:
    assert words in hint(Reason(status=status, text="", count=1))


def test_the_terminal_names_reasons_and_only_where_there_are_some() -> None:
    def printed(records: list[RequestRecord]) -> str:
        out = io.StringIO()
        print_run(Console(file=out, width=200), "r", evaluate(records, SLO, 1.0), 0.9)
        return out.getvalue()

    assert LATE.format("36.5") in printed(NOTHING)
    assert "requests without a whole answer" not in printed([record(0, 0.5)])


def test_the_page_of_a_run_in_which_nothing_came() -> None:
    shown = check_page(run_page("r", NOTHING, SLO, 1.0, min_attainment=0.9), "r", num_charts=6)
    assert "MISSED: 0.0 %" in shown
    assert LATE.format("36.5") in shown
    assert "hint: the cluster refuses" in shown


def test_the_page_of_a_sweep() -> None:
    shown = check_page(sweep_page("s", PROBES, SLO, 0.9, {"machine": "m"}), "s", num_charts=2)
    assert "1.56 requests/s" in shown


def test_the_page_of_a_comparison() -> None:
    by_shape = curves(
        [recording("a", 1.0, 10), recording("a", 4.0, 8), recording("b", 1.0, 10), recording("b", 4.0, 0)]
    )
    text = comparison_page("c", by_shape, [SLO, SLO.scaled(9.0, 9.0)], min_attainment=0.9, subject="a")
    shown = check_page(text, "c", num_charts=4 + 1 + 2)
    assert "a over best" in shown
    assert "1.92x" in shown
    assert "INVALID" not in shown
    late = curves([recording("a", 1.0, 10, lateness_s=0.01)])
    assert "INVALID: a at 1 requests/s, repeat 0: " in comparison_page("c", late, [SLO], min_attainment=0.9)
    with pytest.raises(ValueError, match=r"^slos: "):
        comparison_page("c", by_shape, [], min_attainment=0.9)
