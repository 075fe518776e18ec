from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from disagg.engine.request import Sequence, SequenceState
from disagg.engine.speculation.looks import LONGEST_REST
from disagg.engine.speculation.lookup import Lookup
from disagg.engine.speculation.proposer import NOTHING, Proposal, Proposer
from disagg.engine.speculation.speculation import LONGEST_STEP, STEPS_BEHIND_FAILURE, TRY_AGAIN, Speculation
from disagg.proto.messages import StepSample
from tests.support.engine import make_spec


def ms_of(rows: int, context: int = 0) -> float:
    """A machine for which rows up to 9 are cheap."""
    return 10.0 + 0.2 * rows + 0.5 * max(0, rows - 9)


CALIBRATION = [StepSample(ms_of(rows), 0, 0, rows, 0) for rows in (1, 8, 32)]


class Scripted(Proposer):
    """Proposes what it is told to, and notes for what."""

    def __init__(self, *token_ids: int, match_length: int = 16) -> None:
        self.proposal = Proposal(token_ids, match_length)
        self.asked: list[tuple[Sequence, int]] = []
        self.forgotten: list[Sequence] = []

    def propose(self, sequence: Sequence, most: int) -> Proposal:
        self.asked.append((sequence, most))
        ids = self.proposal.token_ids[:most]
        return Proposal(ids, self.proposal.match_length) if ids else NOTHING

    def forget(self, sequence: Sequence) -> None:
        self.forgotten.append(sequence)


def sequence(*text: int) -> Sequence:
    spec = make_spec("r", text, max_tokens=10_000, cached=False)
    return Sequence(spec, SequenceState.RUNNING, token_ids=list(text))


def plan(
    speculation: Speculation, *sequences: Sequence, most: int = 8, most_rows: int = 32, most_ms: float = math.inf
) -> list[tuple[int, ...]]:
    wanted = [(each, most) for each in sequences]
    return speculation.plan(wanted, num_rows=len(sequences), context=0, most_rows=most_rows, most_ms=most_ms)


def test_drafts_are_those_of_the_proposer_up_to_the_most_of_the_worker() -> None:
    proposer = Scripted(1, 2, 3, 4, 5)
    assert plan(Speculation(proposer, CALIBRATION, max_draft=3), sequence(7)) == [(1, 2, 3)]
    assert proposer.asked[0][1] == 3


@pytest.mark.parametrize(("most", "most_rows", "expected"), [(2, 32, (1, 2)), (8, 2, (1,)), (8, 1, ()), (0, 32, ())])
def test_drafts_stay_within_the_bounds_of_the_step(most: int, most_rows: int, expected: tuple[int, ...]) -> None:
    speculation = Speculation(Scripted(1, 2, 3), CALIBRATION, max_draft=8)
    assert plan(speculation, sequence(7), most=most, most_rows=most_rows) == [expected]


@pytest.mark.parametrize(("most_ms", "expected"), [(10.1, ()), (10.401, (1,)), (10.601, (1, 2)), (11.0, (1, 2, 3))])
def test_a_step_with_drafts_takes_no_longer_than_the_tightest_sequence_allows(
    most_ms: float, expected: tuple[int, ...]
) -> None:
    speculation = Speculation(Scripted(1, 2, 3), CALIBRATION, max_draft=8)
    assert plan(speculation, sequence(7), most_ms=most_ms) == [expected]


def test_a_step_with_drafts_takes_at_most_half_as_long_again_as_one_without() -> None:
    """Eight sequences, which with all drafts would take 2.3 times as long, for 3 times as many tokens."""
    speculation = Speculation(Scripted(1, 2, 3, 4, 5, 6, 7, 8), CALIBRATION, max_draft=8)
    rows = [sequence(7, each) for each in range(8)]
    for _ in range(30):  # all drafts are right
        drafts = plan(speculation, *rows, most_rows=64)
        for each in rows:
            each.token_ids += [1, 2, 3, 4, 5, 6, 7, 8]
    num_rows, times = 8 + sum(map(len, drafts)), speculation._times
    assert times.ms(num_rows, 0) <= LONGEST_STEP * times.ms(8, 0) < times.ms(num_rows + 1, 0)


