"""Batches are run to their end: by one runner, by the next after a kill, side by side, cancelled, expired, wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from disagg.gateway.batches import lines
from disagg.gateway.batches.batch_quota import BatchQuota, num_admissible
from disagg.gateway.batches.lines import Line
from disagg.gateway.batches.runner import MAX_OPEN, NO_ROOM, BatchRunner, Later, LineResult
from disagg.gateway.batches.store import Batch, BatchStore, File
from disagg.gateway.batches.tries import KeptTries, Tries
from disagg.gateway.config import StoreLimits
from disagg.gateway.requests.call_use import CallUse
from tests.support.waiting import eventually

URL = "/v1/completions"
LEASE_S = StoreLimits().lease_s


MODELS = ("m", "other")


def _line(name: str, url: str = URL, **more: Any) -> bytes:
    body = {"model": "m", "prompt": name, **more}
    return msgspec.json.encode({"custom_id": name, "method": "POST", "url": url, "body": body}) + b"\n"


@pytest.fixture(autouse=True)
def _without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs are indexed in the order in which their batches came, however busy the machine is."""

    async def call(function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    monkeypatch.setattr(asyncio, "to_thread", call)


class _Bench:
    """A store with one batch, and what runs its lines."""

    def __init__(self, folder: Path, content: bytes, most: int = 3, limits: StoreLimits | None = None) -> None:
        self.folder, self.most, self.now = folder, most, 0.0
        self.limits = limits or StoreLimits()
        self.ran: list[str] = []
        self.used: list[tuple[str, str]] = []
        """Tenant and name of each line that was kept."""
        self.waiting: tuple[str, ...] = ()
        self.together: set[frozenset[str]] = set()
        """As each line ran: the tasks of all lines that had begun and not ended."""
        self.quotas: dict[int, int] = {}
        """Answers that may run at the model of that position until the line `last` has run, where it is not `most`."""
        self.last = ""
        self.answer_bytes = 0
        """Of each answer, at least."""
        self.turn_s = 0.01
        self.pace_s = 0.0
        """What passes with each look at the clock."""
        self.limited: dict[str, int] = {}
        """How many answers a tenant may have running."""
        self.refusals: dict[str, list[Later]] = {}
        """What the first tries of a line come to."""
        self.refused: list[tuple[str, float]] = []
        """Those tries, with the time."""
        self.on_try: Callable[[str, Tries], None] = lambda name, tries: None
        """Called with what became of a line before each try."""
        self.hang_from: int | None = None
        """After so many lines, the others hang."""
        self.held: tuple[str, str] | None = None
        """The first line runs once the answer to the second one is kept."""
        self.released = asyncio.Event()
        self.kept = asyncio.Event()
        """The answers of all that do not hang are in the store."""
        self.store = BatchStore(folder, self.limits)
        self.add("b", "a", content)

    def add(self, batch_id: str, tenant: str, content: bytes) -> None:
        file_id = f"file-{batch_id}"
        (self.folder / "upload").write_bytes(content)
        self.store.add_file(File(file_id, tenant, "in", "batch", len(content), 0.0), self.folder / "upload")
        self.store.create(batch_id, tenant, URL, file_id, self.now, 100.0)

    def runner(self, owner: str) -> BatchRunner:
        store = BatchStore(self.folder, self.limits)
        return BatchRunner(
            store, owner, lambda: MODELS, self, self._quota, self._clock, self._kept, self.turn_s, self._sleep
        )

    async def _sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)

    def most_running(self, batch: Batch) -> int | None:
        return self.limited.get(batch.tenant)

    def _quota(self, model: int, num_running: int, num_all: int) -> BatchQuota:
        most = self.quotas.get(model, self.most)
        return BatchQuota(num_admissible(9, 0, 0, num_running, most), 9, dict.fromkeys(self.waiting, (1, 0)))

    def _clock(self) -> float:
        self.now += self.pace_s
        if self.batch().num_completed == self.hang_from:
            self.kept.set()
        return self.now

    def _kept(self, tenant: str, use: CallUse) -> None:
        self.used.append((tenant, use.model))
        if self.held is not None and use.model == self.held[1]:
            self.released.set()

    async def __call__(self, batch: Batch, line: Line, tries: Tries) -> LineResult | Later:
        self.on_try(line.custom_id, tries)
        if later := self.refusals.get(line.custom_id, []):
            tries.num += 1
            tries.num_lost += 1
            self.refused.append((line.custom_id, self.now))
            return later.pop(0)
        if self.hang_from is not None and len(self.ran) >= self.hang_from:
            await asyncio.Event().wait()
        if self.held is not None and line.custom_id == self.held[0]:
            await self.released.wait()
        self.ran.append(line.custom_id)
        tasks = (task.get_name() for task in asyncio.all_tasks())
        self.together.add(frozenset(name for name in tasks if name.startswith("batch-")))
        self.waiting = ()
        if line.custom_id == self.last:
            self.quotas = {}
        status = 400 if line.custom_id == "bad" else 200
        text = line.custom_id.encode().ljust(self.answer_bytes, b".")
        return LineResult(status, b'{"text":"' + text + b'"}', CallUse(line.custom_id))

    def fill(self, tenant: str, num_bytes: int) -> None:
        """Store a file."""
        (self.folder / "upload").write_bytes(b"x")
        file = File(f"file-{tenant}", tenant, "in", "batch", num_bytes, 0.0)
        self.store.add_file(file, self.folder / "upload")

    @property
    def peak(self) -> int:
        """The most lines at a time."""
        return max(map(len, self.together))

    def batch(self, batch_id: str = "b", tenant: str = "a") -> Batch:
        found = self.store.batch(tenant, batch_id)
        assert found is not None
        return found

    def names(self, file_id: str | None) -> list[str]:
        assert file_id is not None
        return [msgspec.json.decode(raw)["custom_id"] for raw in self.store.path(file_id).read_bytes().splitlines()]


