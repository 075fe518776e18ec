"""How many bytes of unfinished request bodies the gateway holds, and which body is given up for others. Pure.

    start ──> received* ──> finish          received returns the bodies to refuse, the caller's own among them or not

Over the budget, the tenant that holds the most bytes loses the body that has made no progress for longest: the
uploads of other tenants go on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

RETRY_AFTER_S: Final = 1.0


@dataclass(slots=True, eq=False)
class Body:
    """One unfinished body, known by its identity."""

    tenant: str
    num_bytes: int = 0


class BodyBudget:
    """The incomplete bodies of one gateway, by tenant.

    Args:
        max_bytes: of all unfinished bodies together.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        """Bytes of all unfinished bodies."""
        self._tenants: dict[str, dict[Body, None]] = {}
        """The unfinished bodies of each tenant, the one without progress for longest first."""
        self._sums: dict[str, int] = {}

    def __len__(self) -> int:
        return sum(len(bodies) for bodies in self._tenants.values())

    def start(self, tenant: str) -> Body:
        """Register a body whose head has arrived."""
        body = Body(tenant)
        self._tenants.setdefault(tenant, {})[body] = None
        self._sums.setdefault(tenant, 0)
        return body

    def received(self, body: Body, num_bytes: int) -> list[Body]:
        """Count bytes of `body` that have arrived. Returns the bodies that must be refused now; they are counted no
        longer. A body that is not counted any more changes nothing."""
        bodies = self._tenants.get(body.tenant, {})
        if body not in bodies:
            return []
        if num_bytes:
            del bodies[body]
            bodies[body] = None
            self._count(body, num_bytes)
        refused = []
        while self.num_bytes > self.max_bytes:
            largest = max(self._sums, key=self._sums.__getitem__)
            victim = next(held for held in self._tenants[largest] if held.num_bytes)
            self.finish(victim)
            refused.append(victim)
        return refused

    def finish(self, body: Body) -> None:
        """Stop counting a body that is complete or given up. Idempotent."""
        bodies = self._tenants.get(body.tenant, {})
        if body not in bodies:
            return
        del bodies[body]
        self._count(body, -body.num_bytes)
        if not bodies:
            del self._tenants[body.tenant], self._sums[body.tenant]

    def _count(self, body: Body, num_bytes: int) -> None:
        body.num_bytes += num_bytes
        self._sums[body.tenant] += num_bytes
        self.num_bytes += num_bytes
