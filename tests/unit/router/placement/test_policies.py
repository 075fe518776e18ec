"""The policies that `joint` is compared with, word for word."""

import pytest

from disagg.proto.ids import AttemptKey, RequestId
from disagg.router.config import PolicyName, RouterConfig
from disagg.router.placement.placement import uniform_draw
from disagg.router.workers.assignments import Assignment
from tests.support.placing import Placing, busy

# ---------------------------------------------------------------- least_loaded


def test_p_with_the_least_work_in_front_wins_its_cached_prefix_counted() -> None:
    def where(*workers: object) -> str:
        return Placing("least_loaded", *workers, "d0").where()  # type: ignore[arg-type]

    assert where(busy("p0", tokens=10, seqs=1), "p1") == "p1 d0"
    assert where(busy("p0", tokens=10, seqs=1, cached=48), "p1") == "p0 d0"
    assert where(busy("p0", tokens=100, seqs=1, cached=48), "p1") == "p1 d0"


def test_d_with_the_least_kv_utilization_after_joining_wins() -> None:
    assert Placing("least_loaded", "p0", busy("d0", seqs=1, used=8), "d1").where() == "p0 d1"
    # What it has need not be written: 5 blocks on d1, 2 more on d0.
    assert Placing("least_loaded", "p0", busy("d0", seqs=1, used=2, cached=48), "d1").where() == "p0 d0"
    assert Placing("least_loaded", "p0", busy("d0", seqs=1, used=4, cached=48), "d1").where() == "p0 d1"


def test_a_worker_with_both_roles_competes_by_the_tokens_in_front() -> None:
    assert Placing("least_loaded", "p0", "d0", busy("c0", tokens=5, seqs=1)).where() == "p0 d0"
    assert Placing("least_loaded", busy("p0", tokens=9, seqs=1), "d0", busy("c0", tokens=5, seqs=1)).where() == "- c0"
    assert Placing("least_loaded", busy("c0", tokens=5, seqs=1), "c1").where() == "- c1"


def test_ties_go_round_all_equal_options() -> None:
    it = Placing("least_loaded", "p0", "p1", "d0", "d1", "d2")
    assert [it.where(turn=turn) for turn in range(7)] == [
        "p0 d0",
        "p0 d1",
        "p0 d2",
        "p1 d0",
        "p1 d1",
        "p1 d2",
        "p0 d0",
    ]


# ---------------------------------------------------------------- prefix


def test_the_longest_prefix_wins_whatever_the_load() -> None:
    busy_holder, idle_holder = busy("p0", cached=48, tokens=200, seqs=3), busy("p1", cached=32)
    assert Placing("prefix", busy_holder, idle_holder, "p2", "d0").where() == "p0 d0"
    assert Placing("prefix", "p0", busy("d0", seqs=5, used=40, cached=16), "d1").where() == "p0 d0"


def test_among_equal_prefixes_the_least_loaded_wins() -> None:
    assert Placing("prefix", busy("p0", cached=32, tokens=20, seqs=1), busy("p1", cached=32), "d0").where() == "p1 d0"
    assert Placing("prefix", "p0", busy("d0", seqs=1, used=3), "d1").where() == "p0 d1"


def test_a_holder_without_a_slot_is_passed_over() -> None:
    assert Placing("prefix", busy("p0", cached=48, tokens=256, seqs=1), "p1", "d0").where() == "p1 d0"


def test_a_holder_is_found_among_many() -> None:
    others = [busy(f"p{i}") for i in range(20)]
    assert Placing("prefix", *others, busy("p99", cached=48, tokens=9, seqs=1), "d0").where() == "p99 d0"


# ---------------------------------------------------------------- round_robin, random


def place_all(it: Placing, count: int) -> list[str]:
    """Places that many, one after the other, all of which stay."""
    places = []
    for turn in range(count):
        choice = it.choose(turn=turn)
        assert choice is not None
        places.append(it.where(turn=turn))
        for candidate in (choice.prefill, choice.decode):
            if candidate is not None:
                it.fleet.open(candidate.worker, AttemptKey(RequestId(f"r{turn}"), 0), Assignment(tokens=1), turn)
    return places


def test_round_robin_goes_round() -> None:
    it = Placing("round_robin", "p0", "p1", "d0", "d1", "d2")
    assert place_all(it, 6) == ["p0 d0", "p1 d1", "p0 d2", "p1 d0", "p0 d1", "p1 d2"]


def test_round_robin_passes_over_who_has_no_room() -> None:
    it = Placing("round_robin", busy("p0", tokens=256, seqs=1), "p1", "p2", "d0")
    assert place_all(it, 4) == ["p1 d0", "p2 d0", "p1 d0", "p2 d0"]


def test_prefixes_mean_nothing_to_round_robin() -> None:
    it = Placing("round_robin", "p0", busy("p1", cached=48), "d0")
    assert it.where(turn=1) == "p0 d0"


def test_random_reaches_everybody_about_equally_often() -> None:
    it = Placing("random", *(busy(f"p{i}", cached=48 if i == 3 else 0) for i in range(10)), "d0")
    it.policy._draw = uniform_draw  # type: ignore[attr-defined]
    counts: dict[str, int] = {}
    for turn in range(1000):
        place = it.where(turn=turn)
        counts[place] = counts.get(place, 0) + 1
    assert len(counts) == 10
    assert min(counts.values()) > 60
    assert max(counts.values()) < 140


def test_draws_are_functions_of_their_counter() -> None:
    assert [uniform_draw(counter, 1000) for counter in range(4)] == [535, 700, 679, 444]
    assert len({uniform_draw(counter, 1000) for counter in range(100)}) > 90
    assert {uniform_draw(counter, 3) for counter in range(-20, 20)} == {0, 1, 2}


# ---------------------------------------------------------------- local prefill


@pytest.mark.parametrize("policy", ["prefix", "least_loaded", "round_robin", "random"])
def test_the_simple_policies_use_pairs_while_there_is_a_prefill_worker(policy: PolicyName) -> None:
    auto = RouterConfig(watermark=0.0)
    assert Placing(policy, "p0", busy("d0", cached=48), config=auto).where() == "p0 d0"
    assert Placing(policy, busy("p0", tokens=256, seqs=1), "d0", config=auto).where() == "none"
    assert Placing(policy, "d0", config=auto).where() == "- d0"