async def test_all_lines_are_answered_in_order_and_errors_apart(tmp_path: Path) -> None:
    bench = _Bench(tmp_path, _line("x") + _line("bad") + _line("y"), most=2)
    assert await bench.runner("me").run()
    batch = bench.batch()
    assert (batch.status, batch.total, batch.num_completed, batch.num_failed) == ("completed", 3, 2, 1)
    assert (bench.names(batch.output_file), bench.names(batch.error_file)) == (["x", "y"], ["bad"])
    assert bench.peak == 2
    assert sorted(bench.used) == [("a", "bad"), ("a", "x"), ("a", "y")]
    assert not await bench.runner("me").run()


async def test_the_next_owner_runs_only_the_lines_without_an_answer(tmp_path: Path) -> None:
    names = [f"line-{number}" for number in range(20)]
    bench = _Bench(tmp_path, b"".join(map(_line, names)))
    bench.hang_from = 8
    killed = asyncio.create_task(bench.runner("killed").run())
    await bench.kept.wait()
    killed.cancel()
    await asyncio.gather(killed, return_exceptions=True)
    bench.hang_from, bench.now = None, LEASE_S
    assert await bench.runner("next").run()
    assert bench.names(bench.batch().output_file) == names
    assert sorted(bench.ran) == sorted(names)


@pytest.mark.parametrize("status", ["cancelled", "expired"])
async def test_a_batch_that_ends_early_keeps_its_answers(tmp_path: Path, status: str) -> None:
    bench = _Bench(tmp_path, b"".join(_line(str(number)) for number in range(9)))
    bench.hang_from = 2
    running = asyncio.create_task(bench.runner("me").run())
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
        (_line("x") + b'{"body":' + b"[" * 10_000 + b"]" * 10_000 + b"}\n", "line 2: is nested too deeply"),
        (_line("x") + _line("x"), "line 2: custom_id: an earlier line has the same"),
        (_line("x", "/v1/models"), "line 1: url: must be /v1/completions, as of the batch"),
    ],
)
async def test_a_wrong_input_fails_with_its_line(tmp_path: Path, content: bytes, reason: str) -> None:
    bench = _Bench(tmp_path, content)
    assert await bench.runner("me").run()
    assert (bench.batch().status, bench.ran) == ("failed", [])
    assert (bench.batch().error or "").startswith(reason)


