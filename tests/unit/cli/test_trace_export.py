"""The timeline of requests in the trace-event format."""

from __future__ import annotations

import io
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from disagg.cli import trace_export
from disagg.cluster.system.children import LaunchError
from disagg.proto.errors import ConfigError
from disagg.v1 import inference_pb2 as pb
from tests.unit.cli.test_explain import Requests


def span(stage: str, worker: str, start_ms: float, end_ms: float | None) -> pb.StageSpan:
    return pb.StageSpan(stage=stage, worker=worker, start_ms=start_ms, end_ms=end_ms)


def request(request_id: str, arrived_at: float, *spans: pb.StageSpan) -> pb.ExplainRequestResponse:
    return pb.ExplainRequestResponse(request_id=request_id, arrived_at=arrived_at, outcome="stop", spans=spans)


def names_of(events: list[dict[str, Any]], kind: str) -> dict[tuple[int, int], str]:
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == kind}


def bars_of(events: list[dict[str, Any]]) -> list[tuple[str, str, str, float, float]]:
    """(process, track, name, from, how long) in microseconds, of each bar."""
    processes, tracks = names_of(events, "process_name"), names_of(events, "thread_name")
    return [
        (processes[e["pid"], 0], tracks[e["pid"], e["tid"]], e["name"], e["ts"], e["dur"])
        for e in events
        if e["ph"] == "X"
    ]


def test_a_track_for_each_request_and_each_worker() -> None:
    made = trace_export.trace_of(
        [
            request("r2", 1000.5, span("prefill", "p0", 1, 3)),
            request("r1", 1000.0, span("tokenize", "", 0, 1), span("prefill", "p0", 1, 2), span("decode", "d0", 2, 4)),
        ]
    )
    assert made["displayTimeUnit"] == "ms"
    assert made["otherData"] == {"begin_s": 1000.0}
    assert bars_of(made["traceEvents"]) == [
        ("requests", "r1", "tokenize", 0, 1000),
        ("requests", "r1", "prefill", 1000, 1000),
        ("requests", "r1", "decode", 2000, 2000),
        ("requests", "r2", "prefill", 501000, 2000),
        ("gateway", "gateway", "tokenize", 0, 1000),
        ("d0", "d0", "decode", 2000, 2000),
        ("p0", "p0", "prefill", 1000, 1000),
        ("p0", "p0", "prefill", 501000, 2000),
    ]
    json.dumps(made)


def test_a_bar_says_whose_it_is() -> None:
    (event,) = [
        e
        for e in trace_export.trace_of([request("r1", 5.0, span("prefill", "p0", 1, 2))])["traceEvents"]
        if e["ph"] == "X" and e["pid"] == trace_export.REQUESTS_PID
    ]
    assert event["args"]["request_id"] == "r1"
    assert event["args"]["worker"] == "p0"
    assert event["args"]["outcome"] == "stop"


def test_what_overlaps_gets_a_track_of_its_own() -> None:
    events = trace_export.trace_of(
        [
            request(
                "r1", 0.0, span("prefill", "p0", 0, 10), span("kv_transfer", "p0", 5, 12), span("decode", "d0", 10, 20)
            )
        ]
    )["traceEvents"]
    tids = {e["name"]: e["tid"] for e in events if e["ph"] == "X" and e["pid"] == trace_export.REQUESTS_PID}
    assert tids == {"prefill": 1, "kv_transfer": 2, "decode": 1}
    assert names_of(events, "thread_name")[trace_export.REQUESTS_PID, 2] == "r1"


def test_what_lasts_goes_on_to_the_last_thing_that_is_known() -> None:
    events = trace_export.trace_of([request("r1", 0.0, span("decode", "d0", 2, None), span("detokenize", "", 3, 9))])[
        "traceEvents"
    ]
    decode = next(e for e in events if e["name"] == "decode")
    assert (decode["ts"], decode["dur"], decode["args"]["lasts"]) == (2000, 7000, True)


def test_no_requests_are_an_empty_trace() -> None:
    assert bars_of(trace_export.trace_of([])["traceEvents"]) == []


SPANS = st.builds(
    lambda worker, start, length: span("x", worker, start, start + length),
    st.sampled_from(["", "p0", "d0"]),
    st.integers(0, 50),
    st.integers(0, 20),
)


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(SPANS, max_size=6)), max_size=5))
def test_no_two_bars_of_a_track_overlap_and_none_is_lost(given_requests: list[tuple[int, list[pb.StageSpan]]]) -> None:
    requests = [request(f"r{i}", float(at), *spans) for i, (at, spans) in enumerate(given_requests)]
    events = trace_export.trace_of(requests)["traceEvents"]
    bars = [e for e in events if e["ph"] == "X"]
    assert len(bars) == 2 * sum(len(spans) for _, spans in given_requests)
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for bar in bars:
        tracks.setdefault((bar["pid"], bar["tid"]), []).append((bar["ts"], bar["ts"] + bar["dur"]))
    for times in tracks.values():
        assert all(before[1] <= after[0] for before, after in pairwise(sorted(times)))
    assert tracks.keys() <= names_of(events, "thread_name").keys()


def export(monkeypatch: pytest.MonkeyPatch, client: Requests, file: Path) -> str:
    monkeypatch.setattr(trace_export, "open_client", lambda address: client)
    out = io.StringIO()
    trace_export.run_export("x:1", file, 10, Console(file=out, width=300))
    return out.getvalue()


def test_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    told = export(monkeypatch, Requests(request("r1", 1.0, span("prefill", "p0", 0, 1))), file)
    assert told == f"1 request in {file}; open it in https://ui.perfetto.dev\n"
    assert len(bars_of(json.loads(file.read_text())["traceEvents"])) == 2


def test_nothing_is_written_before_the_first_request(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"^there was no request yet"):
        export(monkeypatch, Requests(), tmp_path / "trace.json")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none/trace\.json: cannot be written \(No such file or directory\)$"):
        export(monkeypatch, Requests(request("r1", 1.0)), tmp_path / "none" / "trace.json")
