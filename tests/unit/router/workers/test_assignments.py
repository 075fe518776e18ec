import pytest

from disagg.proto.ids import AttemptKey, RequestId, WorkerId
from disagg.router.workers.assignments import Assignment, Assignments

P, D = WorkerId("p0"), WorkerId("d0")
K0, K1 = AttemptKey(RequestId("r0"), 0), AttemptKey(RequestId("r1"), 0)
NOTHING = {"tokens": 0, "sequences": 0, "blocks": 0}


def test_what_was_assigned_is_given_back() -> None:
    assignments = Assignments()
    assignments.open(P, K0, Assignment(tokens=100, blocks=7))
    assignments.open(P, K1, Assignment(tokens=10, blocks=1))
    assignments.open(D, K0, Assignment(blocks=9))
    assert assignments.holdings() == {"tokens": 110, "sequences": 3, "blocks": 17}
    assigned = assignments.of_worker(P)
    assert (assigned.tokens, assigned.blocks, assigned.sequences) == (110, 8, 2)
    assert sorted(assignments.entries()) == [(D, K0), (P, K0), (P, K1)]
    for worker_id, key in list(assignments.entries()):
        assignments.close(worker_id, key)
    assert assignments.holdings() == NOTHING
    assert assignments.check_integrity() == []


def test_a_computed_prompt_gives_back_its_tokens_once() -> None:
    assignments = Assignments()
    assignments.open(P, K0, Assignment(tokens=100, blocks=7))
    assert assignments.computed(P, K0) == 100
    assert assignments.computed(P, K0) == 0
    assert assignments.holdings() == {"tokens": 0, "sequences": 1, "blocks": 7}
    assignments.close(P, K0)
    assert assignments.holdings() == NOTHING


def test_an_assignment_is_opened_and_closed_exactly_once() -> None:
    assignments = Assignments()
    assignment = Assignment(tokens=1)
    assignments.open(P, K0, assignment)
    for again in (Assignment(tokens=1), assignment):
        with pytest.raises(ValueError, match="r0/0 is assigned to p0 already"):
            assignments.open(P, K0, again)
    assignments.close(P, K0)
    with pytest.raises(KeyError):
        assignments.close(P, K0)
    assert assignments.holdings() == NOTHING


def test_an_answer_that_grows_is_given_back_with_its_assignment() -> None:
    assignments = Assignments()
    assigned = assignments.of_worker(D)
    assignments.open(D, K0, Assignment(tokens=10, pairs=55, blocks=2, context=10))
    assignments.grow(D, K0, 3, 1.5)
    assignments.grow(D, K0, 0, 2.5)
    assert (assigned.tokens, assigned.pairs, assigned.blocks, assigned.context) == (10, 55, 2, 13)
    assignments.computed(D, K0)
    assert (assigned.tokens, assigned.pairs, assigned.blocks, assigned.context) == (0, 0, 2, 13)
    assert assignments.close(D, K0) == Assignment(blocks=2, context=13, first_at=1.5)
    assert (assigned.blocks, assigned.context) == (0, 0)
    assignments.forget(D)
    assert assignments.of_worker(D) is not assigned


def test_integrity_sees_sums_that_are_off() -> None:
    assignments = Assignments()
    assignments.open(P, K0, Assignment(tokens=5, blocks=2))
    assignments.of_worker(P).tokens += 1
    assert assignments.check_integrity() == ["load of p0: 6 tokens, but the sum of its assignments is 5"]
