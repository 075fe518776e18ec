"""`joint`, with workers of known speed: 2 ms a step, 1 ms a prompt token, 0.5 ms a decoding sequence, and (where a test
says so) context and attention."""

import math

import pytest

from disagg.proto.messages import KvLayout, Load, StepSample
from disagg.router.config import RouterConfig
from disagg.router.placement.placement import Demand
from disagg.router.requests.explain import Placed
from tests.support.placing import LOAD, Busy, Placing, busy, samples
from tests.support.router import worker_info

SPEED = samples(base_ms=2.0, prefill_token_ms=1.0, decode_ms=0.5)
SLOW = samples(base_ms=2.0, prefill_token_ms=2.0, decode_ms=1.0)
AUTO = RouterConfig(watermark=0.0, kv_barrier_ms=0.0)
NEVER = RouterConfig(watermark=0.0, kv_barrier_ms=0.0, local_prefill="never")


def worker(name: str, speed: tuple[StepSample, ...] = SPEED, load: Load = LOAD, **state: int) -> Busy:
    return busy(worker_info(name, calibration=speed, num_blocks=1024, max_num_seqs=64), load, **state)


def test_the_cost_is_the_sum_of_its_parts() -> None:
    it = Placing("joint", worker("p0", tokens=100, seqs=1), worker("d0", seqs=3, used=256, context=300))
    it.config = RouterConfig(local_prefill="never")
    choice = it.choose(output_tokens=11.0)
    assert choice is not None
    decision = Placed(it.policy, Demand(num_tokens=64), choice).decision()
    link_ms = it.links.exposed_ms(worker_info("p0").worker_id, worker_info("d0").worker_id, 64 * 64)
    # P: 100 tokens in front, in steps of 128; then 64 tokens in one step. D: 10 steps with 4 sequences, each of which
    # takes 0.5 ms longer for 3 others. KV: 5 of 1,024 blocks on P, 256 + 5 on D.
    k_p, k_d = 5 / 1024, 261 / 1024
    assert decision.wait_ms == pytest.approx(100 + 2 * 100 / 128, rel=1e-3)
    assert decision.prefill_ms == pytest.approx(66, rel=1e-3)
    assert decision.transfer_ms == link_ms
    assert decision.tpot_ms == pytest.approx(4.0, rel=1e-3)
    assert decision.decode_ms == pytest.approx(40, rel=1e-3)
    assert decision.delay_ms == pytest.approx(15, rel=1e-3)
    assert decision.barrier_ms == pytest.approx(20 * (k_p / (1 - k_p) + k_d / (1 - k_d)), rel=1e-6)
    parts = (decision.wait_ms, decision.prefill_ms, decision.transfer_ms, decision.decode_ms, decision.delay_ms)
    assert decision.cost == pytest.approx(sum(parts) + decision.barrier_ms)
    assert decision.ttft_ms == pytest.approx(decision.wait_ms + decision.prefill_ms)
    assert (decision.policy, decision.num_options) == ("joint", 1)


def test_context_and_attention_cost_as_measured() -> None:
    speed = samples(base_ms=2.0, prefill_token_ms=1.0, decode_ms=0.5, context_ms=0.01, attended_ms=0.001)
    it = Placing("joint", worker("p0", speed), worker("d0", speed, seqs=2, context=1000), config=NEVER)
    choice = it.choose(output_tokens=21.0)
    assert choice is not None
    assert choice.prefill_weight is not None
    assert choice.prefill_weight.prefill_ms == pytest.approx(2 + 64 + 0.001 * 64 * 65 / 2, rel=0.02)
    # 74.5 tokens of its own on average, 1,000 of the others.
    assert choice.decode_weight.step_ms == pytest.approx(2 + 3 * 0.5 + 0.01 * 1074.5, rel=0.02)
    assert choice.decode_weight.delay_ms == pytest.approx(20 * 2 * (0.5 + 0.01 * 74.5), rel=0.02)


# ---------------------------------------------------------------- drafts

DRAFTS = Load(tokens_per_step=2.5, rows_per_step=4.0)