def test_a_sequence_that_may_have_none_is_not_looked_up() -> None:
    proposer, first, second = Scripted(1, 2), sequence(7), sequence(8)
    speculation = Speculation(proposer, CALIBRATION, max_draft=8)
    wanted = [(first, 0), (second, 8)]
    assert speculation.plan(wanted, num_rows=2, context=0, most_rows=32, most_ms=math.inf) == [(), (1, 2)]
    assert proposer.asked == [(second, 8)]


def test_nothing_is_looked_up_where_rows_cost_as_much_as_they_give() -> None:
    proposer = Scripted(1, 2, 3)
    linear = [StepSample(2.0 * rows, 0, 0, rows, 0) for rows in (1, 8, 32)]
    assert plan(Speculation(proposer, linear, max_draft=8), sequence(7)) == [()]
    assert proposer.asked == []


def test_measured_steps_decide_where_the_calibration_was_wrong() -> None:
    speculation = Speculation(Scripted(1, 2, 3), CALIBRATION, max_draft=8)
    for _ in range(200):
        for rows in (1, 2, 3, 4):
            speculation.observe(rows, 0, 10.0 * rows)
    assert plan(speculation, sequence(7)) == [()]


def test_totals_count_what_was_walked() -> None:
    speculation = Speculation(Scripted(1, 2, 3), CALIBRATION, max_draft=3)
    first, second = sequence(7), sequence(8)
    assert plan(speculation, first, second) == [(1, 2, 3), (1, 2, 3)]
    first.token_ids += [1, 2, 9]
    speculation.totals.walked(3, 2)
    speculation.totals.walked(3, 0)
    assert plan(speculation, first) == [(1, 2, 3)]
    first.token_ids += [1, 2, 3, 4]
    speculation.totals.walked(3, 3)
    assert speculation.totals.counts() == (2, 9, 5, (1, 0, 1, 1, *[0] * 12))


def test_a_sequence_that_is_forgotten_leaves_nothing() -> None:
    proposer, its = Scripted(1, 2), sequence(7)
    speculation = Speculation(proposer, CALIBRATION, max_draft=2)
    plan(speculation, its)
    its.token_ids += [1, 2, 3]
    plan(speculation, its)
    speculation.forget(its)
    speculation.forget(its)
    assert proposer.forgotten == [its, its]
    assert speculation._proposed == {}
    assert speculation._acceptance._shifts == {}


def test_drafts_that_were_not_computed_are_learned_from_as_well() -> None:
    """So text that begins to be predicted has drafts, without a row to try."""
    speculation, its = Speculation(Scripted(1), CALIBRATION, max_draft=1), sequence(7)
    for _ in range(200):
        plan(speculation, its)
        its.token_ids.append(9)
    num_steps, num_tokens = speculation.totals.steps_with_drafts, its.num_tokens
    while plan(speculation, its) == [()]:
        its.token_ids.append(1)
    assert 0 < its.num_tokens - num_tokens < 45
    assert num_steps < 40


def test_where_nothing_comes_of_it_most_steps_pass_without_a_look() -> None:
    proposer, its = Scripted(1), sequence(7)
    speculation = Speculation(proposer, CALIBRATION, max_draft=1)
    for _ in range(1000):
        plan(speculation, its)
        its.token_ids.append(9)
    proposer.asked.clear()
    for _ in range(900):
        plan(speculation, its)
        its.token_ids.append(9)
    assert len(proposer.asked) == 100


def test_a_text_that_is_always_mispredicted_costs_no_row_however_good_other_texts_were() -> None:
    proposer = Scripted(1, 2, 3)
    speculation = Speculation(proposer, CALIBRATION, max_draft=3)
    good, hostile = sequence(7), sequence(8)
    for _ in range(600):
        good.token_ids += (*plan(speculation, good)[0], 4)
    for _ in range(300):
        plan(speculation, hostile)
        hostile.token_ids.append(9)
    proposer.asked.clear()
    for _ in range(270):
        assert plan(speculation, hostile) == [()]
        hostile.token_ids.append(9)
    assert len(proposer.asked) == 30


