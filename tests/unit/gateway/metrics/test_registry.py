"""The exposition: what the router counted, under our names and under those of vLLM."""

from __future__ import annotations

import dataclasses

import pytest

from disagg.gateway.metrics.registry import GatewayMetrics
from disagg.router.api import ClusterView, PlacementView
from tests.support.metrics import Samples, busy_view, read_samples, value


@pytest.fixture
def metrics() -> GatewayMetrics:
    return GatewayMetrics({"tiny": busy_view})


@pytest.fixture
def samples(metrics: GatewayMetrics) -> Samples:
    return read_samples(metrics.render()[0])


def test_calls_are_counted_by_protocol_and_outcome(metrics: GatewayMetrics) -> None:
    for protocol, outcome in (("grpc", "ok"), ("http", "ok"), ("http", "ok"), ("http", "slow_down")):
        metrics.count_call(protocol, outcome)  # type: ignore[arg-type]
    found = read_samples(metrics.render()[0])
    assert value(found, "disagg_calls_total", protocol="grpc", outcome="ok") == 1
    assert value(found, "disagg_calls_total", protocol="http", outcome="ok") == 2
    assert value(found, "disagg_calls_total", protocol="http", outcome="slow_down") == 1


@pytest.mark.parametrize("version", ["abc", "1.x", "2.x", "9" * 5000])
@pytest.mark.parametrize("kind", ["application/openmetrics-text", "text/plain"])
def test_whatever_a_client_accepts_it_gets_the_numbers(metrics: GatewayMetrics, kind: str, version: str) -> None:
    assert b"disagg_requests_in_flight" in metrics.render(f"{kind};version={version}")[0]


def test_requests(samples: Samples) -> None:
    assert {dict(labels)["stage"]: count for labels, count in samples["disagg_requests_in_flight"].items()} == {
        "queued": 1,
        "prefill": 1,
        "transfer": 2,
        "decode": 3,
    }
    assert {dict(labels)["outcome"]: count for labels, count in samples["disagg_requests_total"].items()} == {
        "stop": 2,
        "length": 1,
        "cancelled": 4,
        "timeout": 5,
    }
    assert value(samples, "disagg_prompt_tokens_total") == 100
    assert value(samples, "disagg_cached_prompt_tokens_total") == 16
    assert value(samples, "disagg_output_tokens_total") == 70


def test_tenants(samples: Samples) -> None:
    name = "disagg_tenant_requests"
    assert value(samples, f"{name}_in_flight", tenant="a", state="queued") == 1
    assert value(samples, f"{name}_in_flight", tenant="b", state="running") == 2
    assert value(samples, f"{name}_total", tenant="a", outcome="cancelled") == 4
    assert value(samples, "disagg_tenant_prompt_tokens_total", tenant="a") == 90
    assert value(samples, "disagg_tenant_output_tokens_total", tenant="b") == 10
    assert samples["disagg_tenant_refused_total"] == {frozenset({("tenant", "a"), ("limit", "queued")}): 3}


def test_targets_are_there_before_anybody_has_one(samples: Samples) -> None:
    slos = {(dict(ls)["slo"], dict(ls)["met"]): count for ls, count in samples["disagg_slo_requests_total"].items()}
    assert slos == {
        ("ttft", "true"): 2,
        ("ttft", "false"): 1,
        ("tpot", "true"): 0,
        ("tpot", "false"): 0,
        ("both", "true"): 2,
        ("both", "false"): 1,
    }


def test_a_histogram_is_cumulative(samples: Samples) -> None:
    name = "disagg_time_to_first_token_seconds"
    ends = {
        dict(labels)["le"]: count for labels, count in samples[f"{name}_bucket"].items() if ("path", "pd") in labels
    }
    assert (ends["0.02"], ends["0.05"], ends["0.2"], ends["0.3"], ends["+Inf"]) == (0, 1, 1, 2, 2)
    assert value(samples, f"{name}_count", path="pd") == 2
    assert value(samples, f"{name}_sum", path="pd") == pytest.approx(0.3)


def test_workers(samples: Samples) -> None:
    blocks = {
        (dict(labels)["instance"], dict(labels)["state"]): count
        for labels, count in samples["disagg_kv_blocks"].items()
    }
    assert blocks == {
        ("d0", "active"): 50,
        ("d0", "cached"): 60,
        ("d0", "reserved"): 30,
        ("d0", "free"): 60,
        ("p0", "active"): 10,
        ("p0", "cached"): 0,
        ("p0", "reserved"): 0,
        ("p0", "free"): 90,
    }
    assert value(samples, "disagg_instances", role="prefill", state="ready") == 1
    assert value(samples, "disagg_instances", role="decode", state="draining") == 1
    assert value(samples, "disagg_instances", role="decode", state="unreachable") == 1
    assert value(samples, "disagg_instances", role="colocated", state="ready") == 0
    assert value(samples, "disagg_router_view_age_seconds", instance="p0") == 0.5
    assert value(samples, "disagg_router_quarantined", instance="p0") == 2
    assert value(samples, "disagg_router_quarantined", instance="d0") == 0
    assert value(samples, "disagg_instance_sequences", instance="d0", state="waiting") == 1
    assert value(samples, "disagg_instance_sequences", instance="d0", state="suspended") == 2


