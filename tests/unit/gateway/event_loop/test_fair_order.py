"""Whose work runs next, and what is refused."""

from __future__ import annotations

import pytest

from disagg.gateway.event_loop.fair_order import QUANTUM_BYTES, FairOrder, Work
from disagg.proto.errors import OverloadedError

MIB = 1 << 20


def turns(max_bytes: int = 32 * MIB, max_tenant_bytes: int = 16 * MIB) -> FairOrder:
    return FairOrder(max_bytes, max_tenant_bytes)


def order(it: FairOrder) -> list[str]:
    """The tenants of all that waits, in the order in which it is taken."""
    taken = []
    while (work := it.take(0.0)[0]) is not None:
        taken.append(work.tenant)
        it.finished(work)
    return taken


def test_one_tenants_work_runs_in_order_of_arrival() -> None:
    it = FairOrder(32 * MIB, 16 * MIB, max_tenant_running=3)
    works = [Work("a", size) for size in (MIB, 10, 3 * QUANTUM_BYTES)]
    for work in works:
        it.offer(work)

    assert [it.take(0.0)[0] for _ in range(4)] == [*works, None]


def test_a_tenant_has_so_many_running_and_no_more() -> None:
    it = FairOrder(32 * MIB, 16 * MIB, max_tenant_running=2)
    works = [Work("a", MIB) for _ in range(4)]
    for work in works:
        it.offer(work)
    assert [it.take(0.0)[0] for _ in range(3)] == [works[0], works[1], None]
    other = Work("b", MIB)
    it.offer(other)
    assert [it.take(0.0)[0] for _ in range(2)] == [other, None]

    it.finished(works[1])

    assert it.num_waiting == 2
    assert it.cancel(works[2])
    assert [it.take(0.0)[0] for _ in range(2)] == [works[3], None]
    for work in (works[0], works[3], other):
        it.finished(work)
    assert (it.num_bytes, it.num_waiting) == (0, 0)


def test_a_small_piece_passes_another_tenants_large_ones() -> None:
    it = turns()
    for _ in range(12):
        it.offer(Work("many", MIB))
    it.offer(Work("one", 20_000))

    assert order(it) == ["one"] + 12 * ["many"]


def test_tenants_with_equal_work_alternate() -> None:
    it = turns()
    for tenant in "aaabbb":
        it.offer(Work(tenant, MIB))

    assert order(it) == list("ababab")


def test_bytes_are_shared_and_not_pieces() -> None:
    it = turns()
    for _ in range(8):
        it.offer(Work("small", QUANTUM_BYTES))
    for _ in range(2):
        it.offer(Work("large", 4 * QUANTUM_BYTES))

    assert order(it) == 4 * ["small"] + ["large"] + 4 * ["small"] + ["large"]


def test_a_tenant_that_comes_back_has_no_credit_left_over() -> None:
    it = turns()
    for _ in range(3):
        it.offer(Work("a", 1))
        assert order(it) == ["a"]
    it.offer(Work("a", 2 * QUANTUM_BYTES))
    it.offer(Work("b", QUANTUM_BYTES))

    assert order(it) == ["b", "a"]


def test_a_tenant_over_its_bytes_is_refused_and_others_are_not() -> None:
    it = turns(max_bytes=100, max_tenant_bytes=60)
    it.offer(Work("a", 60))

    with pytest.raises(OverloadedError, match="60 bytes of this key's prompts") as refused:
        it.offer(Work("a", 1))
    assert refused.value.retry_after_s == 1.0
    it.offer(Work("b", 40))
    with pytest.raises(OverloadedError, match="100 bytes of prompts are worked on, at most 100"):
        it.offer(Work("c", 1))
    assert it.num_bytes == 100
    assert it.num_waiting == 2


def test_one_piece_above_the_limits_is_taken_alone() -> None:
    it = turns(max_bytes=100, max_tenant_bytes=60)
    large = Work("a", 1000)
    it.offer(large)
    with pytest.raises(OverloadedError):
        it.offer(Work("b", 1))

    assert it.take(0.0) == (large, [])


def test_bytes_of_running_work_count_until_it_ends() -> None:
    it = turns(max_bytes=100, max_tenant_bytes=60)
    work = Work("a", 60)
    it.offer(work)
    assert it.take(0.0) == (work, [])
    with pytest.raises(OverloadedError):
        it.offer(Work("a", 1))

    it.finished(work)

    assert it.num_bytes == 0
    it.offer(Work("a", 60))


def test_cancelled_work_leaves_the_line_and_frees_its_bytes() -> None:
    it = turns(max_bytes=100, max_tenant_bytes=60)
    first, second = Work("a", 30), Work("a", 30)
    it.offer(first)
    it.offer(second)

    assert it.cancel(first)
    assert not it.cancel(first)
    assert it.num_bytes == 30
    assert it.take(0.0) == (second, [])
    assert not it.cancel(second)
    it.finished(second)
    assert it.num_bytes == 0


def test_late_work_is_dropped_at_its_turn() -> None:
    it = turns()
    late, later, good = Work("a", 10, deadline=5.0), Work("b", 10, deadline=4.0), Work("b", 10, deadline=5.1)
    for work in (late, later, good):
        it.offer(work)

    assert it.take(5.0) == (good, [late, later])
    assert it.num_bytes == 10
    it.finished(good)
    assert it.take(6.0) == (None, [])
    assert it.num_bytes == 0
