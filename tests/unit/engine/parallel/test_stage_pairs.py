"""KV between workers of stages, with ranks as objects of one process, over real byte channels."""

from __future__ import annotations

import itertools
from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.engine.fake_runner import FakeModelRunner, fake_generate
from disagg.engine.kv_transfer.transport import PairTransport, Received, ignore_posted
from disagg.engine.kv_transfer.transports.local import LocalTransport
from disagg.engine.parallel.channels import RankChannels
from disagg.engine.parallel.transport import GroupTransport
from disagg.engine.plan import Buffer, ScheduledSequence, StepPlan, StepResult
from disagg.engine.rank_messages import ReceivePart, ScatterPart, SendPart
from disagg.engine.request import WindowTable
from disagg.engine.sharding.kv_routes import plan_pair
from disagg.engine.sharding.shards import Shard
from disagg.proto.messages import ONE_RANK
from tests.support.engine import VOCAB_SIZE, make_prompt, make_sequence, make_spec
from tests.support.rank_connections import FakeGroup, carry, fake_group
from tests.support.reshard import Answer, Model, Pair, RankedWorker, arrived, fill, pair_of
from tests.support.secret import checksum

PAIRS = [
    ((1, 1), (2, 1)),
    ((2, 2), (1, 2)),
    ((4, 1), (2, 2)),
    ((2, 2), (2, 2)),
    ((1, 4), (3, 1)),
    ((3, 2), (2, 4)),
]
"""(stages, ranks of each) of P and of D."""
LAYERS = 5
WINDOW = 8
PROMPT = make_prompt(70)
TABLE, WINDOW_TABLE = [7, 2, 5, 0, 9], [1, 8, 3, 4, 6]


def worker(model: Model, wide: tuple[int, int], stage_ends: tuple[int, ...] = ()) -> RankedWorker:
    pp, tp = wide
    return RankedWorker(model, tp, pp, stage_ends)


def move(pair: Pair, chunks: list[tuple[range, int]]) -> None:
    """Chunks of cache groups, all at once: a payload is sent when its receive is posted."""
    moving = []
    for tokens, group in chunks:
        source, announced = pair.gather(tokens, group)
        target, got, gone = pair.d.runner.new_staging(pair.nbytes(tokens, group)), Answer(), Answer()
        pair.receiving.of_group(group).recv(target, pair.nbytes(tokens, group), got, got.posted)
        moving.append((tokens, group, source, announced, target, got, gone))
    for tokens, group, source, _, _, got, gone in moving:
        got.wait_posted()
        pair.sending.of_group(group).send(source, pair.nbytes(tokens, group), gone)
    for tokens, group, _, announced, target, got, gone in moving:
        assert gone.result()[:2] == (True, "")
        assert got.result() == (True, "", announced)
        pair.scatter(tokens, target, group)


def assert_arrived(pair: Pair, tokens: range) -> None:
    for runner in pair.d.ranks:
        for group, pages in enumerate(runner._group_pages):
            assert np.array_equal(pages, arrived(runner, tokens, group))


def all_of(model: Model, tokens: list[range]) -> list[tuple[range, int]]:
    """Chunks of all groups, one group after the other in each range."""
    return list(itertools.product(tokens, range(1 + len(model.windows))))


