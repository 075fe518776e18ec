"""The membership as differences: whatever a stream loses or brings in another order, the copy ends as the list."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.proto.control import ControllerToGateway, Member, Membership, MembershipChange, MemberState
from disagg.proto.ids import WorkerId
from disagg.proto.membership import MembershipCopy, MembershipLog
from disagg.proto.messages import decoder, encode
from tests.support.control import make_info


def member(name: str, incarnation: int = 1, state: MemberState = "ready") -> Member:
    return Member(info=make_info(name, incarnation), state=state)


def shown(message: Membership | MembershipChange | None) -> tuple[int, list[str], list[str]]:
    """Revision, what came or changed, what left."""
    assert message is not None
    members = message.members if isinstance(message, Membership) else message.changed
    removed = message.removed if isinstance(message, MembershipChange) else ()
    return message.revision, [f"{m.info.incarnation} {m.state}" for m in members], list(removed)


def test_a_change_names_what_came_what_is_another_and_what_left() -> None:
    log = MembershipLog("c1")
    assert log.update([]) is None
    assert shown(log.update([member("a"), member("b")])) == (1, ["a.1 ready", "b.1 ready"], [])
    assert log.update([member("a"), member("b")]) is None
    assert shown(log.update([member("a"), member("b", state="draining")])) == (2, ["b.1 draining"], [])
    assert shown(log.update([member("a", 2), member("c")])) == (3, ["a.2 ready", "c.1 ready"], ["b"])
    assert shown(log.snapshot()) == (3, ["a.2 ready", "c.1 ready"], [])


def test_a_copy_takes_the_whole_and_then_each_change_once() -> None:
    log, copy = MembershipLog("c1"), MembershipCopy()
    log.update([member("a")])
    assert copy.apply(log.snapshot()) == "new"
    change = log.update([member("b")])
    assert change is not None
    assert (copy.apply(change), copy.apply(change)) == ("new", "old")
    assert copy.members == (member("b"),)


def test_a_gap_is_said_once_and_ends_with_the_whole() -> None:
    log, copy = MembershipLog("c1"), MembershipCopy()
    early = log.snapshot()
    copy.apply(early)
    changes = [log.update([member("a", incarnation)]) for incarnation in (1, 2, 3, 4)]
    assert [copy.apply(change) for change in changes[1:] if change is not None] == ["gap", "waiting", "waiting"]
    assert not copy.members
    assert copy.apply(early) == "gap", "it is behind the changes that were seen"
    assert copy.apply(log.snapshot()) == "new"
    assert copy.members == (member("a", 4),)
    last = log.update([])
    assert last is not None
    assert copy.apply(last) == "new"
    assert not copy.members


def test_a_change_before_the_whole_or_of_another_controller_is_a_gap() -> None:
    log, other, copy = MembershipLog("c1"), MembershipLog("c2"), MembershipCopy()
    first, foreign = log.update([member("a")]), other.update([member("b")])
    assert first is not None
    assert foreign is not None
    assert copy.apply(first) == "gap"
    assert copy.apply(log.snapshot()) == "new"
    other.update([])
    third = other.update([member("c")])
    assert third is not None
    assert copy.apply(third) == "gap"
    assert copy.members == (member("a"),)
    assert copy.apply(other.snapshot()) == "new"
    assert copy.members == (member("c"),)


def test_what_registers_costs_a_gateway_is_linear_in_the_number_of_workers() -> None:
    def sizes(num_workers: int) -> list[int]:
        log, members = MembershipLog("c1"), list[Member]()
        found = []
        for number in range(num_workers):
            members.append(member(f"w-{number:03}"))
            change = log.update(members)
            assert change is not None
            found.append(len(encode(change)))
        return found

    last = sizes(400)
    assert last[:100] == sizes(100)
    assert max(last) - min(last) == 2, "the revision takes one byte, two, or three"


WorkerStates = st.dictionaries(st.sampled_from("abcde"), st.tuples(st.integers(1, 2), st.booleans()), max_size=5)
"""Worker -> its incarnation, and whether it drains."""
Fate = st.sampled_from(["arrives", "is lost", "is late", "comes twice", "the stream breaks"])


def members_of(states: dict[str, tuple[int, bool]]) -> list[Member]:
    return [
        member(name, incarnation, "draining" if drains else "ready") for name, (incarnation, drains) in states.items()
    ]


def by_id(members: Sequence[Member]) -> dict[WorkerId, Member]:
    return {each.info.worker_id: each for each in members}


@settings(deadline=None, max_examples=200, derandomize=True)
@given(st.lists(st.tuples(WorkerStates, Fate), max_size=30), WorkerStates)
def test_whatever_happens_to_changes_the_copy_ends_as_the_list(
    steps: list[tuple[dict[str, tuple[int, bool]], str]], last: dict[str, tuple[int, bool]]
) -> None:
    log, copy = MembershipLog("c1"), MembershipCopy()
    held: list[bytes] = []
    num_asked = num_spoilt = 0

    def arrive(frame: bytes) -> None:
        nonlocal num_asked
        if copy.apply(decoder(ControllerToGateway).decode(frame)) == "gap":
            num_asked += 1
            arrive(encode(log.snapshot()))

    arrive(encode(log.snapshot()))
    for states, fate in steps:
        change = log.update(members_of(states))
        if fate == "the stream breaks":
            copy = MembershipCopy()
            held.clear()
            arrive(encode(log.snapshot()))
        elif change is not None:
            num_spoilt += fate in ("is lost", "is late")
            if fate == "is late":
                held.append(encode(change))
            elif fate != "is lost":
                for _ in range(2 if fate == "comes twice" else 1):
                    arrive(encode(change))
                while held:
                    arrive(held.pop())
    for states in ({}, {"z": (1, False)}, last):  # whatever was lost before shows with the next change
        change = log.update(members_of(states))
        if change is not None:
            arrive(encode(change))
    assert by_id(copy.members) == by_id(log.snapshot().members)
    assert num_asked <= num_spoilt, "a whole membership is sent for a change that is missing only"
