"""The latest requests of all tenants, with those that the gateway refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from typing_extensions import override

from disagg.gateway.auth.auth import Caller
from disagg.gateway.operators.requests_list import RequestFilter
from disagg.gateway.operators.shell.admin import AdminService
from disagg.gateway.requests.refusals import Refusals
from disagg.proto.ids import RequestId
from disagg.router.api import ClusterView, Decision, Option, RequestTrace, Way


class Known(list[RequestTrace]):
    """Counts how often it is gone through."""

    num_rounds = 0

    @override
    def __iter__(self) -> Iterator[RequestTrace]:
        self.num_rounds += 1
        return super().__iter__()


class OnePlacement:
    """With a single option."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    transfer_ms = 0.0

    def decision(self) -> Decision:
        times: dict[str, Any] = dict.fromkeys(
            ("cost", "wait_ms", "prefill_ms", "transfer_ms", "decode_ms", "delay_ms", "barrier_ms"), 1.0
        )
        names: dict[str, Any] = {"prefill_worker": None, "decode_worker": "decode-0", "policy": "joint"}
        return Decision(num_misses=0, ttft_ms=None, tpot_ms=None, num_options=1, **names, **times)

    def options(self) -> list[Option]:
        return [self.decision()]

    def ways(self) -> list[Way]:
        return [Way("compute", None, 0, 0.0, 1.0, 0.0, True)]


class Source:
    """What a router knows, and what was refused before it."""

    def __init__(self, known: Known, refused: list[RequestTrace]) -> None:
        self._known, self._refused = known, refused

    def recent(self, limit: int) -> Known:
        return self._known

    def trace(self, request_id: RequestId) -> RequestTrace | None:
        return next((each for each in self._known if each.request_id == request_id), None)

    def view(self) -> ClusterView:
        return ClusterView(workers=(), num_queued=0, num_running=0)

    @property
    def refusals(self) -> Any:
        """As `Refusals`, with the traces that were given."""
        kept = Refusals(lambda: 0.0)
        for trace in reversed(self._refused):
            kept.traces.end(trace, trace.arrival)
        return kept


def trace(name: str, arrival: float) -> RequestTrace:
    return RequestTrace(request_id=RequestId(name), arrival=arrival)


def test_why_a_request_failed_is_for_admins() -> None:
    """It may name hosts."""
    failed = RequestTrace(
        request_id=RequestId("a"), tenant="t", outcome="worker_lost", detail="no answer from 10.0.0.7"
    )
    source: Any = Source(Known([failed]), [])
    audit: Any = None
    admin = AdminService(source, audit=audit, refusals=source.refusals)
    seen = [admin.explain(RequestId("a"), caller) for caller in (Caller("t", False), Caller("ops", True))]
    assert [(each.outcome, each.detail) for each in seen] == [
        ("worker_lost", ""),
        ("worker_lost", "no answer from 10.0.0.7"),
    ]


def test_what_others_have_under_way_is_not_told_by_the_costs_of_a_placement() -> None:
    placed = RequestTrace(request_id=RequestId("a"), tenant="t", placement=OnePlacement())
    source: Any = Source(Known([placed]), [])
    audit: Any = None
    admin = AdminService(source, audit=audit, refusals=source.refusals)
    callers = (Caller("t", False), Caller("t", False, metrics=True), Caller("ops", True))
    seen = [admin.explain(RequestId("a"), caller) for caller in callers]
    assert [(each.policy, each.HasField("chosen"), len(each.options), len(each.ways)) for each in seen] == [
        ("joint", False, 0, 0),
        ("joint", True, 1, 1),
        ("joint", True, 1, 1),
    ]


async def test_refused_prompts_stand_between_the_others_by_their_time() -> None:
    known = Known([trace("a", 9.0), trace("b", 5.0), trace("c", 1.0)])
    source: Any = Source(known, [trace("y", 6.0), trace("b", 5.0), trace("x", 2.0)])
    audit: Any = None
    admin = AdminService(source, audit=audit, refusals=source.refusals)
    assert [found.request_id async for found in admin.recent(4)] == ["a", "y", "b", "x"]
    assert known.num_rounds == 2  # not once more for each that was refused


async def test_a_refused_request_is_found_by_its_id_and_in_the_list() -> None:
    known = Known([RequestTrace(request_id=RequestId("a"), arrival=9.0, attempts=1, model="tiny")])
    refused = RequestTrace(request_id=RequestId("y"), arrival=6.0, outcome="invalid_value", detail="top_p: must be > 0")
    source: Any = Source(known, [refused])
    audit: Any = None
    admin = AdminService(source, audit=audit, refusals=source.refusals, clock=lambda: 10.0, wall_clock=lambda: 110.0)
    assert admin.explain(RequestId("y"), Caller("ops", True)).detail == "top_p: must be > 0"
    found = admin.find(RequestFilter(state="refused"), 5)
    assert [(line["id"], line["state"], line["reason"]) for line in found.requests] == [
        ("y", "refused", "top_p: must be > 0")
    ]
    assert (found.requests[0]["arrived_at"], found.num_matching, found.num_searched) == (106.0, 1, 2)
    everything = admin.find(RequestFilter(), 1)
    assert [(line["id"], line["model"], line["state"]) for line in everything.requests] == [("a", "tiny", "running")]
    assert (everything.num_matching, everything.num_searched) == (2, 2)
