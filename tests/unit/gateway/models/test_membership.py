"""What the gateway makes of a membership, without a controller."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest

from disagg.gateway.models.membership import CONNECT_TIMEOUT_S, ControllerLink
from disagg.proto.control import (
    AdaptersFollowed,
    ExpectedWorkers,
    GatewayHello,
    GatewayToController,
    Member,
    Membership,
    MembershipChange,
    MembershipRequest,
    MemberState,
    ServedAdapter,
    ServedAdapters,
    WorkerIncarnation,
)
from disagg.proto.ids import GatewayId, Incarnation, WorkerId
from disagg.proto.messages import Adapter, WorkerInfo, decoder
from disagg.router.config import RouterConfig
from tests.support.control import make_info
from tests.support.secret import SECRET


class Workers:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.fails = False
        self.unreachable = ""
        self.on_drained: Callable[[WorkerId, Incarnation], None] = lambda worker_id, incarnation: None

    async def add_worker(self, info: WorkerInfo) -> None:
        if self.fails:
            raise RuntimeError("no channel")
        self.told.append(f"add {info.incarnation}")

    async def remove_worker(self, worker_id: WorkerId) -> None:
        if self.fails:
            raise RuntimeError("no channel")
        self.told.append(f"remove {worker_id}")

    async def wait_until_connected(self, timeout_s: float) -> None:
        assert timeout_s == CONNECT_TIMEOUT_S
        self.told.append("connect")
        if self.unreachable:
            raise TimeoutError(f"no session with {self.unreachable} after {timeout_s:g} s")

    def drain_worker(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        self.told.append(f"drain {incarnation}")

    def resume_worker(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        self.told.append(f"resume {incarnation}")

    def expect_workers(self, in_s: Mapping[WorkerId, float]) -> None:
        self.told.append(f"expect {dict(in_s)}")

    def configure(self, configs: Mapping[str, RouterConfig]) -> None:
        self.told += [f"configure {config.policy}" for config in configs.values()]

    def take(self) -> list[str]:
        told, self.told = self.told, []
        return told


def membership(**states: MemberState) -> Membership:
    """`a1="ready"`: the first incarnation of worker a."""
    members = [Member(info=make_info(name[0], int(name[1])), state=state) for name, state in states.items()]
    return Membership(members=tuple(members))


def make_link(workers: Workers, *known: WorkerInfo) -> ControllerLink:
    return ControllerLink(GatewayId("g"), lambda: "127.0.0.1:1", workers, SECRET, known)


async def test_a_membership_replaces_what_was_known() -> None:
    workers = Workers()
    link = make_link(workers, make_info("a", 1), make_info("b", 1))
    await link.take(membership(a1="ready", b1="ready"))
    assert workers.take() == []
    await link.take(membership(a2="ready", c1="ready"))
    assert workers.take() == ["remove b", "add a.2", "add c.1"]
    await link.take(membership())
    assert workers.take() == ["remove a", "remove c"]


async def test_a_worker_drains_until_it_is_gone_or_back_as_another_incarnation() -> None:
    workers = Workers()
    link = make_link(workers, make_info("a", 1), make_info("b", 1))
    await link.take(membership(a1="draining", b1="ready"))
    assert workers.take() == ["connect", "drain a.1"]
    workers.on_drained(WorkerId("a"), Incarnation("a.1"))
    await link.take(membership(a1="draining", b1="draining"))
    assert workers.take() == ["connect", "drain b.1"], "a is known to be empty"
    await link.take(membership(a2="draining", b1="draining"))
    assert workers.take() == ["add a.2", "connect", "drain a.2", "drain b.1"]


async def test_a_worker_that_joins_draining_is_added_and_drained() -> None:
    workers = Workers()
    await make_link(workers).take(membership(a1="draining"))
    assert workers.take() == ["add a.1", "connect", "drain a.1"]


async def test_a_worker_that_leaves_waits_for_those_that_came(caplog: pytest.LogCaptureFixture) -> None:
    workers = Workers()
    link = make_link(workers, make_info("a", 1))
    await link.take(membership(a1="draining", b1="ready"))
    assert workers.take() == ["add b.1", "connect", "drain a.1"]
    await link.take(membership(a1="draining", b1="ready", c1="ready"))
    assert workers.take() == ["add c.1", "drain a.1"], "nothing else leaves"
    workers.unreachable = "c"
    await link.take(membership(b1="draining", c1="ready"))
    assert workers.take() == ["remove a", "connect", "drain b.1"]
    assert caplog.messages == [
        "draining b although other workers are not connected: no session with c after 5 s",
    ]


async def test_a_worker_that_is_not_to_drain_any_more_is_used_again() -> None:
    workers = Workers()
    link = make_link(workers, make_info("a", 1), make_info("b", 1))
    await link.take(membership(a1="draining", b1="ready"))
    await link.take(membership(a1="ready", b1="ready"))
    assert workers.take() == ["connect", "drain a.1", "resume a.1"]
    await link.take(membership(a1="draining", b1="ready"))
    assert workers.take() == ["connect", "drain a.1"]


async def test_workers_that_are_coming_are_told_to_the_routers() -> None:
    workers = Workers()
    await make_link(workers).take(ExpectedWorkers(in_s={WorkerId("decode-0"): 6.0}))
    assert workers.told == ["expect {'decode-0': 6.0}"]


async def test_the_next_controller_hears_what_is_draining() -> None:
    link = make_link(Workers(), make_info("a", 1), make_info("b", 1))
    await link.take(membership(a1="draining", b1="ready"))
    hello = GatewayHello(gateway_id=GatewayId("g"), address="", pid=1)
    first = await anext(link._frames(hello))
    found = decoder(GatewayToController).decode(first)
    assert found.draining == (WorkerIncarnation(worker_id=WorkerId("a"), incarnation=Incarnation("a.1")),)


async def test_what_could_not_be_added_or_removed_is_tried_again_with_the_next_membership() -> None:
    workers = Workers()
    link = make_link(workers, make_info("a", 1), make_info("b", 1))
    for _ in range(2):
        workers.fails = True
        with pytest.raises(RuntimeError, match="no channel"):
            await link.take(membership(a2="ready"))
    workers.fails = False
    await link.take(membership(a2="ready", c1="ready"))
    assert workers.take() == ["remove b", "add a.2", "add c.1"]


async def test_a_change_is_applied_and_a_missing_one_has_the_whole_sent() -> None:
    workers = Workers()
    link = make_link(workers)
    [a, b, c] = [Member(info=make_info(name, 1), state="ready") for name in "abc"]
    await link.take(Membership(source="x", revision=4, members=(a, b)))
    await link.take(MembershipChange(source="x", revision=5, changed=(c,), removed=(a.info.worker_id,)))
    assert workers.take() == ["add a.1", "add b.1", "remove a", "add c.1"]
    await link.take(MembershipChange(source="x", revision=7, changed=(a,)))
    await link.take(MembershipChange(source="x", revision=8, removed=(b.info.worker_id,)))
    assert workers.take() == []
    assert [link._outbox.get_nowait() for _ in range(link._outbox.qsize())] == [MembershipRequest()]
    await link.take(Membership(source="x", revision=8, members=(a, c)))
    assert workers.take() == ["remove b", "add a.1"]
    assert link.counters == {"snapshot": 2, "change": 3, "gap": 1}


async def test_adapters_are_told_and_answered() -> None:
    told: list[Sequence[ServedAdapter]] = []
    link = make_link(Workers())
    link.on_adapters = told.append
    adapter = ServedAdapter(model="", adapter=Adapter(name="sql", path="sql", fingerprint="ab" * 32))
    await link.take(ServedAdapters(adapters=(adapter,), revision=7))
    assert told == [(adapter,)]
    assert link._outbox.get_nowait() == AdaptersFollowed(revision=7)
