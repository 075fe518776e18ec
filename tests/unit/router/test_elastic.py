"""`elastic`, with workers of known speed: 2 ms a step, 1 ms a prompt token, 0.5 ms a decoding sequence."""

from __future__ import annotations

import pytest

from disagg.proto.ids import AttemptKey, RequestId, WorkerId
from disagg.proto.messages import Load
from disagg.router.config import Decodes, RouterConfig
from disagg.router.placement.placement import Candidate, Demand
from disagg.router.placement.policies.elastic import Elastic
from disagg.router.workers.assignments import Assignment
from tests.support.placing import Placing, busy, samples
from tests.support.router import Scenario, routed_request, tokens_update, worker_info, worker_report

SPEED = samples(base_ms=2.0, prefill_token_ms=1.0, decode_ms=0.5)
NUM_TOKENS = 64


def placing(decodes: Decodes, *, num_workers: int = 2, num_tokens: int = NUM_TOKENS) -> Placing:
    config = RouterConfig(policy="elastic", decodes=decodes, watermark=0.0, kv_barrier_ms=0.0)
    names = [f"w{number}" for number in range(num_workers)]
    idle = [busy(worker_info(name, calibration=SPEED, num_blocks=1024, max_num_seqs=64)) for name in names]
    return Placing("elastic", *idle, config=config, num_tokens=num_tokens)


def decode_on(it: Placing, name: str, count: int, *, tpot_ms: float, num_done: int = 10, first_at: float = 0.0) -> None:
    """Sequences of 64 tokens that began to decode at `first_at`, of answers of at most 100 tokens."""
    worker = it.fleet.worker(WorkerId(name))
    for number in range(count):
        assignment = Assignment(
            context=64 + num_done, known_tokens=64, most_output_tokens=100, tpot_ms=tpot_ms, first_at=first_at
        )
        it.fleet.open(worker, AttemptKey(RequestId(f"{name}-{number}"), 0), assignment, -1)


def where(it: Placing, now: float = 0.05, **demand: float) -> str:
    wanted = {"answer_tokens": 100.0, "tpot_ms": 20.0, "ttft_left_ms": 2000.0, **demand}
    return it.where(without=(), now=now, **wanted)


def test_gather_decodes_where_others_do_and_computes_prompts_where_none_do() -> None:
    it = placing("gather")
    decode_on(it, "w0", 3, tpot_ms=20.0)
    assert where(it) == "w1 w0"


def test_spread_computes_and_decodes_where_the_prompt_is_finished_first() -> None:
    it = placing("spread")
    decode_on(it, "w0", 3, tpot_ms=20.0)
    assert where(it) == "- w1"


def test_the_time_of_a_token_counts_where_drafts_are_accepted() -> None:
    """4 sequences with 4 rows each take (2 + 16 * 0.5) / 2.5 ms a token, 3 of them 3.2 ms."""
    it = placing("split:1")
    worker = it.fleet.worker(WorkerId("w0"))
    decode_on(it, "w0", 3, tpot_ms=20.0)
    load = Load(tokens_per_step=2.5, rows_per_step=4.0)
    assert it.fleet.report(worker_report("w0", 1, load=load), 0.0)
    weight = it.policy.weigh_decode(Demand(num_tokens=64, output_tokens=11.0, tpot_ms=20.0), Candidate(worker))
    assert weight.step_ms == pytest.approx(4.0, rel=1e-3)
    assert weight.delay_ms == pytest.approx(10 * 4 * (4.0 - 3.2), rel=1e-3)
    spare, _ = worker.saved(0.05, 100.0)
    assert spare == pytest.approx(0.98 * 20.0 * 99 - 50 - 1.2 * 90 * 3.2, rel=0.01)


def test_what_sequences_have_saved_is_time_for_a_prompt() -> None:
    # Each has 10 tokens after 0.05 s: 90 more are due 0.98 * 1.98 s after the first one, and take 90 * 1.2 steps of
    # 3.5 ms.
    it = placing("spread", num_workers=1)
    decode_on(it, "w0", 3, tpot_ms=20.0)
    spare, pace = it.fleet.worker(WorkerId("w0")).saved(0.05, 100.0)
    assert pace == 20.0
    assert spare == pytest.approx(0.98 * 20.0 * 99 - 50 - 1.2 * 90 * 3.5, rel=0.01)
    # A little later, without a change, as much less.
    assert it.fleet.worker(WorkerId("w0")).saved(0.06, 100.0)[0] == pytest.approx(spare - 10)


