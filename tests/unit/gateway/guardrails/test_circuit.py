"""For whom a guardrail is asked no more after failures."""

from __future__ import annotations

from disagg.gateway.guardrails.circuit import FAILURES, PAUSE_S, Circuits


def test_failures_of_one_tenant_are_that_tenants() -> None:
    circuits = Circuits()
    assert [circuits.failed("a", 0.0) for _ in range(FAILURES)] == [None] * (FAILURES - 1) + ["tenant"]
    assert (circuits.asks("a", 0.0), circuits.asks("b", 0.0), circuits.is_open) == (False, True, True)
    assert not circuits.passed("b")
    assert not circuits.asks("a", PAUSE_S - 0.1)
    assert [circuits.asks("a", PAUSE_S) for _ in range(2)] == [True, False]  # one trial
    assert circuits.failed("a", PAUSE_S) is None
    assert not circuits.asks("a", PAUSE_S)
    assert circuits.asks("a", 2 * PAUSE_S)
    circuits.withdrawn("a")
    assert circuits.asks("a", 2 * PAUSE_S)
    assert circuits.passed("a")
    assert (circuits.asks("a", 2 * PAUSE_S), circuits.is_open) == (True, False)


def test_verdicts_for_others_do_not_excuse_a_tenants_own_failures() -> None:
    circuits, found = Circuits(), list[str | None]()
    for _ in range(FAILURES):
        circuits.passed("b")
        found.append(circuits.failed("a", 0.0))
    assert found == [None] * (FAILURES - 1) + ["tenant"]
    assert circuits.asks("b", 0.0)


def test_failures_of_several_with_no_verdict_between_are_of_all() -> None:
    circuits = Circuits()
    circuits.failed("a", 0.0)
    circuits.passed("c")
    assert [circuits.failed(tenant, 0.0) for tenant in "aabab"] == [None] * (FAILURES - 1) + ["all"]
    assert [circuits.asks(tenant, 0.0) for tenant in "abc"] == [False] * 3
    assert [circuits.asks(tenant, PAUSE_S) for tenant in "cab"] == [True, False, False]
    assert circuits.failed("c", PAUSE_S) is None
    assert not circuits.asks("b", PAUSE_S)
    assert circuits.asks("b", 2 * PAUSE_S)
    assert circuits.passed("b")
    assert [circuits.asks(tenant, 2 * PAUSE_S) for tenant in "abc"] == [True] * 3
    assert not circuits.is_open


def test_a_tenant_whose_trial_failed_leaves_the_next_one_to_others() -> None:
    """Else one whose own questions always fail, and who asks most, could keep the circuit of all open."""
    circuits = Circuits()
    assert [circuits.failed(tenant, 0.0) for tenant in "aaaab"][-1] == "all"
    circuits.failed("b", 0.0)  # one that ran then: no trial
    assert circuits.asks("a", PAUSE_S)
    assert circuits.failed("a", PAUSE_S) is None
    assert [circuits.asks(tenant, 2 * PAUSE_S) for tenant in "ab"] == [False, True]
    assert circuits.failed("b", 2 * PAUSE_S) is None
    assert [circuits.asks(tenant, 3 * PAUSE_S) for tenant in "ba"] == [False, True]
    circuits.withdrawn("a")
    assert circuits.asks("b", 4 * PAUSE_S)
    assert circuits.passed("b")
    assert [circuits.asks(tenant, 4 * PAUSE_S) for tenant in "ab"] == [True, True]


def test_a_recovery_is_of_all() -> None:
    """Also of those whose own questions failed often enough."""
    circuits = Circuits()
    assert [circuits.failed("a", 0.0) for _ in range(FAILURES)][-1] == "tenant"
    assert circuits.failed("b", 0.0) == "all"
    assert circuits.asks("b", PAUSE_S)
    assert circuits.passed("b")
    assert circuits.asks("a", PAUSE_S)


def test_failures_of_the_only_tenant_are_an_outage() -> None:
    circuits = Circuits()
    assert [circuits.failed("a", 1.0, is_sole=True) for _ in range(FAILURES)] == [None] * (FAILURES - 1) + ["all"]
    assert (circuits.is_outage, circuits.open_since("a")) == (True, 1.0)
    for trial in (1, 2):  # nobody else could make the next one
        assert [circuits.asks("a", 1.0 + trial * PAUSE_S) for _ in range(2)] == [True, False]
        assert circuits.failed("a", 1.0 + trial * PAUSE_S, is_sole=True) is None
    assert circuits.open_since("a") == 1.0
    assert circuits.asks("a", 1.0 + 3 * PAUSE_S)
    assert circuits.passed("a")
    assert (circuits.is_outage, circuits.open_since("a")) == (False, None)


def test_a_tenants_own_failures_are_no_outage() -> None:
    circuits = Circuits()
    assert [circuits.failed("a", 1.0) for _ in range(FAILURES)][-1] == "tenant"
    assert (circuits.is_open, circuits.is_outage) == (True, False)
    assert (circuits.open_since("a"), circuits.open_since("b")) == (1.0, None)
    assert circuits.failed("b", 2.0) == "all"
    assert (circuits.is_outage, circuits.open_since("a"), circuits.open_since("b")) == (True, 2.0, 2.0)
