"""Cores with tiers over the fake runner: the same tokens, fewer of them computed, and nothing held whatever fails."""

from __future__ import annotations

import random

import msgspec
import pytest

from disagg.engine.commands import (
    ForgetTenant,
    Pin,
    Pinned,
    Release,
    TierAnswer,
    TierForgotten,
    TierFull,
    TierScanned,
    TierWritten,
)
from disagg.engine.config import DiskTier, TierOptions
from disagg.engine.core.calibration import PREFILLS
from disagg.engine.fake_runner import FakeModelRunner
from disagg.engine.plan import Buffer
from disagg.engine.tiers.extents import Extent, extent_keys
from disagg.engine.tiers.folder import SCANNED_AGAIN_S, SILENT_S, TRIED_AGAIN_S
from disagg.engine.tiers.loading import LEAST_S, MOST_BESIDE_OTHERS
from disagg.engine.tiers.sizes import MAX_STAGING
from disagg.engine.tiers.store import LEFT_FOR_READS
from disagg.engine.tiers.tiers import check_tiers
from disagg.proto.errors import ConfigError
from disagg.proto.messages import SequenceSpec, StepSample
from disagg.proto.token_ids import unpack_token_ids
from tests.support.engine import (
    BLOCK,
    IDLE,
    VOCAB_SIZE,
    FailingRunner,
    assert_idle,
    end_of,
    expected_output,
    key_of,
    make_prompt,
    make_spec,
    token_ids_of,
)
from tests.support.tiers import FAKE_EXTENT_BYTES, PlayedDisk, TierWorker

NUM_TURNS = 3


def conversation(name: str, seed: int) -> list[SequenceSpec]:
    """Three turns: each prompt is the one before, its answer and some words more."""
    prompt, specs = make_prompt(250, seed), []
    for turn in range(NUM_TURNS):
        specs.append(make_spec(f"{name}{turn}", prompt, max_tokens=8))
        prompt = (*prompt, *expected_output(prompt, 8), *make_prompt(40, seed + 100 + turn))
    return specs


def prompt_of(name: str, num_tokens: int = 300) -> SequenceSpec:
    """A prompt that others whose names begin alike have, too."""
    return make_spec(name, make_prompt(num_tokens, seed=ord(name[0])), max_tokens=4)


def serve_conversations(worker: TierWorker) -> None:
    """Four of them in turn, of which the device cache holds two."""
    conversations = [conversation(name, seed) for name, seed in zip("abcd", (1, 2, 3, 4), strict=True)]
    for turn in range(NUM_TURNS):
        for specs in conversations:
            spec = specs[turn]
            assert worker.run(spec) == expected(spec)
    assert_idle(worker.core)


def _ids(spec: SequenceSpec) -> list[int]:
    return list(unpack_token_ids(spec.prompt_token_ids))


def expected(spec: SequenceSpec) -> list[int]:
    return expected_output(tuple(_ids(spec)), spec.sampling.max_tokens)


class TestConversations:
    @pytest.mark.parametrize(
        ("host", "disk", "num_blocks", "computed"),
        [(0, 0, 32, 3576), (12, 0, 32, 1528), (0, 12, 32, 1528), (12, 12, 32, 1528), (0, 0, 480, 1336)],
        ids=["none", "host", "disk", "both", "unlimited"],
    )
    def test_history_is_loaded_and_not_computed(self, host: int, disk: int, num_blocks: int, computed: int) -> None:
        worker = TierWorker(
            host_extents=host, disk_extents=disk, disk=PlayedDisk() if disk else None, num_blocks=num_blocks
        )
        serve_conversations(worker)
        assert worker.computed == computed

    def test_tiers_are_off_by_default(self) -> None:
        worker = TierWorker()
        assert worker.core.totals().tiers == ()
        assert worker.core.next_deadline is None


class TestRestart:
    def test_the_first_prompt_after_it_is_loaded(self) -> None:
        disk = PlayedDisk()
        before = TierWorker(disk_extents=16, disk=disk)
        for spec in conversation("a", 1)[:2]:
            before.run(spec)
        after = TierWorker(disk_extents=16, disk=PlayedDisk(disk.files))
        spec = conversation("a", 1)[2]
        assert after.run(spec) == expected(spec)
        assert after.computed == len(_ids(spec)) - 256
        assert end_of(after.events, "a2").cached_tokens == 256

    def test_a_worker_is_used_before_its_folder_was_scanned(self) -> None:
        worker = TierWorker(disk_extents=16)
        worker.disk = PlayedDisk()
        assert worker.run(prompt_of("a")) == expected(prompt_of("a"))

    def test_what_is_out_of_reach_is_deleted(self) -> None:
        disk = PlayedDisk()
        TierWorker(disk_extents=16, disk=disk).run(prompt_of("a"))
        first = next(extent for extent in disk.files if not extent.parent)
        del disk.files[first]
        assert len(disk.files) == 1
        TierWorker(disk_extents=16, disk=disk)
        assert disk.files == {}


