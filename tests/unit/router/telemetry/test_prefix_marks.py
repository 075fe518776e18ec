"""Marks of prompts."""

from __future__ import annotations

from disagg.proto.ids import BlockHash
from disagg.router.telemetry.prefix_marks import MAX_MARKS, PLACES, marks_in
from disagg.simulator.world.prompts import HashRuns


def hashes(number: int) -> list[BlockHash]:
    return [BlockHash(b"%d" % index) for index in range(1, number + 1)]


def test_marks_are_at_fixed_places_eight_in_each_doubling() -> None:
    assert PLACES[:20] == (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 18, 20, 22, 24)
    assert marks_in([]) == ()
    assert marks_in(hashes(3)) == (b"1", b"2", b"3")
    assert marks_in(hashes(19))[-2:] == (b"16", b"18")


def test_no_prompt_has_more_than_so_many() -> None:
    assert len(marks_in(hashes(6250))) == 84
    assert len(marks_in(hashes(PLACES[-1] + 5))) == MAX_MARKS


def test_blocks_that_share_a_hash_are_read_by_their_index() -> None:
    assert marks_in(HashRuns.of([BlockHash(b"a"), BlockHash(b"b")], [4, 6])) == (b"a",) * 4 + (b"b",) * 2