async def test_tenants_take_turns_and_each_has_one_batch_at_a_time(tmp_path: Path) -> None:
    """Lines of the second tenant run from the beginning, though the first one came first and has many more."""
    bench = _Bench(tmp_path, b"".join(_line(f"a{number}") for number in range(20)), most=2)
    bench.add("b2", "a", _line("a-later"))
    bench.add("c", "t", b"".join(_line(f"t{number}") for number in range(5)))
    assert await bench.runner("me").run()
    statuses = [bench.batch(*each).status for each in (("b", "a"), ("b2", "a"), ("c", "t"))]
    assert statuses == ["completed"] * 3
    assert bench.ran[-1] == "a-later"
    assert bench.ran.index("t4") < bench.ran.index("a19")
    assert bench.peak == 2


async def test_a_tenant_that_waits_holds_up_no_other(tmp_path: Path) -> None:
    bench = _Bench(tmp_path, _line("a0"))
    bench.add("c", "t", _line("t0"))
    bench.waiting = ("a",)
    assert await bench.runner("me").run()
    assert bench.ran == ["t0", "a0"]
    assert bench.batch().status == bench.batch("c", "t").status == "completed"


async def test_a_batch_without_room_for_its_answers_waits_and_loses_none(tmp_path: Path) -> None:
    content = b"".join(_line(str(number)) for number in range(60))
    limits = StoreLimits(max_total_bytes=5 * len(content))
    bench = _Bench(tmp_path, content, most=4, limits=limits)
    bench.fill("x", len(content))
    running = asyncio.create_task(bench.runner("me").run())
    await eventually(lambda: bench.batch().error is not None, every_s=0.0)
    assert (bench.batch().status, bench.batch().error) == ("in_progress", NO_ROOM)
    assert len(bench.ran) < 60
    bench.store.delete_file("x", "file-x")
    bench.pace_s = 0.01
    assert await running
    batch = bench.batch()
    assert (batch.status, batch.error, batch.num_completed) == ("completed", None, 60)
    assert len(bench.ran) == len(bench.used) == 60


async def test_a_batch_that_waits_for_room_expires_with_the_answers_that_it_has(tmp_path: Path) -> None:
    content = b"".join(_line(str(number)) for number in range(60))
    bench = _Bench(tmp_path, content, most=4, limits=StoreLimits(max_total_bytes=4 * len(content)))
    running = asyncio.create_task(bench.runner("me").run())
    await eventually(lambda: bench.batch().error is not None, every_s=0.0)
    bench.now = 100.0
    assert await running
    batch = bench.batch()
    assert (batch.status, batch.error) == ("expired", None)
    assert 0 < len(bench.names(batch.output_file)) == len(bench.ran) < 60


async def test_few_lines_run_where_little_room_is_left(tmp_path: Path) -> None:
    """So that what they come to exceeds it by little: answers that are as large as any before them fit."""
    content = b"".join(_line(str(number), fill="x" * 300) for number in range(40))
    bench = _Bench(tmp_path, content, most=9, limits=StoreLimits(max_total_bytes=4 * len(content)))
    bench.answer_bytes = len(content) // 8
    running = asyncio.create_task(bench.runner("me").run())
    await eventually(lambda: bench.batch().error is not None, every_s=0.0)
    assert len(bench.ran) <= 8 + 9  # before the first one was answered, nine had started
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_line_that_comes_again_leaves_its_place_to_others(tmp_path: Path) -> None:
    """Of two places, both were those of lines that wait for a limit of their tenant."""
    bench = _Bench(tmp_path, b"".join(_line(f"a{number}") for number in range(6)), most=2)
    bench.add("c", "t", b"".join(_line(f"t{number}") for number in range(6)))
    bench.refusals = {f"a{number}": [Later(5.0, holds_others=True)] for number in range(6)}
    running = asyncio.create_task(bench.runner("me").run())
    await eventually(lambda: bench.batch("c", "t").status == "completed", every_s=0.0)
    assert sorted(bench.ran) == [f"t{number}" for number in range(6)]
    assert len(bench.refused) <= 2
    bench.pace_s = 0.05
    assert await running
    assert bench.batch().status == "completed"
    assert bench.names(bench.batch().output_file) == [f"a{number}" for number in range(6)]
    times = [at for _, at in bench.refused]
    assert len(times) == 6
    assert times[-1] - times[0] >= 2 * 5.0  # while one waits for the limit, no further line of the batch is tried


