"""Conversion between the protobufs of `AdminService` and the twin's own types. Pure."""

from __future__ import annotations

from disagg.client import RecentLoad, ShapeComparison
from disagg.client.types import RatePrediction, RecentRequest, ShapeOption, WorkerCapacity
from disagg.proto.messages import StepCoefficients
from disagg.router.config import Decodes, is_decodes
from disagg.simulator.twin.comparison import Comparison
from disagg.simulator.twin.load import Arrival, Capacity, Load, check_marks


def load_from(response: RecentLoad) -> Load:
    """Load from a gateway's answer. Workers without measured steps are left out. Raises `ValueError` naming an invalid
    field."""
    arrivals = [_arrival(request) for request in response.requests]
    return Load(
        now_s=response.now_s,
        arrivals=tuple(sorted(arrivals, key=lambda arrival: arrival.at_s)),
        workers=tuple(_capacity(worker) for worker in response.workers if worker.base_ms > 0),
        decodes=_decodes(response.decodes),
        admission=response.admission,
        link_latency_s=response.link_latency_s,
        link_byte_s=response.link_byte_s,
    )


def message_of(comparison: Comparison) -> ShapeComparison:
    """The protobuf of a comparison."""
    return ShapeComparison(
        cause=comparison.cause,
        requests=comparison.num_requests,
        present=comparison.present,
        chosen=comparison.chosen,
        options=[
            ShapeOption(
                decodes=each.decodes,
                predictions=[RatePrediction(rate_factor=rate, attainment=share) for rate, share in each.by_rate],
            )
            for each in comparison.attained
        ],
        difference=comparison.difference,
        error=comparison.error,
        needed=comparison.needed,
        reason=comparison.reason,
        measured=comparison.measured,
        measured_requests=comparison.num_measured,
    )


def _decodes(text: str) -> Decodes | None:
    if text and not is_decodes(text):
        raise ValueError(f"decodes: the gateway has {text!r}, this version knows spread, gather and split:N")
    return text or None


def _arrival(request: RecentRequest) -> Arrival:
    arrival = Arrival(
        at_s=request.arrival_s,
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.completion_tokens,
        is_complete=request.is_complete,
        most_output_tokens=request.max_tokens,
        ttft_s=request.ttft_slo_s if request.HasField("ttft_slo_s") else None,
        tpot_s=request.tpot_slo_s if request.HasField("tpot_slo_s") else None,
        is_met=request.met_targets if request.HasField("met_targets") else None,
        marks=tuple(request.prefix_marks),
    )
    check_marks(arrival)
    return arrival


def _capacity(worker: WorkerCapacity) -> Capacity:
    return Capacity(
        worker_id=worker.worker_id,
        num_blocks=worker.kv_blocks,
        block_size=worker.block_size,
        max_num_seqs=worker.max_num_seqs,
        token_budget=worker.token_budget,
        max_model_len=worker.max_model_len,
        bytes_per_token=worker.kv_bytes_per_token,
        decode_reserve_tokens=worker.decode_reserve_tokens,
        watermark_blocks=worker.watermark_blocks,
        scheduling=worker.scheduling,
        max_itl_ms=worker.max_itl_ms if worker.HasField("max_itl_ms") else None,
        steps=StepCoefficients(
            worker.base_ms, worker.prefill_token_ms, worker.attended_ms, worker.decode_ms, worker.context_ms
        ),
    )
