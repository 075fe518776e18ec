"""The latest requests of all tenants, with the prompts that guardrails refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from typing_extensions import override

from disagg.proto.ids import RequestId
from disagg.router.api import ClusterView, RequestTrace
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

    def view(self) -> ClusterView:
        return ClusterView(workers=(), num_queued=0, num_running=0)

    def refused(self) -> Iterator[RequestTrace]:
        return iter(self._refused)


def trace(name: str, arrival: float) -> RequestTrace:
    return RequestTrace(request_id=RequestId(name), arrival=arrival)


async def test_refused_prompts_stand_between_the_others_by_their_time() -> None:
    known = Known([trace("a", 9.0), trace("b", 5.0), trace("c", 1.0)])
    source: Any = Source(known, [trace("y", 6.0), trace("b", 5.0), trace("x", 2.0)])
    audit: Any = None
    admin = AdminService(source, audit=audit, guardrails=source)
    assert [found.request_id async for found in admin.recent(4)] == ["a", "y", "b", "x"]
    assert known.num_rounds == 2  # not once more for each that was refused