async def test_a_line_that_comes_again_for_a_reason_of_its_own_holds_up_no_other(tmp_path: Path) -> None:
    bench = _Bench(tmp_path, _line("lost") + b"".join(_line(str(number)) for number in range(5)), most=1)
    bench.refusals = {"lost": [Later(5.0, holds_others=False)] * 3}
    bench.pace_s = 0.05
    assert await bench.runner("me").run()
    assert bench.ran == ["0", "1", "2", "3", "4", "lost"]
    assert bench.names(bench.batch().output_file) == ["lost", "0", "1", "2", "3", "4"]


async def test_no_more_lines_start_than_their_tenant_may_have_running(tmp_path: Path) -> None:
    """They would wait in the router, and hold places here meanwhile. One with more answers than that runs alone."""
    content = _line("four", n=4) + b"".join(_line(f"a{number}") for number in range(6))
    bench = _Bench(tmp_path, content, most=9)
    bench.add("c", "t", b"".join(_line(f"t{number}") for number in range(6)))
    bench.limited = {"a": 2}
    assert await bench.runner("me").run()
    of_first = [sum(name.startswith("batch-b-") for name in each) for each in bench.together]
    assert max(of_first) == 2
    assert frozenset({"batch-b-0"}) in {each & {f"batch-b-{i}" for i in range(7)} for each in bench.together}
    assert bench.peak > 2


async def test_batches_that_wait_leave_their_turn_to_those_of_others(tmp_path: Path) -> None:
    bench = _Bench(tmp_path, _line("first"), most=99)
    for number in range(MAX_OPEN):
        bench.add(f"c{number}", f"t{number}", _line(f"t{number}"))
    names = ["first", *(f"t{number}" for number in range(MAX_OPEN))]
    bench.refusals = {name: [Later(30.0, holds_others=True)] * 9 for name in names[:-1]}
    bench.turn_s = 1.0
    running = asyncio.create_task(bench.runner("me").run())
    bench.pace_s = 0.01
    await eventually(lambda: bench.ran == [names[-1]], every_s=0.0)
    bench.refusals = {}
    assert await running
    assert sorted(bench.ran) == sorted(names)


async def test_a_tenant_with_many_batches_has_one_turn_like_others(tmp_path: Path, monkeypatch: Any) -> None:
    """Each of its inputs is wrong, and all are older than that of the other."""
    monkeypatch.setattr("disagg.gateway.batches.runner.MAX_OPEN", 1)
    bench = _Bench(tmp_path, b"{\n", most=1)
    for number in range(5):
        bench.add(f"b{number}", "a", b"{\n")
    bench.add("c", "t", _line("t"))
    bench.pace_s = 0.01
    assert await bench.runner("me").run()
    ended = [batch.ended or 0.0 for batch in (*bench.store.batches("t", 9), *bench.store.batches("a", 9))]
    assert sorted(ended).index(ended[0]) == 1


async def test_each_answer_to_a_line_takes_a_place(tmp_path: Path) -> None:
    content = _line("four", n=4) + _line("best", best_of=3, n=1) + _line("one") + _line("large", n=8) + _line("last")
    bench = _Bench(tmp_path, content, most=5)
    assert await bench.runner("me").run()
    most = {each for each in bench.together if not any(each < other for other in bench.together)}
    assert most == {frozenset(f"batch-b-{number}" for number in numbers) for numbers in ((0,), (1, 2), (3,), (4,))}


