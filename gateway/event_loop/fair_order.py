"""Which piece of offloaded work runs next, and which is refused: deficit round robin on bytes, by tenant. Pure.

    offer ──> waiting ──take──> running ──finished──> (gone)
      └─ OverloadedError   └─ cancel, or the deadline passed when its turn came ──> (gone)

A tenant with much waiting work delays another tenant by one piece of work at most, not by all of it: a tenant never
has all threads where there are several.
Bytes count from `offer` until the work is gone, because its input stays in memory until then.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from disagg.proto.errors import OverloadedError

QUANTUM_BYTES = 64 << 10
"""Bytes by which a tenant's credit grows in each round. Work up to this size runs at its tenant's first turn."""
RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """One piece of work, known by its identity."""

    tenant: str
    num_bytes: int
    """Size of the input, as a measure of the time that the work takes."""
    deadline: float | None = None
    """Time after which the work is not started; `None` for no limit."""


@dataclass(slots=True)
class _TenantQueue:
    """The waiting work of one tenant, and what it uses of the limits."""

    waiting: dict[Work, None] = field(default_factory=dict)
    """Waiting work in the order of arrival."""
    credit: int = 0
    num_bytes: int = 0
    """Bytes of the inputs of waiting and running work."""
    num_running: int = 0


class FairOrder:
    """The order of offloaded work, and its limits in bytes. One owner, one clock.

    Args:
        max_bytes: of all work that waits or runs.
        max_tenant_bytes: of one tenant's work that waits or runs. A single larger piece is still taken when its tenant
            holds nothing.
        max_tenant_running: pieces of one tenant that run at a time.
        what: the work is on, for errors.
    """

    def __init__(
        self, max_bytes: int, max_tenant_bytes: int, max_tenant_running: int = 1, what: str = "prompts"
    ) -> None:
        self._what = what
        self._max_tenant_running = max_tenant_running
        self._max_bytes = max_bytes
        self._max_tenant_bytes = max_tenant_bytes
        self._queues: dict[str, _TenantQueue] = {}
        self._ring: deque[str] = deque()
        """Tenants with waiting work that may run; the first one is next."""
        self.num_bytes = 0
        """Bytes of the inputs of all work that waits or runs."""

    @property
    def num_waiting(self) -> int:
        """Number of pieces of work that have not been started."""
        return sum(len(queue.waiting) for queue in self._queues.values())

    def offer(self, work: Work) -> None:
        """Add `work` to its tenant's queue. Raises `OverloadedError` where that would hold too many bytes."""
        queue = self._queues.get(work.tenant)
        if queue is not None and queue.num_bytes + work.num_bytes > self._max_tenant_bytes:
            raise OverloadedError(
                f"{queue.num_bytes} bytes of this key's {self._what} are worked on, at most {self._max_tenant_bytes}",
                RETRY_AFTER_S,
            )
        if self.num_bytes and self.num_bytes + work.num_bytes > self._max_bytes:
            raise OverloadedError(
                f"{self.num_bytes} bytes of {self._what} are worked on, at most {self._max_bytes}", RETRY_AFTER_S
            )
        if queue is None:
            queue = self._queues[work.tenant] = _TenantQueue()
        if not queue.waiting and queue.num_running < self._max_tenant_running:
            self._join_ring(work.tenant, queue)
        queue.waiting[work] = None
        queue.num_bytes += work.num_bytes
        self.num_bytes += work.num_bytes

    def take(self, now: float) -> tuple[Work | None, list[Work]]:
        """The work to start now, `None` if none waits; and the work that was dropped because its deadline passed."""
        late: list[Work] = []
        while self._ring:
            tenant = self._ring[0]
            queue = self._queues[tenant]
            work = next(iter(queue.waiting))
            if work.deadline is not None and work.deadline <= now:
                late.append(work)
                self.cancel(work)
            elif work.num_bytes <= queue.credit:
                queue.credit -= work.num_bytes
                queue.num_running += 1
                self._leave_queue(work, queue)
                return work, late
            else:
                queue.credit += QUANTUM_BYTES
                self._ring.rotate(-1)
        return None, late

    def cancel(self, work: Work) -> bool:
        """Drop `work` if it still waits. Returns whether it did."""
        queue = self._queues.get(work.tenant)
        if queue is None or work not in queue.waiting:
            return False
        self._leave_queue(work, queue)
        self._free(work, queue)
        return True

    def finished(self, work: Work) -> None:
        """Free the bytes of work that `take` returned and that has ended."""
        queue = self._queues[work.tenant]
        if queue.num_running == self._max_tenant_running and queue.waiting:
            self._join_ring(work.tenant, queue)
        queue.num_running -= 1
        self._free(work, queue)

    def _free(self, work: Work, queue: _TenantQueue) -> None:
        queue.num_bytes -= work.num_bytes
        self.num_bytes -= work.num_bytes
        if not queue.num_running and not queue.waiting:
            del self._queues[work.tenant]

    def _join_ring(self, tenant: str, queue: _TenantQueue) -> None:
        queue.credit = QUANTUM_BYTES
        self._ring.append(tenant)

    def _leave_queue(self, work: Work, queue: _TenantQueue) -> None:
        del queue.waiting[work]
        may_run = bool(queue.waiting) and queue.num_running < self._max_tenant_running
        if not may_run and work.tenant in self._ring:
            self._ring.remove(work.tenant)
