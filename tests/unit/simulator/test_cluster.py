"""Whole runs whose times follow by hand: a step takes 10 ms, and 1 ms for each prompt token and 2 ms for each decode.

Both engines; what they do differently is in `test_agreement.py`.
"""

from __future__ import annotations

import dataclasses

import pytest

from disagg.engine.config import SpeculationOptions, TransferLimits
from disagg.loadtests.records import RequestRecord
from disagg.loadtests.verdict.goodput import Slo, evaluate
from disagg.loadtests.workload.workload import MultiTurnWorkload, RandomWorkload
from disagg.proto.ids import WorkerId
from disagg.router.config import RouterConfig
from disagg.simulator.cluster import SimulatedCluster
from disagg.simulator.durations.drafts import DraftedSteps, Drafts
from disagg.simulator.durations.overheads import Overheads
from disagg.simulator.world.settings import EngineKind, Fault
from disagg.simulator.world.users import Habits
from tests.support.simulation import BYTES_PER_TOKEN, NO_LOCAL, LinearTimes, asked, cluster_spec, planned, simulated

ENGINES: tuple[EngineKind, ...] = ("exact", "fast")
both = pytest.mark.parametrize("engine", ENGINES)


def times(record: RequestRecord) -> list[float]:
    return [round(time_s, 9) for time_s in record.token_times_s]


@both
def test_one_request_on_one_worker(engine: EngineKind) -> None:
    result = simulated(cluster_spec(colocated=1, engine=engine), asked((1.0, 100, 4)))
    (record,) = result.records
    assert times(record) == [1.110, 1.122, 1.134, 1.146]
    assert record.ttft_s == pytest.approx(0.110)
    assert record.tpot_s == pytest.approx(0.012)
    assert (record.status, record.cached_tokens) == ("ok", 0)
    assert record.end_s == pytest.approx(1.146)


@both
def test_a_long_prompt_takes_a_step_for_each_budget(engine: EngineKind) -> None:
    result = simulated(cluster_spec(colocated=1, engine=engine, token_budget=64), asked((0.0, 150, 2)))
    # 64 + 64 + 22 prompt tokens, each step 10 ms more.
    assert times(result.records[0]) == [0.180, 0.192]


@both
def test_two_requests_share_steps(engine: EngineKind) -> None:
    result = simulated(cluster_spec(colocated=1, engine=engine), asked((0.0, 100, 3), (0.0, 50, 3)))
    # One step with both prompts, then steps of two decodes.
    assert [times(record) for record in result.records] == [[0.160, 0.174, 0.188]] * 2


@both
def test_a_prompt_shares_its_step_with_who_decodes(engine: EngineKind) -> None:
    result = simulated(cluster_spec(colocated=1, engine=engine), asked((0.0, 100, 4), (0.105, 50, 2)))
    # The second prompt waits for the step under way, then delays a decode, and both go on together.
    first, second = (times(record) for record in result.records)
    assert first == [0.110, 0.172, 0.186, 0.198]
    assert second == [0.172, 0.186]


@both
def test_tokens_come_faster_with_drafts_but_not_beside_prompts(engine: EngineKind) -> None:
    spec = cluster_spec(colocated=1, engine=engine)
    drafted = DraftedSteps(spec.pools[0].times, Drafts(tokens_per_step=2, rows_per_step=4))
    spec = dataclasses.replace(spec, pools=[dataclasses.replace(spec.pools[0], times=drafted)])
    result = simulated(spec, asked((0.0, 100, 5), (0.115, 50, 2)))
    # 4 rows take 18 ms and give 2 tokens, 8 rows 26 ms. The step with the second prompt has one row.
    first, second = (times(record) for record in result.records)
    assert first == [0.110, 0.119, 0.181, 0.194, 0.203]
    assert second == [0.181, 0.194]


@both
def test_simulated_workers_look_nothing_up(engine: EngineKind) -> None:
    requests = asked(*[(0.01 * number, 100, 100) for number in range(4)], same=True)
    plain, looking = (
        simulated(cluster_spec(colocated=1, engine=engine, speculation=SpeculationOptions(method=method)), requests)
        for method in ("off", "lookup")
    )
    assert looking.records == plain.records


@both
def test_context_counts_in_each_decode(engine: EngineKind) -> None:
    spec = cluster_spec(colocated=1, engine=engine, times=LinearTimes(context_s=1e-5))
    result = simulated(spec, asked((0.0, 100, 4)))
    # The first decode attends to 101 tokens.
    assert times(result.records[0]) == [0.110, 0.12301, 0.13603, 0.14906]


@both
def test_a_hand_over_by_hand(engine: EngineKind) -> None:
    overheads = Overheads(message_s=0.001)
    spec = cluster_spec(
        prefill=1, decode=1, engine=engine, router=NO_LOCAL, overheads=overheads, bandwidth_bytes_per_s=1e7
    )
    result = simulated(spec, asked((0.0, 100, 3)))
    # Dispatch, offer, reservation: 3 ms; the prompt 110 ms; token 0 reaches the gateway 1 ms later. The KV, 100,000
    # bytes, takes 10 ms from the end of the step; then D steps, and its tokens take 1 ms.
    assert times(result.records[0]) == [0.114, 0.136, 0.148]
    assert result.kv_bytes_moved == 100 * BYTES_PER_TOKEN
    assert result.placements["pair"] == 1


