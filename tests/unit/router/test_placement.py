import pytest

from disagg.proto.messages import KvLayout, WorkerInfo
from disagg.router.books import Booking
from disagg.router.config import RouterConfig
from disagg.router.placement import (
    Candidate,
    Choice,
    Demand,
    LeastLoaded,
    can_pair,
    decode_booking,
    longest_sequence,
    prefill_booking,
)
from tests.support.router import worker_info


def candidate(worker: WorkerInfo | str, *, cached: int = 0, tokens: int = 0, seqs: int = 0, used: int = 0) -> Candidate:
    info = worker_info(worker) if isinstance(worker, str) else worker
    return Candidate(info=info, cached_tokens=cached, outstanding_tokens=tokens, num_sequences=seqs, used_blocks=used)


def choose(*candidates: Candidate, num_tokens: int = 64, reserve: int = 16, turn: int = 0, **config: object) -> str:
    """`p0 d0`, `- d0` for one worker alone, or `none`."""
    settings: dict[str, object] = {"local_prefill": "never", "watermark": 0.0, **config}
    policy = LeastLoaded(RouterConfig(**settings))  # type: ignore[arg-type]
    choice = policy(Demand(num_tokens=num_tokens, reserve_tokens=reserve, turn=turn), candidates)
    return _name(choice)


def _name(choice: Choice | None) -> str:
    if choice is None:
        return "none"
    return f"{choice.prefill.worker_id if choice.prefill else '-'} {choice.decode.worker_id}"


def test_a_pair_of_idle_workers_and_nothing_without_both_roles() -> None:
    assert choose(candidate("p0"), candidate("d0")) == "p0 d0"
    assert choose(candidate("p0")) == "none"
    assert choose(candidate("d0")) == "none"
    assert choose() == "none"


def test_p_with_the_least_work_in_front_wins_its_cached_prefix_counted() -> None:
    d0 = candidate("d0")
    assert choose(candidate("p0", tokens=10, seqs=1), candidate("p1"), d0) == "p1 d0"
    assert choose(candidate("p0", tokens=10, seqs=1, cached=48), candidate("p1"), d0) == "p0 d0"
    assert choose(candidate("p0", tokens=100, seqs=1, cached=48), candidate("p1"), d0) == "p1 d0"


def test_d_with_the_least_utilization_wins_a_cached_prefix_counted() -> None:
    p0 = candidate("p0")
    assert choose(p0, candidate("d0", seqs=1, used=8), candidate("d1")) == "p0 d1"
    # 48 of 64 tokens: saves 3 of 64 blocks, and is worth 0.375 of utilization.
    assert choose(p0, candidate("d0", seqs=1, used=26, cached=48), candidate("d1")) == "p0 d0"
    assert choose(p0, candidate("d0", seqs=1, used=28, cached=48), candidate("d1")) == "p0 d1"
    assert choose(p0, candidate("d0", seqs=1, used=4, cached=48), candidate("d1"), prefix_weight=0.0) == "p0 d1"


def test_ties_go_round() -> None:
    workers = [candidate(name) for name in ("p0", "p1", "d0", "d1", "d2")]
    assert [choose(*workers, turn=turn) for turn in range(4)] == ["p0 d0", "p1 d1", "p0 d2", "p1 d0"]


def test_a_prefill_slot_is_free_below_two_token_budgets() -> None:
    d0 = candidate("d0")
    assert choose(candidate("p0", tokens=255, seqs=1), d0) == "p0 d0"
    assert choose(candidate("p0", tokens=256, seqs=1), d0) == "none"
    assert choose(candidate("p0", tokens=127, seqs=1), d0, prefill_chunks=1) == "p0 d0"
    assert choose(candidate("p0", tokens=128, seqs=1), d0, prefill_chunks=1) == "none"


def test_d_needs_blocks_for_what_it_lacks_and_for_the_reserve() -> None:
    p0 = candidate("p0")
    # 64 + 16 tokens are 5 blocks.
    assert choose(p0, candidate("d0", seqs=1, used=59)) == "p0 d0"
    assert choose(p0, candidate("d0", seqs=1, used=60)) == "none"
    assert choose(p0, candidate("d0", seqs=1, used=62, cached=48)) == "p0 d0"
    assert choose(p0, candidate("d0", seqs=1, used=59), watermark=0.05) == "none"
    assert choose(p0, candidate("d0", seqs=1, used=56), watermark=0.05) == "p0 d0"