async def test_a_line_that_does_not_fit_waits_for_those_of_other_batches_too(tmp_path: Path) -> None:
    """Of three places one is taken by the last line of another batch, which runs yet when there is another turn."""
    bench = _Bench(tmp_path, _line("held"), most=3)
    bench.add("c", "t", _line("short") + _line("large", n=3))
    bench.held = "held", "short"
    assert await bench.runner("me").run()
    assert bench.ran == ["short", "held", "large"]
    assert not any({"batch-b-0", "batch-c-1"} <= each for each in bench.together)


async def test_a_line_that_never_fits_has_its_turn(tmp_path: Path) -> None:
    """It runs alone, before the second line of a batch that came first."""
    bench = _Bench(tmp_path, b"".join(_line(f"small-{number}") for number in range(4)), most=3)
    bench.add("c", "t", _line("large", n=8))
    assert await bench.runner("me").run()
    assert bench.ran[:2] == ["small-0", "large"]
    assert sorted(bench.ran[2:]) == ["small-1", "small-2", "small-3"]
    assert frozenset({"batch-c-0"}) in bench.together


async def test_a_model_without_room_holds_up_no_line_of_another(tmp_path: Path) -> None:
    """Lines for a model that is not served end at once."""
    names = [("a", "m"), ("b", "m"), ("c", "other"), ("d", "none"), ("e", "other")]
    bench = _Bench(tmp_path, b"".join(_line(name, model=model) for name, model in names), most=9)
    bench.quotas, bench.last = {0: 0, 1: 1}, "e"
    assert await bench.runner("me").run()
    assert bench.ran.index("c") < bench.ran.index("e") < bench.ran.index("a")
    assert bench.names(bench.batch().output_file) == ["a", "b", "c", "d", "e"]


async def test_tries_of_a_line_count_though_its_batch_gives_its_turn_away(tmp_path: Path) -> None:
    """Else a line that always loses its worker would be tried for ever, with more tenants than turns."""
    bench = _Bench(tmp_path, _line("first"), most=99)
    for number in range(MAX_OPEN):
        bench.add(f"c{number}", f"t{number}", _line(f"t{number}"))
    names = ["first", *(f"t{number}" for number in range(MAX_OPEN))]
    bench.refusals = {name: [Later(30.0, holds_others=False)] * 4 for name in names}
    bench.turn_s, bench.pace_s = 1.0, 0.01
    seen: dict[str, list[int]] = {name: [] for name in names}
    bench.on_try = lambda name, tries: seen[name].append(tries.num_lost)
    assert await bench.runner("me").run()
    assert sorted(bench.ran) == sorted(names)
    assert seen == {name: [0, 1, 2, 3, 4] for name in names}


def test_tries_are_kept_for_so_many_lines(monkeypatch: Any) -> None:
    monkeypatch.setattr("disagg.gateway.batches.tries._MAX_LINES", 3)
    kept = KeptTries()
    kept.keep("a", {1: Tries(num_lost=1), 2: Tries(num=9)})
    kept.keep("b", {3: Tries(num_unjudged=1), 4: Tries(num_lost=2)})
    kept.keep("c", {5: Tries(num_lost=3)})
    assert [list(kept.take(batch_id)) for batch_id in "aabc"] == [[], [], [3, 4], [5]]


async def test_an_indexing_that_nobody_waits_for_ends(tmp_path: Path, monkeypatch: Any) -> None:
    """Cancelling its task does not end its thread."""
    bench = _Bench(tmp_path, _line("x"))
    stops: list[Callable[[], bool]] = []

    async def call(function: Callable[..., Any], *args: Any) -> Any:
        if function is lines.index:
            stops.append(args[3])
            await asyncio.Event().wait()
        return function(*args)

    monkeypatch.setattr(asyncio, "to_thread", call)
    running = asyncio.create_task(bench.runner("me").run())
    await eventually(lambda: bool(stops), every_s=0.0)
    assert not stops[0]()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert stops[0]()
