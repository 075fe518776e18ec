"""`disagg explain`: where a request ran, why there, what then happened, and where its time went.

    ExplainRequestResponse ──report──> facts, options with predicted costs, predicted against measured, a waterfall

`report` is pure; what a policy or an early state does not have is left out.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from disagg.cli.address import reaching
from disagg.cli.operations.operate import LOAD_LEFT_OUT, open_client
from disagg.cli.request_ids import find, request_id_of, shortened
from disagg.client import Client, Explanation
from disagg.client.types import GuardrailDecision, PlacementOption, StageSpan
from disagg.cluster.system.children import LaunchError
from disagg.cluster.system.program import command
from disagg.cluster.system.terminal import format_bytes, table
from disagg.gateway.operators.admin_answers import explanation_json
from disagg.proto.errors import PermissionDeniedError, RequestNotFoundError

WATERFALL_CELLS = 40
PARTS = ("wait", "prefill", "transfer", "decode", "delay", "barrier", "adapter")
"""Parts of an option's cost; each is a column of the table if any option has some of it."""
MAX_LISTED = 1000
"""Largest number of requests that a gateway lists."""
WAYS_NOTE = "a load or a fetch is taken if it saves a tenth and 5 ms more than it takes; the wait hides some of it"
UNBOUNDED = 10_000
"""Width in columns in which every table fits."""
LOOKED_AT = 100
"""Number of latest requests that are searched for one that is no probe of `disagg doctor`."""


def run_explain(address: str, request_id: str | None, console: Console, *, as_json: bool) -> None:
    """Explain a request, or the latest one. The id of an answer over HTTP is one of its request. For
    an administrator the beginning of an id is enough if no other recent one begins with it.

    Raises:
        ConfigError: if several ids begin with `request_id`.
        LaunchError: if there is no gateway, or no request.
        RequestNotFoundError: if the request is not known (any more).
    """
    with open_client(address) as client, reaching(address):
        found = latest(client.requests(LOOKED_AT)) if request_id is None else _explain(client, request_id)
    if found is None:
        raise LaunchError(no_request())
    if as_json:
        console.print_json(data=explanation_json(found))
    else:
        console.print(report(found, ascii_only=console.options.ascii_only))


def _explain(client: Client, text: str) -> Explanation:
    request_id = request_id_of(text)
    try:
        return client.explain(request_id)
    except RequestNotFoundError as missing:
        try:
            recent = {request.request_id: request for request in client.requests(MAX_LISTED)}
        except PermissionDeniedError:  # only administrators search; others name their own request whole
            raise missing from None
        whole = find(request_id, recent)
        if whole is None:
            raise
        return recent[whole]


def run_list(address: str, limit: int, console: Console, *, as_json: bool) -> None:
    """Print the latest requests, newest first. Raises `LaunchError` if there is no gateway."""
    with open_client(address) as client, reaching(address):
        requests = client.requests(limit)
    if as_json:
        console.print_json(data=[explanation_json(request) for request in requests])
    elif requests:
        now = time.time()
        whole = listing(requests, now)
        fits = console.measure(whole, options=console.options.update(width=UNBOUNDED)).maximum <= console.width
        console.print(whole if fits else listing(requests, now, are_ids_short=True))
    else:
        console.print(no_request(), markup=False, highlight=False, soft_wrap=True)


def no_request() -> str:
    """Text for a gateway that has had no request."""
    return f"there was no request yet; next: {command('generate TEXT')}"


def latest(requests: Sequence[Explanation]) -> Explanation | None:
    """The first request that a client sent; else the first probe; None if there are none."""
    return next((request for request in requests if not request.is_probe), requests[0] if requests else None)


# ---------------------------------------------------------------- one request


def report(request: Explanation, *, ascii_only: bool = False, shows_options: bool = True) -> Group:
    """Everything about one request; without the options of its placement if `shows_options` is false."""
    parts: list[RenderableType] = [_facts(request)]
    if shows_options and (request.options or request.HasField("chosen")):
        parts += [Text(), Text("Why there", style="bold"), *why(request)]
    elif shows_options and request.policy:
        parts += [Text(), Text("Why there", style="bold"), Text(LOAD_LEFT_OUT, style="dim")]
    if forecast := _forecast(request):
        parts += [Text(), Text("Predicted and measured", style="bold"), forecast]
    if request.spans:
        parts += [Text(), Text("Where the time went", style="bold"), waterfall(request.spans, ascii_only=ascii_only)]
    return Group(*parts)


