"""Elastic workers: each can be the P of a pair, the D of one, or compute a request alone."""

from __future__ import annotations

from disagg.proto.ids import WorkerId
from disagg.router.config import RouterConfig
from tests.support.placing import Busy, Placing, busy, samples
from tests.support.router import worker_info

SPEED = samples(base_ms=2.0, prefill_token_ms=1.0, decode_ms=0.5)
CONFIG = RouterConfig(watermark=0.0, kv_barrier_ms=0.0)


def worker(name: str, **state: int) -> Busy:
    return busy(worker_info(name, calibration=SPEED, num_blocks=1024, max_num_seqs=64), **state)


def test_pairs_are_formed_both_ways_with_each_other_only() -> None:
    it = Placing("joint", "w0", "w1", "p0", "d0")
    pairs = {name: [(p, d.worker_id) for p, d in it.fleet.pairs_to_form(WorkerId(name))] for name in ("w1", "p0")}
    assert pairs == {"w1": [("w1", "w0"), ("w0", "w1")], "p0": [("p0", "d0")]}


def test_an_idle_worker_computes_a_request_alone() -> None:
    assert Placing("joint", worker("w0", seqs=3), worker("w1"), config=CONFIG).where(output_tokens=11.0) == "- w1"


def test_a_prompt_is_computed_where_it_delays_few_and_decoded_where_steps_are_short() -> None:
    # On w0 the prompt's 128 ms delay three sequences; on w1 it waits for 80 ms, delays one, and each of 200 steps
    # delays one.
    it = Placing("joint", worker("w0", seqs=3), worker("w1", tokens=80, seqs=1), config=CONFIG, num_tokens=128)
    assert it.where(output_tokens=201.0) == "- w1"
    # w1 would take 2 s until it begins: w0 computes the prompt, and w1 decodes, where 200 steps are shorter by more
    # than the way there.
    it = Placing("joint", worker("w0", seqs=3), worker("w1", tokens=2000, seqs=1), config=CONFIG, num_tokens=128)
    assert it.where(output_tokens=201.0) == "w0 w1"


def test_no_worker_hands_over_to_itself() -> None:
    assert Placing("least_loaded", "w0").where() == "- w0"
    assert Placing("least_loaded", "w0", worker("w1", seqs=2, used=100)).where(without=["w1"]) == "- w0"
