"""KV between workers of different width, with ranks as objects of one process."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.engine.kv_transfer.transport import PairTransport, TransportError
from disagg.engine.kv_transfer.transports.factory import make_connector
from disagg.engine.kv_transfer.transports.local import LocalRendezvous, LocalTransport
from disagg.engine.parallel.channels import CLOSED, AllOf, RankChannels
from disagg.engine.parallel.interfaces import Reply
from disagg.engine.parallel.staging import GroupBuffer
from disagg.engine.parallel.transport import GroupTransport, ShardTransports, form_pair
from disagg.engine.rank_messages import ClosePair, Done, OpenPair, RankCall, ReceivePart, SendPart
from disagg.engine.sharding.kv_routes import plan_pair
from disagg.engine.sharding.shards import Shard
from disagg.proto.messages import ONE_RANK, ParallelShape
from tests.support.reshard import (
    HOST,
    WAIT_S,
    Answer,
    Model,
    Pair,
    RankedWorker,
    arrived,
    fake_rank,
    formed_pair,
)
from tests.support.secret import SECRET

WIDTHS = [(1, 1), (1, 2), (2, 1), (2, 2), (4, 2), (2, 4)]


def move(pair: Pair, chunks: list[range], group: int = 0) -> None:
    """All chunks at once, as a link does: a payload is sent when its receive is posted."""
    sources = [pair.gather(tokens, group) for tokens in chunks]
    targets = [pair.d.runner.new_staging(pair.nbytes(tokens, group)) for tokens in chunks]
    received, sent = [Answer() for _ in chunks], [Answer() for _ in chunks]
    for tokens, target, answer in zip(chunks, targets, received, strict=True):
        pair.receiving.of_group(group).recv(target, pair.nbytes(tokens, group), answer, answer.posted)
    for tokens, (source, _), got, gone in zip(chunks, sources, received, sent, strict=True):
        got.wait_posted()
        pair.sending.of_group(group).send(source, pair.nbytes(tokens, group), gone)
    for tokens, (_, checksum), target, got, gone in zip(chunks, sources, targets, received, sent, strict=True):
        assert gone.result()[:2] == (True, "")
        assert got.result() == (True, "", checksum)
        pair.scatter(tokens, target, group)


def assert_arrived(pair: Pair, tokens: range, group: int = 0) -> None:
    for runner in pair.d.ranks:
        assert np.array_equal(runner._group_pages[group], arrived(runner, tokens, group))


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize(("p_tp", "d_tp"), WIDTHS)
def test_every_rank_gets_the_bytes_of_its_heads(p_tp: int, d_tp: int, num_kv_heads: int) -> None:
    with formed_pair(num_kv_heads, p_tp, d_tp) as pair:
        move(pair, [range(3, 9), range(9, 10), range(10, 21)])
        assert_arrived(pair, range(3, 21))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_widths_heads_and_chunks(data: st.DataObject) -> None:
    """Every destination element is written exactly once, from the right source, and no other is touched."""
    heads = data.draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    fits = st.sampled_from([tp for tp in (1, 2, 3, 4, 6, 8) if heads % tp == 0 or tp % heads == 0])
    cuts = sorted(data.draw(st.sets(st.integers(0, 24), min_size=2, max_size=5)))
    with formed_pair(heads, data.draw(fits), data.draw(fits)) as pair:
        move(pair, [range(start, end) for start, end in itertools.pairwise(cuts)])
        assert_arrived(pair, range(cuts[0], cuts[-1]))


def test_two_workers_of_one_rank_use_the_plain_channel() -> None:
    with formed_pair(4, 1, 1) as pair:
        assert isinstance(pair.sending, LocalTransport)
        assert isinstance(pair.receiving, LocalTransport)


def test_only_ranks_with_slices_are_asked() -> None:
    with formed_pair(1, 4, 1) as pair:  # every rank of P holds the one head; rank 0 sends it
        move(pair, [range(0, 8)])
        assert [
            command for _, command in pair.p.played.asked if isinstance(command, OpenPair | SendPart | ClosePair)
        ] == []


@pytest.mark.parametrize(("p_tp", "d_tp"), WIDTHS)
def test_a_chunk_that_was_announced_is_sent_though_its_gather_was_refused(p_tp: int, d_tp: int) -> None:
    """The sequence ended meanwhile: D waits for bytes all the same, and no rank has a part of that buffer yet."""
    with formed_pair(4, p_tp, d_tp) as pair:
        nbytes = pair.nbytes(range(1))
        got, gone = Answer(), Answer()
        pair.receiving.recv(pair.d.runner.new_staging(nbytes), nbytes, got, got.posted)
        got.wait_posted()
        pair.sending.send(pair.p.runner.new_staging(nbytes), nbytes, gone)
        assert gone.result()[:2] == (True, "")
        assert got.result()[:2] == (True, "")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_slice_that_is_spoilt_on_one_rank_shows_in_the_checksum(rank: int) -> None:
    with formed_pair(4, 2, 2) as pair:
        tokens = range(0, 8)
        source, announced = pair.gather(tokens)
        assert isinstance(source, GroupBuffer)
        part = source.local if rank == 0 else pair.p.others[0].staging(source.number, source.nbytes)
        part[5] ^= 0x10
        got, gone = Answer(), Answer()
        pair.receiving.recv(pair.d.runner.new_staging(pair.nbytes(tokens)), pair.nbytes(tokens), got)
        pair.sending.send(source, pair.nbytes(tokens), gone)
        ok, _, checksum = got.result()
        assert ok
        assert checksum != announced


# ---------------------------------------------------------------- ends


@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 2), (2, 1), (2, 2)])
def test_close_answers_all_that_is_under_way_on_both_sides(p_tp: int, d_tp: int) -> None:
    with formed_pair(4, p_tp, d_tp) as pair:
        tokens = range(0, 4)
        answers = [Answer() for _ in range(3)]
        for answer in answers:
            pair.receiving.recv(pair.d.runner.new_staging(pair.nbytes(tokens)), pair.nbytes(tokens), answer)
        pair.receiving.close()
        assert [answer.results[0][0] for answer in answers] == [False] * 3  # before close returned
        late = Answer()
        pair.receiving.recv(pair.d.runner.new_staging(pair.nbytes(tokens)), pair.nbytes(tokens), late, late.posted)
        assert late.result()[0] is False
        gone = Answer()
        source, _ = pair.gather(tokens)
        pair.sending.send(source, pair.nbytes(tokens), gone)
        assert gone.result()[0] is False
        pair.receiving.close()


@pytest.mark.parametrize("victim", [0, 1])
def test_one_broken_channel_ends_the_pair_on_all_ranks(victim: int) -> None:
    """Rank `victim` of P loses its channel; the other rank's bytes would never be wanted."""
    with formed_pair(4, 2, 2) as pair:
        tokens = range(0, 4)
        got, next_got = Answer(), Answer()
        for answer in (got, next_got):
            pair.receiving.recv(pair.d.runner.new_staging(pair.nbytes(tokens)), pair.nbytes(tokens), answer)
        assert isinstance(pair.sending, GroupTransport)
        channels = pair.sending._channels if victim == 0 else pair.p.others[0].transports._pairs["pair"].channels
        channels._channels[victim].close()
        assert got.result()[0] is False
        assert next_got.result()[0] is False
        gone = Answer()
        source, _ = pair.gather(tokens)
        pair.sending.send(source, pair.nbytes(tokens), gone)
        assert gone.result()[0] is False


