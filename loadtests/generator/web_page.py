"""Locust's web page: the requests that it accepts, the sites that may send them, and the goodput tab on it.

Locust answers every web site (`Access-Control-Allow-Origin: *`), and `/swarm` writes any option of the command line
that a form names, hidden ones too. A web page that the operator opens could so send the load, and the API key with it,
elsewhere, or overwrite a file. Therefore:

- a request must come from this page itself: its Host a name of this machine, its Origin the page's own; - a form may
change what the page shows. The gateway, the recording and the rest stay as on the command line; - the page lies under a
random path, which `disagg load run --web` prints (`--web-base-path`).

Locust's page takes further tabs and tables by name, declared in its template's arguments, and fills a table from the
`extended_stats` of the answer that it polls every two seconds. The rows must be quick to compute: the page is served by
the process that sends the load. So there are counts and sorted latencies here, but nothing per token.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec
from flask import Response, jsonify, request

from disagg.loadtests.records import RequestRecord
from disagg.loadtests.verdict.goodput import MAX_LATENESS_S, Quantiles, Slo, meets, meets_tpot, meets_ttft, quantiles

if TYPE_CHECKING:  # an import of Locust patches the standard library
    from locust.web import WebUI

LOOPBACK_NAMES = frozenset({"127.0.0.1", "::1", "localhost"})
_OWN_SITES = (None, "same-origin", "none")
"""Allowed values of `Sec-Fetch-Site`: not a browser, the page itself, or an address that the operator typed."""
_WITHOUT_MEANING = frozenset({"user_count", "spawn_rate"})
"""Fields of Locust's own form that the open loop does not use."""
_FORMS = ("swarm", "stop", "reset")
"""Last parts of the paths that accept a POST."""

KEY = "goodput"
"""Key of the tab, its table and the table's rows."""
COLUMNS = [{"key": "name", "title": "Of the requests that have ended"}, {"key": "value", "title": ""}]

Row = dict[str, str]
View = tuple[list[RequestRecord], Slo]
"""Records of the requests that have ended so far, and the limits."""


# ---------------------------------------------------------------- what the page takes


def is_form(path: str) -> bool:
    """Whether a path of Locust's accepts a POST here. Another one (`/user`) writes attributes of the user's class."""
    return path.rpartition("/")[2] in _FORMS


def foreign(host: str, origin: str | None, fetch_site: str | None, names: Collection[str]) -> str | None:
    """Why a request does not come from this page itself; None if it does.

    Args:
        host: its `Host`; any port, as the page may be reached through a forwarded one.
        origin: its `Origin`; browsers send one with every form and every request of a script to another site.
        fetch_site: its `Sec-Fetch-Site`.
        names: host names under which this page is served.
    """
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        name = None
    if name not in names:
        return "Host is not a name of this page"
    if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
        return "Origin is another web site"
    if fetch_site not in _OWN_SITES:
        return "Sec-Fetch-Site names another web site"
    return None


def frozen_field(
    form: Iterable[tuple[str, list[str]]], options: Mapping[str, Any], free: Collection[str]
) -> str | None:
    """The first field of a form that would change an option other than the `free` ones; None if there is none."""
    for name, values in form:
        if name in free or name in _WITHOUT_MEANING:
            continue
        if any(value != _text(options.get(name)) for value in values):
            return name
    return None


def _text(value: object) -> str:
    """Text of an option in a form."""
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def guard_page(web_ui: WebUI, options: Namespace, free: Collection[str]) -> None:
    """Make the page refuse other sites, and changes of options other than the `free` ones. To be called before the page
    is served."""
    names = LOOPBACK_NAMES | {web_ui.host}

    def check() -> Response | None:
        headers = request.headers
        why = foreign(headers.get("Host", ""), headers.get("Origin"), headers.get("Sec-Fetch-Site"), names)
        if why is None and request.method == "POST" and not is_form(request.path):
            why = "this page does not offer that"
        if why is not None:
            return Response(why + "\n", status=403, content_type="text/plain")
        field = frozen_field(request.form.lists(), vars(options), free) if request.method == "POST" else None
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


# ---------------------------------------------------------------- the goodput tab


def add_goodput_tab(web_ui: WebUI, view: Callable[[], View | None]) -> None:
    """Add the tab to Locust's page; `view` returns its present data, or None before the first run."""
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
    """Rows of the goodput table for the requests that have ended."""
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