@pytest.mark.parametrize("transport", ["local", pytest.param("shm", marks=pytest.mark.slow)])
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize(("p", "d"), PAIRS)
def test_every_rank_gets_its_layers_and_heads(
    p: tuple[int, int], d: tuple[int, int], heads: int, transport: str
) -> None:
    model = Model(heads=heads, layers=LAYERS, windows=(WINDOW,))
    with pair_of(worker(model, p), worker(model, d), transport) as pair:
        for runner in pair.p.ranks:
            fill(runner)
        move(pair, all_of(model, [range(3, 9), range(9, 10), range(10, 21)]))
        assert_arrived(pair, range(3, 21))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_stages_widths_and_chunks(data: st.DataObject) -> None:
    """Every destination element is written exactly once, from the right source, and no other is touched; groups may
    have no layer on a stage behind the first."""
    heads = data.draw(st.sampled_from([1, 2, 3, 4]))
    model = Model(heads=heads, layers=data.draw(st.integers(2, 4)), windows=data.draw(st.sampled_from([(), (8,)])))
    num_groups = 1 + len(model.windows)
    num_layers = model.layers * num_groups

    def drawn() -> RankedWorker:
        tp = data.draw(st.sampled_from([tp for tp in (1, 2, 3, 4) if heads % tp == 0 or tp % heads == 0]))
        cuts = sorted(data.draw(st.sets(st.integers(num_groups, num_layers - 1), max_size=3)))
        return RankedWorker(model, tp, 1 + len(cuts), (*cuts, num_layers) if cuts else ())

    bounds = sorted(data.draw(st.sets(st.integers(0, 24), min_size=2, max_size=4)))
    with pair_of(drawn(), drawn()) as pair:
        for runner in pair.p.ranks:
            fill(runner)
        move(pair, all_of(model, [range(start, end) for start, end in itertools.pairwise(bounds)]))
        assert_arrived(pair, range(bounds[0], bounds[-1]))


class Counted(PairTransport):
    """A channel whose sent bytes are counted."""

    def __init__(self, inner: PairTransport, add: Any) -> None:
        self._inner, self._add = inner, add

    @property
    def name(self) -> str:
        return self._inner.name

    def send(self, buffer: Buffer, nbytes: int, done: Any) -> None:
        self._add(nbytes)
        self._inner.send(buffer, nbytes, done)

    def recv(self, buffer: Buffer, nbytes: int, done: Received, posted: Any = ignore_posted) -> None:
        self._inner.recv(buffer, nbytes, done, posted)

    def close(self) -> None:
        self._inner.close()


