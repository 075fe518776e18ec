"""A thread that carries out orders one by one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class OrderThread:
    """Owner: who orders. Orders may come from any thread, also before `start`, and are carried out then."""

    def __init__(self, name: str) -> None:
        self._first: deque[Callable[[], None]] = deque()
        self._others: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin to carry out orders."""
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """End after the present order; whether that was in time. What was ordered and not begun is not done."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def order(self, order: Callable[[], None], *, is_first: bool = False) -> None:
        """Carry it out behind earlier orders. `is_first`: before all that are not."""
        with self._wake:
            (self._first if is_first else self._others).append(order)
            self._wake.notify()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._first or self._others or self._stopping)
                if self._stopping:
                    return
                order = (self._first or self._others).popleft()
            order()