def test_steps_are_queued_unless_drafts_are_likely() -> None:
    its, proposer = sequence(7), Scripted(1)
    speculation = Speculation(proposer, CALIBRATION, max_draft=1)

    def would_plan(most: int) -> bool:
        return speculation.would_plan([(its, most)], num_rows=1, context=0, most_rows=32)

    assert would_plan(1)
    assert not would_plan(0)
    its.token_ids.append(1)
    assert plan(speculation, its) == [(1,)]
    its.token_ids.append(1)
    for _ in range(1000):
        would_plan(0)
    while speculation._looks._num_resting:
        would_plan(0)
    would_plan(0)
    proposer.asked.clear()
    assert [would_plan(1) for _ in range(LONGEST_REST + 1)] == [False] * (LONGEST_REST + 1)
    assert len(proposer.asked) == 1  # and only watched
    its.token_ids.append(1)
    assert would_plan(1)


@pytest.mark.parametrize("num_queued", [0, 1, 10, TRY_AGAIN - 2])
def test_a_costly_proposer_is_asked_again_behind_steps_that_were_queued(num_queued: int) -> None:
    """Steps without drafts count whether they were planned or queued, until one waits for its tokens."""
    its, proposer = sequence(7), Scripted(1, match_length=0)
    proposer.is_costly = True
    speculation = Speculation(proposer, CALIBRATION, max_draft=1)
    while plan(speculation, its) == [(1,)]:
        its.token_ids.append(9)
    for _ in range(TRY_AGAIN - 2 - num_queued):
        assert plan(speculation, its) == [()]
        its.token_ids.append(9)
    proposer.asked.clear()
    waits = []
    for _ in range(num_queued + 1):
        waits.append(speculation.would_plan([(its, 1)], num_rows=1, context=0, most_rows=32))
        its.token_ids.append(9)
    assert waits == [*[False] * num_queued, True]
    assert proposer.asked == []
    assert plan(speculation, its) == [(1,)]


class Unable(Scripted):
    """Makes no drafts for one sequence."""

    is_costly = True

    def __init__(self, unable_for: Sequence) -> None:
        super().__init__(1, match_length=0)
        self._unable_for = unable_for

    def most(self, sequence: Sequence, most: int) -> int:
        return 0 if sequence is self._unable_for else most


def test_steps_do_not_wait_for_drafts_that_a_proposer_cannot_make() -> None:
    its, other = sequence(7), sequence(8)
    proposer = Unable(its)
    speculation = Speculation(proposer, CALIBRATION, max_draft=1)
    assert not speculation.would_plan([(its, 1)], num_rows=1, context=0, most_rows=32)
    assert speculation.would_plan([(its, 1), (other, 1)], num_rows=2, context=0, most_rows=32)
    assert plan(speculation, its, other, most_rows=3) == [(), (1,)]
    assert proposer.asked == [(other, 1)]


class Failing(Scripted):
    """Fails as long as it has an error."""

    error: Exception | None = None

    def propose(self, sequence: Sequence, most: int) -> Proposal:
        if self.error is not None:
            raise self.error
        return super().propose(sequence, most)


@pytest.mark.parametrize("is_costly", [False, True])
def test_a_proposer_that_fails_costs_drafts_and_no_step(is_costly: bool) -> None:
    proposer, its, other = Failing(1, 2), sequence(7), sequence(8)
    proposer.is_costly, proposer.error = is_costly, RuntimeError("out of memory")
    speculation = Speculation(proposer, CALIBRATION, max_draft=2)
    assert plan(speculation, its, other) == [(), ()]
    assert proposer.forgotten == [its, other]
    proposer.error = None
    for _ in range(STEPS_BEHIND_FAILURE):
        assert plan(speculation, its, other) == [(), ()]
    assert proposer.asked == []
    assert plan(speculation, its, other) == [(1, 2), (1, 2)]
    assert speculation.totals.steps_with_drafts == 1


def test_a_device_that_cannot_be_used_any_more_is_no_failure_of_a_proposer() -> None:
    proposer = Failing(1, 2)
    proposer.error = RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        plan(Speculation(proposer, CALIBRATION, max_draft=2), sequence(7))


def test_drafts_of_a_sequence_that_ended_count() -> None:
    speculation = Speculation(Scripted(1), CALIBRATION, max_draft=1)
    for _ in range(200):
        its = sequence(7)
        assert plan(speculation, its) == [(1,)]
        its.token_ids += [1, 2]
        speculation.forget(its)


# ---------------------------------------------------------------- in virtual time