A_FIFTH_OF_A_MS = (
    StepSample(1.0 + 16 * 0.2, *PREFILLS[0][:1], 136, 0, 0),
    StepSample(1.0 + 512 * 0.2, 512, 512 * 513 // 2, 0, 0),
)
"""Steps that take so long for each token."""


def cold(worker: TierWorker, spec: SequenceSpec) -> None:
    """Serve a prompt, and others until it is not in the device cache any more."""
    worker.run(spec)
    for number in range(3):
        worker.run(make_spec(f"other{number}", make_prompt(300, seed=500 + number)))
    worker.events.clear()


class TestLoads:
    def test_sequences_with_the_same_prefix_share_a_load(self) -> None:
        disk = PlayedDisk()
        worker = TierWorker(disk_extents=32, disk=disk)
        cold(worker, prompt_of("a"))
        specs = [make_spec(name, make_prompt(300, seed=ord("a")), max_tokens=4) for name in ("one", "two", "three")]
        num_reads, computed = disk.num_reads, worker.computed
        for spec in specs:
            worker.add(spec)
        worker.settle()
        assert [token_ids_of(worker.events, str(s.request_id)) for s in specs] == [expected(specs[0])] * 3
        assert disk.num_reads - num_reads == 2
        assert worker.computed - computed == 3 * (300 - 256)
        assert_idle(worker.core)

    def test_no_more_than_allowed_load_at_a_time(self) -> None:
        disk = PlayedDisk()
        worker = TierWorker(disk_extents=32, disk=disk, max_loading=1, num_blocks=96)
        for name in "abcdefg":
            worker.run(prompt_of(name))
        worker.events.clear()
        worker.add(prompt_of("a1"))
        worker.add(prompt_of("b1"))
        worker.step()
        assert len(disk.orders) == 2
        worker.settle()
        assert [end_of(worker.events, name).cached_tokens for name in ("a1", "b1")] == [256, 256]

    def test_a_load_that_begins_when_another_ends_is_ordered_at_once(self) -> None:
        """Only one may load. The first comes from host memory, and is there in the same turn."""
        disk = PlayedDisk()
        worker = TierWorker(host_extents=3, disk_extents=32, disk=disk, max_loading=1)
        for name in "abcde":
            worker.run(prompt_of(name))
        for number in range(3):  # these take the device cache and are not written: their answers do not end
            worker.add(make_spec(f"other{number}", make_prompt(300, seed=500 + number), max_tokens=60))
            for _ in range(8):
                worker.step()
            worker.core.handle(Release(key_of(f"other{number}")), worker.now)
        worker.settle()
        worker.add(prompt_of("e1"))
        worker.add(prompt_of("a1"))
        worker.step()
        assert len(disk.orders) == 2
        worker.settle()
        assert [end_of(worker.events, name).cached_tokens for name in ("e1", "a1")] == [256, 256]

    def test_a_folder_that_does_not_answer_is_not_waited_for(self) -> None:
        disk = PlayedDisk()
        worker = TierWorker(disk_extents=32, disk=disk)
        cold(worker, prompt_of("a"))
        worker.add(make_spec("again", make_prompt(300, seed=ord("a")), timeout_s=1000.0))
        worker.step()
        assert worker.core.load().num_waiting == 1
        assert worker.core.load().uncomputed_prompt_tokens == 300 - 256
        due = worker.core.next_deadline
        assert due is not None
        assert due - worker.now >= LEAST_S - 0.002
        worker.now = due
        worker.step()
        while worker.core.has_work:
            worker.step()
        assert token_ids_of(worker.events, "again") == expected_output(make_prompt(300, seed=ord("a")), 4)
        assert end_of(worker.events, "again").cached_tokens == 0
        worker.settle()
        assert_idle(worker.core)

    def test_what_came_before_a_damaged_file_counts(self) -> None:
        disk = PlayedDisk()
        worker = TierWorker(disk_extents=32, disk=disk, num_blocks=48)
        cold(worker, prompt_of("a", 384 - 5))
        (second,) = [extent for extent in disk.files if extent.key == prompt_of("a", 379).block_hashes[15]]
        disk.damaged.add(second)
        num_written = worker.core.totals().tiers[0].written_extents
        began = worker.now
        spec = make_spec("again", make_prompt(379, seed=ord("a")), max_tokens=4)
        assert worker.run(spec) == expected(spec)
        assert end_of(worker.events, "again").cached_tokens == 128
        (counts,) = worker.core.totals().tiers
        assert (counts.failed_extents, counts.written_extents - num_written) == (1, 1)
        assert worker.now < began + LEAST_S
        assert_idle(worker.core)

    @pytest.mark.parametrize("when", ["waiting", "loading", "read"])
    def test_a_sequence_that_ends_while_it_loads_leaves_nothing(self, when: str) -> None:
        disk = PlayedDisk()
        worker = TierWorker(disk_extents=32, disk=disk)
        cold(worker, prompt_of("a"))
        worker.add(make_spec("again", make_prompt(300, seed=ord("a"))))
        if when != "waiting":
            worker.step()
        if when == "read":
            worker.answer()
        worker.events += worker.core.handle(Release(key_of("again")), worker.now)
        worker.settle()
        assert_idle(worker.core)

    def test_the_deadline_of_a_sequence_holds_while_it_loads(self) -> None:
        disk = PlayedDisk()
        worker = TierWorker(disk_extents=32, disk=disk)
        cold(worker, prompt_of("a"))
        worker.add(make_spec("again", make_prompt(300, seed=ord("a")), timeout_s=0.01))
        worker.step()
        worker.now += 0.02
        worker.step()
        assert end_of(worker.events, "again").reason == "deadline"
        worker.settle()
        assert_idle(worker.core)

    def test_a_slow_disk_is_left_alone_and_tried_later_without_anybody_waiting(self) -> None:
        """Computing 128 tokens takes 30 ms here, a file a second until the worker is asked for the fifth prompt."""
        disk = PlayedDisk()
        disk.read_ms = 1000.0
        worker = TierWorker(disk_extents=32, disk=disk, calibration=A_FIFTH_OF_A_MS)
        for seed in range(6):
            worker.run(make_spec(f"r{seed}", make_prompt(300, seed=seed)))
        worker.events.clear()
        found = []
        for seed, pause_s in (
            (0, 0.0),
            (1, 0.0),
            (2, TRIED_AGAIN_S + 1.0),
            (3, 0.0),
            (4, TRIED_AGAIN_S + 1.0),
            (5, 0.0),
        ):
            worker.now += pause_s
            disk.read_ms = 1000.0 if seed < 4 else 1.0
            num_reads = disk.num_reads
            worker.run(make_spec(f"again{seed}", make_prompt(300, seed=seed)))
            found.append((end_of(worker.events, f"again{seed}").cached_tokens, disk.num_reads - num_reads))
        assert found == [(256, 2), (0, 0), (0, 2), (0, 0), (0, 2), (256, 2)]
        assert_idle(worker.core)

    def test_trial_reads_that_are_not_answered_are_the_only_ones(self) -> None:
        disk = PlayedDisk()
        disk.read_ms = 1000.0
        worker = TierWorker(disk_extents=32, disk=disk, calibration=A_FIFTH_OF_A_MS)
        for seed in range(5):
            worker.run(make_spec(f"r{seed}", make_prompt(300, seed=seed)))
        worker.run(make_spec("slow", make_prompt(300, seed=0)))
        worker.now += TRIED_AGAIN_S + 1.0
        for seed in (1, 2):
            num_reads = disk.num_reads
            worker.add(make_spec(f"again{seed}", make_prompt(300, seed=seed), max_tokens=1))
            for _ in range(10):
                worker.step()
            assert [counts.off_reason for counts in worker.core.totals().tiers] == [""]
            assert end_of(worker.events, f"again{seed}").cached_tokens == 0
            assert disk.num_reads - num_reads == (2 if seed == 1 else 0)
        disk.error = "I/O error"
        worker.settle()
        assert_idle(worker.core)

    def test_a_load_does_not_take_what_others_need(self) -> None:
        """Of 33 blocks a sequence that decodes holds and reserves 24, and may need two more: a load gets seven, which
        is less than an extent."""
        worker = TierWorker(host_extents=32, num_blocks=33)
        cold(worker, prompt_of("a"))
        worker.add(make_spec("long", make_prompt(300, seed=5), max_tokens=80))
        worker.step()
        loaded = worker.core.totals().loaded_tokens
        worker.add(make_spec("again", make_prompt(300, seed=ord("a"))))
        worker.settle()
        assert worker.core.totals().loaded_tokens == loaded
        assert token_ids_of(worker.events, "again") == expected_output(make_prompt(300, seed=ord("a")), 4)

    def test_a_quick_disk_does_not_count_as_slow_where_loads_wait_for_steps(self) -> None:
        """Two extents are copied beside each step of 100 ms, so of three loads two end early."""
        disk = PlayedDisk()
        steps = (StepSample(1.0 + 512 * 0.2, 512, 512 * 513 // 2, 0, 0), StepSample(1.0 + 16 * 0.2, 16, 136, 0, 0))
        worker = TierWorker(disk_extents=64, disk=disk, calibration=steps, num_blocks=96)
        for seed in range(8):
            worker.run(make_spec(f"r{seed}", make_prompt(300, seed=seed)))
        worker.add(make_spec("running", make_prompt(20, seed=99), max_tokens=60))
        worker.step()
        for seed in range(3):
            worker.add(make_spec(f"again{seed}", make_prompt(300, seed=seed)))
        for _ in range(3):
            worker.step()
            worker.answer()
            worker.now += 0.1
        (counts,) = worker.core.totals().tiers
        assert worker.core._tiers is not None
        assert worker.core._tiers._loading.num_late == 2
        assert counts.extent_ms > 10.0
        worker.settle()
        (counts,) = worker.core.totals().tiers
        assert counts.extent_ms == pytest.approx(disk.read_ms)
        assert counts.queue_ms == 0.0
        assert_idle(worker.core)

    @pytest.mark.parametrize(("turn_s", "num_loaded"), [(0.01, 6), (0.03, 2), (0.06, 0)])
    def test_a_load_is_predicted_to_wait_for_the_steps_of_others_and_for_other_loads(
        self, turn_s: float, num_loaded: int
    ) -> None:
        """Two extents are copied beside each step, and computing two takes 52 ms. With steps of 10 ms the third of
        three loads takes 30 ms; with 30 ms the second one takes 60, and so does the first with 60."""
        disk = PlayedDisk()
        steps = (StepSample(1.0 + 512 * 0.2, 512, 512 * 513 // 2, 0, 0), StepSample(1.0 + 16 * 0.2, 16, 136, 0, 0))
        worker = TierWorker(disk_extents=64, disk=disk, calibration=steps, num_blocks=160)
        for seed in range(14):
            worker.run(make_spec(f"r{seed}", make_prompt(300, seed=seed)))
        worker.add(make_spec("running", make_prompt(20, seed=99), max_tokens=250))
        for _ in range(60):
            worker.step()
            worker.now += turn_s - 0.001
        for seed in range(3):
            worker.add(make_spec(f"again{seed}", make_prompt(300, seed=seed)))
        (counts,) = worker.core.totals().tiers
        assert counts.extent_ms == pytest.approx(turn_s * 500, rel=0.01)
        assert counts.queue_ms == 0.0
        worker.step()
        (counts,) = worker.core.totals().tiers
        assert counts.queue_ms == pytest.approx(num_loaded * turn_s * 500, rel=0.01)
        for _ in range(8):
            worker.answer()
            worker.step()
            worker.now += turn_s - 0.001
        assert worker.core.totals().loaded_tokens == num_loaded * 128
        assert worker.core._tiers is not None
        assert worker.core._tiers._loading.num_late == 0
        worker.settle()
        assert_idle(worker.core)

    def test_a_read_is_predicted_to_wait_for_those_before_it(self) -> None:
        """An extent takes 20 ms, and computing two of them 52: only the first of two sequences loads."""
        disk = PlayedDisk()
        disk.read_ms = 20.0
        steps = (StepSample(1.0 + 512 * 0.2, 512, 512 * 513 // 2, 0, 0), StepSample(1.0 + 16 * 0.2, 16, 136, 0, 0))
        worker = TierWorker(disk_extents=64, disk=disk, calibration=steps, num_blocks=96)
        for seed in range(8):
            worker.run(make_spec(f"r{seed}", make_prompt(300, seed=seed)))
        worker.run(make_spec("measured", make_prompt(300, seed=0)))
        loaded = worker.core.totals().loaded_tokens
        for seed in (1, 2):
            worker.add(make_spec(f"again{seed}", make_prompt(300, seed=seed)))
        worker.settle()
        assert worker.core.totals().loaded_tokens - loaded == 256

    def test_a_load_alone_takes_more_than_half_of_the_blocks(self) -> None:
        """Its sequence needs them next."""
        worker = TierWorker(host_extents=32, num_blocks=24)
        cold(worker, prompt_of("a"))
        worker.run(make_spec("other", make_prompt(300, seed=5)))
        worker.run(make_spec("again", make_prompt(300, seed=ord("a"))))
        assert end_of(worker.events, "again").cached_tokens == 256

    def test_all_loads_together_take_half_of_the_blocks(self) -> None:
        """Of 96 blocks, all free or evictable, three loads of two extents take 48, and the fourth finds none left."""
        disk = PlayedDisk()
        worker = TierWorker(disk_extents=64, disk=disk, num_blocks=96, max_loading=8)
        for seed in range(12):
            worker.run(make_spec(f"r{seed}", make_prompt(300, seed=seed)))
        for seed in range(4):
            worker.add(make_spec(f"again{seed}", make_prompt(300, seed=seed)))
        worker.step()
        states = [worker.core._scheduler.sequences[key_of(f"again{seed}")].state.value for seed in range(4)]
        assert states == ["loading", "loading", "loading", "running"]
        worker.settle()
        cached = [end_of(worker.events, f"again{seed}").cached_tokens for seed in range(4)]
        assert cached == [256, 256, 256, 0]

    def test_a_higher_priority_is_loaded_first(self) -> None:
        disk = PlayedDisk()
        worker = TierWorker(disk_extents=64, disk=disk, num_blocks=96, max_loading=1)
        for seed in range(8):
            worker.run(make_spec(f"r{seed}", make_prompt(300, seed=seed)))
        for seed in range(2):
            worker.add(make_spec(f"again{seed}", make_prompt(300, seed=seed), priority=seed))
        worker.step()
        worker.answer()
        worker.step()
        sequences = worker.core._scheduler.sequences
        assert [sequences[key_of(f"again{seed}")].state.value for seed in range(2)] == ["loading", "running"]
        worker.settle()
        assert_idle(worker.core)

    def test_a_load_takes_no_blocks_while_a_preempted_sequence_waits_for_some(self) -> None:
        """The one of 290 tokens is preempted, and leaves room for an extent but not for itself."""
        worker = TierWorker(host_extents=32, num_blocks=50, decode_reserve_tokens=0)
        cold(worker, prompt_of("a"))
        for seed, num_tokens in enumerate((220, 220, 290)):
            worker.add(make_spec(f"long{seed}", make_prompt(num_tokens, seed=seed), max_tokens=60))
        while not worker.core.load().num_preempted:
            worker.step()
        loaded = worker.core.totals().loaded_tokens
        worker.add(make_spec("again", make_prompt(300, seed=ord("a"))))
        worker.step()
        assert worker.core.load().num_preempted == 1
        assert worker.core.totals().loaded_tokens == loaded
        worker.settle()
        assert_idle(worker.core)


class TestPrefixesThatOthersFetch:
    """A prefix of 256 tokens that the device cache has no more."""

    @staticmethod
    def pin(worker: TierWorker) -> None:
        cold(worker, prompt_of("a"))
        spec = make_spec("fetch-r", make_prompt(300, seed=ord("a"))[:256], timeout_s=100.0)
        worker.events += worker.core.handle(Pin(spec), worker.now)

    @staticmethod
    def pinned(worker: TierWorker) -> list[tuple[int, str]]:
        return [(event.num_tokens, event.reason) for event in worker.events if isinstance(event, Pinned)]

    @pytest.mark.parametrize("tier", ["host", "disk"])
    def test_what_a_tier_has_is_loaded_and_pinned(self, tier: str) -> None:
        disk = PlayedDisk() if tier == "disk" else None
        worker = TierWorker(host_extents=32 * (disk is None), disk_extents=32 * (disk is not None), disk=disk)
        self.pin(worker)
        assert self.pinned(worker) == []
        worker.settle()
        assert self.pinned(worker) == [(256, "")]
        assert worker.core.audit()[0]["blocks_active"] == 256 // BLOCK
        worker.core.handle(Release(key_of("fetch-r")), worker.now)
        worker.settle()
        assert_idle(worker.core)

    def test_a_tier_that_fails_leaves_what_is_cached(self) -> None:
        disk = PlayedDisk()
        worker = TierWorker(disk_extents=32, disk=disk)
        self.pin(worker)
        disk.error = "Input/output error"
        worker.settle()
        assert self.pinned(worker) == [(0, "nothing of it is cached any more")]
        assert_idle(worker.core)

    def test_one_that_is_released_while_it_loads_leaves_nothing(self) -> None:
        disk = PlayedDisk()
        worker = TierWorker(disk_extents=32, disk=disk)
        self.pin(worker)
        worker.step()
        worker.core.handle(Release(key_of("fetch-r")), worker.now)
        worker.settle()
        assert self.pinned(worker) == []
        assert_idle(worker.core)


class SmallDisk(PlayedDisk):
    """Has room for so many files."""

    most = 4

    def _write(self, number: int, extent: Extent, payload: Buffer) -> list[TierAnswer]:
        if len(self.files) >= self.most:
            return [TierWritten(number, False), TierFull("No space left on device")]
        return super()._write(number, extent, payload)


class ReadOnlyLater(PlayedDisk):
    """Files of which none can be deleted for a while."""

    is_read_only = False

    def _forget(self, tag: bytes) -> list[TierAnswer]:
        if self.is_read_only:
            return [TierForgotten(tag, False), TierFull("Read-only file system")]
        return super()._forget(tag)

    def _delete(self, extents: tuple[Extent, ...]) -> list[TierAnswer]:
        return [TierFull("Read-only file system")] if self.is_read_only else super()._delete(extents)


class TestWrites:
    def test_nothing_is_written_while_a_prompt_waits(self) -> None:
        worker = TierWorker(host_extents=32)
        worker.add(prompt_of("a"))
        while not any(True for event in worker.events if getattr(event, "reason", "") == "length"):
            worker.step()
        worker.add(prompt_of("b"))
        worker.step()
        assert worker.core.totals().tiers[0].written_extents == 0
        worker.settle()
        assert worker.core.totals().tiers[0].written_extents == 4

    def test_a_block_that_is_needed_is_not_kept_for_a_write(self) -> None:
        worker = TierWorker(host_extents=32, num_blocks=24)
        worker.add(prompt_of("a"))
        worker.add(prompt_of("b"))
        worker.settle()
        counts = worker.core.totals()
        assert (counts.tiers[0].written_extents, counts.dropped_extents) == (2, 2)

    @pytest.mark.parametrize(("in_session", "written"), [(False, 0), (True, 2)])
    def test_a_short_prompt_that_is_handed_over_is_kept_in_a_session(self, in_session: bool, written: int) -> None:
        worker = TierWorker(host_extents=4)
        spec = make_spec("a", make_prompt(300, seed=1), max_tokens=60)
        worker.add(msgspec.structs.replace(spec, in_session=in_session))
        for _ in range(8):
            worker.step()
        worker.core.handle(Release(key_of("a")), worker.now)
        worker.settle()
        assert worker.core.totals().tiers[0].written_extents == written

    def test_the_oldest_conversation_gives_way(self) -> None:
        worker = TierWorker(host_extents=4)
        for name in "abc":
            worker.run(prompt_of(name))
        (host,) = worker.core.totals().tiers
        assert (host.held_bytes, host.written_extents, host.evicted_extents) == (4 * FAKE_EXTENT_BYTES, 6, 2)

    def test_a_conversation_that_is_used_stays(self) -> None:
        worker = TierWorker(host_extents=4)
        for name in ("a", "b", "a1", "c"):
            worker.run(prompt_of(name))
        keys = extent_keys(prompt_of("a").block_hashes, 300), extent_keys(prompt_of("b").block_hashes, 300)
        held = worker.core.prefix_snapshot().tiers["host"]
        assert [set(each) <= set(held) for each in keys] == [True, False]

    def test_files_that_are_written_leave_buffers_to_those_that_are_read(self) -> None:
        disk = PlayedDisk()
        worker = TierWorker(disk_extents=32, disk=disk, num_blocks=96)
        for name in "abcd":
            worker.add(prompt_of(name))
        for _ in range(200):
            worker.step()
        assert len(disk.orders) == MAX_STAGING - LEFT_FOR_READS
        worker.settle()
        assert len(disk.files) == 8

    def test_evicted_extents_are_deleted(self) -> None:
        disk = PlayedDisk()
        worker = TierWorker(disk_extents=4, disk=disk)
        for name in "abc":
            worker.run(prompt_of(name))
        worker.settle()
        assert len(disk.files) == 4

    def test_what_gives_way_is_deleted_before_the_next_file_is_written(self) -> None:
        """A file system that has room for just the tier is never full."""
        disk = SmallDisk()
        worker = TierWorker(disk_extents=SmallDisk.most, disk=disk)
        for name in "abcd":
            worker.run(prompt_of(name))
        worker.settle()
        (counts,) = worker.core.totals().tiers
        assert (counts.written_extents, counts.failed_extents, len(disk.files)) == (8, 0, SmallDisk.most)

    def test_forget_deletes_what_a_tenant_has(self) -> None:
        disk = PlayedDisk()
        worker = TierWorker(host_extents=16, disk_extents=16, disk=disk)
        worker.run(prompt_of("a"))
        worker.core.handle(ForgetTenant(b"another"), worker.now)
        assert [tier.held_bytes for tier in worker.core.totals().tiers] == [2 * FAKE_EXTENT_BYTES] * 2
        worker.core.handle(ForgetTenant(b""), worker.now)
        worker.settle()
        assert [tier.held_bytes for tier in worker.core.totals().tiers] == [0, 0]
        assert disk.files == {}
        assert worker.core.prefix_snapshot().hashes == ()
        worker.run(prompt_of("a1"))
        assert end_of(worker.events, "a1").cached_tokens == 0

    def test_a_folder_of_an_idle_worker_has_time_to_forget(self) -> None:
        """It had nothing to answer before."""
        disk = PlayedDisk()
        worker = TierWorker(disk_extents=16, disk=disk)
        worker.run(prompt_of("a"))
        worker.now += 2 * SILENT_S
        worker.core.handle(ForgetTenant(b""), worker.now)
        worker.step()
        assert [counts.off_reason for counts in worker.core.totals().tiers] == [""]
        worker.settle()
        assert disk.files == {}

    def test_what_a_sequence_uses_is_not_forgotten(self) -> None:
        worker = TierWorker(host_extents=16)
        worker.run(prompt_of("b"))
        worker.add(make_spec("a", make_prompt(60, seed=1), max_tokens=8))
        worker.step()
        worker.core.handle(ForgetTenant(b""), worker.now)
        assert set(worker.core.prefix_snapshot().hashes) == set(
            make_spec("a", make_prompt(60, seed=1)).block_hashes[:3]
        )
        worker.settle()
        assert token_ids_of(worker.events, "a") == expected_output(make_prompt(60, seed=1), 8)
        assert_idle(worker.core)

    def test_forget_deletes_files_when_a_folder_that_failed_is_good_again(self) -> None:
        disk = PlayedDisk()
        worker = TierWorker(disk_extents=16, disk=disk)
        worker.run(prompt_of("a"))
        disk.error = "Input/output error"
        worker.run(prompt_of("b"))
        worker.core.handle(ForgetTenant(b""), worker.now)
        worker.settle()
        assert len(disk.files) == 2
        disk.error = ""
        worker.now += TRIED_AGAIN_S
        worker.settle()
        (counts,) = worker.core.totals().tiers
        assert (counts.off_reason, counts.held_bytes, disk.files) == ("", 0, {})

    def test_forget_deletes_files_when_a_folder_that_was_read_only_is_not_any_more(self) -> None:
        disk = ReadOnlyLater()
        worker = TierWorker(disk_extents=16, disk=disk)
        worker.run(prompt_of("a"))
        disk.is_read_only = True
        worker.core.handle(ForgetTenant(b""), worker.now)
        worker.settle()
        for _ in range(2):
            assert len(disk.files) == 2
            worker.now += TRIED_AGAIN_S
            worker.settle()
        disk.is_read_only = False
        worker.now += TRIED_AGAIN_S
        worker.settle()
        assert disk.files == {}
        assert_idle(worker.core)


class TestSharedFolders:
    def test_what_others_deleted_is_not_counted_on(self) -> None:
        disk = PlayedDisk()
        worker = TierWorker(disk_extents=16, disk=disk, is_shared=True)
        worker.run(prompt_of("a"))
        last = next(extent for extent in disk.files if extent.parent)
        disk.orders.append(lambda: [TierScanned((), (last.key,))])
        worker.now += SCANNED_AGAIN_S - 1.0
        worker.answer()
        worker.step()
        assert worker.core.totals().tiers[0].held_bytes == FAKE_EXTENT_BYTES

    def test_what_others_wrote_is_found_and_what_is_damaged_is_left_to_them(self) -> None:
        disk = PlayedDisk()
        first = TierWorker(disk_extents=16, disk=disk, is_shared=True)
        second = TierWorker(disk_extents=16, disk=PlayedDisk(disk.files), is_shared=True)
        first.run(prompt_of("a"))
        second.now += SCANNED_AGAIN_S
        second.settle()
        assert second.run(prompt_of("a1")) == expected(prompt_of("a"))
        assert end_of(second.events, "a1").cached_tokens == 256
        third = TierWorker(disk_extents=16, disk=PlayedDisk(disk.files), is_shared=True)
        assert third.disk is not None
        third.disk.damaged = set(disk.files)
        assert third.run(prompt_of("a2")) == expected(prompt_of("a"))
        assert (end_of(third.events, "a2").cached_tokens, third.disk.deleted) == (0, [])

    def test_others_may_delete_what_is_about_to_be_loaded(self) -> None:
        disk = PlayedDisk()
        worker = TierWorker(disk_extents=16, disk=disk, is_shared=True)
        cold(worker, prompt_of("a"))
        disk.files.clear()
        spec = make_spec("again", make_prompt(300, seed=ord("a")), max_tokens=4)
        assert worker.run(spec) == expected(spec)
        assert_idle(worker.core)

    def test_copies_beside_a_running_sequence_are_few(self) -> None:
        worker = TierWorker(host_extents=32, num_blocks=96)
        for name in "abcdef":
            worker.run(prompt_of(name, 384 - 5))
        worker.add(make_spec("running", make_prompt(20, seed=5), max_tokens=40))
        worker.step()
        loaded = worker.core.totals().loaded_tokens
        for name in ("a1", "b1"):
            worker.add(prompt_of(name, 384 - 5))
        worker.step()
        assert worker.core.totals().loaded_tokens - loaded == MOST_BESIDE_OTHERS * 128


class NarrowDisk(PlayedDisk):
    """Takes two orders at a time."""

    @property
    def has_room(self) -> bool:
        return len(self.orders) < 2


class TestFaults:
    def test_a_folder_that_fails_turns_the_tier_off_until_it_is_good_again(self) -> None:
        disk = PlayedDisk()
        worker = TierWorker(disk_extents=16, disk=disk)
        worker.run(prompt_of("a"))
        disk.error = "No space left on device"
        assert worker.run(prompt_of("b")) == expected(prompt_of("b"))
        assert worker.core.totals().tiers[0].off_reason == "No space left on device"
        assert worker.core.totals().tiers[0].held_bytes == 0
        disk.error = ""
        worker.now += TRIED_AGAIN_S
        worker.settle()
        assert worker.core.totals().tiers[0].off_reason == ""
        assert worker.core.totals().tiers[0].held_bytes == 2 * FAKE_EXTENT_BYTES

    def test_a_full_disk_is_read_and_logged_once(self, caplog: pytest.LogCaptureFixture) -> None:
        """Each write fails; what is there is loaded."""
        caplog.set_level("INFO", "disagg.engine.tiers.folder")
        disk = SmallDisk()
        worker = TierWorker(disk_extents=32, disk=disk)
        cold(worker, prompt_of("a"))
        for number in range(2):
            assert worker.core.totals().tiers[0].off_reason == "no file is written: No space left on device"
            assert worker.run(prompt_of(f"a{number}")) == expected(prompt_of("a"))
            assert end_of(worker.events, f"a{number}").cached_tokens == 256
            worker.now += TRIED_AGAIN_S
            worker.run(prompt_of(chr(ord("k") + number)))
            worker.run(prompt_of(chr(ord("p") + number)))
        disk.most = 32
        worker.now += TRIED_AGAIN_S
        worker.run(prompt_of("d"))
        assert worker.core.totals().tiers[0].off_reason == ""
        texts = [record.getMessage() for record in caplog.records]
        assert texts == [
            "no file of KV is written to the disk tier: No space left on device; it is tried again every 30 s",
            "the disk tier of the KV is on again, a file was written to it",
        ]

    def test_a_disk_that_does_not_answer_keeps_nothing_from_host_memory(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("INFO", "disagg.engine.tiers.folder")
        disk = NarrowDisk()
        worker = TierWorker(host_extents=32, disk_extents=32, disk=disk, num_blocks=96)
        worker.run(prompt_of("a"))
        for name in "bcd":  # what is written of them is not answered
            worker.add(prompt_of(name))
            for _ in range(60):
                worker.step()
        num_written = worker.core.totals().tiers[0].written_extents
        due = worker.core.next_deadline
        assert due is not None
        assert 0.0 < due - worker.now <= SILENT_S
        worker.now = due
        worker.step()
        assert worker.core.totals().tiers[1].off_reason == "no answer since 23:59:50 UTC"
        assert num_written == 4
        for _ in range(10):
            worker.step()
        assert worker.core.totals().tiers[0].written_extents == 8
        num_orders = len(disk.orders)
        worker.now += 1000.0
        for _ in range(10):
            worker.step()
        assert len(disk.orders) == num_orders
        worker.settle()
        folder = worker.core.totals().tiers[1]
        assert (folder.off_reason, folder.held_bytes) == ("", 4 * FAKE_EXTENT_BYTES)
        assert [record.getMessage() for record in caplog.records] == [
            "the disk tier of the KV is off: no answer since 23:59:50 UTC; it is on again when the disk answers",
            "the disk tier of the KV is on again, the disk answers",
        ]
        assert_idle(worker.core)

    def test_a_read_that_fails_is_computed(self) -> None:
        disk = PlayedDisk()
        worker = TierWorker(disk_extents=32, disk=disk)
        cold(worker, prompt_of("a"))
        disk.error = "Input/output error"
        spec = make_spec("again", make_prompt(300, seed=ord("a")))
        assert worker.run(spec) == expected(spec)
        assert worker.core.totals().tiers[0].off_reason == "Input/output error"
        assert_idle(worker.core)

    @pytest.mark.parametrize("operation", ["gather", "scatter"])
    def test_a_copy_that_fails_costs_the_tier_and_not_the_request(self, operation: str) -> None:
        runner = FailingRunner(48)
        runner.max_model_len = 384
        worker = TierWorker(host_extents=32, runner=runner)
        cold(worker, prompt_of("a"))
        runner.failing.add(operation)
        spec = make_spec("again", make_prompt(300, seed=ord("a")), max_tokens=4)
        assert worker.run(spec) == expected(spec)
        assert_idle(worker.core)


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "runner", "text"),
        [
            (TierOptions(host_bytes=2 * 1024), {}, "host_bytes: 2048 is less than the KV of max_model_len 384, 3072"),
            (
                TierOptions(disk=DiskTier(path="/x", bytes=2 * 1024)),
                {},
                "disk.bytes: 2048 is less than the KV of max_model_len 384, 3072",
            ),
            (TierOptions(host_bytes=1 << 20), {"windows": ((64, 40),)}, "models with windows have none"),
            (TierOptions(host_bytes=1 << 20), {"block_size": 48}, "need a block_size that divides 128, not 48"),
        ],
    )
    def test_what_cannot_work_is_refused_by_name(self, options: TierOptions, runner: dict[str, int], text: str) -> None:
        arguments = {"num_blocks": 48, "block_size": BLOCK, "max_model_len": 384, "vocab_size": VOCAB_SIZE, **runner}
        with pytest.raises(ConfigError, match=f"kv_cache.tiers.*{text}"):
            check_tiers(options, FakeModelRunner(**arguments), 384)  # type: ignore[arg-type]  # of two kinds


@pytest.mark.parametrize("seed", range(12))
def test_tokens_are_right_and_nothing_is_held_whatever_happens(seed: int) -> None:
    """Random prompts with common beginnings, a small device cache, and a folder that fails and is slow at times."""
    draw = random.Random(seed)
    disk = PlayedDisk() if seed % 3 else None
    worker = TierWorker(
        host_extents=draw.choice([3, 6]) if seed % 2 or disk is None else 0,
        disk_extents=draw.choice([3, 8]) if disk is not None else 0,
        disk=disk,
        max_loading=draw.randint(1, 3),
        min_tokens=draw.choice([1, 1024]),
    )
    live: dict[str, SequenceSpec] = {}
    done: dict[str, SequenceSpec] = {}
    for number in range(60):
        match draw.randrange(8):
            case 0 | 1 | 2:
                tree = make_prompt(draw.choice([130, 260]), seed=draw.randrange(3))
                prompt = (*tree, *make_prompt(draw.randint(1, 80), seed=10 + draw.randrange(4)))
                spec = live[f"r{number}"] = make_spec(f"r{number}", prompt, max_tokens=draw.randint(1, 6))
                worker.add(spec)
            case 3 if live:
                name = draw.choice(list(live))
                del live[name]
                worker.core.handle(Release(key_of(name)), worker.now)
            case 4:
                worker.answer()
            case 5 if disk is not None:
                disk.error = draw.choice(["", "", "Input/output error"])
                disk.damaged = {extent for extent in disk.files if draw.random() < 0.2}
            case 6:
                worker.now += draw.choice([0.0, 0.06, 31.0])
            case _:
                for _ in range(draw.randint(1, 6)):
                    worker.step()
    if disk is not None:
        disk.error = ""
    worker.settle()
    done.update(live)
    for name, spec in done.items():
        assert token_ids_of(worker.events, name) == expected(spec), name
    assert worker.core.audit() == (IDLE, [])
