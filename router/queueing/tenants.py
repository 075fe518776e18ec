"""The tenants of a router and their limits: requests and tokens a minute, answers that wait and that run, and turns in
the queue.

    a call ──admit──> its answers and their least tokens are charged, or all of it is refused
    a request ──refusal──> ──charge──> the rest of its tokens ──ended──> the unused part is refunded

An admitted answer counts as waiting until its request is submitted or refunded, while its prompt is tokenized. So the
requests of an admitted call always fit into the queue, and calls that come meanwhile do not take their room.

Besides its own limits, a tenant that is not the only one gets a share of the queue, of the decode places and of the KV
tokens. The share shrinks with the free amount: alone at most `tenant_queue_share` and `tenant_place_share`, several
less each. So there is room for tenants that come later, without a reserve for each.

Places to decode and KV tokens are shared out in the same way (`shares.py`): each tenant is guaranteed its recent
demand, up to its part by weight, and others leave that free. Where the next place becomes free within `SOON_S` on
average, turns in the queue are enough, and nothing is left free for guarantees.

An idle tenant is forgotten `FORGET_S` after its last call, once its limits per minute are fully available again. The
cost of an event does not depend on the number of known tenants.

The limits per minute hold for all models of a gateway together, so each router has a replica of the used part. Each
records its charges (`charges`), and takes those of the others (`charged_elsewhere`) before any other event. Waiting and
running requests are counted by each router for its own model.

Owner: the router core.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence

from disagg.proto.block_hash import tenant_tag
from disagg.proto.errors import LimitError
from disagg.router.api import CallDemand, Quota, RateCharge, TenantLimits
from disagg.router.config import RouterConfig
from disagg.router.queueing.queue import Share
from disagg.router.queueing.shares import Part, SharedResource
from disagg.router.queueing.token_bucket import TokenBucket, sized, take

SOON_S = 0.05
FORGET_S = 600.0
_LOOKS = 2
"""Number of tenants that are checked at each call, beginning with those that have not called for the longest time."""


class Tenant:
    """The counts and limits of one tenant. Updated by the router core with each change of a request's state."""

    __slots__ = (
        "called_at",
        "is_over_share",
        "is_unlimited",
        "kv",
        "limits",
        "name",
        "num_admitted",
        "num_boosted",
        "num_running",
        "num_waiting",
        "places",
        "requests",
        "share",
        "tag",
        "tokens",
    )

    def __init__(self, name: str, limits: TenantLimits, now: float) -> None:
        self.name = name
        self.tag = tenant_tag(name)
        """Tag by which workers know the tenant."""
        self.share = Share(name)
        self.num_admitted = 0
        """Number of answers of admitted calls that are not submitted yet."""
        self.num_waiting = 0
        self.num_running = 0
        self.num_boosted = 0
        """Number of requests that are queued by a target of their own."""
        self.places, self.kv = Part(), Part()
        """The tenant's parts of the places to decode and of the KV tokens."""
        self.is_over_share = False
        """Whether its next request would exceed its share of the KV tokens, as of the present pass of the queue."""
        self.called_at = now
        self.requests: TokenBucket | None = None
        self.tokens: TokenBucket | None = None
        self.set_limits(limits, now)

    def set_limits(self, limits: TenantLimits, now: float) -> None:
        """Set new limits; a bucket keeps its fill ratio."""
        self.limits = limits
        self.is_unlimited = limits.is_sole and (
            limits.requests_per_minute is limits.tokens_per_minute is limits.running is limits.queued is None
        )
        """Whether no limit applies to the tenant."""
        self.share.weight = limits.weight
        self.requests = sized(self.requests, limits.requests_per_minute, now)
        self.tokens = sized(self.tokens, limits.tokens_per_minute, now)

    @property
    def num_kept(self) -> int:
        """Number of decode places that others leave free for the tenant."""
        return self.places.kept

    @property
    def is_idle(self) -> bool:
        """Whether no answer of the tenant waits, runs or is admitted."""
        return not (self.num_admitted or self.num_waiting or self.num_running or self.num_boosted)

    def is_whole(self, now: float) -> bool:
        """Whether its limits per minute are fully available."""
        buckets = (self.requests, self.tokens)
        return all(each is None or each.level(now) >= each.per_minute for each in buckets)