def test_d_and_p_need_a_free_sequence() -> None:
    assert choose(candidate("p0"), candidate("d0", seqs=7)) == "p0 d0"
    assert choose(candidate("p0"), candidate("d0", seqs=8)) == "none"
    assert choose(candidate("p0", seqs=8), candidate("d0")) == "none"


def test_p_needs_blocks_for_the_prompt_and_one_token() -> None:
    assert choose(candidate("p0", seqs=1, used=59), candidate("d0")) == "p0 d0"
    assert choose(candidate("p0", seqs=1, used=60), candidate("d0")) == "none"


def test_an_empty_worker_takes_what_fits_into_it_at_all() -> None:
    small = worker_info("d0", num_blocks=4)
    p0 = candidate("p0")
    assert choose(p0, candidate(small), num_tokens=63, reserve=512) == "p0 d0"
    assert choose(p0, candidate(small), num_tokens=64, reserve=1) == "none"
    assert choose(p0, candidate(small, seqs=1, used=1), num_tokens=63, reserve=1) == "none"
    short = worker_info("d0", max_model_len=64)
    assert choose(p0, candidate(short), num_tokens=63) == "p0 d0"
    assert choose(p0, candidate(short), num_tokens=64) == "none"


def test_only_workers_of_one_model_and_layout_form_a_pair() -> None:
    wide = KvLayout(num_layers=2, num_kv_heads=4, head_dim=4, dtype="fake", bytes_per_token=128)
    other_model = worker_info("d0", fingerprint="model-b")
    other_layout = worker_info("d1", kv_layout=wide)
    assert not can_pair(worker_info("p0"), other_model)
    assert not can_pair(worker_info("p0"), other_layout)
    assert choose(candidate("p0"), candidate(other_model), candidate(other_layout)) == "none"
    # The busy P is the one that has a partner.
    partner = candidate(worker_info("p1", fingerprint="model-b"), tokens=200, seqs=1)
    assert choose(candidate("p0"), partner, candidate(other_model)) == "p1 d0"


def test_local_prefill_where_the_uncached_suffix_is_short() -> None:
    p0, far, near = candidate("p0"), candidate("d0", cached=16), candidate("d1", cached=32, seqs=1, used=60)
    assert choose(p0, far, near, reserve=1, local_prefill="auto") == "- d1"
    assert choose(p0, far, near, reserve=1, local_prefill="auto", local_prefill_tokens=31) == "p0 d0"
    assert choose(p0, far, near, reserve=1) == "p0 d0"
    assert choose(near, reserve=1, local_prefill="auto") == "- d1"


def test_a_worker_with_both_roles_is_dispatched_alone() -> None:
    assert choose(candidate("c0")) == "- c0"
    assert choose(candidate("c0", tokens=5, seqs=1), candidate("c1")) == "- c1"
    assert choose(candidate("c0", tokens=256, seqs=1)) == "none"
    assert choose(candidate("c0", seqs=1, used=60)) == "none"
    assert choose(candidate("p0"), candidate("c0")) == "- c0"
    assert choose(candidate("p0"), candidate("d0"), candidate("c0", tokens=5, seqs=1)) == "p0 d0"
    assert choose(candidate("p0", tokens=9, seqs=1), candidate("d0"), candidate("c0", tokens=5, seqs=1)) == "- c0"


def test_bookings() -> None:
    demand = Demand(num_tokens=64, reserve_tokens=100)
    assert prefill_booking(demand, candidate("p0")) == Booking(tokens=64, blocks=5)
    assert prefill_booking(demand, candidate("p0", cached=48)) == Booking(tokens=16, blocks=2)
    assert decode_booking(demand, candidate("d0"), computes_prompt=False) == Booking(tokens=0, blocks=11)
    assert decode_booking(demand, candidate("d0", cached=48), computes_prompt=True) == Booking(tokens=16, blocks=8)
    short = candidate(worker_info("d0", max_model_len=96))
    assert decode_booking(demand, short, computes_prompt=False) == Booking(blocks=6)
    large_blocks = candidate(worker_info("d0", block_size=64), cached=48)
    assert decode_booking(demand, large_blocks, computes_prompt=False) == Booking(blocks=3)


@pytest.mark.parametrize(("num_blocks", "max_model_len", "longest"), [(4, 1024, 64), (64, 100, 100)])
def test_longest_sequence(num_blocks: int, max_model_len: int, longest: int) -> None:
    assert longest_sequence(worker_info("d0", num_blocks=num_blocks, max_model_len=max_model_len)) == longest