def test_engines_and_transfers(samples: Samples) -> None:
    step = "disagg_engine_step_seconds"
    assert value(samples, f"{step}_bucket", instance="p0", le="0.001") == 3
    assert value(samples, f"{step}_bucket", instance="p0", le="5.0") == 3
    assert value(samples, f"{step}_count", instance="p0") == 4
    assert value(samples, f"{step}_sum", instance="p0") == 9.0
    assert value(samples, "disagg_engine_preemptions_total", instance="p0") == 1
    assert value(samples, "disagg_engine_swapped_out_blocks_total", instance="p0") == 9
    assert value(samples, "disagg_engine_swapped_in_blocks_total", instance="p0") == 8
    pair = {"src": "p0", "dst": "d0", "transport": "gloo"}
    assert value(samples, "disagg_kv_transfers_total", pair) == 3
    assert value(samples, "disagg_kv_transfer_bytes_total", pair) == 4096
    assert value(samples, "disagg_kv_transfer_failures_total", src="p0", dst="d0", reason="stuck") == 2


def test_drafts(samples: Samples) -> None:
    assert value(samples, "disagg_engine_draft_steps_total", instance="d0") == 9
    assert value(samples, "disagg_engine_drafted_tokens_total", instance="d0") == 40
    assert value(samples, "disagg_engine_accepted_tokens_total", instance="d0") == 12
    length = "disagg_engine_accepted_length"
    buckets = [value(samples, f"{length}_bucket", instance="d0", le=le) for le in ("0.0", "2.0", "14.0", "+Inf")]
    assert buckets == [5, 7, 8, 9]
    assert value(samples, f"{length}_sum", instance="d0") == 12
    assert [dict(labels)["instance"] for labels in samples[f"{length}_count"]] == ["d0"]


def test_tiers(samples: Samples) -> None:
    tier, host, disk = "disagg_kv_tier", {"instance": "p0", "tier": "host"}, {"instance": "p0", "tier": "disk"}
    assert value(samples, f"{tier}_bytes", host) == 1024
    assert value(samples, f"{tier}_capacity_bytes", host) == 4096
    assert [value(samples, f"{tier}_on", labels) for labels in (host, disk)] == [1, 0]
    assert value(samples, f"{tier}_written_extents_total", host) == 5
    assert value(samples, f"{tier}_loaded_extents_total", host) == 4
    assert value(samples, f"{tier}_evicted_extents_total", disk) == 2
    assert value(samples, f"{tier}_failed_extents_total", disk) == 1
    assert value(samples, f"{tier}_dropped_extents_total", instance="p0") == 3
    assert value(samples, "disagg_engine_loaded_tokens_total", instance="p0") == 12


def test_fetches(samples: Samples) -> None:
    assert value(samples, "disagg_engine_fetched_tokens_total", instance="p0") == 384
    assert value(samples, "disagg_kv_served_fetches_total", instance="p0") == 2
    outcomes = {
        outcome: value(samples, "disagg_kv_fetches_total", instance="p0", outcome=outcome)
        for outcome in ("done", "refused", "failed", "late")
    }
    assert outcomes == {"done": 3, "refused": 1, "failed": 0, "late": 0}


def test_fetches_of_workers_that_made_none_are_counted_from_zero(samples: Samples) -> None:
    counts = samples["disagg_kv_fetches_total"]
    workers = {dict(labels)["instance"] for labels in samples["disagg_kv_served_fetches_total"]}
    assert len(workers) > 1
    assert {dict(labels)["instance"] for labels in counts} == workers
    assert len(counts) == 4 * len(workers)
    assert sum(counts.values()) == 4


def test_the_tiers_of_a_worker_that_is_gone_keep_their_counts_only(samples: Samples) -> None:
    def view() -> ClusterView:
        busy = busy_view()
        workers = tuple([worker for worker in busy.workers if worker.info.worker_id != "p0"])
        return dataclasses.replace(busy, workers=workers)

    found = read_samples(GatewayMetrics({"tiny": view}).render()[0])
    assert found["disagg_kv_tier_written_extents_total"] == samples["disagg_kv_tier_written_extents_total"]
    gauges = ("disagg_kv_tier_bytes", "disagg_kv_tier_capacity_bytes", "disagg_kv_tier_on")
    assert [name in found for name in gauges] == [False] * 3


def test_experts(samples: Samples) -> None:
    found = {dict(labels)["layer"]: count for labels, count in samples["disagg_expert_imbalance"].items()}
    assert found == {"0": 1.25, "1": 2.0}


