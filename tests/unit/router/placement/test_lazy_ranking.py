"""The order of a pool against sorting it anew each time."""

import math

from hypothesis import given
from hypothesis import strategies as st

from disagg.proto.ids import WorkerId
from disagg.router.placement.lazy_ranking import LazyRanking
from disagg.router.workers.assignments import AssignedLoad
from disagg.router.workers.worker import Worker
from tests.support.router import worker_info

RANKS = st.sampled_from([0.0, 1.0, 2.0, 2.0, 5.5, math.inf])


def workers(count: int) -> list[Worker]:
    return [Worker(worker_info(f"d{i}"), AssignedLoad(), i, 256) for i in range(count)]


@given(
    steps=st.lists(st.tuples(st.integers(0, 5), RANKS, st.booleans()), max_size=40),
    count=st.integers(0, 7),
    without=st.sets(st.integers(0, 5), max_size=3),
    begin=st.integers(0, 99),
)
def test_it_is_sorted_after_any_changes(
    steps: list[tuple[int, float, bool]], count: int, without: set[int], begin: int
) -> None:
    ranks: dict[Worker, float] = {}
    order = LazyRanking(ranks.__getitem__)
    everybody = workers(6)
    for number, rank, leaves in steps:
        worker = everybody[number]
        if leaves and worker in ranks:
            order.remove(worker)
            del ranks[worker]
        else:
            ranks[worker] = rank
            order.changed[worker] = None
        avoided = {WorkerId(f"d{i}") for i in without}
        there = sorted((r, w.position, w) for w, r in ranks.items() if r < math.inf)
        expected = [w for *_, w in there if w.worker_id not in avoided]
        if number % 2:
            assert order.ranks() == {worker.worker_id: rank for rank, _, worker in there}
        assert order.first(count, avoided) == expected[:count]
        start = begin % len(there) if there else 0
        turned = [w for *_, w in there[start:] + there[:start] if w.worker_id not in avoided]
        assert len(order) == len(there)
        assert order.first(count, avoided, start) == turned[:count]


def test_workers_of_one_rank_stay_in_the_order_in_which_they_came() -> None:
    order = LazyRanking(lambda _: 1.0)
    first, second, third = workers(3)
    for worker in (third, first, second):
        order.changed[worker] = None
    assert order.first(3, ()) == [first, second, third]
    assert order.first(1, {first.worker_id}) == [second]
