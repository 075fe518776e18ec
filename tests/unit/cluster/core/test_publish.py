"""What the controller sends to gateways: the whole membership once, then what is new in it."""

from __future__ import annotations

import msgspec

from disagg.cluster.core import events
from disagg.cluster.core.workers import MORE_S
from disagg.proto.control import MembershipChange
from disagg.proto.ids import GatewayId, WorkerId
from disagg.proto.messages import StartPhase
from tests.support.control import ADDRESS, GATEWAY_ID, Driver, make_info, settled

OTHER = GatewayId("g2")


def published(control: Driver, event: events.Event) -> tuple[MembershipChange | None, tuple[GatewayId, ...]]:
    """What the one `Publish` that an event leads to brings, and to whom the whole goes."""
    found = [c for c in control.core.handle(event, control.now) if isinstance(c, events.Publish)]
    assert len(found) == 1, found
    return found[0].change, found[0].snapshot_for


def joined(gateway_id: GatewayId) -> events.GatewayJoined:
    return events.GatewayJoined(gateway_id, ADDRESS, 7)


def test_the_whole_goes_to_a_gateway_that_joins_and_to_no_other() -> None:
    control = settled({"decode": 1})
    assert published(control, joined(OTHER)) == (None, (OTHER,))
    assert published(control, joined(GATEWAY_ID)) == (None, (GATEWAY_ID,))


def test_a_worker_that_registers_is_all_that_is_sent() -> None:
    control = settled({"decode": 40})
    control.scale(decode=41)
    before = control.core.membership().revision
    change, snapshot_for = published(control, events.WorkerRegistered(make_info("decode-40")))
    assert (change, snapshot_for) == (
        MembershipChange(
            source="c1",
            revision=before + 1,
            changed=control.core.membership().members[-1:],
        ),
        (),
    )
    assert control.core.membership().members[-1].info == make_info("decode-40")


def test_a_worker_that_leaves_is_its_name() -> None:
    control = settled({"decode": 3})
    control.scale(decode=2)
    change, snapshot_for = published(
        control, events.WorkerEmpty(GATEWAY_ID, WorkerId("decode-2"), make_info("decode-2").incarnation)
    )
    assert change is not None
    assert (change.changed, change.removed, snapshot_for) == ((), ("decode-2",), ())


def test_a_gateway_that_missed_a_change_gets_the_whole_once() -> None:
    control = settled({"decode": 1})
    control(joined(OTHER))
    assert published(control, events.MembershipMissed(OTHER)) == (None, (OTHER,))
    assert control.core.handle(events.MembershipMissed(GatewayId("gone")), control.now) == []
    control.scale(decode=2)
    change, snapshot_for = published(control, events.WorkerRegistered(make_info("decode-1")))
    assert change is not None
    assert snapshot_for == ()


def expected(control: Driver, event: events.Event) -> dict[str, float] | None:
    """The workers that gateways are told to wait for after an event; None where they are told nothing new."""
    found = [c for c in control.core.handle(event, control.now) if isinstance(c, events.Expect)]
    assert len(found) <= 1, found
    return {str(name): in_s for name, in_s in found[0].in_s.items()} if found else None


def ready(control: Driver, name: str, incarnation: int = 1, start_s: float = 4.0) -> events.WorkerRegistered:
    info = make_info(name, incarnation, start_id="")
    return events.WorkerRegistered(msgspec.structs.replace(info, start_phases=(StartPhase("model", start_s),)))


def test_gateways_know_when_a_worker_that_died_is_back() -> None:
    """The pause before the start, and what the start took before."""
    control = settled({"decode": 1})
    control(ready(control, "decode-0"))
    assert expected(control, events.ProcessExited("decode-0", "killed by SIGKILL")) == {"decode-0": 0.5 + 4.0 + MORE_S}
    control.now += 1.5
    assert expected(control, events.Tick()) is None
    assert expected(control, events.WorkersStopped((WorkerId("decode-0"),))) is None
    assert expected(control, joined(OTHER)) == {"decode-0": 3.0 + MORE_S}
    assert expected(control, ready(control, "decode-0", 2)) == {}


def test_a_start_that_was_never_measured_takes_as_long_as_that_of_another_worker() -> None:
    control = settled({"decode": 2})
    control(ready(control, "decode-0", start_s=7.0))
    control.scale(decode=3)
    assert expected(control, joined(OTHER)) == {"decode-2": 7.0 + MORE_S}


def test_a_worker_that_leaves_for_good_is_not_expected() -> None:
    control = settled({"decode": 2})
    assert expected(control, events.Scale({"decode": 1})) is None
    control.empty("decode-1")
    assert expected(control, events.WorkersStopped((WorkerId("decode-1"),))) is None


def test_a_worker_that_fails_again_and_again_is_not_expected() -> None:
    control = settled({"decode": 1})
    control.exited("decode-0")
    for _ in range(2):
        control.tick(40.0)
        control.stopped("decode-0")
        last = expected(control, events.WorkerStartFailed(WorkerId("decode-0"), "no weights", ""))
    assert last == {}
