"""The slots of host memory, and the copies between them and the cache."""

from __future__ import annotations

import pytest

from disagg.engine.blocks.swap import Piece, SwapIn, SwapOut, Swapper, SwapPool, slot_tokens_for, swap_pool
from disagg.engine.fake_runner import FakeModelRunner
from disagg.engine.request import SequenceState, WindowTable
from disagg.engine.sharding.shards import Shard
from tests.support.engine import VOCAB_SIZE, key_of, kv_of, make_prompt, make_sequence, make_spec, new_buffer


@pytest.mark.parametrize(("block_size", "slot_tokens"), [(16, 128), (48, 96), (64, 128), (128, 128), (256, 256)])
def test_a_slot_is_whole_blocks(block_size: int, slot_tokens: int) -> None:
    assert slot_tokens_for(block_size) == slot_tokens


class TestSwapPool:
    def test_a_sequence_takes_as_many_slots_as_it_needs(self) -> None:
        pool = SwapPool(4, 32, 100)
        assert pool.keep(key_of("a"), 65) == (Piece(0, 0, 32), Piece(1, 32, 64), Piece(2, 64, 65))
        assert (pool.num_kept, pool.num_bytes) == (1, 300)
        assert pool.keep(key_of("b"), 33) == ()
        assert pool.keep(key_of("b"), 32) == (Piece(3, 0, 32),)
        assert pool.keep(key_of("c"), 1) == ()
        assert pool.check_integrity({key_of("a"): 65, key_of("b"): 32}) == []

    def test_slots_that_were_used_are_used_again_before_new_ones(self) -> None:
        pool = SwapPool(10, 16, 1)
        pool.keep(key_of("a"), 32)
        pool.keep(key_of("b"), 16)
        pool.free_slots(key_of("a"))
        pool.free_slots(key_of("a"))
        assert [piece.slot for piece in pool.keep(key_of("c"), 48)] == [0, 1, 3]
        assert pool.check_integrity({key_of("b"): 16, key_of("c"): 48}) == []

    def test_a_part_can_be_asked_for(self) -> None:
        pool = SwapPool(4, 32, 1)
        pieces = pool.keep(key_of("a"), 70)
        assert [pool.pieces(key_of("a"), start) for start in (0, 32, 64, 80)] == [pieces, pieces[1:], pieces[2:], ()]

    def test_nothing_to_keep_takes_nothing(self) -> None:
        pool = SwapPool(4, 32, 1)
        assert pool.keep(key_of("a"), 0) == ()
        assert pool.check_integrity({}) == []

    def test_integrity_findings(self) -> None:
        pool = SwapPool(4, 32, 1)
        pool.keep(key_of("a"), 70)
        assert pool.check_integrity({}) == ["host memory is kept for other sequences than the suspended ones"]
        pool._free.append(1)
        pool.num_slots = 2
        assert pool.check_integrity({key_of("a"): 70}) == [
            "of 3 slots of host memory some are lost or used twice",
            "3 slots of host memory were made, 2 are allowed",
        ]


class TestWindows:
    def test_of_a_window_what_is_left_is_kept_in_slots_of_equal_bytes(self) -> None:
        pool = SwapPool(9, 64, 1, window_tokens=(32, 16))
        pieces = pool.keep(key_of("a"), 100, (48, 90))
        assert pieces == (
            Piece(0, 0, 64),
            Piece(1, 64, 100),
            Piece(2, 48, 80, 1),
            Piece(3, 80, 100, 1),
            Piece(4, 90, 100, 2),
        )
        assert pool.pieces(key_of("a"), 64) == pieces[1:]
        assert pool.check_integrity({key_of("a"): 100}) == []

    def test_slots_hold_whole_blocks_of_each_group(self) -> None:
        pool = swap_pool(FakeModelRunner(10, 16, 4096, VOCAB_SIZE, windows=((40, 20), (5, 20))), 5000)
        assert (pool.num_slots, pool.slot_bytes, pool._group_tokens) == (4, 1024, (128, 128, 128))

    def test_copies_go_to_the_blocks_of_their_group(self) -> None:
        runner = FakeModelRunner(40, 16, 4096, VOCAB_SIZE, windows=((40, 20),))
        swapper, known = Swapper(runner, 1024), make_prompt(60)
        for group in (0, 1):
            runner.scatter(range(4), 0, 60, kv_of(known, 0, 60), group=group)
        sequence = make_sequence(make_spec("a", known), state=SequenceState.SUSPENDED)
        pieces = (Piece(0, 0, 60), Piece(1, 16, 60, 1))
        swapper.swap_out(SwapOut(sequence, ((0, 1, 2, 3), (0, 1, 2, 3)), pieces))
        sequence.block_table = [30, 31, 32, 33]
        sequence.windows = [WindowTable([0, 11, 12, 13], 1, 16, 1, 5)]
        swapper.swap_in(SwapIn(sequence, pieces))
        for group, start in ((0, 0), (1, 16)):
            out = new_buffer(60 - start)
            runner.gather(sequence.table_of(group), start, 60, out, group=group)
            assert out.tolist() == kv_of(known, start, 60).tolist()


