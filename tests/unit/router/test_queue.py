from disagg.proto.ids import RequestId
from disagg.router.queue import RequestQueue, Urgency


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
    assert [queue[position] for position in range(len(queue))] == order
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
