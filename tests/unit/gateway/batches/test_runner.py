"""Batches are run to their end: by one runner, by the next after a kill, cancelled, expired, wrong."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from disagg.router.gateway.batches.lines import Line
from disagg.router.gateway.batches.runner import BatchRunner, num_admissible
from disagg.router.gateway.batches.store import LEASE_S, Batch, BatchStore, File, StoreLimits

URL = "/v1/completions"


def _line(name: str, url: str = URL) -> bytes:
    return msgspec.json.encode({"custom_id": name, "method": "POST", "url": url, "body": {"prompt": name}}) + b"\n"


class _Bench:
    """A store with one batch, and what runs its lines."""

    def __init__(self, folder: Path, content: bytes, most: int = 3) -> None:
        self.folder, self.most, self.now = folder, most, 0.0
        self.ran: list[str] = []
        self.peak = self.running = 0
        self.hang_from: int | None = None
        """After so many lines, the others hang."""
        self.kept = asyncio.Event()
        """The answers of all that do not hang are in the store."""
        self.store = BatchStore(folder, StoreLimits())
        (folder / "upload").write_bytes(content)
        self.store.add_file(File("file-1", "a", "in", "batch", len(content), 0.0), folder / "upload")
        self.store.create("b", "a", URL, "file-1", 0.0, 100.0)

    def runner(self, owner: str) -> BatchRunner:
        store = BatchStore(self.folder, StoreLimits())
        return BatchRunner(
            store, owner, self._answer, lambda n: num_admissible(9, 0, 0, n, self.most), self._clock, 0.01
        )

    def _clock(self) -> float:
        if self.batch().num_completed == self.hang_from:
            self.kept.set()
        return self.now

    async def _answer(self, batch: Batch, line: Line) -> tuple[int, bytes]:
        if self.hang_from is not None and len(self.ran) >= self.hang_from:
            await asyncio.Event().wait()
        self.ran.append(line.custom_id)
        self.running += 1
        self.peak = max(self.peak, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        return (400 if line.custom_id == "bad" else 200), b'{"text":"' + line.custom_id.encode() + b'"}'

    def batch(self) -> Batch:
        found = self.store.batch("a", "b")
        assert found is not None
        return found

    def names(self, file_id: str | None) -> list[str]:
        assert file_id is not None
        return [msgspec.json.decode(raw)["custom_id"] for raw in self.store.path(file_id).read_bytes().splitlines()]


async def test_all_lines_are_answered_in_order_and_errors_apart(tmp_path: Path) -> None:
    bench = _Bench(tmp_path, _line("x") + _line("bad") + _line("y"), most=2)
    assert await bench.runner("me").run_one()
    batch = bench.batch()
    assert (batch.status, batch.total, batch.num_completed, batch.num_failed) == ("completed", 3, 2, 1)
    assert (bench.names(batch.output_file), bench.names(batch.error_file)) == (["x", "y"], ["bad"])
    assert bench.peak <= 2
    assert not await bench.runner("me").run_one()


async def test_the_next_owner_runs_only_the_lines_without_an_answer(tmp_path: Path) -> None:
    names = [f"line-{number}" for number in range(20)]
    bench = _Bench(tmp_path, b"".join(map(_line, names)))
    bench.hang_from = 8
    killed = asyncio.create_task(bench.runner("killed").run_one())
    await bench.kept.wait()
    killed.cancel()
    await asyncio.gather(killed, return_exceptions=True)
    bench.hang_from, bench.now = None, LEASE_S
    assert await bench.runner("next").run_one()
    assert bench.names(bench.batch().output_file) == names
    assert sorted(bench.ran) == sorted(names)


@pytest.mark.parametrize("status", ["cancelled", "expired"])
async def test_a_batch_that_ends_early_keeps_its_answers(tmp_path: Path, status: str) -> None:
    bench = _Bench(tmp_path, b"".join(_line(str(number)) for number in range(9)))
    bench.hang_from = 2
    running = asyncio.create_task(bench.runner("me").run_one())
    await bench.kept.wait()
    if status == "cancelled":
        bench.store.cancel("a", "b")
        bench.now = 1.0  # the next look at the batch's state
    else:
        bench.now = 100.0
    assert await running
    assert (bench.batch().status, bench.batch().num_completed) == (status, 2)
    assert len(bench.names(bench.batch().output_file)) == 2


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "the file has no line"),
        (_line("x") + b"{\n", "line 2: "),
        (_line("x") + _line("x"), "line 2: custom_id: an earlier line has the same"),
        (_line("x", "/v1/models"), "line 1: url: must be /v1/completions, as of the batch"),
    ],
)
async def test_a_wrong_input_fails_with_its_line(tmp_path: Path, content: bytes, reason: str) -> None:
    bench = _Bench(tmp_path, content)
    assert await bench.runner("me").run_one()
    assert (bench.batch().status, bench.ran) == ("failed", [])
    assert (bench.batch().error or "").startswith(reason)


def test_lines_start_only_in_room_that_nobody_waits_for() -> None:
    assert num_admissible(10, 0, 4, 0, 100) == 6
    assert num_admissible(10, 0, 4, 98, 100) == 2
    assert num_admissible(10, 1, 4, 0, 100) == 0
    assert num_admissible(3, 0, 4, 0, 100) == 0
