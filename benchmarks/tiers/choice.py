"""Is a prefix loaded where that is quicker, and computed where it is not?

A disk tier is slowed down so that loading and computing cross at about 1,024 tokens: the first file of a load takes
half of the time in which so many tokens are computed, as latency, and all files together the other half, by their rate.
The same prompts are then computed by a core without tiers, loaded by one that believes that computing takes for ever,
and left to one that decides as workers do, by what it has measured. All three are cores over one runner, with the real
files and their thread. For the same with a link see `links.py`.

    chosen / better of computed and loaded, by the length of the prefix
"""

from __future__ import annotations

import queue
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import load
from disagg.connections.cluster_secret import ClusterSecret
from disagg.engine.commands import Add, Ended, Event, TierAnswer, TokenSampled
from disagg.engine.config import DiskTier, TierOptions, WorkerConfig
from disagg.engine.core.calibration import calibrate
from disagg.engine.core.engine_core import EngineCore
from disagg.engine.parallel.factories import make_runner, warm_up
from disagg.engine.plan import Buffer, ModelRunner
from disagg.engine.shell.extent_files import ExtentFiles
from disagg.engine.shell.tier_disk import TierDisk
from disagg.engine.tiers.extent_file import extent_format
from disagg.engine.tiers.extents import Extent
from disagg.engine.tiers.sizes import extent_bytes
from disagg.engine.tiers.store import TierParts
from disagg.proto.block_hash import chain_hashes, root_hash
from disagg.proto.ids import GatewayId, RequestId
from disagg.proto.messages import EXTENT_TOKENS, Sampling, SequenceSpec, StepSample
from disagg.proto.token_ids import pack_token_ids
from tests.support.reports import percentile

COMPUTED, LOADED, CHOSEN = "computed", "loaded", "chosen"
LENGTHS = (128, 512, 1024, 2048, 4096)
CROSSING = 1024
TAIL_TOKENS = 32
"""Tokens of each prompt behind its prefix; they are always computed."""
ALLOWED_MS = 5.0
"""Milliseconds by which the choice may be slower, beside a tenth."""
_SETTLED_S = 60.0
_TAUGHT = 384
"""Tokens of the prefix by which a new core learns how fast the tier is."""


_MOST_FILES = 4096
_QUIET_TURNS = 250
"""Turns without anything after which all files are written: one takes milliseconds, more on a busy machine."""


class SlowFiles(ExtentFiles):
    """Files of which each takes a given time to read, at least, and the first one of a load a latency beside that."""

    read_s = 0.0
    latency_s = 0.0
    is_first = False
    """Whether the next file is the first one of a load."""
    sleep: Callable[[float], None] = staticmethod(time.sleep)

    def read(self, extent: Extent, payload: Buffer) -> str:
        """Read a file, no sooner than that."""
        due = time.perf_counter() + self.read_s + self.latency_s * self.is_first
        self.is_first = False
        fault = super().read(extent, payload)
        self.sleep(max(0.0, due - time.perf_counter()))
        return fault


@dataclass(frozen=True, kw_only=True)
class First:
    """The first token of an answer."""

    token: int
    ttft_ms: float
    cached_tokens: int


class Worker:
    """An engine core with its disk tier, on the calling thread. `files`: of the tier; None for none."""

    def __init__(
        self,
        runner: ModelRunner,
        config: WorkerConfig,
        calibration: Sequence[StepSample],
        files: SlowFiles | None,
        *,
        observes: bool = True,
    ) -> None:
        self._answers: queue.SimpleQueue[TierAnswer] = queue.SimpleQueue()
        self._files = files
        self._disk = TierDisk(files, _MOST_FILES) if files is not None else None
        if files is None or self._disk is None:
            config = msgspec.structs.replace(config, tiers=None)
        else:
            files.open()
            self._disk.start(self._answers.put)
        self._core = EngineCore(
            runner, config=config, calibration=calibration, tier_parts=TierParts(time.monotonic, self._disk)
        )
        self._observes = observes
        self._root = root_hash(runner.fingerprint)
        self._num_requests = 0
        self.settle()

    def close(self) -> None:
        """Let go of the folder."""
        if self._disk is not None:
            self._disk.stop(_SETTLED_S)

    def ask(self, prompt: list[int]) -> First:
        """The first token of a prompt, alone."""
        self._num_requests += 1
        if self._files is not None:
            self._files.is_first = True
        packed = pack_token_ids(prompt)
        spec = SequenceSpec(
            request_id=RequestId(f"bench-{self._num_requests}"),
            attempt=0,
            gateway_id=GatewayId("bench"),
            prompt_token_ids=packed,
            block_hashes=tuple(chain_hashes(self._root, packed)),
            root_hash=self._root,
            sampling=Sampling(temperature=0.0, max_tokens=1),
        )
        began = time.perf_counter()
        events = self._core.handle(Add(spec), time.monotonic())
        while not any(isinstance(event, Ended) for event in events):
            events += self._turn()
        ttft_ms = (time.perf_counter() - began) * 1e3
        token = next(event for event in events if isinstance(event, TokenSampled))
        end = next(event for event in events if isinstance(event, Ended))
        return First(token=token.token_id, ttft_ms=ttft_ms, cached_tokens=end.cached_tokens)

    def settle(self, quiet_turns: int = 3) -> None:
        """Until the folder was read and all is written: nothing happens for so many turns of 2 ms."""
        until = time.monotonic() + _SETTLED_S
        quiet = 0
        while quiet < quiet_turns and time.monotonic() < until:
            quiet = 0 if self._turn() or self._core.has_work or self._is_due() else quiet + 1

    def _is_due(self) -> bool:
        due = self._core.next_deadline
        return due is not None and due < time.monotonic() + 1.0

    def _turn(self) -> list[Event]:
        core = self._core
        try:
            answer: TierAnswer | None = self._answers.get(timeout=0.0 if core.has_work else 0.002)
        except queue.Empty:
            answer = None
        events = core.handle(answer, time.monotonic()) if answer is not None else []
        began = time.perf_counter()
        events += core.step(time.monotonic())
        if core.last_plan.entries and self._observes:
            core.observe(core.last_plan.measured((time.perf_counter() - began) * 1e3))
        return events


