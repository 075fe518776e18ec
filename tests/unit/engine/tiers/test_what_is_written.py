"""What is admitted to tiers, in which order and at which pace it is written, and when loading is chosen."""

from __future__ import annotations

import pytest

from disagg.engine.tiers.admission import Admission
from disagg.engine.tiers.extents import Chain, chain_of, extent_keys
from disagg.engine.tiers.load_times import TRIED_AGAIN_S, Loadable, LoadPlan, LoadTimes, plan_load
from disagg.engine.tiers.write_queue import MOST_WAITING, WriteQueue
from disagg.proto.ids import BlockHash

HASHES = [BlockHash(bytes([number])) for number in range(40)]
KEYS = tuple(HASHES[7::8])


class TestExtents:
    def test_the_key_is_the_hash_of_the_last_block(self) -> None:
        assert extent_keys(HASHES, 16 * 40) == KEYS
        assert extent_keys(HASHES, 128 * 2 + 127) == KEYS[:2]
        assert extent_keys(HASHES[:15], 1000) == KEYS[:1]

    @pytest.mark.parametrize(("block_size", "expected"), [(16, HASHES[8:16]), (64, [HASHES[11], HASHES[15]])])
    def test_the_blocks_of_an_extent_are_found_by_their_own_hashes(
        self, block_size: int, expected: list[BlockHash]
    ) -> None:
        chain = chain_of(HASHES, 300, block_size, b"", is_copy=False)
        assert chain.keys == KEYS[:2]
        assert chain.blocks_of(1) == tuple(expected)


class TestAdmission:
    def test_a_short_chain_is_written_at_its_second_use(self) -> None:
        admission = Admission(1024, 100)
        assert admission.num_admitted(KEYS[:3], num_tokens=400, cached_tokens=0) == 0
        assert admission.num_admitted(KEYS[:4], num_tokens=512, cached_tokens=0) == 3

    def test_what_was_found_in_the_device_cache_was_used_before(self) -> None:
        assert Admission(1024, 0).num_admitted(KEYS[:3], num_tokens=400, cached_tokens=300) == 2

    @pytest.mark.parametrize(("num_tokens", "expected"), [(256, 0), (257, 2)])
    def test_a_long_chain_is_written_at_once(self, num_tokens: int, expected: int) -> None:
        assert Admission(256, 100).num_admitted(KEYS[:2], num_tokens=num_tokens, cached_tokens=0) == expected

    def test_a_conversation_is_written_at_once(self) -> None:
        assert Admission(1024, 100).num_admitted(KEYS[:2], num_tokens=256, cached_tokens=0, in_conversation=True) == 2

    def test_what_was_used_longest_ago_is_forgotten_first(self) -> None:
        admission = Admission(1024, 2)
        admission.num_admitted(KEYS[:2], num_tokens=256, cached_tokens=0)
        admission.num_admitted(KEYS[2:3], num_tokens=128, cached_tokens=0)
        assert admission.num_admitted(KEYS[:2], num_tokens=256, cached_tokens=0) == 1


def chain(*keys: BlockHash) -> Chain:
    return Chain(keys, keys)


class TestWriteQueue:
    def test_extents_are_written_in_order_and_once(self) -> None:
        queue, whole = WriteQueue(1e6), chain(*KEYS)
        for index in (0, 1, 0, 2):
            queue.add(whole, index)
        assert [queue.take()[1] for _ in range(len(queue))] == [0, 1, 2]

    def test_no_more_is_written_than_is_allowed(self) -> None:
        queue = WriteQueue(1000.0)
        queue.wrote(500, 0.0, now=10.0)
        assert queue.due_at(is_decoding=False) == 10.5
        queue.wrote(500, 0.0, now=10.5)
        assert queue.due_at(is_decoding=False) == 11.0
        queue.wrote(500, 0.0, now=20.0)
        assert queue.due_at(is_decoding=False) == 20.5

    def test_sequences_that_decode_lose_a_twentieth_of_their_time(self) -> None:
        queue = WriteQueue(1e12)
        queue.wrote(500, 2.0, now=10.0)
        assert queue.due_at(is_decoding=True) == pytest.approx(10.04)
        assert queue.due_at(is_decoding=False) == pytest.approx(10.0)

    def test_the_time_of_the_thread_counts_too(self) -> None:
        queue = WriteQueue(1e12)
        queue.wrote(500, 2.0, now=10.0)
        queue.took(1.0, now=10.01)
        assert queue.due_at(is_decoding=True) == pytest.approx(10.04 + 0.02)
        queue.took(1.0, now=20.0)
        assert queue.due_at(is_decoding=True) == pytest.approx(20.02)
        assert queue.due_at(is_decoding=False) == pytest.approx(10.0)

    def test_what_does_not_fit_is_counted(self) -> None:
        queue = WriteQueue(1e6)
        for number in range(MOST_WAITING + 2):
            queue.add(chain(BlockHash(number.to_bytes(4, "big"))), 0)
        assert (len(queue), queue.num_dropped) == (MOST_WAITING, 2)

    def test_a_forgotten_tenant_has_nothing_to_write(self) -> None:
        queue = WriteQueue(1e6)
        queue.add(Chain(KEYS[:1], KEYS[:1], b"one"), 0)
        queue.add(Chain(KEYS[1:2], KEYS[1:2], b"two"), 0)
        queue.forget(b"one")
        assert queue.take()[0].tag == b"two"