def test_without_spare_time_a_prompt_goes_on_at_the_share_that_decodes_leave() -> None:
    # 10 tokens in 1.56 s: late. 90 more at 3.5 ms would come in time, but not with 1.2 times their steps and a
    # prompt.
    it = placing("spread", num_workers=1)
    decode_on(it, "w0", 3, tpot_ms=20.0)
    policy, worker = it.policy, it.fleet.worker(WorkerId("w0"))
    demand = Demand(num_tokens=NUM_TOKENS, output_tokens=10.0, tpot_ms=20.0, now=1.56, answer_tokens=100.0)
    assert worker.saved(1.56, 100.0)[0] == pytest.approx(2.0, abs=0.5)
    share = 1 - 1.2 * 3.5 / 20
    finish = 2.0 + (64 + 3.5 - 2.0) / share
    assert policy.weigh_prefill(demand, Candidate(worker)).prefill_ms == pytest.approx(finish, rel=0.02)


def test_a_sequence_that_is_late_whatever_happens_holds_no_prompt_back() -> None:
    it = placing("spread", num_workers=1)
    decode_on(it, "w0", 1, tpot_ms=20.0)
    worker = it.fleet.worker(WorkerId("w0"))
    assert worker.saved(60.0, 100.0) == (float("inf"), float("inf"))


def test_sequences_without_a_target_hold_no_prompt_back() -> None:
    it = placing("spread", num_workers=1)
    decode_on(it, "w0", 2, tpot_ms=float("inf"))
    assert it.fleet.worker(WorkerId("w0")).saved(60.0, 100.0) == (float("inf"), float("inf"))


def test_gather_uses_a_second_worker_where_steps_would_be_late() -> None:
    # 1.1 times the target of 6 ms is 6.6 ms: ten sequences take 7 ms, eight 6 ms.
    it = placing("gather")
    decode_on(it, "w0", 7, tpot_ms=6.0)
    assert where(it, tpot_ms=6.0) == "w1 w0"
    it = placing("gather")
    decode_on(it, "w0", 12, tpot_ms=6.0)
    assert where(it, tpot_ms=6.0) == "- w1"


def test_a_prompt_is_computed_beside_decodes_where_it_would_be_late_elsewhere() -> None:
    it = placing("gather")
    decode_on(it, "w0", 3, tpot_ms=20.0)
    backlog = Assignment(tokens=90, pairs=4095, is_handed_over=True)
    it.fleet.open(it.fleet.worker(WorkerId("w1")), AttemptKey(RequestId("long"), 0), backlog, -1)
    assert where(it, ttft_left_ms=400.0) == "w1 w0"
    assert where(it, ttft_left_ms=120.0) == "- w0"


def test_a_request_without_a_tpot_target_is_placed_as_by_joint() -> None:
    elastic, joint = placing("gather"), placing("gather")
    joint.policy = Placing("joint").policy
    for it in (elastic, joint):
        decode_on(it, "w0", 3, tpot_ms=20.0)
    infinite = float("inf")
    assert where(elastic, tpot_ms=infinite) == where(joint, tpot_ms=infinite) == "- w1"


def test_the_setting_may_change_at_any_time() -> None:
    it = placing("spread")
    decode_on(it, "w0", 3, tpot_ms=20.0)
    assert where(it) == "- w1"
    assert isinstance(it.policy, Elastic)
    it.policy.decodes = "gather"
    assert where(it) == "w1 w0"


def test_a_worker_takes_one_prompt_after_the_other() -> None:
    it = placing("spread", num_workers=1)
    worker = it.fleet.worker(WorkerId("w0"))
    it.fleet.open(worker, AttemptKey(RequestId("a"), 0), Assignment(tokens=80, pairs=3240), -1)
    assert worker.has_slot
    it.fleet.open(worker, AttemptKey(RequestId("b"), 0), Assignment(tokens=40, pairs=820), -1)
    assert not worker.has_slot


