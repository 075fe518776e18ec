"""What the controller sends to gateways: the whole membership once, then what is new in it."""

from __future__ import annotations

from disagg.cluster.control import events
from disagg.proto.control import MembershipChange
from disagg.proto.ids import GatewayId, WorkerId
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