@pytest.mark.parametrize(("p", "d"), PAIRS)
def test_each_rank_sends_what_is_planned_and_no_more(
    p: tuple[int, int], d: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens x 8 bytes of each head of each layer that a rank of D holds, to that rank."""
    sent: Counter[tuple[int, int]] = Counter()
    add = RankChannels._add

    def counted(self: RankChannels, peer: int, channel: PairTransport) -> None:
        key = (self._rank, peer)
        add(self, peer, Counted(channel, lambda nbytes: sent.update({key: nbytes})))

    monkeypatch.setattr(RankChannels, "_add", counted)
    model, tokens = Model(heads=4, layers=LAYERS, windows=(WINDOW,)), range(3, 21)
    with pair_of(worker(model, p), worker(model, d)) as pair:
        move(pair, all_of(model, [tokens]))
        planned: Counter[tuple[int, int]] = Counter()
        for moved in pair.plan.groups:
            for each in moved.slices:
                planned[each.sender, each.receiver] += each.num_elements * 8 * len(tokens)
        if pair.plan.sender.num_ranks > 1 or pair.plan.receiver.num_ranks > 1:
            assert sent == planned
        of_rank: Counter[int] = Counter()
        for (_, receiver), nbytes in planned.items():
            of_rank[receiver] += nbytes
        assert [of_rank[runner.shard.number] for runner in pair.d.ranks] == [
            sum(2 * 4 * len(shifts) * len(tokens) for shifts in runner._shifts_H1) for runner in pair.d.ranks
        ]
        copies = max(1, d[1] // model.heads)
        assert sum(of_rank.values()) == copies * pair.p.layout.bytes_per_token * len(tokens)


def test_a_stage_without_layers_of_a_group_is_told_nothing_of_it() -> None:
    """Model layers alternate between the groups; the last stage has the last one, of the window, only."""
    model = Model(heads=1, layers=2, windows=(WINDOW,))
    with pair_of(worker(model, (3, 1), (2, 3, 4)), worker(model, (3, 1), (2, 3, 4))) as pair:
        for runner in pair.p.ranks:
            fill(runner)
        move(pair, [(range(0, 8), 0), (range(0, 8), 1)])
        assert_arrived(pair, range(0, 8))
        for end, kind in ((pair.p, SendPart), (pair.d, ReceivePart), (pair.d, ScatterPart)):
            told = [(rank, command.group) for rank, command in end.played.asked if isinstance(command, kind)]
            assert told == [(1, 0), (2, 1)]
        assert [len(shifts) for shifts in pair.d.ranks[2]._shifts_H1] == [0, 1]


def test_two_workers_of_one_rank_use_the_plain_channel() -> None:
    with pair_of(worker(Model(heads=1, layers=3), (1, 1)), worker(Model(heads=1, layers=3), (1, 1))) as pair:
        assert isinstance(pair.sending, LocalTransport)
        assert pair.sending.of_group(0) is pair.sending


def test_a_payload_of_each_group_is_of_the_whole_channel() -> None:
    with pair_of(worker(Model(heads=1, layers=2), (2, 1)), worker(Model(heads=1, layers=2), (1, 1))) as pair:
        of_group = pair.sending.of_group(0)
        assert isinstance(pair.sending, GroupTransport)
        assert of_group.name == of_group.of_group(0).name == pair.sending.name
        of_group.close()
        gone = Answer()
        pair.sending.send(pair.p.runner.new_staging(16), 16, gone)
        assert gone.result()[0] is False


def test_a_slice_that_is_spoilt_on_a_later_stage_shows_in_the_checksum() -> None:
    model = Model(heads=1, layers=2)
    with pair_of(worker(model, (2, 1)), worker(model, (1, 1))) as pair:
        tokens = range(0, 8)
        source, announced = pair.gather(tokens)
        pair.p.others[0].staging(source.number, source.nbytes)[5] ^= 0x10
        got, gone = Answer(), Answer()
        pair.receiving.recv(pair.d.runner.new_staging(pair.nbytes(tokens)), pair.nbytes(tokens), got)
        pair.sending.send(source, pair.nbytes(tokens), gone)
        ok, _, found = got.result()
        assert ok
        assert found != announced


# ---------------------------------------------------------------- groups of ranks


def entry(start: int, num_tokens: int, *, samples: bool) -> ScheduledSequence:
    sequence = make_sequence(make_spec("a", PROMPT))
    sequence.block_table = list(TABLE)
    sequence.windows = [WindowTable(list(WINDOW_TABLE), 0, 0, 0, len(WINDOW_TABLE))]
    return ScheduledSequence(sequence, start, num_tokens, samples)


def next_token(runner: Any) -> list[int]:
    """What `runner` samples behind `PROMPT`, whose KV it has: all of it is read back."""
    result: StepResult = runner.run(StepPlan(decodes=(entry(len(PROMPT) - 1, 1, samples=True),)))
    return result.token_ids


def runners(group: FakeGroup) -> list[FakeModelRunner]:
    local: Any = group.runner._local
    return [local, *(rank.runner for rank in group.ranks)]


def wait_for_steps(group: FakeGroup) -> None:
    """A copy is answered behind the steps before it, on every rank."""
    buffer = group.runner.new_staging(1024)
    group.runner.gather(TABLE, 0, 1, buffer, group.runner.shape)


MODEL: dict[str, Any] = {"num_layers": LAYERS, "windows": [(WINDOW, 10)]}


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize(("p", "d"), PAIRS)
def test_the_kv_of_one_group_goes_on_in_another(p: tuple[int, int], d: tuple[int, int], heads: int) -> None:
    """Gathered on all ranks of one, moved slice by slice, scattered on all ranks of the other, and read back there.
    Each rank has what it would have computed."""
    (p_pp, p_tp), (d_pp, d_tp), length = p, d, len(PROMPT)
    with (
        fake_group(p_tp, heads, pp=p_pp, **MODEL) as source,
        fake_group(d_tp, heads, pp=d_pp, **MODEL) as target,
        fake_group(d_tp, heads, pp=d_pp, **MODEL) as computed,
    ):
        source.runner.run(StepPlan(prefills=(entry(0, length, samples=True),)))
        computed.runner.run(StepPlan(prefills=(entry(0, length, samples=True),)))
        wait_for_steps(computed)
        plan = plan_pair(source.runner.layout, source.runner.shape, target.runner.shape)
        for number, moved in enumerate(plan.groups):
            table, nbytes = (TABLE, WINDOW_TABLE)[number], moved.token_bytes * length
            sent, received = source.runner.new_staging(nbytes + 100), target.runner.new_staging(nbytes)
            told = source.runner.gather(table, 0, length, sent[:nbytes], target.runner.shape, number)
            slices = carry(moved, nbytes, partial(source.part, sent), partial(target.part, received))
            assert told == checksum.combined([checksum(each) for each in slices])
            target.runner.scatter(table, 0, length, received[:nbytes], source.runner.shape, number)
        for found, expected in zip(runners(target), runners(computed), strict=True):
            for number, pages in enumerate(found._group_pages):
                slots = found._slots((TABLE, WINDOW_TABLE)[number], 0, length)
                assert np.array_equal(pages[:, :, *slots], expected._group_pages[number][:, :, *slots])
        assert next_token(target.runner) == fake_generate(PROMPT, 1, VOCAB_SIZE, windows=[WINDOW])
    assert source.faults == target.faults == []


def test_another_layer_in_place_of_one_shows() -> None:
    """Layers differ by a shift: a stage that reads back another one's KV samples another token."""
    with fake_group(1, 1, pp=2, num_layers=2) as group:
        group.runner.run(StepPlan(prefills=(entry(0, len(PROMPT), samples=True),)))
        wait_for_steps(group)
        first, second = runners(group)
        assert next_token(first) == next_token(second) == fake_generate(PROMPT, 1, VOCAB_SIZE)
        first._pages_2HNB[...] = second._pages_2HNB
        assert next_token(first) != fake_generate(PROMPT, 1, VOCAB_SIZE)


def test_no_rank_has_a_copy_of_what_another_stage_has() -> None:
    """Bytes of pages, and of the parts of a staging buffer, of all ranks together."""
    whole = FakeModelRunner(10, 16, 4096, VOCAB_SIZE, num_kv_heads=4, num_layers=6)
    with fake_group(2, 4, pp=3, num_layers=6) as group:
        pages = [runner._pages_2HNB.nbytes for runner in runners(group)]
        assert pages == [whole._pages_2HNB.nbytes // 6] * 6
        buffer = group.runner.new_staging(16 * whole.layout.bytes_per_token)
        group.runner.gather(TABLE, 0, 16, buffer, group.runner.shape)
        assert [group.part(buffer, rank).nbytes for rank in range(6)] == [buffer.nbytes // 6] * 6
    with fake_group(1, 4, pp=2, num_layers=6, stage_ends=(4, 6)) as group:
        buffer = group.runner.new_staging(6 * 100)
        assert [group.part(buffer, rank).nbytes for rank in range(2)] == [400, 200]


def test_cleared_staging_is_zero_on_all_stages() -> None:
    with fake_group(1, 1, pp=2, num_layers=3) as group:
        buffer = group.runner.new_staging(16 * group.runner.layout.bytes_per_token)
        buffer[:] = 0
        group.runner.run(StepPlan(prefills=(entry(0, len(PROMPT), samples=False),)))
        group.runner.scatter(TABLE, 0, 16, buffer)
        for runner in runners(group):
            assert not runner._pages_2HNB[:, :, TABLE[0]].any()
            assert runner._pages_2HNB[:, :, TABLE[1]].any()


# ---------------------------------------------------------------- the fake model


def test_the_fake_model_refuses_stages_that_cannot_read_back() -> None:
    with pytest.raises(ValueError, match="the first stage of the fake model has no layer of some cache group"):
        FakeModelRunner(4, 16, 64, num_layers=2, windows=[(8, 4)], shard=Shard(0, 1, 0, 2), stage_ends=(1, 4))
    with pytest.raises(ValueError, match=r"the fake model has stages up to layers \[0, 1\]"):
        FakeModelRunner(4, 16, 64, shard=Shard(0, 1, 1, 2))
    with pytest.raises(ValueError, match="num_layers must be positive, not 0"):
        FakeModelRunner(4, 16, 64, num_layers=0)


def test_the_fake_model_of_one_layer_is_what_it_was() -> None:
    runner = FakeModelRunner(4, 16, 64, windows=[(8, 4)])
    assert [(group.layers, group.bytes_per_token) for group in runner.layout.groups] == [((0,), 8), ((1,), 8)]
    assert runner.shape == ONE_RANK