def test_a_pair_whose_peer_does_not_come_leaves_nothing() -> None:
    p, d = RankedWorker(Model(heads=4), 2), RankedWorker(Model(heads=4), 2)
    pair = Pair(p, d, LocalRendezvous(SECRET))
    errors: list[str] = []

    def form() -> None:
        try:
            pair.form_d()
        except TransportError as error:
            errors.append(str(error))

    thread = threading.Thread(target=form)
    thread.start()
    while len(pair.rendezvous._meetings) < 2:  # type: ignore[attr-defined]  # both ranks wait
        pass
    pair.rendezvous.close()
    thread.join(WAIT_S)
    assert "did not come" in errors[0]
    d.close()


def test_a_rank_that_cannot_form_its_channel_fails_the_pair() -> None:
    """Rank 1 of P finds no rendezvous; rank 0's channel, which stands, is closed again."""
    p, d = RankedWorker(Model(heads=4), 2), RankedWorker(Model(heads=4), 2)
    pair = Pair(p, d, LocalRendezvous(SECRET))
    made: list[PairTransport] = []
    thread = threading.Thread(target=lambda: made.append(pair.rendezvous.accept("pair/0-0")))
    thread.start()
    connect, address = make_connector("local", HOST, SECRET), pair.rendezvous.address
    lost = Pair(p, d, LocalRendezvous(SECRET))
    lost.rendezvous.close()
    with pytest.raises(TransportError, match=r"could not form the pair 'pair': rank 1: no rendezvous"):
        form_pair(lost.end("sender"), lambda name: connect(name, address), p.followers)
    thread.join(WAIT_S)
    gone = Answer()
    while not gone.results:  # rank 0's channel is closed on a thread of its own
        gone = Answer()
        made[0].recv(np.zeros(1, np.uint8), 1, gone)
    p.close()


