"""Traces are sent by a thread, in order, from a bounded queue; a collector that fails costs traces and nothing else."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import pytest

from disagg.proto.ids import RequestId
from disagg.router.api import RequestTrace
from disagg.router.config import TracingOptions
from disagg.router.shell import tracing
from disagg.router.shell.tracing import MAX_REQUESTS, Export, Tracer
from disagg.router.telemetry.exported_spans import ExportedSpan

LONG_S = 60.0


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "EXPORT_EVERY_S", 0.001)


class Collector(Export):
    """Keeps the ids of requests by export; `takes` says what it answers, `opened` lets it answer."""

    def __init__(self, *takes: bool | Exception) -> None:
        self.batches: list[list[object]] = []
        self.entered, self.opened = threading.Event(), threading.Event()
        self._takes = list(takes)

    def __call__(self, spans: Sequence[ExportedSpan]) -> bool:
        self.batches.append([span.attributes["disagg.request_id"] for span in spans if span.is_request])
        self.entered.set()
        assert self.opened.wait(LONG_S)
        answer = self._takes.pop(0) if self._takes else True
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self.opened.set()


def ended(index: int, outcome: str = "internal") -> RequestTrace:
    return RequestTrace(
        request_id=RequestId(f"r{index}"), arrival=1.0, stages={"tokenize": 1.5, "end": 2.0}, outcome=outcome
    )


def tracer(collector: Collector, max_waiting: int = 1000) -> Tracer:
    options = TracingOptions(endpoint="http://127.0.0.1:1/v1/traces", sample=0.0, max_waiting=max_waiting)
    return Tracer(options, "m", collector, clock=lambda: 3.0)


def test_what_waits_is_sent_at_the_end_in_order() -> None:
    collector = Collector()
    collector.opened.set()
    it = tracer(collector)
    for index in range(MAX_REQUESTS + 3):
        it.ended(ended(index))
    it.ended(ended(999, "stop"))
    it.close()
    it.close()
    assert [each for batch in collector.batches for each in batch] == [f"r{i}" for i in range(MAX_REQUESTS + 3)]
    assert max(map(len, collector.batches)) <= MAX_REQUESTS
    assert it.counts == {"sent": MAX_REQUESTS + 3, "not_sampled": 1}


def test_what_does_not_fit_is_dropped_and_counted() -> None:
    collector = Collector()
    it = tracer(collector, max_waiting=2)
    it.ended(ended(0))
    assert collector.entered.wait(LONG_S)
    for index in range(1, 6):
        it.ended(ended(index))
    assert it.counts == {"dropped": 3}
    collector.opened.set()
    it.close()
    assert it.counts == {"dropped": 3, "sent": 3}
    assert [each for batch in collector.batches for each in batch] == ["r0", "r1", "r2"]


def test_a_collector_that_fails_is_logged_once_and_when_it_is_back(caplog: pytest.LogCaptureFixture) -> None:
    collector = Collector(False, RuntimeError("broken"), True)
    collector.opened.set()
    it = tracer(collector)
    with caplog.at_level(logging.INFO):
        for index in range(2 * MAX_REQUESTS + 1):
            it.ended(ended(index))
        it.close()
    assert it.counts["failed"] + it.counts["sent"] == 2 * MAX_REQUESTS + 1
    messages = [record.message for record in caplog.records if record.levelno in (logging.INFO, logging.WARNING)]
    assert messages == [
        "traces cannot be sent to http://127.0.0.1:1/v1/traces; they are dropped until it takes them",
        "traces are sent to http://127.0.0.1:1/v1/traces again",
    ]
