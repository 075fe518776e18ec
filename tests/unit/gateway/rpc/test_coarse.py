"""What is seen of the load of others without the right to exact counts."""

from __future__ import annotations

import dataclasses

from disagg.proto.autoscaling import AutoscalerState, Decision, PoolDecision
from disagg.proto.control import ControlState
from disagg.router.gateway.rpc.admin_answers import cluster_state
from disagg.router.gateway.rpc.coarse import make_coarse
from disagg.router.statistics import Rates
from disagg.v1 import inference_pb2 as pb
from tests.support.metrics import busy_view


def seen(num_tokens: int) -> pb.GetClusterStateResponse:
    """By a key without the right, of one answer of so many tokens in ten seconds."""
    view = dataclasses.replace(busy_view(), slos={"ttft": (37, 41)}, rates=Rates(0.1, num_tokens / 10))
    return cluster_state(view, ControlState(pools=(), workers=(), gateways=()), with_counts=False, with_addresses=False)


def test_the_length_of_another_answer_cannot_be_told() -> None:
    assert seen(350) == seen(520) == seen(640)
    assert (seen(640).requests_per_s, seen(640).output_tokens_per_s) == (0.125, 64.0)
    assert not seen(640).transfers


def test_counts_are_powers_of_two_blocks_eighths_and_shares_tenths() -> None:
    state = pb.GetClusterStateResponse(
        queued_requests=5,
        running_requests=0,
        stages=[pb.StageCount(stage="decode", requests=9)],
        slos=[pb.SloState(slo="ttft", met=37, total=41), pb.SloState(slo="tpot")],
        workers=[
            pb.WorkerState(sequences=3, kv_blocks_total=1000, kv_blocks_active=1, kv_blocks_cached=876),
            pb.WorkerState(sequences=1, kv_blocks_total=3, kv_blocks_reserved=3),
            pb.WorkerState(),
        ],
    )
    make_coarse(state)
    assert (state.queued_requests, state.running_requests, state.stages[0].requests) == (8, 0, 16)
    assert [(slo.met, slo.total) for slo in state.slos] == [(9, 10), (0, 0)]
    first, second, third = state.workers
    assert (first.sequences, first.kv_blocks_active, first.kv_blocks_cached) == (4, 125, 1000)
    assert (second.sequences, second.kv_blocks_reserved, third.kv_blocks_active) == (1, 3, 0)


def test_what_the_autoscaler_measured_is_coarse_too() -> None:
    pools = (PoolDecision(name="decode", size=1, wanted=2, reason="0.37 requests/s", change="below 0.2"),)
    decision = Decision(pools=pools, requests_per_s=0.37, output_tokens_per_s=33.0)
    known = ControlState(
        pools=(),
        workers=(),
        gateways=(),
        autoscaler=AutoscalerState(policy="slo", dry_run=False, age_s=1.0, decision=decision),
    )
    found = cluster_state(busy_view(), known, with_counts=False).autoscaler
    assert (found.requests_per_s, found.output_tokens_per_s, found.forecast_per_s) == (0.5, 64.0, 0.0)
    assert [(pool.wanted, pool.reason, pool.change) for pool in found.pools] == [(2, "", "")]
    assert cluster_state(busy_view(), known).autoscaler.pools[0].reason == "0.37 requests/s"