def test_buffers_of_a_rank(samples: Samples) -> None:
    found = {dict(labels)["buffer"]: count for labels, count in samples["disagg_worker_buffer_bytes"].items()}
    assert found == {"kv": 4096, "kv_window_512": 1024, "experts": 77}


def test_accepted_drafts_by_place_under_the_name_of_vllm(samples: Samples) -> None:
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    counts = [value(samples, name, model_name="tiny", position=str(place)) for place in range(15)]
    assert counts == [4, 2, 2, *[1] * 12]


def test_the_router(samples: Samples) -> None:
    assert value(samples, "disagg_router_decisions_total", reason="pair") == 3
    assert value(samples, "disagg_router_decisions_total", reason="no_slot") == 0
    assert value(samples, "disagg_router_events_total", event="refused") == 7
    assert value(samples, "disagg_exported_traces_total", result="sent") == 4
    ratio = "disagg_router_prediction_error_ratio"
    assert value(samples, f"{ratio}_bucket", what="ttft", le="1.25") == 0
    assert value(samples, f"{ratio}_bucket", what="ttft", le="1.5") == 1


def test_the_names_of_vllm_show_the_same_numbers(samples: Samples) -> None:
    model = {"model_name": "tiny"}
    expected = {
        "num_requests_running": 6,
        "num_requests_waiting": 1,
        "kv_cache_usage_perc": 0.25,  # of the decode workers
        "gpu_cache_usage_perc": 0.25,
        "prompt_tokens_total": 100,
        "generation_tokens_total": 70,
        "prefix_cache_queries_total": 100,
        "prefix_cache_hits_total": 16,
        "num_preemptions_total": 1,
        "spec_decode_num_drafts_total": 9,
        "spec_decode_num_draft_tokens_total": 40,
        "spec_decode_num_accepted_tokens_total": 12,
        "time_to_first_token_seconds_count": 3,
        "inter_token_latency_seconds_count": 57,
        "time_per_output_token_seconds_count": 57,
        "e2e_request_latency_seconds_sum": 1.5,
        "request_prompt_tokens_sum": 100,
        "request_generation_tokens_sum": 60,
        "request_max_num_generation_tokens_sum": 60,
        "request_queue_time_seconds_sum": 0.75,
        "request_prefill_time_seconds_sum": 0.375,
        "request_decode_time_seconds_sum": 0.1875,
    }
    assert {name: value(samples, f"vllm:{name}", model) for name in expected} == pytest.approx(expected)
    success = {dict(ls)["finished_reason"]: count for ls, count in samples["vllm:request_success_total"].items()}
    assert success == {"stop": 2, "length": 1, "abort": 4}


def test_the_names_of_vllm_can_be_left_out() -> None:
    found = read_samples(GatewayMetrics({"tiny": busy_view}, vllm_aliases=False).render()[0])
    assert found.keys()
    assert [name for name in found if not name.startswith("disagg_")] == []


def test_an_empty_cluster_has_metrics_too() -> None:
    found = read_samples(GatewayMetrics({"tiny": lambda: ClusterView((), 0, 0)}).render()[0])
    assert value(found, "vllm:kv_cache_usage_perc", model_name="tiny") == 0
    assert value(found, "disagg_inter_token_latency_seconds_count") == 0


def test_where_answers_decode_is_shown_by_policies_that_have_the_setting(metrics: GatewayMetrics) -> None:
    without = ClusterView((), 0, 0, placement=PlacementView("joint"))
    assert not any("decodes" in name for name in read_samples(GatewayMetrics({"tiny": lambda: without}).render()[0]))
    found = read_samples(metrics.render()[0])
    assert value(found, "disagg_router_decodes", setting="gather") == 1
    assert value(found, "disagg_router_decodes", setting="spread") == 0
    assert value(found, "disagg_router_decodes_changes_total") == 3


def test_the_client_chooses_the_format(metrics: GatewayMetrics) -> None:
    assert metrics.render()[1] == "text/plain; version=0.0.4; charset=utf-8"
    body, content_type = metrics.render("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")


def test_no_metric_is_made_twice(metrics: GatewayMetrics) -> None:
    families = [line.split()[2] for line in metrics.render()[0].decode().splitlines() if line.startswith("# TYPE")]
    assert len(families) == len(set(families))


def test_of_several_gateways_one_shows_what_all_have_alike() -> None:
    shown = [
        read_samples(GatewayMetrics({"m": busy_view}, name=name, shows_workers=first).render()[0])
        for name, first in (("gateway", True), ("gateway-1", False))
    ]
    assert value(shown[1], "disagg_gateway_info", gateway="gateway-1") == 1
    assert set(shown[1]["disagg_gateway_info"]) != set(shown[0]["disagg_gateway_info"])
    alike = {"disagg_instances", "disagg_kv_blocks", "disagg_instance_sequences", "disagg_kv_transfers_total"}
    assert alike <= set(shown[0])
    assert not alike & set(shown[1])
    assert shown[1]["disagg_requests_in_flight"] == shown[0]["disagg_requests_in_flight"]