class TestLoadTimes:
    def test_the_latency_is_told_apart_once_a_later_extent_was_loaded(self) -> None:
        times = LoadTimes(1.0)
        times.observe(90.0, 0.0, is_first=True)
        assert (times.ms(0.0), times.latency_ms) == (90.0, 0.0)
        times.observe(10.0, 0.1)
        assert (times.ms(0.1), times.latency_ms) == (10.0, 80.0)
        times.observe(98.0, 0.2, is_first=True)
        assert (times.ms(0.2), times.latency_ms) == (10.0, 81.0)

    def test_loads_that_are_all_alike_have_no_latency(self) -> None:
        times = LoadTimes(1.0)
        for is_first in (True, False, False, True, False):
            times.observe(7.0, 0.0, is_first=is_first)
        assert (times.ms(0.0), times.latency_ms) == (7.0, 0.0)

    def test_what_was_learned_of_a_disk_counts_until_something_newer_was(self) -> None:
        times, late = LoadTimes(1.0, has_trials=True), 1e6
        times.observe(390.0, 0.0, is_first=True)
        times.observe(40.0, 1.0)
        assert [times.is_left_alone(now) for now in (1.0 + TRIED_AGAIN_S, 1.1 + TRIED_AGAIN_S)] == [False, True]
        assert (times.ms(late), times.latency_ms) == (40.0, 350.0)
        times.observe(470.0, late, is_first=True)  # slower ones count by an eighth, as ever
        times.observe(48.0, late)
        assert (times.ms(late), times.latency_ms) == (41.0, 359.0)
        times.observe(45.0, late + 1.0)
        assert (times.ms(late), times.latency_ms) == (41.5, 358.5)

    def test_a_disk_that_is_quick_again_counts_at_once(self) -> None:
        """After a while without a load two files are enough, or one where no chain has two."""
        for seen, expected in (([6.0, 4.0], (4.0, 2.0)), ([6.0], (6.0, 0.0))):
            times = LoadTimes(1.0, has_trials=True)
            times.observe(390.0, 0.0, is_first=True)
            times.observe(40.0, 0.0)
            for number, ms in enumerate(seen):
                times.observe(ms, 1e6, is_first=not number)
            assert (times.ms(1e6), times.latency_ms) == expected

    def test_a_latency_stays_where_only_the_rate_is_higher(self) -> None:
        times = LoadTimes(1.0, has_trials=True)
        times.observe(390.0, 0.0, is_first=True)
        times.observe(40.0, 0.0)
        times.observe(355.0, 1e6, is_first=True)
        times.observe(5.0, 1e6)
        assert (times.ms(1e6), times.latency_ms) == (5.0, 350.0)

    def test_a_load_from_disk_counts_with_its_latency(self) -> None:
        def compute_ms(start: int, end: int) -> float:
            return float(end - start)

        few, many = Loadable(0, 0, 2, 1.0, 10.0), Loadable(0, 0, 9, 1.0, 10.0)
        assert plan_load(few._replace(disk_latency_ms=235.0), compute_ms) == LoadPlan(0, 0, 2, 255.0, 256.0)
        assert plan_load(few._replace(disk_latency_ms=237.0), compute_ms) is None
        assert plan_load(many._replace(disk_latency_ms=237.0), compute_ms) == LoadPlan(0, 0, 9, 327.0, 1152.0)

    def test_a_measured_time_replaces_the_assumed_one(self) -> None:
        times = LoadTimes(1.0)
        times.observe(5.0, now=0.0)
        assert times.ms(0.0) == 5.0
        times.observe(13.0, now=1.0)
        assert times.ms(1.0) == 6.0

    def test_a_write_tells_what_a_load_may_take_until_one_was_made(self) -> None:
        times = LoadTimes(16.8)
        for write_ms in (20.0, 1.5, 2.5):
            times.assume(write_ms)
        assert times.ms(0.0) == 1.5
        times.observe(2.5, now=1.0)
        times.assume(0.5)
        assert times.ms(1.0) == 2.5

    def test_a_slow_tier_is_tried_again_and_one_that_is_quick_again_counts_at_once(self) -> None:
        times = LoadTimes(1.0)
        times.observe(2.0, now=0.0)
        for _ in range(50):
            times.observe(100.0, now=1.0)
        assert times.ms(2.0) > 90.0
        assert times.ms(1.5 + TRIED_AGAIN_S) == 1.0
        times.observe(3.0, now=2.0 + TRIED_AGAIN_S)
        assert times.ms(2.5 + TRIED_AGAIN_S) == 3.0

    def test_a_load_that_was_late_doubles_the_time(self) -> None:
        times = LoadTimes(1.0)
        times.observe(4.0, now=0.0)
        times.late(began=1.0, now=2.0)
        assert times.ms(2.0) == 8.0

    def test_a_tier_that_answered_other_loads_meanwhile_is_as_quick_as_measured(self) -> None:
        times = LoadTimes(1.0)
        times.observe(4.0, now=1.0)
        times.late(began=1.0, now=2.0)
        assert times.ms(2.0) == 4.0

    def test_a_tier_that_does_not_answer_at_all_is_left_alone_until_it_is_tried_again(self) -> None:
        times = LoadTimes(1.0)
        times.late(began=4.0, now=5.0)
        assert times.ms(5.0) == 2.0
        assert times.ms(5.5 + TRIED_AGAIN_S) == 1.0
        times.late(began=5.1 + TRIED_AGAIN_S, now=5.5 + TRIED_AGAIN_S)
        assert times.ms(5.5 + TRIED_AGAIN_S) == 4.0