@both
def test_chunks_of_a_long_prompt_travel_while_it_is_computed(engine: EngineKind) -> None:
    spec = cluster_spec(
        prefill=1,
        decode=1,
        engine=engine,
        router=NO_LOCAL,
        token_budget=64,
        bandwidth_bytes_per_s=1e7,
        transfer=TransferLimits(chunk_bytes=64 * BYTES_PER_TOKEN),
    )
    result = simulated(spec, asked((0.0, 128, 2)))
    # Steps end at 74 and 148 ms; the first chunk arrives during the second step, the second one 6.4 ms after it.
    assert times(result.records[0]) == [0.148, 0.1664]


@both
def test_transfers_of_one_worker_share_its_link(engine: EngineKind) -> None:
    spec = cluster_spec(
        prefill=1,
        decode=2,
        engine=engine,
        router=RouterConfig(local_prefill="never", policy="round_robin"),
        bandwidth_bytes_per_s=1e6,
        times=LinearTimes(token_s=0.0),
    )
    result = simulated(spec, asked((0.0, 100, 2), (0.0, 100, 2)))
    # Both prompts in one step of 10 ms; their KV takes 100 ms alone, and twice as long together; then a decode.
    assert [times(record) for record in result.records] == [[0.010, 0.222]] * 2


@both
def test_a_cached_prefix_is_not_computed_again(engine: EngineKind) -> None:
    result = simulated(cluster_spec(colocated=1, engine=engine), asked((0.0, 100, 2), (1.0, 100, 2), same=True))
    # Six full blocks are cached; four tokens are left.
    assert times(result.records[0]) == [0.110, 0.122]
    assert times(result.records[1]) == [1.014, 1.026]
    assert [record.cached_tokens for record in result.records] == [0, 96]


@both
def test_what_the_decode_worker_has_is_not_sent_again(engine: EngineKind) -> None:
    spec = cluster_spec(prefill=1, decode=1, engine=engine, router=NO_LOCAL)
    result = simulated(spec, asked((0.0, 100, 2), (1.0, 100, 2), same=True))
    assert result.kv_bytes_moved == (100 + 4) * BYTES_PER_TOKEN


@both
def test_answers_of_unknown_length_end_with_a_stop_token(engine: EngineKind) -> None:
    spec = cluster_spec(colocated=1, engine=engine)
    result = simulated(spec, asked((0.0, 100, 4)), Habits(max_tokens=1000))
    assert times(result.records[0]) == [0.110, 0.122, 0.134, 0.146]
    score = evaluate(result.records, Slo(), 1.0)
    assert score.is_valid


@both
def test_overheads_of_gateway_and_worker(engine: EngineKind) -> None:
    overheads = Overheads(request_s=0.1, request_token_s=0.001, token_s=0.05, step_s=0.003)
    result = simulated(cluster_spec(colocated=1, engine=engine, overheads=overheads), asked((0.0, 100, 3)))
    assert times(result.records[0]) == [0.36, 0.375, 0.39]


@both
def test_the_turns_of_a_conversation_wait_for_answers_and_find_them_cached(engine: EngineKind) -> None:
    workload = MultiTurnWorkload(turns=3, new_tokens=64, osl=33, think_time_s=0.0)
    result = simulated(cluster_spec(colocated=1, engine=engine), planned(workload, rate_per_s=1.0, num_requests=3))
    first, second, third = result.records
    assert second.due_s == first.end_s
    assert third.due_s == second.end_s
    # A turn's prompt is 97 tokens longer; the KV of an answer's last token was never computed.
    assert [record.num_prompt_tokens for record in result.records] == [64, 161, 258]
    assert [record.cached_tokens for record in result.records] == [0, 96, 192]


@both
def test_a_turn_after_one_that_failed_fails(engine: EngineKind) -> None:
    workload = MultiTurnWorkload(turns=2, new_tokens=64, osl=10, think_time_s=0.0)
    requests = planned(workload, rate_per_s=1.0, num_requests=2)
    result = simulated(cluster_spec(colocated=1, engine=engine), requests, Habits(patience_s=0.05))
    assert [(record.status, record.error) for record in result.records] == [
        ("failed", "the client left after 0.05 s"),
        ("failed", "the turn before it failed"),
    ]


@both
def test_a_client_that_leaves_frees_its_place(engine: EngineKind) -> None:
    requests = asked((0.0, 400, 5), (0.01, 400, 5), (1.0, 100, 2))
    spec = cluster_spec(prefill=1, decode=1, engine=engine, router=NO_LOCAL)
    result = simulated(spec, requests, Habits(patience_s=0.5))
    assert [record.status for record in result.records] == ["ok", "failed", "ok"]
    assert times(result.records[2])[0] == 1.110


