"""The tenants of a router and their limits: requests and tokens a minute, answers that wait and that run, and turns in
the queue.

    a call ──admit──> its answers and their least tokens are charged, or all of it is refused
    a request ──refusal──> ──charge──> the rest of its tokens ──ended──> what it did not use is refunded

An admitted answer counts as waiting until its request is submitted or refunded, while its prompt is tokenized. So the
requests of an admitted call always fit into the queue, and calls that come meanwhile do not take their room.

Beside its own limits a tenant that is not the only one gets a share of the queue, and of the decode places, that
shrinks with what is left: alone at most `tenant_queue_share` and `tenant_place_share`, several less each. So there is
room for one that comes later, without anything being set apart for each.

A tenant is guaranteed as many decode places as it had requests at a time in the last `DEMAND_S` to twice that, up to
its part of all places by weight. Others leave those free, so that long answers of one do not take what another needs
from one second to the next. Where the next place becomes free within `SOON_S` on average, turns in the queue are
enough, and nothing is left free.

The limits for a minute are of all models of a gateway: the routers are replicas of what was taken. Each notes what it
charged (`charges`), and takes what the others did (`charged_elsewhere`), before anything else happens to any of them.
What waits and runs is counted by each router for its own model.

Owner: the router core.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from disagg.proto.block_hash import tenant_tag
from disagg.proto.errors import LimitError
from disagg.router.api import CallDemand, Quota, RateCharge, RateView, TenantLimits
from disagg.router.config import RouterConfig
from disagg.router.queueing.queue import Share

DEMAND_S = 30.0
SOON_S = 0.05


class Tenant:
    """The counts and limits of one tenant. Updated by the router core with each change of a request's state."""

    __slots__ = (
        "earlier_peak",
        "is_unlimited",
        "limits",
        "name",
        "num_admitted",
        "num_boosted",
        "num_guaranteed",
        "num_kept",
        "num_running",
        "num_waiting",
        "peak",
        "requests",
        "share",
        "tag",
        "tokens",
    )

    def __init__(self, name: str, limits: TenantLimits, now: float) -> None:
        self.name = name
        self.tag = tenant_tag(name)
        """What workers call it."""
        self.share = Share(name)
        self.num_admitted = 0
        """Answers of admitted calls that are not submitted yet."""
        self.num_waiting = 0
        self.num_running = 0
        self.num_boosted = 0
        """Requests that are queued by a target of their own."""
        self.peak = self.earlier_peak = 0
        """Peak of its requests in flight, in this period and in the one before."""
        self.num_guaranteed = 0
        """Decode places that it is guaranteed."""
        self.num_kept = 0
        """Of these, those that are unused now."""
        self.requests: TokenBucket | None = None
        self.tokens: TokenBucket | None = None
        self.set_limits(limits, now)

    def set_limits(self, limits: TenantLimits, now: float) -> None:
        """New limits; a bucket stays as full as it is."""
        self.limits = limits
        self.is_unlimited = limits.is_sole and (
            limits.requests_per_minute is limits.tokens_per_minute is limits.running is limits.queued is None
        )
        """Whether no limit applies to it."""
        self.share.weight = limits.weight
        self.requests = _bucket(self.requests, limits.requests_per_minute, now)
        self.tokens = _bucket(self.tokens, limits.tokens_per_minute, now)


