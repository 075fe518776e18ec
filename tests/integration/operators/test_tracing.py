"""A real cluster's spans at a collector: the tree of a request is its timeline."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from disagg.client import Client
from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.hosts.processes import ProcessCluster
from tests.integration.workers.test_processes import FAKE, PROMPT
from tests.support.waiting import wait_until

TRACE, CALLERS = "a" * 32, "c" * 16
ROOT = "text_completion fake"


class _Collector(ThreadingHTTPServer):
    """Keeps the spans that it gets, with the process that each comes from."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[tuple[str, Span]] = []


class _Handler(BaseHTTPRequestHandler):
    server: _Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            raise AssertionError("the exporter is not told to compress")
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            names = {each.key: each.value.string_value for each in resource.resource.attributes}
            process = names["service.name"] + " " + names["service.instance.id"]
            for scope in resource.scope_spans:
                self.server.spans += [(process, span) for span in scope.spans]
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Keep the output of tests clean."""


@contextmanager
def collector() -> Iterator[_Collector]:
    server = _Collector()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_tree_at_the_collector_is_the_timeline() -> None:
    with collector() as at:
        tracing = {"endpoint": f"http://127.0.0.1:{at.server_port}/v1/traces", "sample": 0.0}
        gateway = {"port": 0, "http_port": 0, "tracing": tracing}
        placement = {"local_prefill": "never", "admission": False}  # targets that cannot be met are missed
        config = parse_config({**FAKE, "gateway": gateway, "placement": placement})
        with ProcessCluster(config) as cluster, Client(cluster.address) as client:
            body = {"model": "fake", "prompt": list(PROMPT), "max_tokens": 6, "ignore_eos": True}
            url = f"http://{cluster.http_address}/v1/completions"
            quiet = httpx.post(url, json=body)
            recorded = httpx.post(url, json=body, headers={"traceparent": f"00-{TRACE}-{CALLERS}-01"})
            missed = httpx.post(url, json=body, headers={"x-slo-ttft-ms": "0.01"})
            assert [each.status_code for each in (quiet, recorded, missed)] == [200, 200, 200]
            assert wait_until(lambda: [span.name for _, span in at.spans].count(ROOT) == 2, timeout_s=120)
            explained = client.explain(recorded.headers["x-disagg-request-id"])
    of_request = [(process, span) for process, span in at.spans if span.trace_id.hex() == TRACE]
    (_, root), stages = of_request[0], of_request[1:]
    assert (root.name, root.parent_span_id.hex()) == (ROOT, CALLERS)
    assert root.span_id.hex() == recorded.headers["traceparent"].split("-")[2]
    assert {span.parent_span_id for _, span in stages} == {root.span_id}
    expected = [
        (span.stage, f"disagg-worker {span.worker}" if span.worker else "disagg-gateway gateway")
        for span in explained.spans
    ]
    assert sorted((span.name, process) for process, span in stages) == sorted(expected)
    assert {"prefill", "decode", "kv_transfer_exposed"} <= {span.name for _, span in stages}