@both
def test_a_target_that_cannot_be_met_is_refused(engine: EngineKind) -> None:
    requests = planned(RandomWorkload(isl=400, osl=4), rate_per_s=10, num_requests=40, targets=Slo(ttft_s=1.0))
    result = simulated(cluster_spec(colocated=1, engine=engine), requests)
    statuses = {record.status for record in result.records}
    assert statuses == {"ok", "refused"}
    refused = [record for record in result.records if record.status == "refused"]
    assert {record.error for record in refused} == {"slow_down"}
    assert all(record.end_s == record.due_s for record in refused)


@both
def test_requests_of_a_worker_that_dies_go_on_elsewhere_and_it_comes_back(engine: EngineKind) -> None:
    faults = (Fault(at_s=0.5, worker_id="decode-0", back_after_s=2.0),)
    spec = cluster_spec(prefill=1, decode=2, engine=engine, router=NO_LOCAL, faults=faults)
    requests = planned(RandomWorkload(isl=50, osl=60), rate_per_s=8, num_requests=40)
    cluster = SimulatedCluster(spec, requests)
    result = cluster.run()
    assert result.problems == []
    assert [record.status for record in result.records] == ["ok"] * 40
    assert result.counters["worker_lost"] > 0
    assert min(sample.num_up for sample in result.samples) == 2
    assert result.samples[-1].num_up == 3


@both
def test_a_prefill_worker_that_dies_loses_nothing(engine: EngineKind) -> None:
    faults = (Fault(at_s=0.55, worker_id="prefill-1", back_after_s=None),)
    spec = cluster_spec(prefill=2, decode=1, engine=engine, router=NO_LOCAL, faults=faults)
    result = simulated(spec, planned(RandomWorkload(isl=300, osl=10), rate_per_s=5, num_requests=20))
    assert [record.status for record in result.records] == ["ok"] * 20


@both
def test_workers_can_be_added_and_removed_while_it_runs(engine: EngineKind) -> None:
    spec = cluster_spec(colocated=1, engine=engine, cold_start_s=1.5)
    requests = planned(RandomWorkload(isl=100, osl=40), rate_per_s=6, num_requests=60)
    cluster = SimulatedCluster(spec, requests)
    assert not cluster.advance(1.0)
    added = cluster.add_worker("colocated")
    assert added == WorkerId("colocated-1")
    cluster.advance(4.0)
    cluster.remove_worker(WorkerId("colocated-0"))
    result = cluster.run()
    assert result.problems == []
    assert [record.status for record in result.records] == ["ok"] * 60
    ups = {sample.time_s: sample.num_up for sample in result.samples}
    assert [ups[at] for at in (0.0, 2.0, 3.0)] == [1, 1, 2]
    assert result.samples[-1].num_up == 1


@pytest.mark.parametrize("swap_bytes", [0, 1 << 24])
@both
def test_sequences_are_preempted_when_blocks_run_out(engine: EngineKind, swap_bytes: int) -> None:
    router = RouterConfig(decode_reserve_tokens=0, watermark=0)
    spec = cluster_spec(
        colocated=1,
        engine=engine,
        router=router,
        num_blocks=20,
        decode_reserve_tokens=0,
        watermark=0.0,
        swap_bytes=swap_bytes,
    )
    requests = planned(RandomWorkload(isl=60, osl=60), rate_per_s=5, num_requests=12)
    cluster = SimulatedCluster(spec, requests)
    result = cluster.run()
    assert result.problems == []
    assert [record.status for record in result.records] == ["ok"] * 12
    assert cluster.num_preemptions > 0


@both
def test_the_same_run_gives_the_same_records(engine: EngineKind) -> None:
    def records() -> list[RequestRecord]:
        requests = planned(RandomWorkload(isl=(20, 300), osl=(1, 40)), rate_per_s=8, num_requests=60)
        return simulated(cluster_spec(prefill=1, decode=2, engine=engine), requests).records

    assert records() == records()


@both
def test_samples_over_time(engine: EngineKind) -> None:
    result = simulated(cluster_spec(colocated=1, engine=engine, num_blocks=100), asked((0.5, 320, 150)))
    first, second, *_ = result.samples
    assert (first.time_s, first.num_in_flight, first.kv_use, first.num_up) == (0.0, 0, 0.0, 1)
    # 320 tokens, and 149 of which the KV will be computed, reserved: 30 blocks.
    assert (second.time_s, second.num_in_flight, second.kv_use) == (1.0, 1, 0.30)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="pools: no worker decodes"):
        cluster_spec(prefill=1)
    with pytest.raises(ValueError, match="faults: there is no worker decode-7; got colocated-0"):
        SimulatedCluster(cluster_spec(colocated=1, faults=[Fault(at_s=1.0, worker_id="decode-7")]), [])
    with pytest.raises(ValueError, match="room for a single KV block"):
        cluster_spec(colocated=1, num_blocks=0)
    with pytest.raises(ValueError, match="message_s: expected a time of at least 0"):
        Overheads(message_s=-1.0)
    with pytest.raises(ValueError, match="patience_s: expected a time above 0"):
        Habits(patience_s=0.0)
