"""The same numbers under the names that dashboards and endpoint pickers for vLLM read, for the cluster as a whole."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from disagg.gateway.metrics.family_constructors import counter, gauge, histogram
from disagg.proto.errors import RequestCancelledError
from disagg.proto.messages import MAX_DRAFT
from disagg.router.api import ClusterView
from disagg.router.statistics import merged

_LABELS = ("model_name",)
_REASONS = {"stop": "stop", "length": "length", "abort": RequestCancelledError.code}
"""Our outcome for each of vLLM's finish reasons."""


def vllm_families(view: ClusterView, model: str) -> Iterator[Metric]:
    """Families under vLLM's names; `model` is the label `model_name`."""
    yield from _gauges(view, model)
    yield from _counters(view, model)
    yield from _histograms(view, model)


def kv_usage(view: ClusterView) -> float:
    """Share of the KV blocks in use, over the workers on which sequences decode."""
    loads = [worker.load for worker in view.workers if "decode" in worker.info.roles]
    total = sum(load.blocks_total for load in loads)
    return sum(load.blocks_active for load in loads) / total if total else 0.0


def _gauges(view: ClusterView, model: str) -> Iterator[Metric]:
    usage = kv_usage(view)
    for name, text, value in (
        ("vllm:num_requests_running", "Requests that were placed.", float(view.num_running)),
        ("vllm:num_requests_waiting", "Requests in the router's queue.", float(view.num_queued)),
        ("vllm:kv_cache_usage_perc", "Share of the KV blocks in use where sequences decode; 1 is all.", usage),
        ("vllm:gpu_cache_usage_perc", "The older name of kv_cache_usage_perc.", usage),
    ):
        yield gauge(name, text, _LABELS, [((model,), value)])


def _counters(view: ClusterView, model: str) -> Iterator[Metric]:
    stats = view.stats
    prompt_tokens = int(stats.prompt_tokens.total)
    workers = view.counters.values()
    preemptions = sum(metrics.preemptions for metrics in workers)
    runs_of_each = [metrics.draft_runs for metrics in workers if metrics.draft_runs]
    runs = [sum(counts) for counts in zip(*runs_of_each, strict=True)]
    for name, text, count in (
        ("vllm:prompt_tokens", "Prompt tokens of answered requests.", prompt_tokens),
        ("vllm:generation_tokens", "Output tokens.", stats.num_output_tokens),
        ("vllm:prefix_cache_queries", "Prompt tokens that were looked for in the prefix caches.", prompt_tokens),
        ("vllm:prefix_cache_hits", "Prompt tokens that were found there.", stats.cached_tokens),
        ("vllm:num_preemptions", "Preemptions on all workers.", preemptions),
        ("vllm:spec_decode_num_drafts", "Runs of drafts: those of one sequence in one step.", sum(runs)),
        (
            "vllm:spec_decode_num_draft_tokens",
            "Drafts that were computed.",
            sum(metrics.drafted_tokens for metrics in workers),
        ),
        (
            "vllm:spec_decode_num_accepted_tokens",
            "Drafts that became output tokens.",
            sum(metrics.accepted_tokens for metrics in workers),
        ),
    ):
        yield counter(name, text, _LABELS, [((model,), count)])
    yield counter(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Accepted drafts by their place in their run, from 0 on.",
        (*_LABELS, "position"),
        [((model, str(place)), sum(runs[place + 1 :])) for place in range(MAX_DRAFT)] if runs else [],
    )
    yield counter(
        "vllm:request_success",
        "Requests by how they ended.",
        (*_LABELS, "finished_reason"),
        [((model, reason), stats.outcomes[outcome]) for reason, outcome in _REASONS.items()],
    )


def _histograms(view: ClusterView, model: str) -> Iterator[Metric]:
    stats = view.stats
    for name, text, found in (
        ("vllm:time_to_first_token_seconds", "From arrival to the first token.", merged(stats.ttft.values())),
        ("vllm:inter_token_latency_seconds", "Between two tokens.", stats.itl),
        ("vllm:time_per_output_token_seconds", "The older name of inter_token_latency_seconds.", stats.itl),
        ("vllm:e2e_request_latency_seconds", "From arrival to the end.", stats.e2e),
        ("vllm:request_queue_time_seconds", "Waiting before the prompt is computed.", stats.queue_time),
        ("vllm:request_prefill_time_seconds", "Computing the prompt.", stats.prefill_time),
        ("vllm:request_decode_time_seconds", "From the first to the last token.", stats.decode_time),
        ("vllm:request_prompt_tokens", "Prompt tokens of a request.", stats.prompt_tokens),
        ("vllm:request_generation_tokens", "Output tokens of a request.", stats.output_tokens),
        (
            "vllm:request_max_num_generation_tokens",
            "Output tokens of the longest answer to a request; here each of n answers is a request.",
            stats.output_tokens,
        ),
    ):
        yield histogram(name, text, _LABELS, [((model,), found)])
