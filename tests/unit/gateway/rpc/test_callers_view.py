"""What is seen of the load of others without the right to it, and of models that a key is not for."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from disagg.gateway.operators.admin_answers import cluster_state
from disagg.gateway.rpc.callers_view import leave_out_models
from disagg.proto.autoscaling import AutoscalerState, Decision, PoolDecision
from disagg.proto.control import ControlState
from disagg.router.statistics import Rates
from disagg.v1 import inference_pb2 as pb
from tests.support.metrics import busy_view

POOLS = (PoolDecision(name="decode", size=1, wanted=2, reason="0.37 requests/s", change="below 0.2"),)
DECISION = Decision(pools=POOLS, requests_per_s=0.37, output_tokens_per_s=33.0)


def seen(num_tokens: float, num_queued: int, blocks: int, *, with_counts: bool = False) -> pb.GetClusterStateResponse:
    """Of a cluster in which others do so much."""
    view = busy_view()
    workers = [
        dataclasses.replace(worker, load=msgspec.structs.replace(worker.load, blocks_active=blocks, num_running=blocks))
        for worker in view.workers
    ]
    view = dataclasses.replace(
        view,
        workers=tuple(workers),
        num_queued=num_queued,
        num_running=num_queued,
        stages={"queued": num_queued},
        slos={"ttft": (num_queued, num_queued + 1)},
        rates=Rates(num_tokens / 100, num_tokens),
    )
    decision = msgspec.structs.replace(DECISION, requests_per_s=num_tokens)
    autoscaler = AutoscalerState(policy="slo", dry_run=False, age_s=1.0, decision=decision)
    known = ControlState(pools=(), workers=(), gateways=(), autoscaler=autoscaler)
    return cluster_state(view, known, with_counts=with_counts, with_addresses=False)


def test_nothing_that_a_caller_adds_tells_what_others_do() -> None:
    """Rounding would: known tokens are added until the rounded figure changes."""
    nothing = seen(0, 0, 0)
    assert nothing == seen(31.9, 3, 7) == seen(32.1, 4, 8) == seen(64.1, 129, 90)
    assert nothing.load_left_out
    assert {(w.tokens_per_step, w.drafted_tokens, w.accepted_tokens) for w in nothing.workers} == {(0.0, 0, 0)}
    assert {(w.prompt_tokens, w.loaded_tokens, w.fetched_tokens) for w in nothing.workers} == {(0, 0, 0)}
    assert {100, 200} <= {worker.kv_blocks_total for worker in nothing.workers}
    assert (nothing.autoscaler.policy, len(nothing.autoscaler.pools), nothing.autoscaler.age_s) == ("slo", 0, 1.0)
    shown = seen(32.1, 4, 8, with_counts=True)
    assert (shown.load_left_out, shown.output_tokens_per_s, shown.autoscaler.pools[0].wanted) == (False, 32.1, 2)


@pytest.mark.parametrize("key", ["qwen", "llama"])
def test_nothing_names_a_model_that_the_key_is_not_for(key: str) -> None:
    keys = ("qwen", "llama")
    state = pb.GetClusterStateResponse(
        workers=[pb.WorkerState(worker_id=f"{each}/decode-0") for each in keys],
        pools=[pb.PoolState(name=f"{each}/decode") for each in keys],
        transfers=[pb.TransferState(prefill_worker=f"{each}/prefill-0", bytes=1) for each in keys],
        autoscaler=pb.AutoscalerState(pools=[pb.ScalingDecision(pool=f"{each}/decode") for each in keys]),
        notes=[f"{each}/decode-0 cannot meet the target" for each in keys],
        rollout=pb.RolloutState(generation=2, doing="stops qwen/decode-0", next="llama/decode-0"),
    )
    leave_out_models(state, frozenset([key]))
    (other,) = set(keys) - {key}
    assert other not in str(state)
    assert [len(each) for each in (state.workers, state.pools, state.transfers, state.autoscaler.pools)] == [1] * 4
    assert state.rollout.generation == 2
    leave_out_models(state, frozenset())
    assert key not in str(state)
