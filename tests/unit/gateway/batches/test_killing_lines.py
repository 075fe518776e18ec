"""Lines that end their gateway: each next one knows them, until they are not run any more."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from disagg.gateway.batches.batch_quota import BatchQuota
from disagg.gateway.batches.begun_lines import MAX_ENDS
from disagg.gateway.batches.lines import Line
from disagg.gateway.batches.runner import BatchRunner, Later, LineResult
from disagg.gateway.batches.store import Batch, BatchStore, File
from disagg.gateway.batches.tries import Tries
from disagg.gateway.config import StoreLimits
from disagg.gateway.requests.call_use import CallUse

URL = "/v1/completions"
LEASE_S = StoreLimits().lease_s


def content(*names: str) -> bytes:
    lines = ({"custom_id": name, "method": "POST", "url": URL, "body": {"model": "m", "prompt": "a"}} for name in names)
    return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)


class Lives:
    """Gateways one after the other, which end as soon as a line whose name begins with `killer` runs."""

    def __init__(self, folder: Path, **batches: bytes) -> None:
        self.folder, self.now = folder, 0.0
        self.store = BatchStore(folder, StoreLimits())
        self.ended = asyncio.Event()
        self.running = set[str]()
        self.beside_suspects = set[str]()
        """What ran beside a line with which a gateway had ended."""
        for name, lines in batches.items():
            (folder / "upload").write_bytes(lines)
            self.store.add_file(File(f"file-{name}", name, "in", "batch", len(lines), 0.0), folder / "upload")
            self.store.create(name, name, URL, f"file-{name}", 0.0, 1e6)

    def most_running(self, batch: Batch) -> int | None:
        return None

    async def __call__(self, batch: Batch, line: Line, tries: Tries) -> LineResult | Later:
        name = line.custom_id
        if tries.num_ends >= MAX_ENDS:
            return LineResult(500, b"{}", CallUse())
        if tries.num_ends:
            self.beside_suspects |= self.running
        self.running.add(name)
        if name.startswith("killer"):
            self.ended.set()
        for _ in range(200 if name.startswith("slow") else 1):
            await asyncio.sleep(0)
        if self.ended.is_set():
            await asyncio.Event().wait()
        self.running.discard(name)
        return LineResult(200, b"{}", CallUse())

    async def live(self, number: int) -> bool:
        """One gateway, to its end; whether it ran all batches."""
        store = BatchStore(self.folder, StoreLimits())
        runner = BatchRunner(
            store,
            f"g{number}",
            lambda: ("m",),
            self,
            lambda *_: BatchQuota(4, 4),
            lambda: self.now,
            lambda *_: None,
            0.01,
        )
        self.running.clear()
        self.ended.clear()
        life = asyncio.create_task(runner.run())
        end = asyncio.create_task(self.ended.wait())
        await asyncio.wait([life, end], return_when=asyncio.FIRST_COMPLETED)
        done = life.done()
        for task in (life, end):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        self.now += LEASE_S + 1
        return done

    def failed(self, name: str) -> list[str]:
        """Lines of a batch that has completed."""
        batch = self.store.batch(name, name)
        assert batch is not None
        assert batch.status == "completed"
        if batch.error_file is None:
            return []
        rows = self.store.path(batch.error_file).read_bytes().splitlines()
        return [msgspec.json.decode(row)["custom_id"] for row in rows]


@pytest.mark.parametrize("names", [("x", "killer", "y"), ("slow", "killer", "slow2", "slow3", "x"), ("killer",)])
async def test_a_line_that_ends_its_gateway_alone_is_not_run_again_and_the_others_are(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    lives = Lives(tmp_path, a=content(*names), b=content("z", "slow4"))
    num_ended = 0
    while not await lives.live(num_ended):
        num_ended += 1
    assert num_ended == 3
    assert lives.failed("a") == ["killer"]
    assert lives.failed("b") == []
    assert lives.beside_suspects == set()


async def test_two_such_lines_are_found_one_after_the_other(tmp_path: Path) -> None:
    lives = Lives(tmp_path, a=content("killer", "x", "killer2", "y", "z"))
    num_ended = 0
    while not await lives.live(num_ended):
        num_ended += 1
    assert num_ended <= 5
    assert lives.failed("a") == ["killer", "killer2"]


def test_a_batch_that_is_given_back_has_no_suspects(tmp_path: Path) -> None:
    store = Lives(tmp_path, a=content("x")).store
    for owner in ("g1", "g2"):
        assert store.claim(owner, 0.0) is not None
        store.begun.begin("a", [0])
        store.release(owner)
    batch = store.claim("g3", 0.0)
    assert batch is not None
    assert (batch.num_ends, store.begun.num_ends("a")) == (0, {})
    store.begun.begin("a", [0])
    store.release("g3", has_ended=True)
    batch = store.claim("g4", 0.0)
    assert batch is not None
    assert (batch.num_ends, store.begun.num_ends("a")) == (1, {0: 1})