# ---------------------------------------------------------------- rank 0, with followers that the test plays


class Asked:
    """A `Followers` of which the test gives the answers."""

    size = 3

    def __init__(self) -> None:
        self.open: list[tuple[int, RankCall, Reply, Callable[[], None] | None]] = []

    def broadcast(self, command: object) -> None:
        raise AssertionError(command)

    def call(self, rank: int, command: RankCall, reply: Reply, on_posted: Callable[[], None] | None = None) -> None:
        self.open.append((rank, command, reply, on_posted))

    def answer(self, rank: int, *, ok: bool = True, checksums: tuple[int, ...] = ()) -> None:
        index = next(i for i, (asked, *_) in enumerate(self.open) if asked == rank)
        _, _, reply, _ = self.open.pop(index)
        reply(Done(call=1, ok=ok, error="" if ok else "broken", checksums=checksums))

    def post(self, rank: int) -> None:
        on_posted = next(posted for asked, _, _, posted in self.open if asked == rank)
        assert on_posted is not None
        on_posted()


class Leader:
    """Rank 0 of a D of three ranks; P's rank 0, which has all three heads, is the test."""

    def __init__(self) -> None:
        self.worker = RankedWorker(Model(heads=3), 1)
        self.followers = Asked()
        pair = Pair(self.worker, RankedWorker(Model(heads=3), 3), LocalRendezvous(SECRET))
        self.transport = GroupTransport(pair.end("receiver"), pair.rendezvous.accept, self.followers)
        self.peer: list[PairTransport] = []
        connect = make_connector("local", HOST, SECRET)
        thread = threading.Thread(target=lambda: self.peer.append(connect("pair/0-0", pair.rendezvous.address)))
        thread.start()
        opening = threading.Thread(target=self.transport.open)
        opening.start()
        thread.join(WAIT_S)
        assert opening.is_alive()  # the other ranks have not answered
        assert [(rank, type(command)) for rank, command, *_ in self.followers.open] == [(1, OpenPair), (2, OpenPair)]
        self.followers.answer(2)
        self.followers.answer(1)
        opening.join(WAIT_S)
        assert not opening.is_alive()
        self.buffer = GroupBuffer(7, np.zeros(8, np.uint8), 24)

    def receive(self) -> Answer:
        answer = Answer()
        self.transport.recv(self.buffer, 24, answer, answer.posted)
        return answer

    def send_own_slice(self) -> None:
        self.peer[0].send(np.arange(8, dtype=np.uint8), 8, lambda ok, error: None)

    def close(self) -> None:
        thread = threading.Thread(target=self.transport.close)
        thread.start()
        while not [command for _, command, *_ in self.followers.open if isinstance(command, ClosePair)]:
            pass
        for rank in (1, 2):
            self.followers.answer(rank)
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_the_peer_may_send_when_the_last_rank_has_posted() -> None:
    leader = Leader()
    answer = leader.receive()
    assert [command.element_bytes for _, command, *_ in leader.followers.open if isinstance(command, ReceivePart)] == [
        8,
        8,
    ]
    posted = [answer.was_posted]
    for rank in (2, 1):
        leader.followers.post(rank)
        posted.append(answer.was_posted)
    assert posted == [False, False, True]
    leader.send_own_slice()
    leader.followers.answer(1, checksums=(1,))
    assert not answer.results
    leader.followers.answer(2, checksums=(2,))
    assert answer.result()[0] is True
    leader.close()


