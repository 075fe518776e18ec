"""Leases that ran out: who may take them over, and what counts as the end of a gateway."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from disagg.gateway.batches.batch_quota import BatchQuota
from disagg.gateway.batches.leases import TakeOver, is_alive, owner_of
from disagg.gateway.batches.lines import Line
from disagg.gateway.batches.runner import BatchRunner, LineResult
from disagg.gateway.batches.store import Batch, BatchStore, File
from disagg.gateway.batches.tries import Tries
from disagg.gateway.config import StoreLimits
from disagg.gateway.requests.call_use import CallUse
from disagg.proto.clock.still_time import LOOK_S, StillTime

URL = "/v1/completions"
LEASE_S = StoreLimits().lease_s
LINE = b'{"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": {"model": "m"}}\n'
ALIVE = owner_of("other", "1")
GONE = f"other/{os.getpid()}/1/1"
"""An earlier process with the id of this one."""


class Process:
    """A process whose times a test sets, and looks at in time unless it stands still."""

    def __init__(self) -> None:
        self.monotonic_s = 1000.0
        self.time = StillTime(lambda: self.monotonic_s, lambda: 0.0)
        self.time.begin()

    def runs(self, seconds: float) -> None:
        for _ in range(round(seconds / LOOK_S)):
            self.monotonic_s += LOOK_S
            self.time.look()

    def stands_still(self, seconds: float) -> None:
        self.monotonic_s += seconds


def store_with_a_batch(folder: Path) -> BatchStore:
    store = BatchStore(folder, StoreLimits())
    (folder / "upload").write_bytes(LINE)
    store.add_file(File("file-b", "a", "in", "batch", len(LINE), 0.0), folder / "upload")
    store.create("b", "a", URL, "file-b", 0.0, 1e6)
    return store


@pytest.mark.parametrize(
    ("owner", "num_ends"),
    [
        pytest.param(ALIVE, 0, id="alive"),
        pytest.param(GONE, 1, id="gone, and its id is another's"),
        pytest.param(f"other/{1 << 30}/1/1", 1, id="gone"),
        pytest.param(f"other/{1 << 30}/1", 1, id="gone, of an earlier version"),
        pytest.param("other", 1, id="unknown"),
    ],
)
def test_only_a_process_that_is_gone_has_ended(tmp_path: Path, owner: str, num_ends: int) -> None:
    """One that lives stood still, or hangs: its batch goes on elsewhere, and its lines are no suspects."""
    store = store_with_a_batch(tmp_path)
    assert store.claim(owner, 0.0)
    store.begun.begin("b", [0])
    batch = store.claim("me", LEASE_S)
    assert batch is not None
    assert (batch.num_ends, store.begun.num_ends("b")) == (num_ends, {0: 1} if num_ends else {})


def test_a_process_is_known_by_its_id_and_its_start() -> None:
    assert is_alive(ALIVE)
    assert not is_alive(GONE)
    assert is_alive(f"other/{os.getppid()}/1")  # of an earlier version
    assert not is_alive("other/none")


def test_leases_are_left_alone_for_their_length_after_a_standstill() -> None:
    process = Process()
    take_over = TakeOver(process.time, LEASE_S)
    assert take_over.is_allowed()
    for _ in range(2):
        process.runs(1.0)
        process.stands_still(40.0)
        assert not take_over.is_allowed()
        process.runs(LEASE_S - 1.0)
        assert not take_over.is_allowed()
    process.runs(1.2)
    assert take_over.is_allowed()


class Bench:
    """The runner of a process beside another gateway, whose lease goes by the same wall clock."""

    def __init__(self, folder: Path) -> None:
        self.process, self.num_run = Process(), 0
        self.store = store_with_a_batch(folder)
        store = BatchStore(folder, StoreLimits())
        self.runner = BatchRunner(
            store,
            "me",
            lambda: ("m",),
            self,
            lambda *_: BatchQuota(4, 4),
            self.wall_s,
            lambda *_: None,
            0.01,
            process=self.process.time,
        )

    def wall_s(self) -> float:
        return self.process.monotonic_s

    def most_running(self, batch: Batch) -> int | None:
        return None

    async def __call__(self, batch: Batch, line: Line, tries: Tries) -> LineResult:
        self.num_run += 1
        return LineResult(200, b"{}", CallUse())


async def test_who_wakes_first_lets_the_other_renew_its_lease(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert bench.store.claim(ALIVE, bench.wall_s())
    bench.process.stands_still(3 * LEASE_S)
    assert not await bench.runner.run()
    bench.process.runs(1.0)
    assert bench.store.renew("b", ALIVE, bench.wall_s())
    bench.process.runs(LEASE_S - 0.5)
    assert not await bench.runner.run()
    bench.process.runs(1.0)
    assert await bench.runner.run()  # it renewed nothing more
    assert bench.num_run == 1


async def test_what_nobody_owns_is_run_at_once_after_a_standstill(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.process.stands_still(3 * LEASE_S)
    assert await bench.runner.run()
    assert bench.num_run == 1
