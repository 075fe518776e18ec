"""Rank 0's connections to its followers, which the test plays itself."""

from __future__ import annotations

import queue

import pytest

from disagg.engine.parallel.followers import ConnectedFollowers, RankLostError
from disagg.engine.rank_messages import (
    Begin,
    Done,
    Failed,
    Join,
    Posted,
    RankCommand,
    ReceivePart,
    SendPart,
    Step,
    Stop,
)
from disagg.proto.messages import decoder
from tests.support.rank_connections import WAIT_S, MemoryConnection, memory_connections

BEGIN = Begin(num_blocks=10, collective_address="")


class Follower:
    """The other end of a connection."""

    def __init__(self, followers: ConnectedFollowers, rank: int, join: bool = True) -> None:
        connection, self.connection = memory_connections()
        followers.attach(rank, connection)
        if join:
            self.connection.send(Join(rank=rank, pid=100 + rank, fingerprint="fake", num_blocks=10))

    def hear(self) -> RankCommand:
        frame = self.connection.receive()
        assert frame is not None
        command: RankCommand = decoder(RankCommand).decode(frame)
        return command


class Answers:
    """Collects what rank 0's callbacks are called with."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[Done | str] = queue.SimpleQueue()

    def reply(self, done: Done) -> None:
        self.queue.put(done)

    def posted(self) -> None:
        self.queue.put("posted")

    def next(self) -> Done | str:
        return self.queue.get(timeout=WAIT_S)

    def next_done(self) -> Done:
        answer = self.next()
        assert isinstance(answer, Done)
        return answer


def send_part(number: int = 0) -> SendPart:
    return SendPart(call=0, pair_name="pair", buffer=number, buffer_bytes=8, group=0, element_bytes=8)


RECEIVE = ReceivePart(call=0, pair_name="pair", buffer=1, buffer_bytes=8, group=0, element_bytes=8)


class Worker:
    """Followers of rank 0 that have all joined."""

    def __init__(self, size: int = 3) -> None:
        self.lost: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
        self.followers = ConnectedFollowers(size, self.lost.put)
        self.others = [Follower(self.followers, rank) for rank in range(1, size)]
        self.followers.wait_joined(WAIT_S, WAIT_S)

    def why_lost(self) -> str:
        return str(self.lost.get(timeout=WAIT_S))

    def close(self) -> None:
        for other in self.others:
            other.connection.close()
        self.followers.close()
        assert self.lost.empty(), "told of the loss more than once"


def test_joins_come_back_by_rank() -> None:
    followers = ConnectedFollowers(3, print)
    others = [Follower(followers, rank) for rank in (2, 1)]
    assert [(join.rank, join.pid) for join in followers.wait_joined(WAIT_S, WAIT_S)] == [(1, 101), (2, 102)]
    for other in others:
        other.connection.close()
    followers.close()


def test_orders_to_all_reach_all_in_order() -> None:
    worker = Worker()
    step = Step(
        token_ids=b"a" * 8,
        positions=b"b" * 8,
        slot_mapping=b"c" * 8,
        num_decodes=1,
        decode_tables=b"d" * 4,
        table_lens=b"g" * 4,
        table_width=1,
        context_lens=b"e" * 4,
        prefills=((3, 0, b"f" * 4),),
        sample_rows=None,
    )
    for command in (BEGIN, step, BEGIN):
        worker.followers.broadcast(command)
    assert [[other.hear() for _ in range(3)] for other in worker.others] == [[BEGIN, step, BEGIN]] * 2
    worker.close()


def test_answers_reach_who_asked_in_any_order() -> None:
    worker = Worker()
    first, second = Answers(), Answers()
    worker.followers.call(1, send_part(1), first.reply)
    worker.followers.call(1, send_part(2), second.reply)
    commands = [worker.others[0].hear() for _ in range(2)]
    assert [(type(command), getattr(command, "buffer", 0)) for command in commands] == [(SendPart, 1), (SendPart, 2)]
    calls = [command.call for command in commands if isinstance(command, SendPart)]
    for call in reversed(calls):
        worker.others[0].connection.send(Done(call=call, ok=True, checksums=(call, 7)))
    assert second.next() == Done(call=calls[1], ok=True, checksums=(calls[1], 7))
    assert first.next() == Done(call=calls[0], ok=True, checksums=(calls[0], 7))
    worker.close()


def test_posted_comes_before_the_answer_and_only_where_it_was_said() -> None:
    worker = Worker(2)
    said, unsaid = Answers(), Answers()
    worker.followers.call(1, RECEIVE, said.reply, said.posted)
    worker.followers.call(1, RECEIVE, unsaid.reply, unsaid.posted)
    calls = [
        command.call
        for command in (worker.others[0].hear(), worker.others[0].hear())
        if isinstance(command, ReceivePart)
    ]
    for answer in (
        Posted(call=calls[0]),
        Done(call=calls[0], ok=True),
        Done(call=calls[1], ok=False, error="the peer is gone"),
    ):
        worker.others[0].connection.send(answer)
    assert [said.next(), said.next()] == ["posted", Done(call=calls[0], ok=True)]
    assert unsaid.next() == Done(call=calls[1], ok=False, error="the peer is gone")
    worker.close()


# ---------------------------------------------------------------- loss


def end_connection(connection: MemoryConnection) -> None:
    connection.close()


def send(message: Posted | Done | Failed | Join) -> object:
    return lambda connection: connection.send(message)


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (end_connection, "it ended its connection"),
        (send(Failed(error="no memory")), "no memory"),
        (send(Done(call=99, ok=True)), "ValueError: it answers call 99, which was not made"),
        (send(Done(call=1, ok=True)), "ValueError: it answers call 1, which was not made"),
        (send(Posted(call=99)), "ValueError: it answers call 99, which was not made"),
        (send(Join(rank=2, pid=1, fingerprint="", num_blocks=1)), "ValueError: it joined as rank 2, or twice"),
        (lambda connection: connection.send_frame(b"\xc1"), "ValidationError: .*|DecodeError: .*"),
    ],
    ids=["end", "failed", "unknown-call", "others-call", "unknown-posted", "joins-twice", "no-frame"],
)
def test_a_rank_that_is_lost_or_makes_no_sense_ends_all(act: object, why: str) -> None:
    worker = Worker()
    asked = Answers()
    worker.followers.call(1, send_part(), asked.reply)
    assert callable(act)
    act(worker.others[1].connection)
    done = asked.next_done()
    assert not done.ok
    with pytest.raises(RankLostError, match=f"^rank 2 is lost: ({why})$"):
        raise RankLostError(done.error)
    assert worker.why_lost() == done.error
    assert isinstance(worker.others[0].hear(), SendPart)
    assert worker.others[0].connection.receive() is None  # so that the rank that still lives ends, too
    worker.followers.call(1, send_part(), asked.reply, asked.posted)
    assert asked.next_done().error == done.error
    worker.followers.broadcast(BEGIN)
    worker.close()


def test_a_rank_that_cannot_be_written_to_is_lost() -> None:
    worker = Worker(2)
    asked = Answers()
    worker.others[0].connection.is_closed = True
    worker.followers.call(1, send_part(), asked.reply)
    assert asked.next_done().error == "rank 1 is lost: cannot write: the connection is closed"
    assert worker.why_lost() == "rank 1 is lost: cannot write: the connection is closed"
    worker.close()


def test_what_goes_wrong_before_all_have_joined_is_raised_and_told_to_nobody_else() -> None:
    lost: list[BaseException] = []
    followers = ConnectedFollowers(3, lost.append)
    first, second = Follower(followers, 1), Follower(followers, 2, join=False)
    second.connection.send(Failed(error="no such checkpoint"))
    with pytest.raises(RankLostError, match="rank 2 is lost: no such checkpoint"):
        followers.wait_joined(WAIT_S, WAIT_S)
    assert first.connection.receive() is None
    followers.close()
    assert lost == []


def test_ranks_that_do_not_connect_or_do_not_load_in_time() -> None:
    followers = ConnectedFollowers(4, print)
    with pytest.raises(RankLostError, match="rank 1, 2, 3 has not connected after 0 s"):
        followers.wait_joined(0.0, WAIT_S)
    others = [Follower(followers, rank, join=False) for rank in (1, 2, 3)]
    with pytest.raises(RankLostError, match="rank 1, 2, 3 has not loaded its model after 0 s"):
        followers.wait_joined(WAIT_S, 0.0)
    for other in others:
        other.connection.close()
    followers.close()


def test_stop_is_told_and_what_ends_then_is_not_lost() -> None:
    worker = Worker(2)
    worker.others[0].connection.send(Failed(error="told too late"))
    assert worker.why_lost() == "rank 1 is lost: told too late"
    worker.close()
    calm = Worker(2)
    calm.followers.close(timeout_s=0.0)  # this one is not waited for
    assert calm.others[0].hear() == Stop()
    assert calm.others[0].connection.receive() is None
    calm.followers.close()
    asked = Answers()
    calm.followers.call(1, send_part(), asked.reply)
    assert asked.next_done().error == "the worker stops"
    assert calm.lost.empty()


def test_a_rank_that_comes_when_it_is_over_is_sent_away() -> None:
    worker = Worker(2)
    worker.close()
    late = Follower(worker.followers, 1, join=False)
    assert late.connection.receive() is None