def test_a_rank_that_fails_closes_the_pair_and_the_rest_is_waited_for() -> None:
    leader = Leader()
    answer = leader.receive()
    leader.followers.answer(1, ok=False)
    while len(leader.followers.open) < 3:  # both are told to close; rank 2's receive is still open
        pass
    assert not answer.results  # rank 2 may still write to its part
    leader.followers.answer(2, ok=False)
    assert answer.result() == (False, "rank 1: broken", 0)
    leader.close()


def test_a_rank_that_gives_no_checksum_fails_the_receive() -> None:
    leader = Leader()
    answer = leader.receive()
    for rank in (1, 2):
        leader.followers.post(rank)
    leader.send_own_slice()
    leader.followers.answer(1, checksums=(1,))
    leader.followers.answer(2)
    assert answer.result() == (False, "2 checksums for 3 slices", 0)
    leader.close()


# ---------------------------------------------------------------- a follower, with a rank 0 that the test plays


class Told:
    """A `ShardTransports`, and its answers in order."""

    def __init__(self) -> None:
        runner = fake_rank(Model(heads=2), Shard(1, 2))
        self.buffers = {3: np.zeros(8, np.uint8)}
        self.transports = ShardTransports(
            HOST, runner.layout, runner.shape, runner.shard, lambda number, _: self.buffers[number], SECRET
        )
        self.rendezvous = LocalRendezvous(SECRET)
        self.answers: list[tuple[int, bool]] = []
        self.posted: list[int] = []
        self._changed = threading.Condition()

    def handle(self, command: OpenPair | SendPart | ReceivePart | ClosePair) -> None:
        self.transports.handle(command, self._reply, lambda: self.posted.append(command.call))

    def _reply(self, done: Done) -> None:
        with self._changed:
            self.answers.append((done.call, done.ok))
            self._changed.notify()

    def wait(self, count: int) -> list[tuple[int, bool]]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.answers) >= count, WAIT_S)
        return self.answers

    def open_order(self, call: int) -> OpenPair:
        return OpenPair(
            call=call,
            pair_name="pair",
            side="receiver",
            peer=ONE_RANK,
            transport="local",
            store_address=self.rendezvous.address,
        )


RECEIVE = ReceivePart(call=2, pair_name="pair", buffer=3, buffer_bytes=8, group=0, element_bytes=8)
CLOSE = ClosePair(call=9, pair_name="pair")


def test_a_follower_answers_what_is_under_way_before_the_close() -> None:
    told = Told()
    told.handle(told.open_order(1))
    peer = make_connector("local", HOST, SECRET)("pair/0-1", told.rendezvous.address)
    assert told.wait(1) == [(1, True)]
    told.handle(RECEIVE)
    assert told.posted == [2]
    told.handle(CLOSE)
    assert told.wait(3) == [(1, True), (2, False), (9, True)]
    gone = Answer()
    peer.send(np.zeros(8, np.uint8), 8, gone)
    assert gone.result()[0] is False
    told.handle(ReceivePart(call=10, pair_name="pair", buffer=3, buffer_bytes=8, group=0, element_bytes=8))
    told.handle(SendPart(call=11, pair_name="pair", buffer=3, buffer_bytes=8, group=0, element_bytes=8))
    told.handle(ClosePair(call=12, pair_name="pair"))
    assert told.wait(6)[3:] == [(10, False), (11, False), (12, True)]
    assert told.posted == [2]