class Choice:
    """Measures all lengths. `config`: of a worker of the model, without tiers. `sleep`: by which files are slowed
    down."""

    def __init__(
        self,
        config: WorkerConfig,
        lengths: Sequence[int],
        repeats: int,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._lengths, self._repeats, self._sleep = lengths, repeats, sleep
        longest = max(*lengths, CROSSING) + TAIL_TOKENS + 1
        self._folder = tempfile.TemporaryDirectory(prefix="disagg-bench-")
        blocks = -(-2 * longest // 16)
        tiers = TierOptions(disk=DiskTier(path=self._folder.name, bytes=4 << 30), min_tokens=1, write_mb_per_s=1e5)
        self._config = msgspec.structs.replace(config, num_blocks=blocks, max_model_len=longest, tiers=tiers)
        self._runner = make_runner(self._config)
        warm_up(self._runner, self._config)
        self._calibration = calibrate(self._runner, self._config, time.perf_counter)
        self._secret = ClusterSecret(b"b" * 32)
        self._read_s = self._latency_s = 0.0

    def rows(self) -> Iterator[dict[str, Any]]:
        """One for each length, repeat and way."""
        with self._folder:
            with self._worker(COMPUTED) as worker:
                crossing = percentile([worker.ask(self._prompt(CROSSING, -1 - n)).ttft_ms for n in range(3)], 50)
                crossing -= worker.ask(self._prompt(CROSSING, -3, of_its_own=1)).ttft_ms  # behind a cached prefix
            with self._worker(CHOSEN) as worker:
                for length in (_TAUGHT, *self._lengths):
                    worker.ask(self._prompt(length, 0))
                    worker.settle(_QUIET_TURNS)
            self._latency_s = crossing / 1e3 / 2
            self._read_s = crossing / 1e3 / 2 / (CROSSING / EXTENT_TOKENS)
            for repeat in range(self._repeats):
                for length in self._lengths:
                    yield from self._measured(length, repeat)

    def _measured(self, length: int, repeat: int) -> Iterator[dict[str, Any]]:
        ways = (COMPUTED, LOADED, CHOSEN)
        for way in ways if repeat % 2 == 0 else reversed(ways):
            with self._worker(way) as worker:
                if way != COMPUTED:
                    worker.ask(self._prompt(_TAUGHT, 0))
                    worker.settle()
                first = worker.ask(self._prompt(length, 0, of_its_own=repeat + 1))
            yield {
                "part": "choice",
                "way": way,
                "length": length,
                "repeat": repeat,
                "ttft_ms": round(first.ttft_ms, 3),
                "cached_tokens": first.cached_tokens,
                "token": first.token,
                "extent_ms": round(self._read_s * 1e3, 3),
                "latency_ms": round(self._latency_s * 1e3, 3),
            }

    @contextmanager
    def _worker(self, way: str) -> Iterator[Worker]:
        """A core whose device cache is empty."""
        calibration = self._calibration
        if way == LOADED:
            calibration = tuple([msgspec.structs.replace(sample, ms=sample.ms * 1e3) for sample in calibration])
        files = None
        if way != COMPUTED:
            num_bytes = extent_bytes(self._runner.layout, 1)
            format_ = extent_format(self._runner.fingerprint, self._runner.layout, 1, num_bytes, self._secret)
            files = SlowFiles(Path(self._folder.name), format_, is_shared=False)
            files.read_s, files.latency_s, files.sleep = self._read_s, self._latency_s, self._sleep
        worker = Worker(self._runner, self._config, calibration, files, observes=way != LOADED)
        try:
            yield worker
        finally:
            worker.close()

    def _prompt(self, length: int, number: int, *, of_its_own: int = 0) -> list[int]:
        """A prefix of that many tokens, and a few behind it."""
        vocab_size = self._runner.vocab_size
        prefix = load.random_prompt(length * 100 + number, length, vocab_size)
        return prefix + load.random_prompt(-1 - of_its_own, TAIL_TOKENS, vocab_size)


def worst(rows: Sequence[dict[str, Any]]) -> float | None:
    """By how much the choice is slower than the better way, at the length where it is worst, after what is allowed in
    milliseconds; medians over the repeats. None without rows."""
    found = []
    for length in dict.fromkeys(row["length"] for row in rows):
        ms = {way: median_of(rows, length, way) for way in (COMPUTED, LOADED, CHOSEN)}
        found.append(max(0.0, ms[CHOSEN] - ALLOWED_MS) / min(ms[COMPUTED], ms[LOADED]))
    return round(max(found), 4) if found else None


def median_of(rows: Sequence[dict[str, Any]], length: int, way: str) -> float:
    """Milliseconds to the first token."""
    return percentile([row["ttft_ms"] for row in rows if (row["length"], row["way"]) == (length, way)], 50)


def num_wrong(rows: Sequence[dict[str, Any]]) -> int:
    """First tokens that are not those of the core that computes."""
    tokens = {(row["length"], row["repeat"]): row["token"] for row in rows if row["way"] == COMPUTED}
    return sum(row["token"] != tokens[row["length"], row["repeat"]] for row in rows)
