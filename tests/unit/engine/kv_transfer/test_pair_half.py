"""Slots, leases, memories, tables and checksums."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from disagg.engine.kv_transfer.pair_half import ExpiringSet, PairClock, PeerError, SlotPool, Table, TransitionError
from disagg.engine.kv_transfer.transport import UNKEYED
from disagg.proto.ids import AttemptKey, RequestId


def key(name: str) -> AttemptKey:
    return AttemptKey(RequestId(name), 0)


def test_slots_are_taken_and_given_back() -> None:
    pool = SlotPool(2)
    first, second = pool.take(), pool.take()
    assert ({first, second}, pool.num_free, pool.num_busy) == ({0, 1}, 0, 2)
    pool.give_back(second)
    assert (pool.num_free, pool.num_busy) == (1, 1)
    assert pool.take() == second


def test_a_slot_cannot_be_given_back_twice() -> None:
    pool = SlotPool(1)
    slot = pool.take()
    pool.give_back(slot)
    with pytest.raises(AssertionError, match="twice"):
        pool.give_back(slot)


def test_a_pair_needs_a_slot() -> None:
    with pytest.raises(ValueError, match="slot"):
        SlotPool(0)


def test_silence_counts_from_the_last_message() -> None:
    clock = PairClock(10.0, lease_timeout_s=5.0, heartbeat_s=0.5)
    for now in (11.0, 12.0, 13.0):
        clock.tick(now)
    assert clock.silence_s == 3.0
    clock.heard(13.5)
    clock.tick(14.0)
    assert clock.silence_s == 0.5


def test_a_late_tick_is_our_own_stall_and_not_the_peers_silence() -> None:
    clock = PairClock(0.0, lease_timeout_s=5.0, heartbeat_s=0.5)
    clock.tick(9.0)
    assert clock.silence_s == 0.0
    clock.tick(11.0)
    assert clock.silence_s == 2.0


def test_time_never_goes_back() -> None:
    clock = PairClock(0.0, lease_timeout_s=5.0, heartbeat_s=0.5)
    clock.heard(3.0)
    clock.advance(1.0)
    assert (clock.now, clock.silence_s) == (3.0, 0.0)


def test_beats_follow_jittering_ticks() -> None:
    clock = PairClock(0.0, lease_timeout_s=5.0, heartbeat_s=0.5)
    assert [clock.tick(now) for now in (0.1, 0.3, 0.49, 0.6, 1.0, 1.1, 1.6)] == [
        False,
        False,
        True,
        False,
        True,
        False,
        True,
    ]


def test_memories_fade_by_time() -> None:
    memory = ExpiringSet(ttl_s=10.0, max_keys=9)
    memory.add(key("a"), 0.0)
    memory.add(key("b"), 5.0)
    memory.add(key("a"), 6.0)
    memory.expire(15.1)
    assert (key("a") in memory, key("b") in memory, len(memory)) == (True, False, 1)
    memory.expire(16.1)
    assert len(memory) == 0


def test_memories_are_bounded_and_the_oldest_goes() -> None:
    memory = ExpiringSet(ttl_s=10.0, max_keys=2)
    for name in "abc":
        memory.add(key(name), 0.0)
    assert [key(name) in memory for name in "abc"] == [False, True, True]
    memory.discard(key("b"))
    memory.discard(key("b"))
    assert len(memory) == 1


def test_unlisted_transitions_blame_who_caused_them() -> None:
    table = Table({("a", "go"): "b"})
    assert (table.next("a", "go"), table.next_from_peer("a", "go")) == ("b", "b")
    with pytest.raises(TransitionError, match="go in b"):
        table.next("b", "go")
    with pytest.raises(PeerError, match="go in b"):
        table.next_from_peer("b", "go")


def test_checksum_is_xxh3_64_of_array_view_and_tensor() -> None:
    payload = np.frombuffer(b"canonical order", dtype=np.uint8)
    padded = np.concatenate([payload, payload])
    # The published value for an empty input.
    assert UNKEYED(np.zeros(0, np.uint8)) == 0x2D06800538D394C2
    assert UNKEYED(payload) == UNKEYED(padded[: len(payload)]) == UNKEYED(torch.from_numpy(payload.copy()))
    assert UNKEYED(payload) != UNKEYED(padded)
