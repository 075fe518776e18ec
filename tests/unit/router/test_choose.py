"""The choice among candidates against its definition, which looks at all options."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from disagg.proto.ids import AttemptKey, RequestId
from disagg.router.placement.placement import MAX_SIDE, Candidate, Demand, Shortlist, Weight, choose
from disagg.router.placement.policies.baselines import Simple
from disagg.router.workers.assignments import AssignedLoad, Assignment
from disagg.router.workers.worker import Worker
from tests.support.router import worker_info

Option = tuple[Candidate | None, Candidate]
COSTS = st.sampled_from([0.0, 1.0, 2.0, 2.05, 3.0, 10.0, 10.1, 50.0])
SIDES = st.tuples(COSTS, st.integers(0, 2), st.booleans(), st.integers(0, 2), COSTS)
"""(cost, missed targets, has a slot, sequences there, cost of a link to it)."""


class Given(Simple):
    """Weighs as it was told, and takes options of nearly the same cost for equal."""

    waits = True
    weighs_setup = False
    weighs_local = True
    weighs_fetches = False

    def __init__(self, sides: dict[Candidate, tuple[float, int, bool, int, float]]) -> None:
        self.sides = sides

    def equal_up_to(self, cost: float) -> float:
        return cost * 1.02 + 0.5

    def weigh(self, demand: Demand, candidate: Candidate) -> Weight:
        cost, num_misses, *_ = self.sides[candidate]
        return Weight(cost, num_misses)

    weigh_prefill = weigh_decode = weigh_colocated = weigh

    def weigh_pair(self, demand: Demand, prefill: Candidate, decode: Candidate) -> tuple[float, float]:
        return self.sides[decode][4], 0.0


def candidate(name: str, has_slot: bool, num_sequences: int) -> Candidate:
    assigned = AssignedLoad(assignments={AttemptKey(RequestId(f"r{i}"), 0): Assignment() for i in range(num_sequences)})
    worker = Worker(worker_info(name), assigned, 0, 256)
    worker.has_slot = has_slot
    return Candidate(worker)


def by_definition(policy: Given, shortlist: Shortlist) -> list[Option]:
    """All that may be taken, in the order in which they are drawn from."""

    def best(candidates: list[Candidate], has_slots: bool) -> list[Candidate]:
        def key(candidate: Candidate) -> tuple[int, float, bool]:
            cost, num_misses, has_slot, *_ = policy.sides[candidate]
            return num_misses, cost, has_slots and not has_slot

        return sorted(candidates, key=key)[:MAX_SIDE]

    options: list[tuple[int, float, bool, int, Option]] = []
    for p in best(shortlist.prefills, True):
        for d in best(shortlist.decodes, False):
            (p_cost, p_misses, has_slot, p_seqs, _), (d_cost, d_misses, _, d_seqs, link) = (
                policy.sides[p],
                policy.sides[d],
            )
            options.append((p_misses + d_misses, p_cost + d_cost + link, has_slot, p_seqs + d_seqs + 2, (p, d)))
    for d in best(shortlist.colocated + shortlist.decodes, True):
        cost, num_misses, has_slot, num_sequences, _ = policy.sides[d]
        options.append((num_misses, cost, has_slot, num_sequences + 1, (None, d)))
    fewest_misses = min(option[0] for option in options)
    options = [option for option in options if option[0] == fewest_misses]
    limit = policy.equal_up_to(min(option[1] for option in options))
    options = [option for option in options if option[1] <= limit]
    options = [option for option in options if option[2]] or options
    if limit > min(option[1] for option in options):
        fewest = min(option[3] for option in options)
        options = [option for option in options if option[3] == fewest]
    return [option[4] for option in options]


@given(prefills=st.lists(SIDES, max_size=5), decodes=st.lists(SIDES, max_size=5), colocated=st.lists(SIDES, max_size=3))
def test_it_is_what_looking_at_all_options_gives(
    prefills: list[tuple[float, int, bool, int, float]],
    decodes: list[tuple[float, int, bool, int, float]],
    colocated: list[tuple[float, int, bool, int, float]],
) -> None:
    policy = Given({})
    roles: list[list[Candidate]] = []
    for name, sides in (("p", prefills), ("d", decodes), ("c", colocated)):
        roles.append([candidate(f"{name}{i}", side[2], side[3]) for i, side in enumerate(sides)])
        policy.sides.update(zip(roles[-1], sides, strict=True))
    shortlist = Shortlist(roles[0], roles[1], roles[2], local=True)
    seen: list[int] = []

    def draw(index: int) -> Option | None:
        def take(turn: int, count: int) -> int:
            seen.append(count)
            return index

        choice = choose(policy, Demand(num_tokens=64), [shortlist], take)
        return None if choice is None else (choice.prefill, choice.decode)

    if not decodes and not colocated:
        assert draw(0) is None
        return
    expected = by_definition(policy, shortlist)
    assert [draw(index) for index in range(len(expected))] == expected
    assert set(seen) <= {len(expected)}