def test_a_token_takes_a_step_with_all_its_rows_divided_by_the_tokens_that_it_gives() -> None:
    it = Placing("joint", worker("p0"), worker("d0", load=DRAFTS, seqs=3, context=300), config=NEVER)
    choice = it.choose(output_tokens=11.0)
    assert choice is not None
    # A step has 4 * 4 rows of 0.5 ms. The fourth sequence adds 4 of them, for the others too.
    assert choice.decode_weight.step_ms == pytest.approx((2 + 16 * 0.5) / 2.5, rel=1e-3)
    assert choice.decode_weight.decode_ms == pytest.approx(10 * (2 + 16 * 0.5) / 2.5, rel=1e-3)
    assert choice.decode_weight.delay_ms == pytest.approx(10 * 3 * 4 * 0.5 / 2.5, rel=1e-3)


def test_each_row_attends_to_the_context() -> None:
    speed = samples(base_ms=2.0, prefill_token_ms=1.0, decode_ms=0.5, context_ms=0.01)
    it = Placing("joint", worker("p0", speed), worker("d0", speed, DRAFTS, seqs=2, context=1000), config=NEVER)
    choice = it.choose(output_tokens=21.0)
    assert choice is not None
    assert choice.decode_weight.step_ms == pytest.approx((2 + 4 * (3 * 0.5 + 0.01 * 1074.5)) / 2.5, rel=1e-3)
    assert choice.decode_weight.delay_ms == pytest.approx(20 * 2 * 4 * (0.5 + 0.01 * 74.5) / 2.5, rel=1e-3)


def test_steps_with_prompts_have_no_drafts() -> None:
    it = Placing("joint", worker("d0", load=DRAFTS, seqs=3), config=AUTO)
    choice = it.choose()
    assert choice is not None
    assert choice.decode_weight.prefill_ms == pytest.approx(2 + 3 * 0.5 + 64, rel=1e-3)


@pytest.mark.parametrize(("tokens_per_step", "place"), [(2.0, "p0 d0"), (3.9, "p0 d1")])
def test_d_whose_drafts_are_accepted_wins_over_one_with_fewer_sequences(tokens_per_step: float, place: str) -> None:
    """A sequence alone takes 2.5 ms a token, two with 4 rows each take 3 ms or 1.54, and the other one is delayed."""
    load = Load(tokens_per_step=tokens_per_step, rows_per_step=4.0)
    it = Placing("joint", worker("p0"), worker("d0"), worker("d1", load=load, seqs=1), config=NEVER)
    assert it.where(output_tokens=100.0) == place


def test_a_target_is_met_where_drafts_are_accepted() -> None:
    it = Placing("joint", worker("p0"), worker("d0", load=DRAFTS, seqs=3), config=NEVER)
    choices = [it.choose(tpot_ms=tpot_ms) for tpot_ms in (4.1, 3.9)]
    assert [choice and choice.decode_weight.num_misses for choice in choices] == [0, 1]


def test_views_have_the_time_of_a_token() -> None:
    it = Placing("joint", worker("d0", load=DRAFTS), config=AUTO)
    [view] = it.fleet.views(0.0)
    assert view.steps is not None
    assert view.steps == pytest.approx((2 / 2.5, 1.0, 0.0, 4 * 0.5 / 2.5, 0.0, 0.0, 0.0), abs=1e-3)


# ---------------------------------------------------------------- prefixes


def test_a_prefix_pulls_as_much_as_computing_it_again_takes() -> None:
    """48 cached tokens are worth 48 ms."""
    for tokens, place in ((40, "p0 d0"), (60, "p1 d0")):
        it = Placing("joint", worker("p0", cached=48, tokens=tokens, seqs=1), worker("p1"), worker("d0"), config=NEVER)
        assert it.where() == place


def test_a_hot_prefix_spreads_when_its_holders_wait_exceeds_computing_it_again() -> None:
    holder = worker("p0", cached=480, tokens=255, seqs=1)
    near = Placing("joint", holder, worker("p1"), worker("d0"), num_tokens=500, config=NEVER)
    assert near.where() == "p0 d0"
    far = Placing("joint", holder, worker("p1", cached=320), worker("d0"), num_tokens=500, config=NEVER)
    assert far.where() == "p1 d0"


def test_a_request_waits_for_a_holder_that_has_no_slot_if_that_is_cheaper() -> None:
    holder = worker("p0", cached=480, tokens=300, seqs=1)
    it = Placing("joint", holder, worker("p1"), worker("d0"), num_tokens=500, config=NEVER)
    assert it.where() == "p0 d0 later"
    less = Placing("joint", holder, worker("p1", cached=320), worker("d0"), num_tokens=500, config=NEVER)
    assert less.where() == "p1 d0"


