"""The end of a prompt, announced before its KV is there: what was announced is sent, in the order of D's receives."""

from __future__ import annotations

from typing import Any

import pytest

from disagg.engine.kv_transfer.commands import KV_GONE, GatherChunk, ReleaseSequence, SendControl, SendKv, SendOver
from disagg.engine.kv_transfer.pair_half import abort
from disagg.engine.kv_transfer.sender import Sender
from disagg.proto.handover import Abort, AbortAck, ChunkDone, ChunkSum, ClearToSend, Commit, Failure, Reserved
from disagg.proto.ids import AttemptKey
from tests.support.pair import prompt_of, spec_of
from tests.unit.engine.kv_transfer.test_sender import ID, KEY, NAMED, SPEC, header, prefilling, sender


def announced_early() -> Sender:
    """A sender with 12 of 20 tokens on D; the rest is announced, and computed now."""
    machine = sender()
    machine.offer(SPEC, 0.0)
    machine.on_message(Reserved(**NAMED, cached_tokens=12), 0.0)
    assert machine.on_chunk_planned(KEY, 20) == [
        GatherChunk(KEY, 0, 12, 20, slot=0, nbytes=64),
        header(0, 12, 20, None),
    ]
    return machine


def test_the_end_of_a_prompt_is_announced_while_it_is_computed() -> None:
    machine = announced_early()
    assert machine.on_message(ClearToSend(**NAMED, seq=0, turn=0), 0.0) == []
    assert machine.on_prefill_computed(KEY, 99) == [SendControl(Commit(**NAMED, token_id=99, num_chunks=1))]
    assert machine.on_gathered(KEY, 0, True, 64, 11) == [
        SendControl(ChunkSum(**NAMED, seq=0, checksum=11)),
        SendKv(KEY, 0, slot=0, nbytes=64),
    ]


def two_announced_early_and_cleared() -> tuple[Sender, AttemptKey]:
    """`announced_early`, and another attempt of the same size; the engine has answered for the second one only."""
    machine, second = announced_early(), spec_of("b", prompt_of(20))
    named: dict[str, Any] = {"request_id": second.request_id, "attempt": second.attempt, "generation": 8}
    machine.offer(second, 0.0)
    machine.on_message(Reserved(**named, cached_tokens=12), 0.0)
    machine.on_chunk_planned(second.key, 20)
    machine.on_message(ClearToSend(**NAMED, seq=0, turn=0), 0.0)
    machine.on_message(ClearToSend(**named, seq=0, turn=1), 0.0)
    assert machine.on_gathered(second.key, 0, True, 64, 12) == [SendControl(ChunkSum(**named, seq=0, checksum=12))]
    return machine, second.key


def test_bytes_leave_in_the_order_of_the_receives() -> None:
    machine, second = two_announced_early_and_cleared()
    assert machine.on_gathered(KEY, 0, True, 64, 11) == [
        SendControl(ChunkSum(**NAMED, seq=0, checksum=11)),
        SendKv(KEY, 0, slot=0, nbytes=64),
        SendKv(second, 0, slot=1, nbytes=64),
    ]


def test_bytes_that_wait_for_others_are_forgotten_with_the_pair() -> None:
    machine, _ = two_announced_early_and_cleared()
    machine.close(0.0)
    assert machine.holdings() == {"sending": 0, "sending_chunks": 1, "sending_slots": 1}  # the engine writes to one
    assert SendKv not in map(type, machine.on_gathered(KEY, 0, True, 64, 11))
    assert not any(machine.holdings().values())


def test_without_early_announcement_a_chunk_is_announced_when_it_is_gathered() -> None:
    machine = prefilling(announces_early=False)
    machine.on_prefill_computed(KEY, 99)
    assert machine.on_gathered(KEY, 0, True, 64, 11) == [header(0, 4, 12, 11)]
    assert machine.on_gathered(KEY, 1, True, 64, 12) == [
        header(1, 12, 20, 12),
        SendControl(Commit(**NAMED, token_id=99, num_chunks=2)),
    ]


def test_what_was_announced_early_is_sent_though_its_attempt_was_cancelled() -> None:
    """D has posted the receive. Without a checksum it uses nothing of what comes."""
    machine = announced_early()
    machine.on_message(ClearToSend(**NAMED, seq=0, turn=0), 0.0)
    machine.cancel(KEY)
    assert machine.on_message(AbortAck(**ID), 0.0) == []
    assert machine.on_gathered(KEY, 0, False) == [ReleaseSequence(KEY), SendKv(KEY, 0, slot=0, nbytes=64)]
    machine.on_sent(KEY, 0, True)
    machine.on_message(ChunkDone(**NAMED, seq=0, ok=False), 0.0)
    assert not any(machine.holdings().values())


def test_what_was_announced_early_and_cannot_be_gathered_is_sent_and_fails_its_attempt() -> None:
    machine = announced_early()
    machine.on_message(ClearToSend(**NAMED, seq=0, turn=0), 0.0)
    assert machine.on_gathered(KEY, 0, False) == [
        abort(KEY, KV_GONE),
        SendOver(KEY, "failed", KV_GONE, 64, 12),
        ReleaseSequence(KEY),
        SendKv(KEY, 0, slot=0, nbytes=64),
    ]


@pytest.mark.parametrize("cleared", [False, True])
def test_a_promise_dies_with_the_pair(cleared: bool) -> None:
    machine = announced_early()
    if cleared:
        machine.on_message(ClearToSend(**NAMED, seq=0, turn=0), 0.0)
    machine.close(0.0)
    assert machine.holdings()["sending_slots"] == 1  # the engine writes to it
    assert machine.on_gathered(KEY, 0, True, 64, 11) == [ReleaseSequence(KEY)]
    assert not any(machine.holdings().values())


def test_a_promise_that_d_gave_up_frees_its_slot_when_it_is_gathered() -> None:
    machine = announced_early()
    machine.on_message(Abort(**ID, failure=Failure.DEADLINE), 0.0)
    assert machine.holdings() == {"sending": 0, "sending_chunks": 1, "sending_slots": 1}
    assert machine.on_gathered(KEY, 0, True, 64, 11) == [ReleaseSequence(KEY)]
    assert not any(machine.holdings().values())
