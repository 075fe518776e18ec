from disagg.proto.ids import RequestId
from disagg.router.queue import RequestQueue, Urgency


def push(
    queue: RequestQueue, name: str, order: int, *, priority: int = 0, deadline: float | None = None, again: bool = False
) -> None:
    queue.push(RequestId(name), Urgency.of(priority, deadline, order, is_first_attempt=not again))


def test_order_is_priority_then_retries_then_deadline_then_arrival() -> None:
    queue = RequestQueue()
    push(queue, "late", 0)
    push(queue, "later", 1)
    push(queue, "soon", 2, deadline=5.0)
    push(queue, "sooner", 3, deadline=4.0)
    push(queue, "again", 4, again=True)
    push(queue, "urgent", 5, priority=1, deadline=9.0)
    push(queue, "idle", 6, priority=-1, deadline=1.0)
    assert list(queue) == ["urgent", "again", "sooner", "soon", "late", "later", "idle"]


def test_entries_can_be_removed_while_iterating() -> None:
    queue = RequestQueue()
    for order, name in enumerate("abc"):
        push(queue, name, order)
    for request_id in queue:
        if request_id != "b":
            queue.remove(request_id)
    assert list(queue) == ["b"]
    assert (len(queue), RequestId("a") in queue, RequestId("b") in queue) == (1, False, True)