def test_a_pair_that_is_closed_while_it_is_formed_answers_that_first() -> None:
    told = Told()
    told.handle(told.open_order(1))
    while not told.rendezvous._meetings:
        pass
    told.handle(CLOSE)
    assert told.wait(2) == [(1, False), (9, True)]
    late = make_connector("local", HOST, SECRET)("pair/0-1", told.rendezvous.address)
    gone = Answer()
    while not gone.results:  # what was formed for nobody is closed
        gone = Answer()
        late.recv(np.zeros(1, np.uint8), 1, gone)
    assert told.answers == [(1, False), (9, True)]


def test_orders_that_rank_0_must_not_give_are_errors_of_ours() -> None:
    told = Told()
    told.handle(told.open_order(1))
    with pytest.raises(ValueError, match="opened before"):
        told.handle(told.open_order(2))
    make_connector("local", HOST, SECRET)("pair/0-1", told.rendezvous.address)
    assert told.wait(1) == [(1, True)]
    with pytest.raises(ValueError, match="a payload has 16 bytes on rank 1, the part has 8"):
        told.handle(ReceivePart(call=3, pair_name="pair", buffer=3, buffer_bytes=8, group=0, element_bytes=16))
    told.transports.close()
    told.transports.close()


def test_closing_all_pairs_answers_for_those_that_are_being_formed() -> None:
    told = Told()
    told.handle(told.open_order(1))
    while not told.rendezvous._meetings:
        pass
    told.transports.close()
    assert told.wait(1) == [(1, False)]
    told.rendezvous.close()


# ---------------------------------------------------------------- several as one


def test_several_operations_are_posted_and_over_as_one() -> None:
    said: list[object] = []
    whole = AllOf(
        2,
        lambda ok, error, checksums: said.append((ok, error, checksums)),
        lambda: said.append("posted"),
        lambda: said.append("failed"),
    )
    whole.one_posted()
    whole.one_over(1, True, "", (5,))
    assert said == []
    whole.one_posted()
    assert said == ["posted"]
    whole.one_over(0, False, "torn")
    assert said == ["posted", "failed", (False, "torn", [(), (5,)])]


def test_the_first_error_is_told() -> None:
    said: list[object] = []
    whole = AllOf(3, lambda ok, error, _: said.append((ok, error)), lambda: None, lambda: said.append("failed"))
    for index, error in enumerate(("first", "second", "third")):
        whole.one_over(index, False, error)
    assert said == ["failed", (False, "first")]


def test_nothing_to_do_is_done() -> None:
    plan = plan_pair(fake_rank(Model(heads=1), Shard()).layout, ParallelShape(tp=4), ONE_RANK)
    channels = RankChannels(plan, "sender", 3, "pair", lambda name: pytest.fail(name))
    channels.open()
    said: list[object] = []
    channels.send(np.zeros(0, np.uint8), 0, 5, lambda *answer: said.append(answer))
    assert said == [(True, "", ())]
    channels.close()
    channels.send(np.zeros(0, np.uint8), 0, 5, lambda *answer: said.append(answer))
    assert said[1:] == [(True, "", ())]


def test_channels_that_are_closed_answer_at_once() -> None:
    plan = plan_pair(fake_rank(Model(heads=2), Shard()).layout, ParallelShape(tp=2), ONE_RANK)
    channels = RankChannels(plan, "sender", 0, "pair", lambda name: pytest.fail(name))
    channels.close()
    said: list[object] = []
    channels.send(np.zeros(8, np.uint8), 0, 8, lambda *answer: said.append(answer))
    assert said == [(False, CLOSED, ())]
