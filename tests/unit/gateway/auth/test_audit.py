"""What is written down of refused calls and of changes."""

from __future__ import annotations

import logging
from collections import Counter

import pytest

from disagg.gateway.auth.audit import BURST_LINES, LINES_PER_S, Audit, LineBudget, shown
from disagg.gateway.auth.auth import ANONYMOUS, Caller
from disagg.proto.errors import InvalidRequestError, PermissionDeniedError

OPS = Caller("ops", True)
PEER = "ipv4:10.0.0.7:4"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def counted() -> Counter[tuple[str, str]]:
    return Counter()


@pytest.fixture
def audit(clock: Clock, counted: Counter[tuple[str, str]]) -> Audit:
    return Audit(lambda protocol, reason: counted.update([(protocol, reason)]), clock)


def test_each_refused_key_has_a_line_and_is_counted(
    audit: Audit, counted: Counter[tuple[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    audit.refused("grpc", "unknown", PEER)
    audit.refused("http", "missing", "10.0.0.8:5")
    assert [record[1:] for record in caplog.record_tuples] == [
        (logging.WARNING, f"refused a call over grpc from {PEER}: unknown key"),
        (logging.WARNING, "refused a call over http from 10.0.0.8:5: no key"),
    ]
    assert counted == {("grpc", "unknown"): 1, ("http", "missing"): 1}


def test_many_refusals_are_all_counted_and_few_have_lines(
    audit: Audit, clock: Clock, counted: Counter[tuple[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(1000):
        audit.refused("grpc", "unknown", PEER)
    assert (len(caplog.messages), counted["grpc", "unknown"]) == (BURST_LINES, 1000)
    clock.now += 1 / LINES_PER_S
    audit.refused("grpc", "unknown", PEER)
    assert caplog.messages[BURST_LINES:] == [
        f"refused a call over grpc from {PEER}: unknown key ({1000 - BURST_LINES} such lines omitted before)"
    ]


def test_the_budget_never_grows_beyond_its_burst() -> None:
    budget = LineBudget(2, 1.0)
    assert [budget.take(0.0) for _ in range(4)] == [0, 0, None, None]
    assert [budget.take(1000.0) for _ in range(3)] == [2, 0, None]


def test_each_change_has_a_line(audit: Audit, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(BURST_LINES + 1):
        with audit.change("drain decode-0", OPS, PEER):
            pass
    assert caplog.record_tuples == [
        ("disagg.audit", logging.INFO, f"drain decode-0 by tenant ops from {PEER}: done")
    ] * (BURST_LINES + 1)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionDeniedError("no"), "not allowed"),
        (InvalidRequestError("worker_id", "no such worker"), "worker_id: no such worker"),
        (RuntimeError("secret"), "RuntimeError"),
    ],
)
def test_a_change_that_fails_has_a_line(
    audit: Audit, caplog: pytest.LogCaptureFixture, error: Exception, said: str
) -> None:
    with pytest.raises(type(error)), audit.change("scale decode=2", ANONYMOUS, PEER):
        raise error
    assert caplog.record_tuples == [
        ("disagg.audit", logging.WARNING, f"scale decode=2 by a caller without a key from {PEER}: {said}")
    ]


def test_what_callers_write_stays_on_one_line() -> None:
    assert shown("decode-0") == "decode-0"
    assert shown("x\n2026-01-01 INFO y\x1b[2J") == "x\\n2026-01-01 INFO y\\x1b[2J"
    assert len(shown("y" * 1_000_000)) == 200