def test_a_request_that_cannot_meet_its_target_waits_behind_those_that_can() -> None:
    config = RouterConfig(policy="elastic", ttft_slo_s=0.5, tpot_slo_s=0.02, admission=False, watermark=0.0)
    slow = worker_info("w0", calibration=SPEED, num_blocks=1024, max_num_seqs=64)
    it = Scenario(slow, config=config)
    assert it.submit(routed_request("r0", 600)) == ["dispatch w0 r0/0 alone"]
    assert it.submit(routed_request("late", 300)) == []
    # At 0.3 s `late` would need 0.3 s more than the 0.2 s that are left: it goes behind those that come before 0.8 s.
    assert it.at(0.3) == []
    assert it.submit(routed_request("new", 100)) == []
    assert it.update("w0", tokens_update("r0", 0, 0, 7)) == ["emit r0 [7]", "dispatch w0 new/0 alone"]


def test_a_split_computes_prompts_where_none_are_split_off() -> None:
    it = placing("split:1")
    assert where(it) == "w1 w0"
    backlog = Assignment(tokens=90, pairs=4095, is_handed_over=True)
    it.fleet.open(it.fleet.worker(WorkerId("w1")), AttemptKey(RequestId("long"), 0), backlog, -1)
    assert where(it, ttft_left_ms=400.0) == where(it, ttft_left_ms=120.0) == "w1 w0"


def test_a_split_decodes_elsewhere_only_where_steps_would_be_late() -> None:
    # Ten sequences take 7 ms a step. With a target of 6.9 ms that is 2 * 10 * 0.1 ms later for all; on w1 a step of
    # 2.5 ms counts ten times.
    for tpot_ms, expected in ((7.0, "w1 w0"), (6.9, "w1 w0"), (5.0, "- w1")):
        it = placing("split:1")
        decode_on(it, "w0", 9, tpot_ms=tpot_ms)
        assert where(it, tpot_ms=tpot_ms) == expected


def test_of_several_that_are_split_off_the_one_where_steps_grow_least_decodes() -> None:
    it = placing("split:2", num_workers=3)
    decode_on(it, "w0", 3, tpot_ms=20.0)
    decode_on(it, "w1", 2, tpot_ms=20.0)
    assert where(it) == "w2 w1"


def split_off(it: Placing) -> list[str]:
    names = [view.info.worker_id for view in it.fleet.views(0.0)]
    return [name for name in names if not it.fleet.worker(name).is_for_prompts]


def test_the_first_ones_by_number_are_split_off_and_one_takes_prompts_always() -> None:
    it = placing("split:2", num_workers=0)
    for name, expected in (
        ("w10", []),
        ("w9", ["w9"]),
        ("w2", ["w2", "w9"]),
        ("w1", ["w1", "w2"]),
    ):
        it.add(busy(worker_info(name)))
        assert split_off(it) == expected
    it.fleet.drain(WorkerId("w2"))
    assert split_off(it) == ["w1", "w2", "w9"]  # w2 takes nothing at all
    it.fleet.suspect(WorkerId("w10"))
    assert split_off(it) == ["w1", "w2"]  # w9 is left for prompts
    it.fleet.resume(WorkerId("w2"))
    assert split_off(it) == ["w1", "w2"]
    it.fleet.clear_suspicion(WorkerId("w10"))
    it.fleet.lost(WorkerId("w1"))
    assert split_off(it) == ["w2", "w9"]
    it.fleet.split(1)
    assert split_off(it) == ["w2"]
    it.fleet.split(0)
    assert split_off(it) == []
    assert it.fleet.check_integrity() == []


def test_workers_that_are_split_off_count_nowhere_as_workers_for_prompts() -> None:
    it = placing("split:1", num_workers=3)
    assert it.fleet.backlog() == (0.0, 2)
    backlog = Assignment(tokens=90, pairs=4095)
    for name in ("w1", "w2"):
        it.fleet.open(it.fleet.worker(WorkerId(name)), AttemptKey(RequestId(name), 0), backlog, -1)
    fastest = it.fleet.fastest()
    assert fastest is not None
    assert fastest.worker_id in ("w1", "w2")
    assert fastest.backlog_ms > 90.0


def test_where_no_other_worker_may_take_a_prompt_those_that_are_split_off_do() -> None:
    it = placing("split:1")
    assert it.where(without=("w1",), tpot_ms=20.0) == "- w0"
    it.fleet.drain(WorkerId("w1"))
    assert where(it) == "- w0"


def test_another_configuration_splits_anew() -> None:
    it = placing("split:1", num_workers=3)
    config = RouterConfig(policy="elastic", decodes="split:2", watermark=0.0)
    policy = Elastic(0.0, it.links, it.pairs, config.decodes)
    it.fleet.configure(config, policy)
    assert split_off(it) == ["w0", "w1"]
    assert it.fleet.check_integrity() == []