def _facts(request: Explanation) -> Table:
    facts = {
        "request": request.request_id,
        "outcome": request.outcome + (", a probe of disagg doctor" if request.is_probe else ""),
        "because": request.detail,
        "ran on": _route(request),
        "tokens": f"{request.prompt_tokens} of the prompt, {request.completion_tokens} generated",
        "drafts": f"{request.accepted_tokens} of {request.drafted_tokens} accepted" if request.drafted_tokens else "",
        "cached": _cached(request),
        "fetched": _fetched(request),
        "KV moved": f"{format_bytes(request.kv_bytes)} by {request.transport}" if request.transport else "none",
        "attempts": str(request.attempts) if request.attempts != 1 else "",
        "a trial": request.trial,
        "longest gap": f"{request.max_itl_ms:.1f} ms between two tokens" if request.max_itl_ms else "",
        "guardrails": "\n".join(map(_decision, request.guardrails)),
        "traceparent": request.trace_parent,
    }
    made = Table.grid(padding=(0, 2))
    made.add_column(style="dim")
    made.add_column(overflow="fold")
    for name, value in facts.items():
        if value:
            made.add_row(name, Text(value))
    return made


def _decision(made: GuardrailDecision) -> str:
    """Text of a decision, such as `secrets/keys: replaced in the answer (it has what looks like a secret), 2 times`."""
    what = {"replace": "replaced in", "stop": "stopped", "failed": "gave no verdict on"}.get(made.action, made.action)
    name = f"{made.guardrail}/{made.rule}" if made.rule else made.guardrail
    reason = f" ({made.reason})" if made.reason else ""
    return f"{name}: {what} the {made.subject}{reason}" + (f", {made.count} times" if made.count > 1 else "")


def _route(request: Explanation) -> str:
    prefill, decode = request.prefill_worker, request.decode_worker
    if prefill and decode:
        return f"{prefill} (prefill) -> {decode} (decode)"
    if prefill:
        return f"{prefill}, where it ended with its prompt"
    return f"{decode}, prompt and answer" if decode else "nowhere yet"


def _cached(request: Explanation) -> str:
    found = {
        request.prefill_worker: request.prefill_cached_tokens,
        request.decode_worker: request.decode_cached_tokens,
    }
    texts = [f"{tokens} tokens on {worker}" for worker, tokens in found.items() if worker and tokens]
    return ", ".join(texts) or "nothing"


def _fetched(request: Explanation) -> str:
    if not request.HasField("fetched"):
        return ""
    fetched = request.fetched
    came = f"{fetched.tokens} tokens, {format_bytes(fetched.bytes)} in {fetched.ms:.1f} ms, " if fetched.bytes else ""
    return f"{came}from {fetched.source}" + ("" if fetched.outcome == "done" else f": {fetched.outcome}")


# ---------------------------------------------------------------- why there


def why(request: Explanation) -> list[RenderableType]:
    """The options of the latest placement, with the one that was taken."""
    chosen = request.chosen if request.HasField("chosen") else None
    options = list(request.options) or ([chosen] if chosen is not None else [])
    parts = [part for part in PARTS if any(getattr(option, f"{part}_ms") for option in options)]
    has_misses = any(option.missed_targets for option in options)
    columns = ["", "prefill", "decode", "cost>", *(f"{part}>" for part in parts), "TTFT>", "TPOT>"]
    made = table(*columns, *(["misses>"] if has_misses else []))
    for option in options:
        is_chosen = chosen is not None and _workers(option) == _workers(chosen)
        cells = [
            ">" if is_chosen else "",
            option.prefill_worker or "-",
            option.decode_worker,
            f"{option.cost:.1f}",
            *(f"{getattr(option, f'{part}_ms'):.1f}" for part in parts),
            f"{option.ttft_ms:.1f}" if option.HasField("ttft_ms") else "",
            f"{option.tpot_ms:.1f}" if option.HasField("tpot_ms") else "",
            *([str(option.missed_targets)] if has_misses else []),
        ]
        made.add_row(*map(Text, cells), style="bold" if is_chosen else "")
    attempt = " of the latest attempt" if request.attempts > 1 else ""
    note = f"policy {request.policy}; milliseconds, as predicted at the placement{attempt}; > was chosen"
    found: list[RenderableType] = [made, Text(note, style="dim")]
    if request.ways:
        found += [Text(), _ways(request), Text(WAYS_NOTE, style="dim")]
    return found


