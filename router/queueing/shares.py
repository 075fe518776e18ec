"""The parts of several tenants in a scarce resource: places to decode, KV tokens. Pure.

    asks ──> its peak rises ──> guaranteed: its recent demand, up to its part by weight
    takes, gives back ──> the amount that it has, and the unused part of its guarantee

The demand of a tenant is the amount that it has and waits for. A tenant is guaranteed the peak of its demand in the
last `DEMAND_S` to 2 `DEMAND_S` seconds, up to its part by weight. Others leave that free, so that long answers of one
tenant do not take the room that another suddenly needs. Beyond its guarantee a tenant may have a multiple of the free
amount: alone at most `most_share` of all, several less each. So there is room for tenants that come later, without a
reserve for each.

The cost of an event does not depend on the number of known tenants. Guarantees are updated one by one; a tenant that
begins to ask, or ceases to, changes the parts of the others. Parts are the same for all tenants of one weight, and
multiples of a grain of about a thousandth: all tenants of a weight are updated only when their part changes. With more
tenants than grains it stays 0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

DEMAND_S = 30.0
NUM_GRAINS = 1024
"""Number of grains in the whole resource. Guarantees are multiples of a grain."""
MAX_SHIFTS = 8
"""Most parts whose period is ended in one call; the others wait for the next call."""


class Part:
    """The part of one tenant in one resource. Owner: the `SharedResource`.

    Args:
        weight: the tenant's share while others ask too, relative to their weights.
        most: the most that the tenant may have; None is no limit.
    """

    __slots__ = ("asked", "earlier_peak", "guaranteed", "is_asking", "most", "peak", "used", "weight")

    def __init__(self, weight: float = 1.0, most: int | None = None) -> None:
        self.weight = weight
        self.most = most
        self.used = 0
        """Amount that the tenant's running requests have."""
        self.asked = 0
        """Amount that its running requests have and its waiting ones need."""
        self.peak = self.earlier_peak = 0
        """Peaks of `asked` in this period and in the one before."""
        self.guaranteed = 0
        self.is_asking = False
        """Whether the part has a peak, and so counts among those that share the resource."""

    @property
    def kept(self) -> int:
        """Amount that others leave free for the tenant."""
        return max(0, self.guaranteed - self.used)


