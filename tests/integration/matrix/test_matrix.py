"""Pairs of features change no token: each row combines some, and gives the tokens of a plain run.

In continuous integration the rows are a covering array, in which each allowed pair of levels stands together; the slow
test has a row for each pair alone. A row fails, too, where something that it names did not happen; of drafts the rows
together, because each worker computes them only where they pay.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from disagg.client import AsyncClient
from disagg.cluster.templates.templates import Templates
from disagg.engine.config import KvCacheDtype
from tests.integration.matrix.answers import Question, plain_answers
from tests.integration.matrix.drills import Drill
from tests.integration.matrix.factors import EQUAL_RANKS, ON, covering, name_of, pairs
from tests.integration.matrix.fleet import PLAIN, Fleet, ranks_of, running_fleet, template_of, worker_config
from tests.integration.matrix.front_end import open_front_end
from tests.support.covering import Row
from tests.support.tiny_models import make_checkpoint
from tests.support.workers import wait_until_workers_idle

COVERING = covering()
PAIRS = pairs()
ROWS: list[Row] = [*COVERING, *PAIRS]
IN_INT8 = [row for row in COVERING if row["ranks"] == EQUAL_RANKS]
FEWEST_ROWS = 4
"""Rows with speculation that have to run before something is asked of their drafts together."""
CASES = [
    *(pytest.param(row, id=name_of(row)) for row in COVERING),
    *(pytest.param(row, id=f"pair-{name_of(row)}", marks=pytest.mark.slow) for row in PAIRS),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama3_rope", tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def templates(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Templates]:
    with template_of(checkpoint, tmp_path_factory.mktemp("template")) as found:
        yield found


@pytest.fixture(scope="module")
def plain(checkpoint: Path, templates: Templates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_fleet([worker_config(PLAIN, checkpoint)], tmp_path_factory.mktemp("plain"), templates) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def plain_in_int8(checkpoint: Path, templates: Templates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The plain worker, with KV in 8 bits."""
    config = worker_config(PLAIN, checkpoint, kv="int8")
    with running_fleet([config], tmp_path_factory.mktemp("plain_in_int8"), templates) as fleet:
        yield fleet


class Fleets:
    """The fleet of one shape at a time."""

    def __init__(self, checkpoint: Path, templates: Templates, logs: Path, kv: KvCacheDtype = "auto") -> None:
        self._checkpoint = checkpoint
        self._kv = kv
        self._templates = templates
        self._logs = logs
        self._stack = ExitStack()
        self._running: dict[str, Fleet] = {}

    def of(self, shape: str) -> Fleet:
        """All of its workers run."""
        if shape not in self._running:
            self.close()
            logs = Path(tempfile.mkdtemp(prefix=shape, dir=self._logs))
            ranks = ranks_of(shape).items()
            configs = [worker_config(name, self._checkpoint, tp, self._kv) for name, tp in ranks]
            self._running[shape] = self._stack.enter_context(running_fleet(configs, logs, self._templates))
        self._running[shape].start()
        return self._running[shape]

    def close(self) -> None:
        self._running.clear()
        self._stack.close()


@pytest.fixture(scope="module")
def fleets(checkpoint: Path, templates: Templates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleets]:
    found = Fleets(checkpoint, templates, tmp_path_factory.mktemp("workers"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def fleets_in_int8(
    checkpoint: Path, templates: Templates, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleets]:
    found = Fleets(checkpoint, templates, tmp_path_factory.mktemp("workers_in_int8"), "int8")
    yield found
    found.close()


@pytest.fixture(scope="class")
def case(request: pytest.FixtureRequest, fleets: Fleets) -> tuple[Row, Fleet]:
    """A row and its workers. Of a wider scope than the test, which leaves them running."""
    return request.param, fleets.of(request.param["ranks"])


@pytest.fixture(scope="class")
def case_in_int8(request: pytest.FixtureRequest, fleets_in_int8: Fleets) -> tuple[Row, Fleet]:
    """The same, with KV in 8 bits."""
    return request.param, fleets_in_int8.of(request.param["ranks"])


@pytest.fixture(scope="module")
def accepted() -> list[int]:
    """Number of accepted drafts of each row with speculation that ran."""
    return []


@pytest.mark.parametrize("case", CASES, indirect=True)
async def test_a_row_gives_the_tokens_of_a_plain_run(
    case: tuple[Row, Fleet], plain: Fleet, checkpoint: Path, accepted: list[int]
) -> None:
    row, fleet = case
    num_accepted = await one_row(fleet, plain, checkpoint, Question(row, ROWS.index(row)))
    if row["speculation"] == ON:
        accepted.append(num_accepted)


@pytest.mark.slow
@pytest.mark.parametrize("case_in_int8", IN_INT8, indirect=True, ids=name_of)
async def test_a_row_with_kv_in_8_bits_gives_the_tokens_of_a_plain_run_with_it(
    case_in_int8: tuple[Row, Fleet], plain_in_int8: Fleet, checkpoint: Path
) -> None:
    """Of equal ranks: others have sums whose last bits differ, and an integer may then be the next one."""
    row, fleet = case_in_int8
    await one_row(fleet, plain_in_int8, checkpoint, Question(row, ROWS.index(row)))


def test_drafts_were_accepted_in_some_of_the_rows_before(accepted: list[int]) -> None:
    if len(accepted) < FEWEST_ROWS:
        pytest.skip("too few rows with speculation ran")
    assert sum(number > 0 for number in accepted) >= len(accepted) // 3


async def one_row(fleet: Fleet, plain: Fleet, checkpoint: Path, question: Question) -> int:
    """Ask the question of plain workers and of the others, and compare. Returns the number of accepted drafts."""
    async with open_front_end(list(plain.infos.values()), checkpoint) as front, AsyncClient(front.address) as client:
        expected = await plain_answers(client, question)
    async with open_front_end(list(fleet.infos.values()), checkpoint, expected.guardrails) as front:
        drill = Drill(front, fleet, question, expected)
        answers = await drill.run()
    expected.check(answers)
    drill.seen.check(question.row)
    await wait_until_workers_idle([*fleet.running(), *plain.running()])
    return drill.seen.num_accepted
