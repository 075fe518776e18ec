"""The goodput tab of Locust's web page.

Locust's page takes further tabs and tables by name, declared in its template's arguments, and fills a table from the
`extended_stats` of the answer that it asks for every two seconds. What is in it must be quick to work out: the page is
served by the process that sends the load. So there are counts and sorted latencies here, but nothing per token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from flask import Response, request
from locust.web import WebUI

from disagg.loadtests.goodput import MAX_LATENESS_S, Quantiles, Slo, meets, meets_tpot, meets_ttft, quantiles
from disagg.loadtests.records import RequestRecord

KEY = "goodput"
"""Of the tab, its table and the table's rows."""
COLUMNS = [{"key": "name", "title": "Of the requests that have ended"}, {"key": "value", "title": ""}]

Row = dict[str, str]
View = tuple[list[RequestRecord], Slo]
"""What has ended so far, and the limits."""


def add_goodput_tab(web_ui: WebUI, view: Callable[[], View | None]) -> None:
    """Add the tab to Locust's page; `view` gives what has ended so far, or None before the first run."""
    web_ui.template_args["extended_tabs"] = [{"title": "Goodput", "key": KEY}]
    web_ui.template_args["extended_tables"] = [{"key": KEY, "structure": COLUMNS}]

    def add_rows(response: Response) -> Response:
        if request.path.endswith("/stats/requests") and response.is_json:
            content: dict[str, Any] = response.get_json()
            seen = view()
            content["extended_stats"] = [{"key": KEY, "data": [] if seen is None else goodput_rows(*seen)}]
            response.set_data(msgspec.json.encode(content))
        return response

    web_ui.app.after_request(add_rows)


def goodput_rows(records: list[RequestRecord], slo: Slo) -> list[Row]:
    """The table's rows."""
    if not records:
        return [_row("requests", "0")]
    ok = [record for record in records if record.status == "ok"]
    num_good = sum(meets(record, slo) for record in records)
    span_s = max(record.due_s for record in records)
    lateness = quantiles(record.lateness_s for record in records)
    goodput = f"{num_good / span_s:.3f} /s" if span_s > 0 else "-"
    return [
        _row("limits", str(slo)),
        _row("requests", f"{len(records)}, of which {len(records) - len(ok)} refused, failed or dropped"),
        _row("goodput", goodput),
        _row("attainment of both", _share(num_good, records)),
        _row("attainment of TTFT", _share(sum(meets_ttft(record, slo) for record in records), records)),
        _row("attainment of TPOT", _share(sum(meets_tpot(record, slo) for record in records), records)),
        _row("TTFT p50 / p90 / p99", _ms(quantiles(record.ttft_s for record in ok))),
        _row("TPOT p50 / p90 / p99", _ms(quantiles(record.tpot_s for record in ok))),
        _row(
            "lateness p50 / p90 / p99",
            _ms(lateness) + (" - NOT VALID, the generator is too late" if lateness.p99 > MAX_LATENESS_S else ""),
        ),
    ]


def _row(name: str, value: str) -> Row:
    return {"name": name, "value": value}


def _share(part: int, records: list[RequestRecord]) -> str:
    return f"{part / len(records):.1%}"


def _ms(found: Quantiles) -> str:
    return f"{found.p50 * 1e3:.1f} / {found.p90 * 1e3:.1f} / {found.p99 * 1e3:.1f} ms"
