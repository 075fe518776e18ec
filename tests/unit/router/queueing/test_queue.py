from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.proto.ids import RequestId
from disagg.router.queueing.queue import RequestQueue, Share, Urgency


def push(
    queue: RequestQueue,
    name: str,
    order: int,
    *,
    priority: int = 0,
    due: float = 10.0,
    again: bool = False,
    work_ms: float = 1.0,
) -> None:
    queue.push(RequestId(name), Urgency(-priority, not again, due, order), work_ms)


def test_order_is_priority_then_retries_then_due_time_then_arrival() -> None:
    queue = RequestQueue()
    push(queue, "late", 0)
    push(queue, "later", 1)
    push(queue, "soon", 2, due=5.0)
    push(queue, "sooner", 3, due=4.0)
    push(queue, "again", 4, again=True)
    push(queue, "urgent", 5, priority=1, due=9.0)
    push(queue, "idle", 6, priority=-1, due=1.0)
    order = ["urgent", "again", "sooner", "soon", "late", "later", "idle"]
    assert [queue.at(position) for position in range(8)] == [*order, None]
    assert queue.position(Urgency(0, True, 4.5, 7)) == 3
    assert queue.position(Urgency(-2, True, 4.5, 7)) == 0


def test_the_work_in_front_of_a_position() -> None:
    queue = RequestQueue()
    push(queue, "b", 1, work_ms=2.0)
    push(queue, "a", 0, work_ms=1.0)
    push(queue, "c", 2, work_ms=4.0)
    assert [queue.work_before(position) for position in range(4)] == [0.0, 1.0, 3.0, 7.0]
    queue.remove(RequestId("b"))
    assert [queue.work_before(position) for position in range(3)] == [0.0, 1.0, 5.0]
    assert (len(queue), RequestId("a") in queue, RequestId("b") in queue) == (2, True, False)


# ---------------------------------------------------------------- tenants


class Turns:
    """A queue of quantum 100, and what its tenants are charged."""

    def __init__(self, **weights: float) -> None:
        self.capped: set[str] = set()
        self.queue = RequestQueue(100, lambda tenant: tenant not in self.capped)
        self.shares = {name: Share(name, weight) for name, weight in weights.items()}
        self.costs: dict[RequestId, tuple[str, float]] = {}

    def push(self, tenant: str, cost: float, *, due: float = 10.0, priority: int = 0, again: bool = False) -> RequestId:
        order = len(self.costs)
        name = RequestId(f"{tenant}{order}")
        self.costs[name] = (tenant, cost)
        urgency = Urgency(-priority, not again, due, order)
        self.queue.push(name, urgency, cost, self.shares[tenant], 0.0 if again else cost)
        return name

    def order(self) -> list[str]:
        return [name for position in range(len(self.queue)) if (name := self.queue.at(position)) is not None]

    def place(self) -> tuple[str, float]:
        """The first one."""
        name = self.queue.at(0)
        assert name is not None
        self.queue.remove(name)
        tenant, cost = self.costs[name]
        self.queue.charge(self.shares[tenant], cost)
        return tenant, cost


def test_tenants_take_turns_by_tokens() -> None:
    it = Turns(a=1.0, b=1.0)
    for _ in range(6):
        it.push("a", 100.0)
    for _ in range(6):
        it.push("b", 50.0)
    # A quantum of 100 tokens in each round: one of a, two of b.
    assert it.order() == ["a0", "b6", "b7", "a1", "b8", "b9", "a2", "b10", "b11", "a3", "a4", "a5"]
    assert [it.place()[0] for _ in range(12)] == list("abbabbabbaaa")


def test_a_dear_request_takes_several_rounds_and_weights_count() -> None:
    it = Turns(a=1.0, b=1.0, c=2.0)
    for _ in range(3):
        it.push("a", 300.0)
    for tenant in "bc":
        for _ in range(8):
            it.push(tenant, 100.0)
    placed = [it.place()[0] for _ in range(13)]
    assert "".join(placed) == "abcc" + "bcc" + "bcc" + "abc"
    assert (placed.count("b"), placed.count("c")) == (4, 7)


def test_within_a_round_the_first_due_goes_first_and_priority_and_retries_before_all_turns() -> None:
    it = Turns(a=1.0, b=1.0)
    for _ in range(3):
        it.push("a", 40.0)
    it.push("b", 40.0, due=9.0)
    it.push("b", 40.0, due=11.0)
    it.push("a", 40.0, again=True)
    it.push("a", 40.0, priority=1)
    # Of a: 40 tokens stand before the first of no priority.
    assert it.order() == ["a6", "a5", "b3", "a0", "a1", "b4", "a2"]