class Tenants:
    """All tenants of one router, by name.

    Args:
        config: the shares.
        num_places: sequences that the present workers decode at a time.
    """

    def __init__(self, config: RouterConfig, num_places: Callable[[], int]) -> None:
        self._config = config
        self._num_places = num_places
        self._tenants: dict[str, Tenant] = {}
        self._stated: dict[str, TenantLimits] = {}
        """The latest limits of the key file. Calls that began earlier bring older ones."""
        self._num_running = 0
        self.num_admitted = 0
        """Answers of admitted calls that are not submitted yet."""
        self._num_kept = 0
        """Guaranteed places that are unused."""
        self._shared_out: int | None = None
        """The number of places at the last distribution of guarantees; None where the demand changed since."""
        self._period_ends = 0.0
        self._ends = EndTimes()
        self._now = 0.0
        self.charges: list[RateCharge] | None = None
        """Those that other routers have not taken; None where there is no other."""
        share = config.tenant_place_share
        self._per_free_place = share / (1 - share) if share < 1 else None
        """Places that a tenant may have for each free one, so that alone it gets its share."""

    def configure(self, config: RouterConfig) -> None:
        """The queue may be another length."""
        self._config = config

    def get(self, name: str, limits: TenantLimits, now: float) -> Tenant:
        """The tenant, under these limits from now on, or those that were stated for it."""
        limits = self._stated.get(name, limits)
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant(name, limits, now)
        elif tenant.limits is not limits and tenant.limits != limits:
            tenant.set_limits(limits, now)
        return tenant

    def set_limits(self, limits: Mapping[str, TenantLimits], now: float) -> None:
        """Set the limits of all tenants; tenants that are not in `limits` have those that their calls bring."""
        self._stated = dict(limits)
        self._shared_out = None
        for tenant in self._tenants.values():
            self.get(tenant.name, tenant.limits, now)

    def note_time(self, now: float) -> None:
        """Time passed: forget demand of earlier periods."""
        self._now = now
        if now < self._period_ends:
            return
        self._period_ends = now + DEMAND_S
        self._shared_out = None
        for tenant in self._tenants.values():
            tenant.earlier_peak, tenant.peak = tenant.peak, tenant.num_waiting + tenant.num_running

    def in_flight(self) -> dict[str, tuple[int, int]]:
        """By tenant: requests that wait, and that run."""
        return {name: (each.num_waiting, each.num_running) for name, each in self._tenants.items()}

    def quota(self, name: str, limits: TenantLimits, now: float) -> Quota:
        """What is left to a tenant whose calls bring `limits`. Changes nothing."""
        tenant = self._tenants.get(name) or Tenant(name, self._stated.get(name, limits), now)
        return Quota(*(None if each is None else each.view(now) for each in (tenant.requests, tenant.tokens)))

    # ---------------------------------------------------------------- calls and requests

    def admit(self, call: CallDemand, num_waiting: int, now: float) -> LimitError | None:
        """Charge a call; the error where all of it is refused. `num_waiting`: requests of all tenants."""
        tenant = self.get(call.tenant, call.limits, now)
        error = (
            _over_rate(tenant, "requests_per_minute", tenant.requests, call.num_answers, now)
            or _over_rate(tenant, "tokens_per_minute", tenant.tokens, call.num_tokens, now)
            or self._over_queue(tenant, call.num_answers, num_waiting)
        )
        if error is None:
            self._take(tenant, call.num_answers, call.num_tokens, now)
            self._admitted(tenant, call.num_answers)
        return error

    def refund(self, name: str, num_tokens: int, num_answers: int, now: float) -> None:
        """Return charged tokens that will not be used, and admitted answers that will not be submitted."""
        if (tenant := self._tenants.get(name)) is not None:
            self._take(tenant, 0, -num_tokens, now)
            self._admitted(tenant, -num_answers)

    def submitted(self, tenant: Tenant) -> None:
        """The request of an admitted answer was accepted."""
        self._admitted(tenant, -1)

    def refusal(
        self, tenant: Tenant, num_tokens: int, prepaid: int | None, num_waiting: int, now: float
    ) -> LimitError | None:
        """The error of a request of at most `num_tokens` tokens that a limit refuses; None where it is accepted.
        `prepaid`: what its call was charged for it; None where it was not charged."""
        error = _over_rate(tenant, "tokens_per_minute", tenant.tokens, num_tokens - (prepaid or 0), now, num_tokens)
        if error is None and prepaid is None:
            error = _over_rate(tenant, "requests_per_minute", tenant.requests, 1, now)
        if error is not None or (prepaid is not None and tenant.num_admitted):  # It counts as waiting already.
            return error
        return self._over_queue(tenant, 1, num_waiting)

    def charge(self, tenant: Tenant, num_tokens: int, prepaid: int | None, now: float) -> None:
        """Charge an accepted request."""
        self._take(tenant, int(prepaid is None), num_tokens - (prepaid or 0), now)
        self.note_time(now)
        if tenant.limits.is_sole:
            return
        num_asked = tenant.num_waiting + tenant.num_running + 1
        if num_asked > tenant.peak:
            tenant.peak = num_asked
            self._shared_out = None

    def charged_elsewhere(self, charges: Sequence[RateCharge], now: float) -> None:
        """Another router of the gateway charged these."""
        for charge in charges:
            tenant = self.get(charge.tenant, charge.limits, now)
            _take(tenant.requests, charge.num_answers, now)
            _take(tenant.tokens, charge.num_tokens, now)

    def taken(self, now: float) -> list[RateCharge]:
        """What is missing of the limits for a minute, as charges: for the router of a model that comes."""
        found = []
        for tenant in self._tenants.values():
            num_answers, num_tokens = (
                0 if bucket is None else math.ceil(bucket.per_minute - bucket.level(now))
                for bucket in (tenant.requests, tenant.tokens)
            )
            if num_answers or num_tokens:
                charge = RateCharge(
                    tenant=tenant.name, limits=tenant.limits, num_answers=num_answers, num_tokens=num_tokens
                )
                found.append(charge)
        return found

    # ---------------------------------------------------------------- places

    def started(self, tenant: Tenant) -> None:
        """One of its requests was placed."""
        tenant.num_running += 1
        self._num_running += 1
        if tenant.num_guaranteed:
            self._keep(tenant)

    def stopped(self, tenant: Tenant, now: float) -> None:
        """One of its requests runs no longer."""
        self._ends.add(now)
        tenant.num_running -= 1
        self._num_running -= 1
        if tenant.num_guaranteed:
            self._keep(tenant)

    def may_run(self, name: str) -> bool:
        """Whether a tenant may have one more request running."""
        tenant = self._tenants[name]
        if tenant.is_unlimited:
            return True
        num_running, limits = tenant.num_running, tenant.limits
        if limits.running is not None and num_running >= limits.running:
            return False
        if limits.is_sole or not num_running:
            return True
        num_places = self._num_places()
        if self._shared_out != num_places:
            self._share_out(num_places)
        if num_running < tenant.num_guaranteed:
            return True
        num_left = num_places - self._num_running - 1
        if num_left < self._num_kept - tenant.num_kept and self._ends.wait_s(self._now) > SOON_S:
            return False
        return self._per_free_place is None or num_running < self._per_free_place * num_left

    # ---------------------------------------------------------------- inside

    def _share_out(self, num_places: int) -> None:
        """Distribute guaranteed places by recent demand."""
        asking = [(each, most) for each in self._tenants.values() if (most := max(each.peak, each.earlier_peak))]
        weights = sum(each.limits.weight for each, _ in asking)
        for tenant in self._tenants.values():
            tenant.num_guaranteed = 0
        for tenant, most in asking:
            if tenant.limits.running is not None:
                most = min(most, tenant.limits.running)
            part = min(tenant.limits.weight / weights, self._config.tenant_place_share)
            tenant.num_guaranteed = min(most, int(num_places * part))
        for tenant in self._tenants.values():
            self._keep(tenant)
        self._shared_out = num_places

    def _keep(self, tenant: Tenant) -> None:
        num_kept = max(0, tenant.num_guaranteed - tenant.num_running)
        self._num_kept += num_kept - tenant.num_kept
        tenant.num_kept = num_kept

    def _take(self, tenant: Tenant, num_answers: int, num_tokens: int, now: float) -> None:
        """Charge a tenant's limits for a minute."""
        if tenant.requests is None and tenant.tokens is None:
            return
        _take(tenant.requests, num_answers, now)
        _take(tenant.tokens, num_tokens, now)
        if self.charges is not None and (num_answers or num_tokens):
            charge = RateCharge(
                tenant=tenant.name, limits=tenant.limits, num_answers=num_answers, num_tokens=num_tokens
            )
            self.charges.append(charge)

    def _admitted(self, tenant: Tenant, num_answers: int) -> None:
        tenant.num_admitted += num_answers
        self.num_admitted += num_answers

    def _over_queue(self, tenant: Tenant, num_answers: int, num_waiting: int) -> LimitError | None:
        """The error where a tenant would have too many waiting. New and admitted answers for which there are free
        places do not count."""
        limits = tenant.limits
        num_coming = num_answers + tenant.num_admitted
        num_free = 0
        if (num_coming > 1 or self.num_admitted) and (limits.queued is not None or not limits.is_sole):
            num_free = num_places = max(0, self._num_places() - self._num_running)
            num_waiting += max(0, self.num_admitted - tenant.num_admitted - num_places)
            if limits.running is not None:
                num_free = min(num_free, max(0, limits.running - tenant.num_running))
        num_more = max(1, num_coming - num_free)
        if limits.queued is not None and tenant.num_waiting + num_more > limits.queued:
            return self._queue_error(tenant, num_answers, limits.queued)
        if not limits.is_sole:
            num_others = num_waiting - tenant.num_waiting
            most = max(1, int((self._config.max_queued - num_others) * self._config.tenant_queue_share))
            if tenant.num_waiting + num_more > most:
                return self._queue_error(tenant, num_answers, most)
        return None

    def _queue_error(self, tenant: Tenant, num_answers: int, most: int) -> LimitError:
        asked = "one more is" if num_answers == 1 else f"{num_answers} more are"
        num_waiting = tenant.num_waiting + tenant.num_admitted
        message = f"{num_waiting} answers of tenant {tenant.name} wait and {asked} asked for; at most {most} may"
        return LimitError(tenant.name, "queued", message, self._config.retry_after_s)


