"""Sends ended requests as spans by OTLP: a queue that the event loop appends to, and a thread that exports.

Whether a request is sent is known at its end only (`exported_spans.is_sent`), so nothing is sampled before. If the
collector is slow or down, traces that do not fit into the queue are dropped and counted, without effect on serving. The
exporter is OpenTelemetry's, with its retries.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from typing_extensions import override

from disagg import __version__
from disagg.proto.clock.process_clock import process_clock
from disagg.proto.errors import ConfigError
from disagg.router.api import RequestTrace
from disagg.router.config import TracingOptions
from disagg.router.telemetry.exported_spans import GATEWAY, ExportedSpan, exported_spans, is_sent

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan

logger = logging.getLogger(__name__)

EXPORT_EVERY_S: Final = 1.0
MAX_REQUESTS: Final = 64
"""Most requests of one export, with some 600 spans."""
_MAX_RESOURCES: Final = 1024
"""Most processes whose description is kept; above it all are made again."""


class Export(Protocol):
    """Sends spans to the collector."""

    def __call__(self, spans: Sequence[ExportedSpan]) -> bool:
        """Send spans; blocks until they are sent or given up. Returns whether they were sent."""
        ...

    def close(self) -> None:
        """Give up spans that wait for another try."""
        ...


class Tracer:
    """Sends the ended requests of one gateway. `ended` is called on its event loop.

    Args:
        options: the sample and the collector.
        model: name of the served model.
        export: sends the spans.
        clock: the clock of the traces.
    """

    def __init__(
        self, options: TracingOptions, model: str, export: Export, clock: Callable[[], float] | None = None
    ) -> None:
        self._options = options
        self._model = model
        self._export = export
        self._clock = process_clock().now if clock is None else clock
        self._waiting: deque[RequestTrace] = deque()
        self.counts: Counter[str] = Counter()
        """Number of requests by the fate of their spans: `sent`, `failed` (the collector did not take them), `dropped`
        (too many waited), `not_sampled`."""
        self._has_failed = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tracing", daemon=True)
        self._thread.start()

    def ended(self, trace: RequestTrace) -> None:
        """Queue the trace of an ended request, if it is to be sent."""
        if not is_sent(trace, self._options):
            self.counts["not_sampled"] += not trace.is_probe
        elif len(self._waiting) >= self._options.max_waiting:
            self.counts["dropped"] += 1
        else:
            self._waiting.append(trace)

    def close(self) -> None:
        """Send the queued traces, in at most the time of one export. Idempotent."""
        self._stop.set()
        self._thread.join(self._options.timeout_s)
        self._export.close()
        self._thread.join(self._options.timeout_s)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            # The last words of a trace, such as the time its text took, come just after its end.
            due = len(self._waiting)
            is_last = self._stop.wait(EXPORT_EVERY_S)
            due = len(self._waiting) if is_last else due
            while due > 0:
                batch = [self._waiting.popleft() for _ in range(min(due, MAX_REQUESTS))]
                due -= len(batch)
                self._send(batch)

    def _send(self, batch: Sequence[RequestTrace]) -> None:
        clock_to_epoch_s = time.time() - self._clock()
        try:
            spans = [span for trace in batch for span in exported_spans(trace, clock_to_epoch_s, self._model)]
            is_done = self._export(spans)
        except Exception:
            # A bug, or one of the exporter. Tracing goes on: serving must not depend on it.
            logger.exception("%d traces could not be exported", len(batch))
            is_done = False
        self.counts["sent" if is_done else "failed"] += len(batch)
        if is_done == self._has_failed:
            self._has_failed = not is_done
            where = self._options.endpoint
            if is_done:
                logger.info("traces are sent to %s again", where)
            else:
                logger.warning("traces cannot be sent to %s; they are dropped until it takes them", where)


def start_tracing(options: TracingOptions | None, model: str, gateway: str) -> Tracer | None:
    """The tracer of the gateway of that name; None if no spans are wanted. Raises `ConfigError`."""
    if options is None:
        return None
    logger.info("traces are sent to %s", options.endpoint)
    return Tracer(options, model, OtlpExport(options, gateway))


class OtlpExport(Export):
    """OpenTelemetry's exporter over HTTP.

    Raises (at construction):
        ConfigError: without the packages of the extra `otel`.
    """

    def __init__(self, options: TracingOptions, instance: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError:
            raise ConfigError(
                "gateway.tracing: needs the packages of the extra `otel`: pip install 'disagg[otel]'"
            ) from None
        # Its own warnings, one a try, say less than ours.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._exporter = OTLPSpanExporter(endpoint=options.endpoint, timeout=options.timeout_s)
        self._instance = instance
        self._resources: dict[str, Resource] = {}

    @override
    def __call__(self, spans: Sequence[ExportedSpan]) -> bool:
        from opentelemetry.sdk.trace.export import SpanExportResult

        return self._exporter.export([self._readable(span) for span in spans]) is SpanExportResult.SUCCESS

    @override
    def close(self) -> None:
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _readable(self, span: ExportedSpan) -> ReadableSpan:
        from opentelemetry.sdk.trace import Event, ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

        def context(span_id: str) -> SpanContext:
            return SpanContext(int(span.trace_id, 16), int(span_id, 16), False, TraceFlags(TraceFlags.SAMPLED))

        return ReadableSpan(
            name=span.name,
            context=context(span.span_id),
            parent=context(span.parent_id) if span.parent_id else None,
            resource=self._resource(span.process),
            attributes=span.attributes,
            events=[Event(name, timestamp=time_ns) for name, time_ns in span.events],
            kind=SpanKind.SERVER if span.is_request else SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=InstrumentationScope("disagg", __version__),
        )

    def _resource(self, process: str) -> Resource:
        from opentelemetry.sdk.resources import Resource

        found = self._resources.get(process)
        if found is None:
            if len(self._resources) >= _MAX_RESOURCES:
                self._resources.clear()
            is_gateway = process == GATEWAY
            found = self._resources[process] = Resource(
                {
                    "service.name": "disagg-gateway" if is_gateway else "disagg-worker",
                    "service.instance.id": self._instance if is_gateway else process,
                    "service.version": __version__,
                }
            )
        return found
