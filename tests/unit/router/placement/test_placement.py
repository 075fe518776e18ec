"""What all policies share: who fits, who has room, who forms pairs; and what a placement assignments."""

import pytest

from disagg.proto.messages import KvLayout
from disagg.router.config import PolicyName, RouterConfig
from disagg.router.placement.forecast import num_pairs
from disagg.router.placement.placement import (
    Candidate,
    Demand,
    decode_assignment,
    decode_blocks,
    prefill_assignment,
    prefill_blocks,
)
from disagg.router.workers.assignments import Assignment
from disagg.router.workers.worker import longest_sequence
from tests.support.placing import Busy, Placing, busy
from tests.support.router import worker_info

POLICIES: tuple[PolicyName, ...] = ("joint", "prefix", "least_loaded", "round_robin", "random")


def where(policy: PolicyName, *workers: Busy | str, num_tokens: int = 64, reserve: int = 16, **config: object) -> str:
    settings: dict[str, object] = {"local_prefill": "never", "watermark": 0.0, **config}
    placing = Placing(policy, *workers, num_tokens=num_tokens, config=RouterConfig(**settings))  # type: ignore[arg-type]
    return placing.where(reserve_tokens=reserve)


@pytest.mark.parametrize("policy", POLICIES)
class TestEveryPolicy:
    def test_a_pair_of_idle_workers_and_nothing_without_both_roles(self, policy: PolicyName) -> None:
        assert where(policy, "p0", "d0") == "p0 d0"
        assert where(policy, "p0") == "none"
        assert where(policy, "d0") == "none"
        assert where(policy) == "none"

    def test_a_prefill_slot_is_free_below_two_token_budgets(self, policy: PolicyName) -> None:
        closed = "p0 d0 later" if policy == "joint" else "none"
        assert where(policy, busy("p0", tokens=255, seqs=1), "d0") == "p0 d0"
        assert where(policy, busy("p0", tokens=256, seqs=1), "d0") == closed
        assert where(policy, busy("p0", tokens=127, seqs=1), "d0", prefill_chunks=1) == "p0 d0"
        assert where(policy, busy("p0", tokens=128, seqs=1), "d0", prefill_chunks=1) == closed

    def test_d_needs_blocks_for_what_it_lacks_and_for_the_reserve(self, policy: PolicyName) -> None:
        # 64 + 16 tokens are 5 blocks.
        assert where(policy, "p0", busy("d0", seqs=1, used=59)) == "p0 d0"
        assert where(policy, "p0", busy("d0", seqs=1, used=60)) == "none"
        # Cached blocks that no sequence holds are taken from what is free.
        assert where(policy, "p0", busy("d0", seqs=1, used=60, cached=48)) == "none"
        assert where(policy, "p0", busy("d0", seqs=1, used=62, cached=48, held=48)) == "p0 d0"
        assert where(policy, "p0", busy("d0", seqs=1, used=63, cached=48, held=48)) == "none"
        assert where(policy, "p0", busy("d0", seqs=1, used=59), watermark=0.05) == "none"
        assert where(policy, "p0", busy("d0", seqs=1, used=56), watermark=0.05) == "p0 d0"

    def test_d_and_p_need_a_free_sequence(self, policy: PolicyName) -> None:
        assert where(policy, "p0", busy("d0", seqs=7)) == "p0 d0"
        assert where(policy, "p0", busy("d0", seqs=8)) == "none"
        assert where(policy, busy("p0", seqs=8), "d0") == "none"

    def test_p_needs_blocks_for_the_prompt_and_one_token(self, policy: PolicyName) -> None:
        assert where(policy, busy("p0", seqs=1, used=59), "d0") == "p0 d0"
        assert where(policy, busy("p0", seqs=1, used=60), "d0") == "none"

    def test_an_empty_worker_takes_what_fits_into_it_at_all(self, policy: PolicyName) -> None:
        small = worker_info("d0", num_blocks=4)
        assert where(policy, "p0", busy(small), num_tokens=63, reserve=512) == "p0 d0"
        assert where(policy, "p0", busy(small), num_tokens=64, reserve=1) == "none"
        assert where(policy, "p0", busy(small, seqs=1, used=1), num_tokens=63, reserve=1) == "none"
        short = worker_info("d0", max_model_len=64)
        assert where(policy, "p0", busy(short), num_tokens=63) == "p0 d0"
        assert where(policy, "p0", busy(short), num_tokens=64) == "none"

    def test_who_has_room_is_found_however_many_have_none(self, policy: PolicyName) -> None:
        """The last D has room; the others are less loaded in every other respect."""
        full = [busy(f"d{i}", seqs=1, used=60) for i in range(12)]
        roomy = busy("d99", seqs=7, used=8, context=5000)
        assert where(policy, "p0", *full, roomy) == "p0 d99"

    def test_workers_to_avoid_are_avoided(self, policy: PolicyName) -> None:
        it = Placing(policy, "p0", "p1", busy("d0", cached=48), "d1")
        assert it.where(without=["p0", "d0"]) == "p1 d1"
        assert it.where(without=["d0", "d1"]) == "none"

    def test_only_workers_of_one_model_and_layout_form_a_pair(self, policy: PolicyName) -> None:
        wide = KvLayout.dense(num_layers=2, num_kv_heads=4, head_dim=4, dtype="fake", bytes_per_token=128)
        other_model = busy(worker_info("d0", fingerprint="model-b"))
        other_layout = busy(worker_info("d1", kv_layout=wide))
        assert where(policy, "p0", other_model, other_layout) == "none"
        # The busy P is the one that has a partner.
        partner = busy(worker_info("p1", fingerprint="model-b"), tokens=200, seqs=1)
        assert where(policy, "p0", partner, other_model) == "p1 d0"

    def test_a_worker_with_both_roles_is_dispatched_alone(self, policy: PolicyName) -> None:
        assert where(policy, "c0") == "- c0"
        assert where(policy, busy("c0", seqs=1, used=60)) == "none"

    def test_a_draining_worker_gets_nothing(self, policy: PolicyName) -> None:
        it = Placing(policy, "p0", "p1", busy("d0", cached=48), "d1")
        it.fleet.drain(worker_info("d0").worker_id)
        it.fleet.drain(worker_info("p0").worker_id)
        assert {it.where(turn=turn) for turn in range(8)} == {"p1 d1"}

    def test_without_prefill_workers_decode_workers_compute_prompts_themselves(self, policy: PolicyName) -> None:
        assert where(policy, "d0", local_prefill="auto") == "- d0"
        assert where(policy, "d0", local_prefill="never") == "none"