def _bucket(bucket: TokenBucket | None, per_minute: int | None, now: float) -> TokenBucket | None:
    if per_minute is None:
        return None
    if bucket is None:
        return TokenBucket(per_minute, now)
    if bucket.per_minute != per_minute:
        bucket.resize(per_minute, now)
    return bucket


def _take(bucket: TokenBucket | None, amount: int, now: float) -> None:
    if bucket is not None and amount:
        bucket.take(amount, now)


def _over_rate(
    tenant: Tenant, limit: str, bucket: TokenBucket | None, amount: int, now: float, in_all: int | None = None
) -> LimitError | None:
    if bucket is None:
        return None
    in_all = amount if in_all is None else in_all
    what = limit.partition("_")[0]
    asked = f"tenant {tenant.name} asks for {in_all} {what}"
    if in_all > bucket.per_minute:
        hint = "; set a smaller max_tokens" if what == "tokens" else "; ask for fewer answers in one call"
        return LimitError(tenant.name, limit, f"{asked} at once, and may have {bucket.per_minute} a minute{hint}", None)
    if (wait_s := bucket.missing_s(amount, now)) is None or wait_s > 0:
        left = max(0, int(bucket.level(now)))
        message = f"{asked}, and of {bucket.per_minute} a minute has {left} left"
        return LimitError(tenant.name, limit, message, wait_s)
    return None


