"""The text of failpoints, exactly: what is accepted, what is refused, and on which opportunities a fault falls."""

from __future__ import annotations

import pytest

from disagg.engine.failpoints import ACTIONS, MESSAGES, Failpoint, Plan, Tamper, Trigger, parse
from disagg.proto.handover import Abort, ChunkHeader, ClearToSend, Failure, PairHeartbeat
from disagg.proto.ids import RequestId

RID = RequestId("a")
BEAT = PairHeartbeat()


def clear(seq: int, generation: int = 3) -> ClearToSend:
    return ClearToSend(request_id=RID, attempt=0, generation=generation, seq=seq, turn=seq)


HEADER = ChunkHeader(
    request_id=RID, attempt=0, generation=3, seq=0, start_token=0, end_token=8, nbytes=64, checksum=1
)  # fmt: skip


def tamper(text: str) -> Tamper:
    return Tamper(parse(text).of("w"))


def test_a_text_is_read() -> None:
    text = (
        " transport.receive=corrupt(p=0.01); seed=7;;control.send=drop( message=ClearToSend , p=1e-1,worker=decode-*);"
        "engine.step=hang(ms=250,after=3,times=2)"
    )
    assert parse(text) == Plan(
        (
            Failpoint(point="transport.receive", action="corrupt", p=0.01),
            Failpoint(point="control.send", action="drop", message="ClearToSend", p=0.1, worker="decode-*"),
            Failpoint(point="engine.step", action="hang", ms=250.0, after=3, times=2),
        ),
        seed=7,
    )
    assert parse("") == parse(" ; ") == Plan()


def test_every_point_and_action_can_be_written() -> None:
    text = ";".join(f"{point}={action}()" for point, actions in ACTIONS.items() for action in actions)
    assert [(each.point, each.action) for each in parse(text).failpoints] == [
        (point, action) for point, actions in ACTIONS.items() for action in actions
    ]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("nowhere=drop", "there is no failpoint 'nowhere'; there are transport.send, "),
        ("transport.send=drop", "transport.send cannot 'drop'; it can fail, corrupt, delay"),
        ("transport.send", "'transport.send' is not of the form"),
        ("transport.send=fail(p=0.1", "is not of the form"),
        ("seed=x", "there is no failpoint 'seed'"),
        ("tokens.send=drop(p=2)", "p must be above 0 and at most 1"),
        ("tokens.send=drop(p=0)", "p must be above 0"),
        ("tokens.send=drop(p=nan)", "p must be above 0"),
        ("tokens.send=drop(p=often)", "p must be a number, not 'often'"),
        ("tokens.send=drop(after=1.5)", "after must be a number"),
        ("tokens.send=drop(after=-1)", "after must be at least 0"),
        ("tokens.send=drop(times=0)", "times at least 1"),
        ("engine.step=hang(ms=-1)", "ms must be from 0"),
        ("engine.step=hang(ms=inf)", "ms must be from 0"),
        ("tokens.send=drop(often=1)", "'often' is not, or not once, one of p, after, "),
        ("tokens.send=drop(p=1,p=1)", "'p' is not, or not once"),
        ("tokens.send=drop(message=Offer)", "only control messages have a kind"),
        ("control.send=drop(message=PairHello)", "there is no such message; there are Abort, "),
    ],
)
def test_what_cannot_work_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        parse(text)
    assert complaint in str(caught.value)


def test_messages_that_form_a_pair_cannot_be_touched() -> None:
    assert MESSAGES == (
        "Abort", "AbortAck", "ChunkDone", "ChunkHeader", "ChunkSum", "ClearToSend", "CloseWhenIdle", "Commit",
        "CommitAck", "Extend", "Offer", "PairHeartbeat", "Refused", "Reserved",
    )  # fmt: skip


# ---------------------------------------------------------------- when


def fired(text: str, worker_id: str = "w", num: int = 20) -> list[int]:
    """The opportunities on which the first failpoint of a text falls."""
    (trigger, *_) = parse(text).of(worker_id)
    return [number for number in range(num) if trigger.fires()]


def test_after_and_times_count_opportunities() -> None:
    assert fired("tokens.send=drop") == list(range(20))
    assert fired("tokens.send=drop(after=3,times=2)") == [3, 4]
    assert fired("tokens.send=drop(times=1)") == [0]


def test_a_fault_falls_by_seed_worker_and_place() -> None:
    text = "seed=5;tokens.send=drop(p=0.3)"
    first = fired(text, num=1000)
    assert 240 < len(first) < 360
    assert fired(text, num=1000) == first
    assert fired(text, "v", num=1000) != first
    assert fired(text.replace("5", "6", 1), num=1000) != first
    twice = parse(f"{text};tokens.send=drop(p=0.3)").of("w")
    assert [t.fires() for t in [twice[0]] * 50] != [t.fires() for t in [twice[1]] * 50]


def test_a_failpoint_is_for_the_workers_that_its_pattern_names() -> None:
    plan = parse("tokens.send=drop(worker=decode-*);pair.setup=fail(worker=prefill-1)")
    assert [str(t.failpoint) for t in plan.of("decode-0")] == ["tokens.send=drop"]
    assert [str(t.failpoint) for t in plan.of("prefill-1")] == ["pair.setup=fail"]
    assert plan.of("prefill-0") == []


# ---------------------------------------------------------------- control messages


def through(text: str, *messages: object) -> list[object]:
    act = tamper(text)
    return [each for message in messages for each in act(message).messages]


def test_messages_are_dropped_doubled_and_exchanged() -> None:
    assert through("control.send=drop(message=ClearToSend,after=1,times=1)", clear(0), BEAT, clear(1), clear(2)) == [
        clear(0),
        BEAT,
        clear(2),
    ]
    assert through("control.send=duplicate(times=1)", clear(0), BEAT) == [clear(0), clear(0), BEAT]
    assert through("control.send=reorder(times=1)", clear(0), clear(1), clear(2)) == [clear(1), clear(0), clear(2)]
    assert through("control.send=reorder", clear(0), clear(1), clear(2), clear(3)) == [
        clear(1), clear(0), clear(3), clear(2),
    ]  # fmt: skip


def test_a_stale_copy_comes_first_where_there_are_generations() -> None:
    act = "control.send=stale(times=1)"
    assert through(act, BEAT, clear(0), clear(1)) == [BEAT, clear(0, generation=2), clear(0), clear(1)]


def test_only_a_header_can_say_another_size() -> None:
    abort = Abort(request_id=RID, attempt=0, failure=Failure.OTHER)
    (same, header, again) = through("control.send=resize(times=1)", abort, HEADER, HEADER)
    assert (same, again) == (abort, HEADER)
    assert isinstance(header, ChunkHeader)
    assert header.nbytes == 72


def test_a_delay_names_its_time_and_the_first_failpoint_that_fires_decides() -> None:
    act = tamper("control.send=delay(ms=250,times=1);control.send=drop(times=1)")
    altered = [act(BEAT) for _ in range(3)]
    assert [(each.messages, each.delay_s) for each in altered] == [([BEAT], 0.25), ([], 0.0), ([BEAT], 0.0)]
    assert [each.fault.action if each.fault else "" for each in altered] == ["delay", "drop", ""]


def test_a_trigger_counts_what_it_did() -> None:
    trigger = Trigger(Failpoint(point="tokens.send", action="drop", after=1, times=2), seed=0)
    assert [trigger.fires() for _ in range(5)] == [False, True, True, False, False]
    assert trigger.num_fired == 2