def test_what_d_has_need_not_be_moved() -> None:
    heavy = KvLayout.dense(num_layers=2, num_kv_heads=2, head_dim=4, dtype="fake", bytes_per_token=10_000_000)
    p0 = busy(worker_info("p0", calibration=SPEED, kv_layout=heavy))
    d0 = busy(worker_info("d0", calibration=SPEED, kv_layout=heavy))
    d1 = busy(worker_info("d1", calibration=SPEED, kv_layout=heavy), cached=48)
    it = Placing("joint", p0, d0, d1, config=NEVER)
    for decode in ("d0", "d1"):
        for num_bytes in (10**8, 10**9):
            it.links.observe(worker_info("p0").worker_id, worker_info(decode).worker_id, num_bytes, num_bytes / 10**7)
    assert {it.where(turn=turn) for turn in range(4)} == {"p0 d1"}


def test_a_prefix_counts_however_long_the_answer_is() -> None:
    """What an answer takes on the same D, 5 s, is in both options, and its error with it."""
    it = Placing("joint", worker("p0", cached=48, seqs=1), worker("p1"), worker("d0"), config=NEVER)
    assert {it.where(turn=turn, output_tokens=2000.0) for turn in range(4)} == {"p0 d0"}
    alone = Placing("joint", worker("p0", seqs=1), worker("d0", cached=48, seqs=1), worker("d1"), config=AUTO)
    assert {alone.where(turn=turn, output_tokens=2000.0) for turn in range(4)} == {"- d1"}


# ---------------------------------------------------------------- decode side


def test_d_with_fewer_sequences_wins_and_an_equal_one_is_drawn() -> None:
    it = Placing("joint", worker("p0"), worker("d0", seqs=2), worker("d1", seqs=1), worker("d2", seqs=1), config=NEVER)
    assert [it.where(turn=turn) for turn in range(3)] == ["p0 d1", "p0 d2", "p0 d1"]


def test_a_slow_worker_is_worth_less_than_a_fast_one() -> None:
    it = Placing("joint", worker("p0", SLOW), worker("p1"), worker("d0", SLOW), worker("d1"), config=NEVER)
    assert {it.where(turn=turn) for turn in range(4)} == {"p1 d1"}
    loaded = Placing("joint", worker("p0", SLOW), worker("p1", tokens=80, seqs=1), worker("d0"), config=NEVER)
    assert loaded.where() == "p0 d0"


def test_a_full_cache_repels_and_may_still_be_used() -> None:
    barrier = RouterConfig(watermark=0.0, local_prefill="never", kv_barrier_ms=20.0)
    full, empty = worker("d0", seqs=1, used=1000), worker("d1", seqs=3)
    assert Placing("joint", worker("p0"), full, empty, config=barrier).where() == "p0 d1"
    assert Placing("joint", worker("p0"), full, config=barrier).where() == "p0 d0"
    exactly = worker("d0", seqs=1, used=1019)
    assert Placing("joint", worker("p0"), exactly, config=barrier).where() == "p0 d0"


# ---------------------------------------------------------------- targets


def test_targets_come_before_cost() -> None:
    barrier = RouterConfig(watermark=0.0, local_prefill="never", kv_barrier_ms=20.0)
    many, full = worker("d0", seqs=6), worker("d1", seqs=1, used=1000)
    it = Placing("joint", worker("p0"), many, full, config=barrier)
    assert it.where() == "p0 d0"
    # A step takes 5.5 ms on d0 and 3 ms on d1.
    assert it.where(tpot_ms=4.5) == "p0 d1"
    assert it.where(tpot_ms=1.0) == "p0 d0"


def test_a_wait_that_misses_the_ttft_target_is_avoided() -> None:
    barrier = RouterConfig(watermark=0.0, local_prefill="never", kv_barrier_ms=20.0)
    behind, full = worker("p0", tokens=60, seqs=1), worker("p1", seqs=1, used=1000)
    it = Placing("joint", behind, full, worker("d0"), config=barrier)
    assert it.where() == "p0 d0"
    # The first token comes after 127 ms from p0 and after 66 ms from p1.
    assert it.where(ttft_left_ms=100.0) == "p1 d0"
    assert it.where(ttft_left_ms=30.0) == "p0 d0"
    assert it.where(ttft_left_ms=-1.0) == "p0 d0"


# ---------------------------------------------------------------- one worker alone


