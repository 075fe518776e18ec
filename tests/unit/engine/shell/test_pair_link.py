"""What the links of both roles have in common: which attempt is whose, which pairs are closed, what is held."""

from __future__ import annotations

from typing import Any

import pytest

from disagg.engine.kv_transfer.pair_shell import ReceiverShell
from disagg.engine.kv_transfer.receiver import Receiver
from disagg.engine.shell.pair_link import LinkTable, PairLink, surplus_links, total_holdings
from disagg.proto.ids import WorkerId
from tests.support.pair import ONE_GROUP
from tests.support.pair_ends import RecordedIo
from tests.support.roles import PlayedContext, key_of

A = key_of("a")


class PlayedLink(PairLink):
    """A link of a receiver at rest; the test sets what it copies, and since when it is unused."""

    def __init__(self, name: str = "p", *, used_at: float = 0.0, **held: int) -> None:
        super().__init__(PlayedContext("d", "decode"), WorkerId(name))
        half = Receiver(0.0, groups=ONE_GROUP, max_chunk_bytes=80, credits=1, num_slots=2)
        self.shell = self._shell = ReceiverShell(half, RecordedIo())
        self.used_at = used_at
        self.held = held

    def holdings(self) -> dict[str, int]:
        return self.held

    def begin_copy(self, seq: int) -> None:
        self.shell._copies[A, seq] = 8

    def end_copy(self, seq: int) -> None:
        del self.shell._copies[A, seq]


@pytest.mark.parametrize("copy_ends_first", [False, True])
async def test_an_attempt_has_a_link_until_it_is_decided_and_copied(copy_ends_first: bool) -> None:
    table, link = LinkTable[PlayedLink](), PlayedLink()
    table.add(A, link)
    link.begin_copy(0)
    assert (table.get(A), table.get(key_of("b")), link.is_copying(key_of("b"))) == (link, None, False)

    def end_copy() -> None:
        link.end_copy(0)
        table.copied(A)

    steps: list[Any] = [lambda: table.decided(A), end_copy]
    first, second = reversed(steps) if copy_ends_first else steps
    first()
    assert A in table
    second()
    assert A not in table
    table.decided(A)  # idempotent
    assert table.get(A) is None


async def test_idle_links_that_were_not_used_for_longest_make_room() -> None:
    old, older, busy, copying = (
        PlayedLink(used_at=3.0),
        PlayedLink(used_at=2.0),
        PlayedLink(used_at=0.0, sending=1),
        PlayedLink(used_at=1.0),
    )
    copying.begin_copy(0)
    links = [old, older, busy, copying]
    assert surplus_links(links, 5) == []
    assert surplus_links(links, 4) == [older]
    assert surplus_links(links, 1) == [older, old]  # the others are in use


async def test_holdings_add_up() -> None:
    links = [PlayedLink(sending=1, slots=0), PlayedLink(sending=2)]
    assert total_holdings({"attempts": 4, "sending": 0}, links) == {"attempts": 4, "sending": 3, "slots": 0}
