"""The report of a gateway to the autoscaler: the arriving demand, including refused requests, and the load of the
workers.

Output tokens lag behind demand when it grows, and stay below it while workers are overloaded. So arrivals are counted.
"""

from __future__ import annotations

from collections.abc import Iterable

from disagg.proto.autoscaling import MAX_REQUEST_SAMPLES, LoadReport, RequestSample, WorkerSample
from disagg.router.api import ClusterView, RequestTrace, WorkerView
from disagg.router.telemetry.telemetry import ANSWERED


def load_report(view: ClusterView, traces: Iterable[RequestTrace], now: float, model: str = "") -> LoadReport:
    """The load report by a router's own views; `traces` are the latest requests, the latest arrival first. `model`: its
    key."""
    met, judged = view.slos.get("both", (0, 0))
    samples = [_request(trace, now) for trace in traces if not trace.is_probe]
    return LoadReport(
        model=model,
        num_arrived=view.stats.outcomes.total() + view.num_queued + view.num_running,
        num_queued=view.num_queued,
        num_running=view.num_running,
        num_met=met,
        num_judged=judged,
        requests=tuple(samples[:MAX_REQUEST_SAMPLES]),
        workers=tuple(_worker(worker) for worker in view.workers if worker.takes_requests),
        link_latency_s=view.placement.link_latency_s,
        link_byte_s=view.placement.link_byte_s,
    )


def _request(trace: RequestTrace, now: float) -> RequestSample:
    return RequestSample(
        age_s=max(0.0, now - trace.arrival),
        prompt_tokens=trace.num_prompt_tokens,
        cached_tokens=min(trace.num_prompt_tokens, max(trace.prefill_cached_tokens, trace.decode_cached_tokens)),
        output_tokens=trace.num_output_tokens if trace.outcome in ANSWERED else None,
        max_tokens=trace.most_output_tokens,
        ttft_s=trace.ttft_slo_s,
        tpot_s=trace.tpot_slo_s,
    )


def _worker(worker: WorkerView) -> WorkerSample:
    info, load = worker.info, worker.load
    return WorkerSample(
        worker_id=info.worker_id,
        incarnation=info.incarnation,
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        max_num_seqs=info.max_num_seqs,
        token_budget=info.token_budget,
        kv_layout=info.kv_layout,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        blocks_used=load.blocks_active + load.blocks_reserved,
        steps=worker.steps,
    )
