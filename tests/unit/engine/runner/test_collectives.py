"""Sends and receives between stages over a process group that is played."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from disagg.engine.runner.collectives import Alone, GroupCollective, Lane, receivers, senders
from disagg.engine.sharding.shards import Shard


class PlayedWork:
    """An operation that is over once it was waited for."""

    def __init__(self, log: list[Any], what: str, number: int) -> None:
        self._log, self._what = log, (what, number)

    def wait(self) -> None:
        self._log.append(("wait", *self._what))


class PlayedGroup:
    def __init__(self) -> None:
        self.log: list[Any] = []
        self._number = 0

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> PlayedWork:
        (tensor,) = tensors
        assert tensor.is_contiguous()
        self._number += 1
        self.log.append(("send", self._number, to, tag))
        return PlayedWork(self.log, "send", self._number)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> PlayedWork:
        self._number += 1
        self.log.append(("receive", self._number, source, tag))
        tensors[0].fill_(float(source))
        return PlayedWork(self.log, "receive", self._number)


def played(shard: Shard) -> tuple[GroupCollective, PlayedGroup]:
    group = PlayedGroup()
    return GroupCollective(shard, None, {"rows": group, "results": group}, ()), group


def test_one_more_send_than_there_are_stages_waits_for_the_oldest() -> None:
    """Of those to one rank on one lane; until then their tensors are kept."""
    collective, group = played(Shard(0, 1, 1, 3))
    kept = []
    for _ in range(3):
        tensor = torch.ones(2, 3)
        kept.append(weakref.ref(tensor))
        collective.send(tensor, 2, "rows")
    collective.send(torch.ones(3, 2).t(), 0, "results")
    del tensor
    gc.collect()
    assert group.log == [("send", 1, 2, 1), ("send", 2, 2, 1), ("send", 3, 2, 1), ("send", 4, 0, 2)]
    assert all(each() is not None for each in kept)
    collective.send(torch.ones(1), 2, "rows")
    gc.collect()
    assert group.log[4:] == [("wait", "send", 1), ("send", 5, 2, 1)]
    assert [each() is not None for each in kept] == [False, True, True]


def test_receives_are_posted_and_waited_for_when_they_are_needed() -> None:
    collective, group = played(Shard(0, 1, 0, 3))
    first, second = (collective.receive(torch.zeros(2), 2, "results") for _ in range(2))
    assert group.log == [("receive", 1, 2, 2), ("receive", 2, 2, 2)]
    assert first.wait().tolist() == second.wait().tolist() == [2.0, 2.0]
    assert group.log[2:] == [("wait", "receive", 1), ("wait", "receive", 2)]


def test_a_rank_that_has_left_neither_sends_nor_receives() -> None:
    collective, _ = played(Shard(0, 1, 0, 2))
    collective.close()
    for act in (collective.send, collective.receive):
        with pytest.raises(RuntimeError, match=r"^this rank has left the exchange$"):
            act(torch.ones(1), 1, "rows")


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 2), (2, 3)])
def test_whoever_sends_has_a_receiver(tp: int, pp: int) -> None:
    shards = [Shard.of_number(number, tp, pp) for number in range(tp * pp)]
    lanes: tuple[Lane, ...] = ("rows", "results")
    for lane in lanes:
        sent = {(shard.number, to) for shard in shards for to in receivers(shard, lane)}
        assert sent == {(source, shard.number) for shard in shards for source in senders(shard, lane)}
    rows = {(shard.number, to) for shard in shards for to in receivers(shard, "rows")}
    assert rows == {(number, number + tp) for number in range(tp * (pp - 1))}
    assert senders(shards[0], "results") == tuple(range(tp * (pp - 1), tp * pp))


def test_a_rank_that_measures_gets_rows_from_nobody() -> None:
    alone = Alone(Shard(0, 1, 1, 2))
    alone.send(torch.ones(2), 0, "results")
    assert alone.receive(torch.full((2,), float("nan")), 0, "rows").wait().tolist() == [0.0, 0.0]
