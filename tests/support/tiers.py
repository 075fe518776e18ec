"""Tiers of KV for tests of the engine: a folder in memory, cores with tiers over the fake runner, and what they
compute."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from disagg.engine.commands import (
    Add,
    Event,
    TierAnswer,
    TierFailed,
    TierForgotten,
    TierRead,
    TierScanned,
    TierWritten,
)
from disagg.engine.config import DiskTier, TierOptions, WorkerConfig
from disagg.engine.core.engine_core import EngineCore
from disagg.engine.fake_runner import FakeModelRunner
from disagg.engine.plan import Buffer, ModelRunner, StepPlan, StepResult
from disagg.engine.shell.extent_files import ExtentFiles
from disagg.engine.tiers.extents import Extent
from disagg.engine.tiers.found import arranged
from disagg.engine.tiers.store import DiskPort, TierParts
from disagg.proto.messages import SequenceSpec, StepSample
from tests.support.engine import BLOCK, VOCAB_SIZE, assert_sound, token_ids_of

FAKE_EXTENT_BYTES = 128 * 8
"""Of the fake runner, whose tokens take 8 bytes."""


class PlayedDisk(DiskPort):
    """A folder in memory, which may have so many files. Orders wait until `carry_out`."""

    most = 1024

    def __init__(self, files: dict[Extent, bytes] | None = None) -> None:
        self.files: dict[Extent, bytes] = {} if files is None else files
        self.error = ""
        """With a text every order fails with it."""
        self.damaged: set[Extent] = set()
        self.read_ms = 0.01
        self.num_reads = 0
        self._told: set[Extent] = set()
        """What the last scan found."""
        self.deleted: list[Extent] = []
        """What was to be deleted, whether it was there or not."""
        self.orders: deque[Callable[[], list[TierAnswer]]] = deque()

    @property
    def has_room(self) -> bool:
        return True

    def scan(self, *, anew: bool) -> None:
        self.orders.append(lambda: self._scan(anew=anew))

    def forget(self, tag: bytes) -> None:
        self.orders.append(lambda: self._forget(tag))

    def write(self, number: int, extent: Extent, payload: Buffer) -> None:
        self.orders.append(lambda: self._write(number, extent, payload))

    def read(self, number: int, extent: Extent, payload: Buffer) -> None:
        self.num_reads += 1
        self.orders.append(lambda: self._read(number, extent, payload))

    def delete(self, extents: Iterable[Extent]) -> None:
        gone = tuple(extents)
        self.orders.append(lambda: self._delete(gone))

    def carry_out(self) -> list[TierAnswer]:
        """What the folder answers to all orders."""
        answers = []
        while self.orders:
            answers += self.orders.popleft()()
        return answers

    def _failed(self, *, of_scan: bool = False) -> list[TierAnswer]:
        return [TierFailed(self.error, of_scan)] if self.error else []

    def _scan(self, *, anew: bool) -> list[TierAnswer]:
        if self.error:
            return self._failed(of_scan=True)
        found = arranged(self.files, self.most)
        for extent in found.left:
            del self.files[extent]
        new = tuple(extent for extent in found.extents if anew or extent not in self._told)
        self._told = set(found.extents)
        return [TierScanned(new)]

    def _forget(self, tag: bytes) -> list[TierAnswer]:
        if self.error:
            return [TierForgotten(tag, False), *self._failed()]
        for extent in [extent for extent in self.files if extent.tag == tag]:
            del self.files[extent]
        return [TierForgotten(tag, True)]

    def _write(self, number: int, extent: Extent, payload: Buffer) -> list[TierAnswer]:
        if self.error:
            return [TierWritten(number, False), *self._failed()]
        self.files[extent] = bytes(payload)
        return [TierWritten(number, True)]

    def _read(self, number: int, extent: Extent, payload: Buffer) -> list[TierAnswer]:
        if self.error:
            return [TierRead(number, False), *self._failed()]
        data = self.files.get(extent)
        if data is None or extent in self.damaged:
            payload[:] = 0xEE
            return [TierRead(number, False)]
        payload[:] = memoryview(data)
        return [TierRead(number, True, self.read_ms)]

    def _delete(self, extents: tuple[Extent, ...]) -> list[TierAnswer]:
        self.deleted += extents
        for extent in extents:
            self.files.pop(extent, None)
        return []


class FileDisk(PlayedDisk):
    """Real files, without a thread."""

    def __init__(self, files: ExtentFiles) -> None:
        super().__init__()
        self._real = files

    def _scan(self, *, anew: bool) -> list[TierAnswer]:
        found = arranged(self._real.scan(self.most).extents, self.most)
        self._real.delete(found.left)
        return [TierScanned(found.extents)]

    def _forget(self, tag: bytes) -> list[TierAnswer]:
        self._real.forget(tag)
        return [TierForgotten(tag, True)]

    def _write(self, number: int, extent: Extent, payload: Buffer) -> list[TierAnswer]:
        self._real.write(extent, payload)
        return [TierWritten(number, True)]

    def _read(self, number: int, extent: Extent, payload: Buffer) -> list[TierAnswer]:
        return [TierRead(number, not self._real.read(extent, payload), self.read_ms)]

    def _delete(self, extents: tuple[Extent, ...]) -> list[TierAnswer]:
        self._real.delete(extents)
        return []


class CountingRunner(FakeModelRunner):
    """Counts the prompt tokens that it computes."""

    computed = 0

    def run(self, plan: StepPlan) -> StepResult:
        self.computed += sum(entry.num_tokens for entry in plan.prefills)
        return super().run(plan)


class TierWorker:
    """A core with tiers, on a made-up clock: a step takes a millisecond.

    Args:
        host_extents, disk_extents: sizes of its tiers; 0 for none.
        disk: the folder, of a tier with `disk_extents`.
        num_blocks: of its device cache.
    """

    def __init__(
        self,
        *,
        host_extents: int = 0,
        disk_extents: int = 0,
        disk: PlayedDisk | None = None,
        num_blocks: int = 48,
        runner: ModelRunner | None = None,
        calibration: tuple[StepSample, ...] = (),
        is_shared: bool = False,
        min_tokens: int = 1024,
        max_loading: int = 4,
        cached_share: float = 0.0,
        extent_bytes: int = FAKE_EXTENT_BYTES,
        decode_reserve_tokens: int = 512,
    ) -> None:
        self.disk = disk
        self.runner = CountingRunner(num_blocks, BLOCK, 384, VOCAB_SIZE) if runner is None else runner
        tiers: TierOptions | None = None
        if host_extents or disk_extents:
            folder = None
            if disk_extents:
                folder = DiskTier(path="/folder", bytes=disk_extents * extent_bytes, shared=is_shared)
            tiers = TierOptions(
                host_bytes=host_extents * extent_bytes, disk=folder, min_tokens=min_tokens, max_loading=max_loading
            )
        config = WorkerConfig(
            worker_id="worker",
            roles=("prefill", "decode"),
            model_path="fake",
            max_num_seqs=8,
            token_budget=64,
            watermark=0.0,
            swap_bytes=0,
            tiers=tiers,
            cached_share=cached_share,
            decode_reserve_tokens=decode_reserve_tokens,
        )
        parts = TierParts(disk=disk) if disk is not None else None
        self.core = EngineCore(self.runner, config=config, calibration=calibration, tier_parts=parts)
        self.now = 0.0
        self.events: list[Event] = []
        self.settle()

    def add(self, spec: SequenceSpec) -> None:
        self.events += self.core.handle(Add(spec), self.now)
        assert_sound(self.core)

    def step(self) -> None:
        """One step, and a millisecond later."""
        self.events += self.core.step(self.now)
        self.now += 0.001
        assert_sound(self.core)

    def answer(self) -> None:
        """The folder does what was ordered."""
        if self.disk is not None:
            for answer in self.disk.carry_out():
                self.events += self.core.handle(answer, self.now)
                assert_sound(self.core)

    def settle(self, most: int = 10_000) -> None:
        """Until nothing is left to do but to try a folder again."""
        for _ in range(most):
            due = self.core.next_deadline
            if not (self.core.has_work or (self.disk is not None and self.disk.orders)):
                if due is None or due > self.now + 1.0:
                    return
                self.now = max(self.now, due)
            self.answer()
            self.step()
        raise AssertionError(f"still busy after {most} steps")

    def run(self, spec: SequenceSpec) -> list[int]:
        """Run a request alone, and what follows it; its tokens."""
        self.add(spec)
        self.settle()
        return token_ids_of(self.events, str(spec.request_id))

    @property
    def computed(self) -> int:
        """Prompt tokens that were computed."""
        assert isinstance(self.runner, CountingRunner)
        return self.runner.computed