class EndTimes:
    """How long a request waits on average until the next answer ends, from the times between the latest ones.

    A request comes into a gap between two ends in proportion to the length of the gap, and waits for half of it. So the
    mean wait is the sum of the squares of the gaps over twice their sum. The mean gap alone would be too short: answers
    of one length that began together end together.
    """

    __slots__ = ("_gaps_us", "_latest", "_square_sum", "_sum")

    MAX_GAPS = 64
    MIN_GAPS = 16
    """With fewer the wait is infinite."""

    def __init__(self) -> None:
        self._gaps_us: deque[int] = deque()
        self._latest = -math.inf
        self._sum = self._square_sum = 0
        """In microseconds: sums of integers are exact."""

    def add(self, now: float) -> None:
        """An answer ended."""
        if self._latest > -math.inf:
            gap_us = max(0, round((now - self._latest) * 1e6))
            self._gaps_us.append(gap_us)
            self._sum += gap_us
            self._square_sum += gap_us * gap_us
            if len(self._gaps_us) > self.MAX_GAPS:
                gap_us = self._gaps_us.popleft()
                self._sum -= gap_us
                self._square_sum -= gap_us * gap_us
        self._latest = now

    def wait_s(self, now: float) -> float:
        """Mean seconds until the next end, with the gap since the latest one."""
        if len(self._gaps_us) < self.MIN_GAPS:
            return math.inf
        open_us = max(0.0, (now - self._latest) * 1e6)
        total_us = self._sum + open_us
        return (self._square_sum + open_us * open_us) / (2e6 * total_us) if total_us else 0.0


_PERIOD_S = 60.0


class TokenBucket:
    """What may be taken in a minute: full at first, refilled at an even rate; time is an argument.

    Args:
        per_minute: its size, and what is refilled in a minute.
        now: the time.
    """

    __slots__ = ("_level", "_updated", "per_minute")

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._updated = now

    def missing_s(self, amount: float, now: float) -> float | None:
        """Seconds until `amount` can be taken: 0 for now; None for never."""
        if amount > self.per_minute:
            return None
        return max(0.0, (amount - self.level(now)) * _PERIOD_S / self.per_minute)

    def level(self, now: float) -> float:
        """What can be taken now."""
        passed_s = max(0.0, now - self._updated)
        return min(self.per_minute, self._level + passed_s * self.per_minute / _PERIOD_S)

    def view(self, now: float) -> RateView:
        """Its state for the tenant."""
        level = self.level(now)
        return RateView(self.per_minute, max(0, int(level)), (self.per_minute - level) * _PERIOD_S / self.per_minute)

    def resize(self, per_minute: int, now: float) -> None:
        """Change its size. The fill ratio stays the same, so that neither what was taken nor a debt is forgotten."""
        self._level = self.level(now) * per_minute / self.per_minute
        self._updated = max(self._updated, now)
        self.per_minute = per_minute

    def take(self, amount: float, now: float) -> None:
        """Take `amount`, or give it back where it is negative. Raises nothing: see `missing_s`."""
        self._level = min(self.per_minute, self.level(now) - amount)
        self._updated = max(self._updated, now)