class Tenants:
    """All tenants of one router, by name.

    Args:
        config: the shares.
        num_places: sequences that the present workers decode at a time.
        kv_room: KV tokens that they have, and how many of these are in use.
    """

    def __init__(
        self, config: RouterConfig, num_places: Callable[[], int], kv_room: Callable[[], tuple[int, int]]
    ) -> None:
        self._config = config
        self._num_places = num_places
        self._kv_room = kv_room
        self._places = SharedResource(num_places, config.tenant_place_share)
        self._kv = SharedResource(lambda: kv_room()[0], config.tenant_place_share)
        self._tenants: OrderedDict[str, Tenant] = OrderedDict()
        """All tenants by name, the one that has not called for the longest time first."""
        self._active: dict[str, Tenant] = {}
        """The tenants with requests in flight, by name."""
        self._over_share: list[Tenant] = []
        self._stated: dict[str, TenantLimits] = {}
        """The latest limits of the key file. Calls that began earlier bring older ones."""
        self.num_admitted = 0
        """Number of answers of admitted calls that are not submitted yet."""
        self._ends = EndTimes()
        self._now = 0.0
        self.charges: list[RateCharge] | None = None
        """Charges that other routers have not taken yet; None if there is no other router."""

    def configure(self, config: RouterConfig) -> None:
        """Follow another configuration, in which the queue may have another length."""
        self._config = config

    def get(self, name: str, limits: TenantLimits, now: float) -> Tenant:
        """The tenant that calls, under these limits from now on, or under those that `set_limits` stated for it."""
        limits = self._stated.get(name, limits)
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant(name, limits, now)
            self._set_limits(tenant, limits, now)
        elif tenant.limits is not limits and tenant.limits != limits:
            self._set_limits(tenant, limits, now)
        self._tenants.move_to_end(name)
        tenant.called_at = now
        if len(self._tenants) > 1:
            self._forget_old(now)
        return tenant

    def set_limits(self, limits: Mapping[str, TenantLimits], now: float) -> None:
        """Set the limits of all tenants. Tenants that are not in `limits` have the limits that their calls bring."""
        self._stated = dict(limits)
        for tenant in self._tenants.values():
            its_limits = self._stated.get(tenant.name, tenant.limits)
            if its_limits != tenant.limits:
                self._set_limits(tenant, its_limits, now)

    def note_time(self, now: float) -> None:
        """End the periods of demand that are over."""
        self._now = now
        self._places.note_time(now)
        self._kv.note_time(now)

    def in_flight(self) -> dict[str, tuple[int, int]]:
        """For each tenant with any: the number of requests that wait, and of those that run."""
        return {name: (each.num_waiting, each.num_running) for name, each in self._active.items()}

    def check_integrity(self) -> list[str]:
        """Inconsistencies; empty when there are none."""
        tenants = self._tenants.values()
        problems = self._places.check_integrity([each.places for each in tenants])
        problems += self._kv.check_integrity([each.kv for each in tenants])
        if {each.name for each in tenants if each.num_waiting or each.num_running} != self._active.keys():
            problems.append("other tenants count as active than those with requests in flight")
        return problems

    def remaining_quota(self, name: str, limits: TenantLimits, now: float) -> Quota:
        """What is left to a tenant whose calls bring `limits`. Changes nothing."""
        tenant = self._tenants.get(name) or Tenant(name, self._stated.get(name, limits), now)
        return Quota(*(None if each is None else each.view(now) for each in (tenant.requests, tenant.tokens)))

    # ---------------------------------------------------------------- calls and requests

    def admit(self, call: CallDemand, num_waiting: int, now: float) -> LimitError | None:
        """Charge a call. Returns the error if all of it is refused. `num_waiting`: requests of all tenants."""
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
        """Count down an admitted answer whose request was accepted."""
        self._admitted(tenant, -1)

    def refusal(
        self, tenant: Tenant, num_tokens: int, prepaid: int | None, num_waiting: int, now: float
    ) -> LimitError | None:
        """The error if a limit refuses a request of at most `num_tokens` tokens; None if it is accepted. `prepaid`:
        tokens that its call was charged for it; None if it was not charged."""
        error = _over_rate(tenant, "tokens_per_minute", tenant.tokens, num_tokens - (prepaid or 0), now, num_tokens)
        if error is None and prepaid is None:
            error = _over_rate(tenant, "requests_per_minute", tenant.requests, 1, now)
        if error is not None or (prepaid is not None and tenant.num_admitted):  # It counts as waiting already.
            return error
        return self._over_queue(tenant, 1, num_waiting)

    def charge(self, tenant: Tenant, num_tokens: int, prepaid: int | None, now: float) -> None:
        """Charge an accepted request."""
        self._take(tenant, int(prepaid is None), num_tokens - (prepaid or 0), now)

    def entered(self, tenant: Tenant, kv_tokens: int, now: float) -> None:
        """Count an accepted request that needs `kv_tokens` KV tokens."""
        self._active[tenant.name] = tenant
        is_shared = not tenant.limits.is_sole
        if is_shared:
            self.note_time(now)
        self._places.asks(tenant.places, 1, now, is_shared=is_shared)
        self._kv.asks(tenant.kv, kv_tokens, now, is_shared=is_shared)

    def left(self, tenant: Tenant, kv_tokens: int) -> None:
        """Count down a request that has ended."""
        if not (tenant.num_waiting or tenant.num_running):
            self._active.pop(tenant.name, None)
        self._places.no_longer_asks(tenant.places, 1)
        self._kv.no_longer_asks(tenant.kv, kv_tokens)

    def charged_elsewhere(self, charges: Sequence[RateCharge], now: float) -> None:
        """Take charges of another router of the gateway."""
        for charge in charges:
            tenant = self.get(charge.tenant, charge.limits, now)
            take(tenant.requests, charge.num_answers, now)
            take(tenant.tokens, charge.num_tokens, now)

    def taken(self, now: float) -> list[RateCharge]:
        """The used part of all limits per minute, as charges for the router of a new model."""
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

    # ---------------------------------------------------------------- places and KV

    def started(self, tenant: Tenant, kv_tokens: int) -> None:
        """Count a request that was placed and has `kv_tokens` KV tokens."""
        tenant.num_running += 1
        self._places.takes(tenant.places, 1)
        self._kv.takes(tenant.kv, kv_tokens)

    def stopped(self, tenant: Tenant, kv_tokens: int, now: float) -> None:
        """Count down a request that no longer runs."""
        self._ends.add(now)
        tenant.num_running -= 1
        self._places.gives_back(tenant.places, 1)
        self._kv.gives_back(tenant.kv, kv_tokens)

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
        if tenant.is_over_share:
            return False
        num_free = self._num_places() - self._places.num_used
        return self._places.may_take(tenant.places, 1, num_free, leaves_kept=self._leaves_kept)

    def may_have(self, tenant: Tenant, kv_tokens: int) -> bool:
        """Whether a tenant may have `kv_tokens` more KV tokens. One without a running request always may. One that may
        not has to wait until the next pass."""
        if tenant.limits.is_sole or not tenant.num_running:
            return True
        total, used = self._kv_room()
        if self._kv.may_take(tenant.kv, kv_tokens, total - used, leaves_kept=self._leaves_kept):
            return True
        if not tenant.is_over_share:
            tenant.is_over_share = True
            self._over_share.append(tenant)
        return False

    def begin_pass(self) -> None:
        """Begin a pass of the queue: tenants over their share may be tried again."""
        if not self._over_share:
            return
        for tenant in self._over_share:
            tenant.is_over_share = False
        self._over_share.clear()

    # ---------------------------------------------------------------- inside

    @property
    def _leaves_kept(self) -> bool:
        return self._ends.wait_s(self._now) > SOON_S

    def _set_limits(self, tenant: Tenant, limits: TenantLimits, now: float) -> None:
        tenant.set_limits(limits, now)
        self._places.set_limits(tenant.places, limits.weight, limits.running)
        self._kv.set_limits(tenant.kv, limits.weight, None)

    def _forget_old(self, now: float) -> None:
        """Forget tenants without a call for `FORGET_S`. One that is not idle is checked again after that time."""
        for _ in range(_LOOKS):
            name, tenant = next(iter(self._tenants.items()))
            if now < tenant.called_at + FORGET_S:
                return
            del self._tenants[name]
            is_left = tenant.is_idle and not (tenant.places.is_asking or tenant.kv.is_asking)
            if not (is_left and tenant.is_whole(now)):
                self._tenants[name] = tenant
                tenant.called_at = now

    def _take(self, tenant: Tenant, num_answers: int, num_tokens: int, now: float) -> None:
        """Charge a tenant's limits per minute."""
        if tenant.requests is None and tenant.tokens is None:
            return
        take(tenant.requests, num_answers, now)
        take(tenant.tokens, num_tokens, now)
        if self.charges is not None and (num_answers or num_tokens):
            charge = RateCharge(
                tenant=tenant.name, limits=tenant.limits, num_answers=num_answers, num_tokens=num_tokens
            )
            self.charges.append(charge)

    def _admitted(self, tenant: Tenant, num_answers: int) -> None:
        tenant.num_admitted += num_answers
        self.num_admitted += num_answers

    def _over_queue(self, tenant: Tenant, num_answers: int, num_waiting: int) -> LimitError | None:
        """The error if too many answers of a tenant would wait. New and admitted answers for which there are free
        places do not count."""
        limits = tenant.limits
        num_coming = num_answers + tenant.num_admitted
        num_free = 0
        if (num_coming > 1 or self.num_admitted) and (limits.queued is not None or not limits.is_sole):
            num_free = num_places = max(0, self._num_places() - self._places.num_used)
            num_waiting += max(0, self.num_admitted - tenant.num_admitted - num_places)
            if limits.running is not None:
                num_free = min(num_free, max(0, limits.running - tenant.num_running))
        num_more = max(1, num_coming - num_free)
        if limits.queued is not None and tenant.num_waiting + num_more > limits.queued:
            return self._queue_error(tenant, num_answers, limits.queued, limits.queued)
        if not limits.is_sole:
            num_others = num_waiting - tenant.num_waiting
            most = max(1, int((self._config.max_queued - num_others) * self._config.tenant_queue_share))
            if tenant.num_waiting + num_more > most:
                alone = max(1, int(self._config.max_queued * self._config.tenant_queue_share))
                return self._queue_error(tenant, num_answers, most, alone)
        return None

    def _queue_error(self, tenant: Tenant, num_answers: int, most: int, most_ever: int) -> LimitError:
        """The error of answers of which at most `most` may wait now, and `most_ever` at any time."""
        asked = "one more is" if num_answers == 1 else f"{num_answers} more are"
        num_waiting = tenant.num_waiting + tenant.num_admitted
        message = f"{num_waiting} answers of tenant {tenant.name} wait and {asked} asked for; at most {most} may"
        num_places, running = self._num_places(), tenant.limits.running
        at_a_time = most_ever + (num_places if running is None else min(num_places, running))
        if num_places and num_answers > at_a_time:
            hint = "ask for fewer answers in one call"
            return LimitError(tenant.name, "queued", f"{message}, with {at_a_time} in all at a time; {hint}", None)
        return LimitError(tenant.name, "queued", message, self._config.retry_after_s)


