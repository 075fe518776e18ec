"""Places of a guardrail: no tenant fills them, and the next one is for the tenant with the fewest."""

from __future__ import annotations

import pytest

from disagg.gateway.guardrails.places import Places, PlacesError, Ticket


def tickets(tenant: str, count: int, is_sole: bool = False) -> list[Ticket]:
    return [Ticket(tenant, is_sole) for _ in range(count)]


@pytest.mark.parametrize(
    ("max_running", "is_sole", "share"), [(1, False, 1), (2, False, 1), (3, False, 2), (16, False, 12), (16, True, 16)]
)
def test_a_quarter_is_never_one_tenants(max_running: int, is_sole: bool, share: int) -> None:
    places = Places(max_running, 64)
    assert [places.enter(one) for one in tickets("a", 17, is_sole)] == [True] * share + [False] * (17 - share)
    assert [places.enter(one) for one in tickets("b", 17, is_sole)] == [True] * (max_running - share) + [False] * (
        17 - max_running + share
    )


def test_a_place_that_is_free_again_is_for_the_tenant_with_the_fewest() -> None:
    places = Places(4, 64)
    a, b = tickets("a", 5), tickets("b", 3)
    assert [places.enter(one) for one in (*a, *b)] == [True] * 3 + [False] * 2 + [True] + [False] * 2
    assert places.leave(a[0]) is b[1]
    assert places.leave(a[1]) is a[3]  # both have two, and it came first
    assert places.leave(b[0]) is b[2]
    assert places.leave(a[2]) is a[4]
    assert [places.leave(one) for one in (b[1], b[2], a[3], a[4])] == [None] * 4
    assert [places.enter(one) for one in tickets("c", 3)] == [True] * 3


def test_a_share_that_is_full_leaves_places_empty_until_its_tenant_has_one_again() -> None:
    places = Places(4, 64)
    a = tickets("a", 5)
    assert [places.enter(one) for one in a] == [True] * 3 + [False] * 2
    (b,) = tickets("b", 1)
    assert places.enter(b)
    assert places.leave(b) is None
    assert places.leave(a[0]) is a[3]


def test_who_waits_no_longer_gets_no_place() -> None:
    places = Places(1, 64)
    first, second, third = tickets("a", 3)
    assert [places.enter(one) for one in (first, second, third)] == [True, False, False]
    assert places.leave(second) is None
    assert places.leave(first) is third


def test_who_waits_is_bounded_for_each_tenant_and_for_all() -> None:
    places = Places(1, 4)
    assert [places.enter(one) for one in tickets("a", 4)] == [True] + [False] * 3
    with pytest.raises(PlacesError, match=r"^4 questions of this tenant run or wait$"):
        places.enter(Ticket("a", False))
    assert not places.enter(Ticket("b", False))
    with pytest.raises(PlacesError, match=r"^5 questions run or wait$"):
        places.enter(Ticket("c", False))


def test_where_none_may_wait() -> None:
    places = Places(1, 0)
    (first,) = tickets("a", 1)
    assert places.enter(first)
    with pytest.raises(PlacesError, match=r"^1 questions run or wait$"):
        places.enter(Ticket("b", False))