def compute_ms(start: int, end: int) -> float:
    """A tenth of a millisecond a token."""
    return (end - start) / 10


class TestChoice:
    def test_nothing_is_loaded_that_is_cached(self) -> None:
        assert plan_load(Loadable(256, 2, 2, 1.0, 1.0), compute_ms) is None
        assert plan_load(Loadable(0, 0, 0, 1.0, 1.0), compute_ms) is None

    def test_host_memory_goes_before_the_disk(self) -> None:
        assert plan_load(Loadable(130, 3, 5, 1.0, 2.0), compute_ms) == LoadPlan(1, 3, 5, 6.0, 51.0)

    def test_a_disk_slower_than_computing_is_left_out(self) -> None:
        assert plan_load(Loadable(0, 2, 5, 1.0, 12.9), compute_ms) == LoadPlan(0, 2, 2, 2.0, 25.6)
        assert plan_load(Loadable(0, 0, 5, 1.0, 12.9), compute_ms) is None
        assert plan_load(Loadable(0, 0, 5, 1.0, 12.7), compute_ms) is not None

    def test_what_is_loaded_before_counts(self) -> None:
        assert plan_load(Loadable(0, 4, 0, 1.0, 1.0, 2, 20.0), compute_ms) == LoadPlan(0, 4, 4, 24.0, 51.2)
        assert plan_load(Loadable(0, 4, 0, 1.0, 1.0, 2, 20.0, 8.5), compute_ms) == LoadPlan(0, 4, 4, 51.0, 51.2)
        assert plan_load(Loadable(0, 4, 0, 1.0, 1.0, 2, 20.0, 8.6), compute_ms) is None

    def test_the_part_of_an_extent_that_is_cached_need_not_be_computed(self) -> None:
        """127 of its tokens are here: computing one is quicker than loading all of it."""
        assert plan_load(Loadable(127, 1, 0, 1.0, 1.0), compute_ms) is None
