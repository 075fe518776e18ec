from __future__ import annotations

from disagg.engine.core.policy import LazyHeap


def drain(heap: LazyHeap[str]) -> list[str]:
    items = []
    while (head := heap.peek()) is not None:
        items.append(head[1])
        heap.discard(head[1])
    return items


def test_items_leave_by_order_then_by_arrival() -> None:
    heap: LazyHeap[str] = LazyHeap()
    for order, item in [(2.0, "c"), (1.0, "a"), (1.0, "b"), (0.0, "z")]:
        heap.push((order,), item)
    assert len(heap) == 4
    assert heap.peek() == ((0.0,), "z")
    assert drain(heap) == ["z", "a", "b", "c"]
    assert (len(heap), heap.peek()) == (0, None)


def test_a_discarded_item_does_not_come_up_and_may_come_again() -> None:
    heap: LazyHeap[str] = LazyHeap()
    heap.push((1.0,), "a")
    heap.push((2.0,), "b")
    heap.discard("a")
    heap.discard("unknown")
    assert "a" not in heap
    heap.push((3.0,), "a")
    assert drain(heap) == ["b", "a"]


def test_a_second_push_gives_a_new_place() -> None:
    heap: LazyHeap[str] = LazyHeap()
    heap.push((1.0,), "a")
    heap.push((2.0,), "b")
    heap.push((3.0,), "a")
    assert len(heap) == 2
    assert drain(heap) == ["b", "a"]


def test_memory_follows_the_live_items() -> None:
    heap: LazyHeap[int] = LazyHeap()
    heap.push((0.0,), -1)
    for item in range(10_000):
        heap.push((1.0,), item)
        heap.discard(item)
    assert len(heap) == 1
    assert len(heap._heap) < 100