def _ways(request: Explanation) -> Table:
    """How the prompt's KV could come to the chosen worker."""
    has_delay = any(way.delay_ms for way in request.ways)
    made = table("", "KV by", "tokens>", "get>", "compute>", *(["delay>"] if has_delay else []))
    for way in request.ways:
        cells = [
            ">" if way.chosen else "",
            f"{way.kind} {way.source}" if way.source else way.kind,
            str(way.tokens),
            f"{way.get_ms:.1f}" if way.HasField("get_ms") else "not now",
            f"{way.prefill_ms:.1f}",
            *([f"{way.delay_ms:.1f}"] if has_delay else []),
        ]
        made.add_row(*map(Text, cells), style="bold" if way.chosen else "")
    return made


def _workers(option: PlacementOption) -> tuple[str, str]:
    return (option.prefill_worker, option.decode_worker)


def _forecast(request: Explanation) -> Table | None:
    """Table of TTFT from the placement on, and TPOT; None where neither was both predicted and measured."""
    ended = {entry.stage: entry.at_ms for entry in request.stages}
    made = table("", "predicted>", "measured>", "")
    chosen = request.chosen
    if chosen.HasField("ttft_ms") and {"route", "first_token"} <= ended.keys():
        measured = ended["first_token"] - ended["route"]
        made.add_row("TTFT", f"{chosen.ttft_ms:.1f} ms", f"{measured:.1f} ms", _ratio(measured, chosen.ttft_ms))
    num_gaps = request.completion_tokens - 1
    if chosen.HasField("tpot_ms") and {"first_token", "end"} <= ended.keys() and num_gaps > 0:
        measured = (ended["end"] - ended["first_token"]) / num_gaps
        made.add_row("TPOT", f"{chosen.tpot_ms:.1f} ms", f"{measured:.1f} ms", _ratio(measured, chosen.tpot_ms))
    return made if made.row_count else None


def _ratio(measured: float, predicted: float) -> str:
    return f"{measured / predicted:.2f} of it" if predicted > 0 else ""


# ---------------------------------------------------------------- where the time went


def waterfall(spans: Sequence[StageSpan], *, cells: int = WATERFALL_CELLS, ascii_only: bool = False) -> Table:
    """Table with a line for each span, in the order in which they began: where, when, how long. A span that has not
    ended is open."""
    end_ms = max(max(span.end_ms, span.start_ms) for span in spans)
    made = table("stage", "worker", "from ms>", "for ms>", "")
    for span in sorted(spans, key=lambda span: span.start_ms):
        lasts = not span.HasField("end_ms")
        stop_ms = end_ms if lasts else span.end_ms
        made.add_row(
            Text(span.stage),
            Text(span.worker or "gateway"),
            f"{span.start_ms:.1f}",
            "lasts" if lasts else f"{stop_ms - span.start_ms:.1f}",
            Text(_bar(span.start_ms, stop_ms, end_ms, cells, "#" if ascii_only else "█"), style="cyan"),
        )
    return made


def _bar(start_ms: float, stop_ms: float, whole_ms: float, cells: int, mark: str) -> str:
    """A bar of at least one cell, within the whole width."""
    if whole_ms <= 0:
        return mark
    first = min(int(start_ms / whole_ms * cells), cells - 1)
    last = max(first + 1, round(stop_ms / whole_ms * cells))
    return " " * first + mark * (last - first)


# ---------------------------------------------------------------- many requests


def listing(requests: Sequence[Explanation], now: float, *, are_ids_short: bool = False) -> Table:
    """Table with a line for each request, with whole or shortened ids. `now` is in seconds since the epoch."""
    made = table("request", "ago>", "outcome", "prefill", "decode", "prompt>", "output>", "TTFT\nms>", "total\nms>")
    for column in (made.columns[0], made.columns[1], *made.columns[5:]):
        column.no_wrap = True
    ids = [request.request_id for request in requests]
    for request, request_id in zip(requests, shortened(ids) if are_ids_short else ids, strict=True):
        ended = {entry.stage: entry.at_ms for entry in request.stages}
        made.add_row(
            Text(request_id),
            _ago(now - request.arrived_at),
            Text(request.outcome + (" (probe)" if request.is_probe else "")),
            Text(request.prefill_worker or "-"),
            Text(request.decode_worker or "-"),
            str(request.prompt_tokens),
            str(request.completion_tokens),
            f"{ended['first_token']:.0f}" if "first_token" in ended else "",
            f"{ended['end']:.0f}" if "end" in ended else "",
        )
    return made


def _ago(seconds: float) -> str:
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