def _over_rate(
    tenant: Tenant, limit: str, bucket: TokenBucket | None, amount: int, now: float, in_all: int | None = None
) -> LimitError | None:
    if bucket is None:
        return None
    in_all = amount if in_all is None else in_all
    if in_all > bucket.per_minute:
        return LimitError.beyond_a_minute(tenant.name, limit, in_all, bucket.per_minute)
    if (wait_s := bucket.missing_s(amount, now)) is None or wait_s > 0:
        left = max(0, int(bucket.level(now)))
        asked = f"tenant {tenant.name} asks for {in_all} {limit.partition('_')[0]}"
        message = f"{asked}, and of {bucket.per_minute} a minute has {left} left"
        return LimitError(tenant.name, limit, message, wait_s)
    return None


class EndTimes:
    """The mean time until the next answer ends, as a request experiences it, from the times between the latest ends.

    A request comes into a gap between two ends in proportion to the length of the gap, and waits for half of it. So the
    mean wait is the sum of the squares of the gaps over twice their sum. The mean gap alone would be too short: answers
    of one length that began together end together.
    """

    __slots__ = ("_gaps_us", "_latest", "_square_sum", "_sum")

    MAX_GAPS = 64
    MIN_GAPS = 16
    """Number of gaps below which the wait is infinite."""

    def __init__(self) -> None:
        self._gaps_us: deque[int] = deque()
        self._latest = -math.inf
        self._sum = self._square_sum = 0
        """The sums of the gaps and of their squares, in microseconds: sums of integers are exact."""

    def add(self, now: float) -> None:
        """Note that an answer ended now."""
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
        """Mean seconds until the next end, including the gap since the latest one."""
        if len(self._gaps_us) < self.MIN_GAPS:
            return math.inf
        open_us = max(0.0, (now - self._latest) * 1e6)
        total_us = self._sum + open_us
        return (self._square_sum + open_us * open_us) / (2e6 * total_us) if total_us else 0.0
