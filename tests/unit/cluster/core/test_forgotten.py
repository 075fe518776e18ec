"""Tenants whose KV was dropped while some workers did not run: who is told when, and for how long that is kept."""

from __future__ import annotations

import msgspec

from disagg.cluster.core import events
from disagg.cluster.core.forgotten import MAX_AGE_S, MAX_NOTES, Forgotten, Note, is_old
from disagg.cluster.core.rollout import Desired
from disagg.proto.control import ForgetRequest
from disagg.proto.ids import WorkerId
from tests.support.control import Driver, make_info, settled, succeeding

W0, W1 = WorkerId("w-0"), WorkerId("w-1")


def tags(notes: tuple[Note, ...]) -> list[bytes]:
    return [note.tenant_tag for note in notes]


class TestNotes:
    def test_a_worker_is_told_what_was_noted_since_it_was_ready(self) -> None:
        found = Forgotten().was_ready(W0)
        assert found == Forgotten()  # there is nothing to tell
        found = found.noted(b"a", 1.0).was_ready(W0).noted(b"b", 2.0)
        assert (tags(found.due(W0)), tags(found.due(W1))) == ([b"b"], [b"a", b"b"])
        assert found.told == {W0: 1}
        assert found.was_ready(W1).due(W1) == ()

    def test_the_latest_note_of_a_tenant_counts(self) -> None:
        found = Forgotten().noted(b"a", 1.0).noted(b"b", 2.0).was_ready(W0).noted(b"a", 3.0)
        assert found.notes == (
            Note(number=2, tenant_tag=b"b", at_s=2.0),
            Note(number=3, tenant_tag=b"a", at_s=3.0),
        )
        assert tags(found.due(W0)) == [b"a"]

    def test_old_notes_go_and_of_too_many_the_first(self) -> None:
        found = Forgotten().noted(b"a", 1.0).noted(b"b", 2.0)
        (first, _) = found.notes
        assert [is_old(first, now_s) for now_s in (1.0 + MAX_AGE_S, 1.1 + MAX_AGE_S)] == [False, True]
        assert tags(found.noted(b"c", 1.5 + MAX_AGE_S).notes) == [b"b", b"c"]
        for number in range(MAX_NOTES):
            found = found.noted(number.to_bytes(2, "big"), 3.0)
        assert (len(found.notes), found.notes[0].number) == (MAX_NOTES, 3)

    def test_a_state_that_was_saved_before_has_none(self) -> None:
        desired = msgspec.json.decode(b'{"target": {"generation": 1, "sizes": {}, "config_hashes": {}}}', type=Desired)
        assert desired.forgotten == Forgotten()
        noted = msgspec.structs.replace(desired, forgotten=Forgotten().noted(b"\xff", 1.0).was_ready(W0))
        assert msgspec.json.decode(msgspec.json.encode(noted), type=Desired) == noted


def told(control: Driver, name: str, incarnation: int) -> list[bytes]:
    """What a worker is told when it registers."""
    info = make_info(name, incarnation)
    commands = control.core.handle(events.WorkerRegistered(info, False), control.now)
    for command in commands:
        control._line(command)
    (accepted,) = [command for command in commands if isinstance(command, events.Accept)]
    return tags(accepted.forget)


def restart(control: Driver, name: str) -> None:
    control.exited(name)
    control.tick(100.0)
    control.stopped(name)


class TestCore:
    def test_each_worker_is_told_once_when_it_comes_back(self) -> None:
        control = settled({"prefill": 1, "decode": 1})
        assert control.core.refusal(ForgetRequest(tenant_tag=b"a")) is None
        assert control(events.Forget(b"a", 5.0)) == []
        assert control.saved is not None
        assert tags(control.saved.forgotten.notes) == [b"a"]
        found = []
        for incarnation in (2, 3):
            restart(control, "decode-0")
            found.append(told(control, "decode-0", incarnation))
        assert found == [[b"a"], []]
        assert control.core.saved().forgotten.told == {WorkerId("decode-0"): 1}

    def test_one_that_was_not_ready_is_told_again(self) -> None:
        control = Driver({"prefill": 1, "decode": 1}, probes=True)
        control.tick()
        control(events.Forget(b"a", 5.0))
        assert told(control, "decode-0", 1) == [b"a"]
        restart(control, "decode-0")
        assert told(control, "decode-0", 2) == [b"a"]
        assert told(control, "prefill-0", 1) == [b"a"]
        control.probed()
        assert control.core.saved().forgotten.told == {WorkerId("decode-0"): 1, WorkerId("prefill-0"): 1}

    def test_the_next_controller_tells_workers_that_it_starts_later(self) -> None:
        before = settled({"prefill": 1, "decode": 1})
        before(events.Forget(b"a", 5.0))
        after = succeeding(before, ["prefill-0", "decode-0"])
        after.register("prefill-0")
        after.register("decode-0")
        after.scale(decode=2)
        assert told(after, "decode-1", 1) == [b"a"]