def test_local_prefill_is_cheap_on_an_idle_d_and_dear_on_a_busy_one() -> None:
    assert Placing("joint", worker("p0"), worker("d0"), config=AUTO).where() == "- d0"
    assert Placing("joint", worker("p0"), worker("d0", seqs=2), config=AUTO).where() == "p0 d0"
    # What is left of a long prefix costs less than the transfer would, also beside others.
    assert (
        Placing("joint", worker("p0"), worker("d0", seqs=2, cached=496), num_tokens=500, config=AUTO).where() == "- d0"
    )


def test_local_prefill_may_be_forbidden() -> None:
    assert Placing("joint", worker("p0"), worker("d0"), config=NEVER).where() == "p0 d0"


def test_a_busy_d_does_not_compute_a_prompt_because_p_has_no_slot_just_now() -> None:
    it = Placing("joint", worker("p0", tokens=300, seqs=1), worker("d0", seqs=8), num_tokens=500, config=AUTO)
    assert it.where() == "p0 d0 later"
    free = Placing("joint", worker("p0", tokens=300, seqs=1), worker("d0"), num_tokens=500, config=AUTO)
    assert free.where() == "- d0"


def test_what_waits_before_a_request_is_a_wait_for_p_and_for_workers_with_both_roles() -> None:
    """Alone d0 would take 64 ms more from each of its sequences."""
    it = Placing("joint", worker("p0"), worker("d0", seqs=4), config=AUTO)
    assert it.where(queued_ms=100.0) == "p0 d0"
    assert it.where(queued_ms=400.0) == "- d0"
    both = Placing("joint", worker("d0", seqs=4), worker("c0", seqs=3), config=AUTO)
    assert both.where(queued_ms=30.0) == "- c0"
    assert both.where(queued_ms=400.0) == "- d0"
    forbidden = Placing("joint", worker("p0"), worker("d0"), config=NEVER)
    assert forbidden.where(queued_ms=400.0) == "p0 d0"


def test_a_wait_in_the_queue_misses_the_ttft_target() -> None:
    it = Placing("joint", worker("p0"), worker("d0", seqs=20), config=AUTO)
    assert it.where(queued_ms=100.0) == "p0 d0"
    assert it.where(queued_ms=100.0, ttft_left_ms=150.0) == "- d0"


def test_a_worker_with_both_roles_competes_with_pairs_by_cost() -> None:
    assert Placing("joint", worker("c0"), worker("c1", seqs=1), config=AUTO).where() == "- c0"
    assert Placing("joint", worker("p0"), worker("d0", seqs=1), worker("c0", seqs=4), config=AUTO).where() == "p0 d0"
    assert Placing(
        "joint", worker("p0", tokens=200, seqs=1), worker("d0", seqs=5), worker("c0"), config=AUTO
    ).where() == ("- c0")


def test_a_chunk_beside_decodes_takes_more_steps() -> None:
    """Budget 128: with 28 sequences a step has room for 100 prompt tokens, and 250 take 3 steps instead of 2."""
    it = Placing("joint", worker("c0", seqs=28), num_tokens=250, config=AUTO)
    choice = it.choose()
    assert choice is not None
    assert choice.decode_weight.prefill_ms == pytest.approx(250 + 3 * (2 + 14), rel=1e-3)
    assert choice.decode_weight.delay_ms == pytest.approx(28 * (250 + 9 * 0.5), rel=1e-3)


def test_an_answer_of_one_token_costs_d_nothing_but_room() -> None:
    it = Placing("joint", worker("p0"), worker("d0", seqs=4), config=NEVER)
    choice = it.choose(output_tokens=1.0)
    assert choice is not None
    assert (choice.decode_weight.decode_ms, choice.decode_weight.delay_ms) == (0.0, 0.0)
    assert math.isfinite(choice.decode_weight.cost)


def test_a_speed_that_differs_by_noise_does_not_draw_all_requests_to_one_worker() -> None:
    flat = samples(base_ms=10.0, prefill_token_ms=1.0, decode_ms=0.0)
    quicker = samples(base_ms=9.95, prefill_token_ms=1.0, decode_ms=0.0)
    quick, other = worker("d0", quicker, seqs=3), worker("d1", flat, seqs=1)
    assert Placing("joint", worker("p0"), quick, other, config=NEVER).where() == "p0 d1"
    much_quicker = worker("d0", samples(base_ms=5.0, prefill_token_ms=1.0, decode_ms=0.0), seqs=3)
    assert Placing("joint", worker("p0"), much_quicker, other, config=NEVER).where() == "p0 d0"