def test_assignments() -> None:
    it = Placing(
        "least_loaded", "p0", busy(worker_info("d0", max_model_len=96)), busy(worker_info("d1", block_size=64))
    )
    p0, short, large = (it.fleet.worker(worker_info(name).worker_id) for name in ("p0", "d0", "d1"))
    demand = Demand(num_tokens=64, reserve_tokens=100)
    assert prefill_blocks(demand, p0.info) == 5
    assert [decode_blocks(demand, worker.info) for worker in (p0, short, large)] == [11, 6, 3]
    candidate = Candidate(p0, 48, 4, 7)
    assert prefill_assignment(demand, candidate) == Assignment(tokens=16, pairs=904, blocks=7, is_handed_over=True)
    chain = it.request.block_hashes
    there = Assignment(blocks=7, context=64, known_tokens=64, marks=(chain[2],), num_matched=3)
    assert decode_assignment(demand, candidate, chain, computes_prompt=False) == there
    there.tokens, there.pairs = 16, 904
    assert decode_assignment(demand, candidate, chain, computes_prompt=True) == there


@pytest.mark.parametrize(("cached", "num_tokens", "pairs"), [(0, 1, 1), (0, 4, 10), (2, 4, 7), (48, 64, 904)])
def test_every_token_attends_to_itself_and_all_before_it(cached: int, num_tokens: int, pairs: int) -> None:
    assert num_pairs(cached, num_tokens) == sum(range(cached + 1, num_tokens + 1)) == pairs


@pytest.mark.parametrize(("num_blocks", "max_model_len", "longest"), [(4, 1024, 64), (64, 100, 100)])
def test_longest_sequence(num_blocks: int, max_model_len: int, longest: int) -> None:
    assert longest_sequence(worker_info("d0", num_blocks=num_blocks, max_model_len=max_model_len)) == longest
