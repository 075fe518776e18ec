"""The latest requests of all tenants, with the prompts that guardrails refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from typing_extensions import override

from disagg.proto.ids import RequestId
from disagg.router.api import ClusterView, RequestTrace
from disagg.router.gateway.auth.auth import Caller
from disagg.router.gateway.rpc.admin import AdminService


class Known(list[RequestTrace]):
    """Counts how often it is gone through."""

    num_rounds = 0

    @override
    def __iter__(self) -> Iterator[RequestTrace]:
        self.num_rounds += 1
        return super().__iter__()


class Source:
    """What a router knows, and guardrails refused."""

    def __init__(self, known: Known, refused: list[RequestTrace]) -> None:
        self._known, self._refused = known, refused

    def recent(self, limit: int) -> Known:
        return self._known

    def trace(self, request_id: RequestId) -> RequestTrace | None:
        return next((each for each in self._known if each.request_id == request_id), None)

    def view(self) -> ClusterView:
        return ClusterView(workers=(), num_queued=0, num_running=0)

    def refused(self) -> Iterator[RequestTrace]:
        return iter(self._refused)


def trace(name: str, arrival: float) -> RequestTrace:
    return RequestTrace(request_id=RequestId(name), arrival=arrival)


def test_why_a_request_failed_is_for_admins() -> None:
    """It may name hosts."""
    failed = RequestTrace(
        request_id=RequestId("a"), tenant="t", outcome="worker_lost", detail="no answer from 10.0.0.7"
    )
    source: Any = Source(Known([failed]), [])
    audit: Any = None
    admin = AdminService(source, audit=audit, guardrails=source)
    seen = [admin.explain(RequestId("a"), caller) for caller in (Caller("t", False), Caller("ops", True))]
    assert [(each.outcome, each.detail) for each in seen] == [
        ("worker_lost", ""),
        ("worker_lost", "no answer from 10.0.0.7"),
    ]


async def test_refused_prompts_stand_between_the_others_by_their_time() -> None:
    known = Known([trace("a", 9.0), trace("b", 5.0), trace("c", 1.0)])
    source: Any = Source(known, [trace("y", 6.0), trace("b", 5.0), trace("x", 2.0)])
    audit: Any = None
    admin = AdminService(source, audit=audit, guardrails=source)
    assert [found.request_id async for found in admin.recent(4)] == ["a", "y", "b", "x"]
    assert known.num_rounds == 2  # not once more for each that was refused