class TestSwapper:
    def test_a_pool_has_as_many_slots_as_fit(self) -> None:
        runner = FakeModelRunner(10, 16, 4096, VOCAB_SIZE)
        assert [swap_pool(runner, nbytes).num_slots for nbytes in (0, 1023, 1024, 10_000)] == [0, 0, 1, 9]
        assert swap_pool(runner, 1).slot_bytes == 128 * 8

    @pytest.mark.parametrize(("num_kv_heads", "tp", "num_copies"), [(4, 1, 4), (4, 4, 4), (2, 4, 4), (1, 2, 2)])
    def test_a_head_that_several_ranks_have_is_kept_by_each(self, num_kv_heads: int, tp: int, num_copies: int) -> None:
        runner = FakeModelRunner(10, 16, 4096, VOCAB_SIZE, num_kv_heads=num_kv_heads, shard=Shard(0, tp))
        assert swap_pool(runner, 1).slot_bytes == 128 * 8 * num_copies

    def test_what_went_out_comes_back_into_other_blocks(self) -> None:
        runner = FakeModelRunner(40, 16, 4096, VOCAB_SIZE)
        swapper = Swapper(runner, swap_pool(runner, 1).slot_bytes)
        known = make_prompt(150)
        runner.scatter(range(10), 0, 150, kv_of(known, 0, 150))
        sequence = make_sequence(make_spec("a", known), state=SequenceState.SUSPENDED)
        pieces = (Piece(3, 0, 128), Piece(0, 128, 150))
        swapper.swap_out(SwapOut(sequence, (tuple(range(10)),), pieces))
        runner.scatter(range(10), 0, 150, new_buffer(150))
        sequence.block_table = list(range(39, 29, -1))
        swapper.swap_in(SwapIn(sequence, pieces))
        out = new_buffer(150)
        runner.gather(sequence.block_table, 0, 150, out)
        assert out.tolist() == kv_of(known, 0, 150).tolist()

    @pytest.mark.parametrize(("num_kv_heads", "tp"), [(2, 1), (2, 2), (4, 2), (1, 2), (2, 4)])
    def test_each_rank_keeps_its_own_heads(self, num_kv_heads: int, tp: int) -> None:
        """Every rank copies for itself: what it sends must be what it receives, also where ranks share a head."""
        for rank in range(tp):
            runner = FakeModelRunner(20, 16, 4096, VOCAB_SIZE, num_kv_heads=num_kv_heads, shard=Shard(rank, tp))
            swapper = Swapper(runner, swap_pool(runner, 1).slot_bytes)
            before = runner._pages_2HNB[:, :, :2] = 5 + rank
            sequence = make_sequence(make_spec("a", make_prompt(32)), state=SequenceState.SUSPENDED)
            swapper.swap_out(SwapOut(sequence, ((0, 1),), (Piece(0, 0, 32),)))
            sequence.block_table = [7, 9]
            swapper.swap_in(SwapIn(sequence, (Piece(0, 0, 32),)))
            assert (runner._pages_2HNB[:, :, [7, 9]] == before).all()