class Run:
    """A worker that decodes in virtual time: texts are given, steps take `ms_of`."""

    def __init__(self, prompts: list[list[int]], *, is_plain: bool = False) -> None:
        self.sequences = [sequence(*prompt) for prompt in prompts]
        self.speculation = Speculation(Lookup(), CALIBRATION, max_draft=8)
        self.ms, self.num_tokens = 0.0, 0
        self._most = 0 if is_plain else 8

    def step(self, next_id: Callable[[list[int]], int]) -> None:
        """One step; `next_id` is what plain decoding gives behind a text."""
        drafts = plan(self.speculation, *self.sequences, most=self._most)
        for its, ids in zip(self.sequences, drafts, strict=True):
            size = its.num_tokens
            for draft in (*ids, -1):
                its.token_ids.append(next_id(its.token_ids))
                if its.token_ids[-1] != draft:
                    break
            self.num_tokens += its.num_tokens - size
            if ids:
                self.speculation.totals.walked(len(ids), its.num_tokens - size - 1)
        rows = len(self.sequences) + sum(map(len, drafts))
        self.ms += ms_of(rows)
        self.speculation.observe(rows, 0, ms_of(rows))

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.num_tokens / self.ms * 1e3


def random_prompt(seed: int, size: int = 300, num_ids: int = 50_000) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(num_ids) for _ in range(size)]


def mispredicted(text: list[int]) -> int:
    """Any of a few ids, but never the one that lookup proposes."""
    match = Lookup().propose(sequence(*text), 1)
    drawn = hash(tuple(text[-8:])) % 4
    return drawn if drawn not in match.token_ids else (drawn + 1) % 4


def copied(text: list[int]) -> int:
    """The text of the prompt, again and again."""
    return text[len(text) - 300]


@pytest.mark.parametrize("num_sequences", [1, 4])
def test_a_text_that_lookup_always_mispredicts_costs_less_than_two_percent(num_sequences: int) -> None:
    prompts = [random_prompt(seed, num_ids=4) for seed in range(num_sequences)]
    run, plain = Run(prompts), Run(prompts, is_plain=True)
    for _ in range(400):
        run.step(mispredicted)
        plain.step(mispredicted)
    assert [each.token_ids for each in run.sequences] == [each.token_ids for each in plain.sequences]
    totals = run.speculation.totals
    assert totals.accepted == 0
    assert totals.drafted > 0
    assert run.speed >= 0.98 * plain.speed


def test_hostile_sequences_one_after_the_other_are_not_believed_again_and_again() -> None:
    run = Run([])
    for seed in range(30):
        run.sequences = [sequence(*random_prompt(seed, num_ids=4))]
        for _ in range(20):
            run.step(mispredicted)
        run.speculation.forget(run.sequences[0])
    assert run.speculation.totals.accepted == 0
    assert run.ms <= 600 * ms_of(1) / 0.98


def test_a_copy_soon_has_as_many_drafts_as_may_be() -> None:
    run = Run([[*random_prompt(1), *random_prompt(1)[:4]]])
    for _ in range(20):
        run.step(copied)
    totals = run.speculation.totals
    assert totals.accepted == totals.drafted
    assert totals.by_length[8] >= 18


def test_a_worker_that_saw_an_hour_of_hostile_texts_takes_up_a_copy() -> None:
    run = Run([random_prompt(1, num_ids=4)])
    for _ in range(2000):
        run.step(mispredicted)
    run.speculation.forget(run.sequences[0])
    run.sequences, run.num_tokens = [sequence(*random_prompt(2), *random_prompt(2)[:3])], 0
    for _ in range(60):
        run.step(copied)
    assert run.num_tokens > 0.7 * 60 * 9


def test_a_sequence_that_copies_beside_one_that_is_mispredicted_has_the_drafts() -> None:
    run = Run([[*random_prompt(1), *random_prompt(1)[:3]], random_prompt(2, num_ids=4)])
    for _ in range(200):
        run.step(lambda text: copied(text) if text[0] >= 4 else mispredicted(text))
    copying, other = (len(each.token_ids) for each in run.sequences)
    assert other == 300 + 200
    assert copying > 300 + 7 * 200
    totals = run.speculation.totals
    assert totals.accepted > 0.95 * totals.drafted
