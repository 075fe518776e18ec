"""The goodput tab of Locust's web page, and what keeps other web sites from it.

Locust's page takes further tabs and tables by name, declared in its template's arguments, and fills a table from the
`extended_stats` of the answer that it asks for every two seconds. What is in it must be quick to work out: the page is
served by the process that sends the load. So there are counts and sorted latencies here, but nothing per token.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import msgspec
from flask import Response, jsonify, request
from locust.web import WebUI

from disagg.loadtests.generator.locust_options import PAGE_OPTIONS
from disagg.loadtests.generator.page_guard import LOOPBACK_NAMES, foreign, frozen_field, is_form
from disagg.loadtests.records import RequestRecord
from disagg.loadtests.verdict.goodput import MAX_LATENESS_S, Quantiles, Slo, meets, meets_tpot, meets_ttft, quantiles

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


def guard_page(web_ui: WebUI, options: Namespace) -> None:
    """Have the page refuse what page_guard.py says; before it is served."""
    names = LOOPBACK_NAMES | {web_ui.host}

    def check() -> Response | None:
        headers = request.headers
        why = foreign(headers.get("Host", ""), headers.get("Origin"), headers.get("Sec-Fetch-Site"), names)
        if why is None and request.method == "POST" and not is_form(request.path):
            why = "this page does not offer that"
        if why is not None:
            return Response(why + "\n", status=403, content_type="text/plain")
        field = frozen_field(request.form.lists(), vars(options), PAGE_OPTIONS) if request.method == "POST" else None
        if field is None:
            return None
        message = f"{field} cannot be changed here: it is as on the command line"
        return jsonify({"success": False, "message": message, "host": options.host})  # Locust's page shows it

    def add_headers(response: Response) -> Response:
        response.headers["Referrer-Policy"] = "no-referrer"  # the path is a secret
        response.headers["X-Frame-Options"] = "DENY"
        response.headers["Cross-Origin-Resource-Policy"] = "same-origin"
        del response.headers["Access-Control-Allow-Origin"]
        return response

    web_ui.app.before_request(check)
    web_ui.app.after_request_funcs.setdefault(None, []).insert(0, add_headers)  # runs after Locust's own


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