def test_what_was_claimed_and_not_used_is_given_back() -> None:
    it = Turns(a=1.0, b=1.0)
    for _ in range(4):
        it.push("a", 1000.0)
    assert [it.place()[0] for _ in range(2)] == ["a", "a"]
    for _ in range(3):
        it.push("b", 100.0)
    assert it.order() == ["b4", "b5", "b6", "a2", "a3"]
    for _ in range(2):
        it.queue.settle(it.shares["a"], 1000.0, 100.0)
    # It began when a had claims only: at 0. A has used 200.
    assert it.order() == ["b4", "b5", "a2", "b6", "a3"]


def test_time_without_requests_earns_nothing_and_tokens_taken_alone_cost_nothing() -> None:
    it = Turns(a=1.0, b=1.0)
    for _ in range(20):
        it.push("a", 100.0)
    for _ in range(10):
        it.place()
        it.queue.settle(it.shares["a"], 100.0, 100.0)
    for _ in range(4):
        it.push("b", 100.0)
    assert it.order()[:6] == ["a10", "b20", "a11", "b21", "a12", "b22"]
    # The other way round: b waits alone, and a comes with what it had.
    later = Turns(a=1.0, b=1.0)
    later.shares["a"].used = 1e9
    later.push("b", 100.0)
    later.push("a", 100.0)
    later.push("b", 100.0)
    assert later.order() == ["b0", "a1", "b2"]


def test_the_position_of_a_new_request_is_where_it_comes_to_stand() -> None:
    it = Turns(a=1.0, b=1.0, c=1.0)
    for _ in range(6):
        it.push("a", 100.0)
    for _ in range(3):
        it.push("b", 50.0)
    for tenant in "abc":
        urgency = Urgency(0, True, 10.0, len(it.costs))
        position = it.queue.position(urgency, it.shares[tenant])
        work_ms = it.queue.work_before(position)
        name = it.push(tenant, 10.0)
        assert it.order()[position] == name
        assert (
            work_ms
            == sum(it.costs[RequestId(each)][1] for each in it.order()[:position])
            == (it.queue.work_before(position))
        )


def test_a_request_that_gets_a_kept_place_does_not_stand_behind_tenants_that_may_not_run_more() -> None:
    it = Turns(a=1.0, b=1.0)
    for _ in range(3):
        it.push("a", 10.0)
    it.queue.charge(it.shares["b"], 1e6)  # b has had more, so that a's are before it
    it.queue.look()
    urgency = Urgency(0, True, 10.0, 99)
    assert it.queue.position(urgency, it.shares["b"], 1) == 3  # a may run more
    it.capped = {"a"}
    assert it.queue.position(urgency, it.shares["b"], 1) == 0
    assert it.queue.position(urgency, it.shares["b"], 0) == 3  # no place is kept for b
    it.push("b", 10.0)
    assert it.queue.position(urgency, it.shares["b"], 2) == 1  # behind its own, which gets the first one
    assert it.queue.position(urgency, it.shares["b"], 1) == 4


def test_a_tenant_that_may_not_run_more_is_passed_over() -> None:
    it = Turns(a=1.0, b=1.0)
    it.push("a", 10.0)
    it.push("b", 10.0)
    it.push("a", 10.0)
    it.capped = {"a"}
    it.queue.look()
    assert it.order() == ["b1"]
    assert it.queue.skipped_a_tenant
    it.queue.remove(RequestId("b1"))
    assert it.queue.at(0) is None
    it.capped = set()
    it.queue.look()
    assert it.order() == ["a0", "a2"]
    assert not it.queue.skipped_a_tenant


@settings(max_examples=60, deadline=None)
@given(
    costs=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 400)), min_size=60, max_size=120),
    weight=st.sampled_from([0.5, 1.0, 3.0]),
)
def test_tenants_that_wait_all_the_time_get_the_same(costs: list[tuple[str, int]], weight: float) -> None:
    """Whatever they ask for: while they wait, what they took by their weights differs by a quantum and one request."""
    it = Turns(a=1.0, b=1.0, c=weight)
    for number, (tenant, cost) in enumerate(costs):
        it.push(tenant, cost, due=number % 7)
    running: list[tuple[str, float]] = []
    while len(it.queue):
        levels = [it.shares[name].level for name in {each[0] for each in it.order()}]
        assert max(levels) - min(levels) <= 100 + 400 / min(1.0, weight)
        running.append(it.place())
        if len(running) > 4:
            name, charged = running.pop(0)
            it.queue.settle(it.shares[name], charged, charged)