class SharedResource:
    """The parts of all tenants of one resource.

    Args:
        total: the amount of the whole resource.
        most_share: the largest share of it that one of several tenants may have.
    """

    def __init__(self, total: Callable[[], int], most_share: float) -> None:
        self._total = total
        self._most_share = most_share
        self._per_free = most_share / (1 - most_share) if most_share < 1 else None
        """Amount that a tenant may have for each free unit. With it a tenant alone gets its share."""
        self.num_used = 0
        """Amount that all tenants have, including those without a guarantee."""
        self.num_kept = 0
        """The sum of `kept` over all parts."""
        self._asking: dict[float, dict[Part, None]] = {}
        """The parts that share the resource, by weight."""
        self._weights = 0.0
        """The sum of the weights of these parts."""
        self._guarantee: dict[float, int] = {}
        """The most that each part of a weight is guaranteed."""
        self._shared_out: int | None = None
        """The total for which `_guarantee` was computed; None after a change of the parts that share."""
        self._due: deque[tuple[float, Part]] = deque()
        """When the period of each asking part ends, in order of time."""

    # ---------------------------------------------------------------- demand

    def asks(self, part: Part, amount: int, now: float, *, is_shared: bool) -> None:
        """Add the need of a request of the tenant. `is_shared`: whether the tenant is one of several."""
        part.asked += amount
        if is_shared and part.asked > part.peak:
            part.peak = part.asked
            if not part.is_asking:
                self._joins(part, now)
            self._set(part)

    def no_longer_asks(self, part: Part, amount: int) -> None:
        """Remove the need of a request that has ended."""
        part.asked -= amount

    def note_time(self, now: float) -> None:
        """End the periods that are over, and forget their demand."""
        if not self._due or now < self._due[0][0]:
            return
        for _ in range(min(MAX_SHIFTS, len(self._due))):
            ends, part = self._due[0]
            if now < ends:
                return
            self._due.popleft()
            part.earlier_peak, part.peak = part.peak, part.asked
            if part.peak or part.earlier_peak:
                self._due.append((now + DEMAND_S, part))
                self._set(part)
            else:
                self._leaves(part)

    def set_limits(self, part: Part, weight: float, most: int | None) -> None:
        """Set other limits of the tenant."""
        if part.is_asking and weight != part.weight:
            self._remove(part)
            part.weight = weight
            self._add(part)
        part.weight, part.most = weight, most
        self._set(part)

    # ---------------------------------------------------------------- use

    def takes(self, part: Part, amount: int) -> None:
        """Count the amount of a request that was placed."""
        self.num_used += amount
        self._use(part, amount)

    def gives_back(self, part: Part, amount: int) -> None:
        """Count back the amount of a request that no longer runs."""
        self.num_used -= amount
        self._use(part, -amount)

    def may_take(self, part: Part, amount: int, num_free: int, *, leaves_kept: bool) -> bool:
        """Whether one of several tenants may take `amount` more. `num_free`: the amount that nobody has now;
        `leaves_kept`: whether the tenant has to leave free what is kept for others."""
        self._share_out()
        if part.used + amount <= part.guaranteed:
            return True
        num_left = num_free - amount
        if leaves_kept and num_left < self.num_kept - part.kept:
            return False
        return self._per_free is None or part.used + amount <= self._per_free * num_left

    def guaranteed(self, part: Part) -> int:
        """The amount that the part is guaranteed now."""
        self._share_out()
        return part.guaranteed

    def check_integrity(self, parts: list[Part]) -> list[str]:
        """Inconsistencies, by all existing parts; empty when there are none. Changes nothing."""
        problems = []
        asking = [part for part in parts if part.is_asking]
        if self.num_kept != sum(part.kept for part in parts) or self.num_used != sum(part.used for part in parts):
            problems.append("sums of what tenants have, or of what is kept for them, are wrong")
        if {part for parts in self._asking.values() for part in parts} != set(asking) or len(self._due) != len(asking):
            problems.append("other tenants share than those that ask")
        return problems

    # ---------------------------------------------------------------- inside

    def _joins(self, part: Part, now: float) -> None:
        part.is_asking = True
        self._due.append((now + DEMAND_S, part))
        self._add(part)

    def _leaves(self, part: Part) -> None:
        part.is_asking = False
        self._remove(part)
        self._set(part)

    def _add(self, part: Part) -> None:
        self._asking.setdefault(part.weight, {})[part] = None
        self._weights += part.weight
        self._shared_out = None
        self._share_out()  # At once: later there may be many more of them.

    def _remove(self, part: Part) -> None:
        same = self._asking[part.weight]
        del same[part]
        if not same:
            del self._asking[part.weight]
            self._guarantee.pop(part.weight, None)
        self._weights = self._weights - part.weight if self._asking else 0.0
        self._shared_out = None
        self._share_out()

    def _share_out(self) -> None:
        """Update the guarantees to the total and to the parts that share it."""
        total = self._total()
        if self._shared_out == total:
            return
        self._shared_out = total
        grain = max(1, total // NUM_GRAINS)
        for weight, parts in self._asking.items():
            share = min(weight / self._weights, self._most_share)
            guarantee = int(total * share) // grain * grain
            if self._guarantee.get(weight) != guarantee:
                self._guarantee[weight] = guarantee
                for part in parts:
                    self._set(part)

    def _set(self, part: Part) -> None:
        """Set the guarantee of a part by its demand and its weight."""
        guaranteed = 0
        if part.is_asking:
            guaranteed = min(max(part.peak, part.earlier_peak), self._guarantee.get(part.weight, 0))
            if part.most is not None:
                guaranteed = min(guaranteed, part.most)
        before = part.kept
        part.guaranteed = guaranteed
        self.num_kept += part.kept - before

    def _use(self, part: Part, amount: int) -> None:
        if not part.guaranteed:
            part.used += amount
            return
        before = part.kept
        part.used += amount
        self.num_kept += part.kept - before
