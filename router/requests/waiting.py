"""The requests that wait for a worker: in the queue while a present worker could hold them, unschedulable while none
could even if empty.

    add ──> queue ──a pass finds room──> placed
              │  ^
         none │  │ a worker comes up                  another one that may end workers is tried: isolated
        could v  │
         unschedulable ──the grace is over──> the core fails it

A pass goes through the queue from its head. A request that is not placed lets others pass: it avoids a worker, or the
best worker for it has no free slot just now and waiting is cheaper than the free workers, or its tenant has its share
of the KV blocks (then those of other tenants), or it needs more KV blocks than are free. In the last case only smaller
ones are tried, and after a while a worker is held for it: else large requests would starve, see `WorkerHold`. At most
`MAX_LOOKS` requests are tried for one event, and none if no event could have freed capacity, so the cost of an event
does not depend on the length of the queue. The request for which a worker is held is tried in every pass, at any
position: those before it may not use that worker, and could take all tries.

Owner: the router core.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

from disagg.proto.ids import RequestId, WorkerId
from disagg.router.config import RouterConfig
from disagg.router.placement.fleet import Fleet
from disagg.router.placement.placement import Demand
from disagg.router.queueing.queue import RequestQueue, Share
from disagg.router.requests.admission import work_ms
from disagg.router.requests.attempts import Attempts, Blocked
from disagg.router.requests.core_state import CoreState
from disagg.router.requests.events import Dispatch
from disagg.router.requests.record import RequestRecord
from disagg.router.workers.worker import Worker

MAX_LOOKS = 16
"""Most requests of one pass that are tried and not placed."""
MAX_PASSED = 64
"""Number of requests from the head of the queue among which smaller ones are placed before one that waits for room."""


class Waiting:
    """Decides when each waiting request is placed.

    Args:
        config: how long to wait for a worker that could hold a request at all.
        state: the state of the router core. Its requests are only read; its timers get the end of the grace and of
            the bypass; its tenants tell which of them may have more running.
        attempts: places requests.
    """

    def __init__(self, config: RouterConfig, state: CoreState, attempts: Attempts) -> None:
        self.queue = RequestQueue(config.fair_quantum_tokens, state.tenants.may_run)
        self._tenants = state.tenants
        self._config = config
        self._records: Mapping[RequestId, RequestRecord] = state.requests
        self._fleet = state.fleet
        self._attempts = attempts
        self._late_last = attempts.late_last
        self._timers = state.timers
        self._unschedulable: dict[RequestId, RequestRecord] = {}
        self._isolated: RequestRecord | None = None
        """The only request that is queued or runs, of those that may end workers."""
        self._to_isolate: dict[RequestId, RequestRecord] = {}
        """The others of these requests, in order. Tenants do not take turns here: a request that is no longer isolated
        runs beside the next one that is tried, so innocent ones would only lose their attempts with the workers of
        those."""
        self._hold = WorkerHold(state.fleet, config.bypass_s, self.queue.level)
        self._must_look = False
        self._least_lacking: int | None = None
        """The fewest tokens for which there is no room; None if no request waits for room."""
        self._least_lacking_unheld: int | None = None
        """The fewest tokens for which there is no room on the workers that are not held for another request."""
        self._seen_openings = 0
        self._seen_releases = 0

    def __len__(self) -> int:
        return len(self.queue) + len(self._unschedulable) + len(self._to_isolate)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self.queue or request_id in self._unschedulable or request_id in self._to_isolate

    def add(self, record: RequestRecord, now: float) -> Dispatch | None:
        """Add a new request. Returns its dispatch if it is placed at once; else it waits."""
        position = 0
        if self.queue:
            position = self.queue.position(record.urgency, record.tenant.share, record.tenant.num_kept)
        else:
            self._mark_seen()
        if not self._move_if_unschedulable(record, now):
            result = None
            may_run = record.tenant.is_unlimited or self._may_run(record)
            fits = self._may_fit(record)
            if may_run and fits and position < (MAX_LOOKS if self._least_lacking is None else MAX_PASSED):
                result = self._try_start(record, now, position)
                if isinstance(result, Dispatch):
                    return result
            self._push(record, now)
            if result is Blocked.NO_ROOM:
                self._note_lacking(record, now)
                self._note_large(record, now)
            elif result is Blocked.OVER_SHARE:
                self.queue.skipped_a_tenant = True
            elif may_run and not fits:
                self._note_lacking(record, now)
        record.tenant.num_waiting += 1
        return None

    def put_back(self, record: RequestRecord, now: float) -> None:
        """Add a request again whose attempt was lost."""
        record.tenant.num_waiting += 1
        if record.is_isolated and self._isolated not in (None, record):
            self._to_isolate[record.request_id] = record
            return
        if record.is_isolated:
            self._isolated = record
        self._push(record, now)
        self._must_look = True

    def no_longer_isolated(self, record: RequestRecord, now: float) -> None:
        """End the isolation of a request that has ended no worker, or has itself ended. The next one is tried."""
        record.is_isolated = False
        if self._isolated is not record:
            return
        self._isolated = next(iter(self._to_isolate.values()), None)
        if self._isolated is not None:
            del self._to_isolate[self._isolated.request_id]
            self._push(self._isolated, now)
            self._must_look = True

    def remove(self, request_id: RequestId) -> None:
        """Remove a waiting request that has ended."""
        record = self._records[request_id]
        record.tenant.num_waiting -= 1
        if self._unschedulable.pop(request_id, None) is None and self._to_isolate.pop(request_id, None) is None:
            self._take_out(record)
            self._must_look = True

    def settle(self, record: RequestRecord, now: float) -> None:
        """Refund the unused part of an ended request's charge to its tenant."""
        if record.is_isolated:
            self.no_longer_isolated(record, now)
        if record.is_charged:
            self.queue.settle(record.tenant.share, record.cost, record.num_used)

    def workers_changed(self, now: float) -> None:
        """Look again after a worker came up, was lost, or drains."""
        self._must_look = True
        self._hold.workers_changed()
        if not self._unschedulable:
            return
        for record in [record for record in self._unschedulable.values() if self._could_fit(record)]:
            del self._unschedulable[record.request_id]
            record.unservable_since = None
            self._push(record, now)

    def costs_changed(self) -> None:
        """Look again, because another choice may be the best now."""
        self._must_look = True
        self._hold.workers_changed()

    def configure(self, config: RouterConfig) -> None:
        """Follow another configuration: the policy of the attempts, the grace and the costs may have changed."""
        self._config, self._late_last = config, self._attempts.late_last
        self.costs_changed()

    def limits_changed(self) -> None:
        """Look again, because a tenant may have become able to run more."""
        self._must_look = True

    def wake(self, record: RequestRecord, now: float) -> bool:
        """Handle the due timer of a waiting request. Returns whether the grace for a worker that could hold it is
        over."""
        self._must_look = True
        since = record.unservable_since
        if record.request_id in self.queue and self._late_in_s(record, now) == 0.0:
            self._take_out(record)
            self._push(record, now)
        return since is not None and self._is_grace_over(record, since, now)

    def expectations_changed(self, now: float) -> None:
        """Check the requests that wait for a worker again, because other workers are expected."""
        for record in self._unschedulable.values():
            self._timers.add(now, record.request_id)

    def _is_grace_over(self, record: RequestRecord, since: float, now: float) -> bool:
        """Whether a request has waited long enough for a worker that could hold it; sets a timer for the end of the
        grace."""
        config, expected = self._config, self._fleet.expected
        end, last = since + config.no_worker_grace_s, since + config.expected_worker_grace_s
        missing = self._fleet.missing_role()
        in_s = None if missing is None else expected.next_in_s(missing, now)
        if in_s is not None and now + in_s < last:
            end = min(max(end, last), max(end, expected.known_until(now)))
        if now >= end:
            return True
        self._timers.add(end, record.request_id)
        return False

    def place(self, now: float) -> list[Dispatch]:
        """Make one pass: place the requests that there is room for."""
        self._mark_seen()
        self._tenants.note_time(now)
        self.queue.look()
        placed: list[Dispatch] = []
        position = num_looks = 0
        looked_at: set[RequestId] = set()
        while position < MAX_PASSED and num_looks < MAX_LOOKS:
            request_id = self.queue.at(position)
            if request_id is None:
                break
            if request_id in looked_at:
                position += 1
                continue
            record = self._records[request_id]
            if self._move_if_unschedulable(record, now):
                self._take_out(record)
                continue
            looked_at.add(request_id)
            if not self._may_fit(record):
                self._note_lacking(record, now)
                position += 1
                continue
            result = self._try_queued(record, now, position)
            if isinstance(result, Dispatch):
                placed.append(result)
                if self._take_out(record):  # The worker that was held for it may be used again.
                    looked_at.clear()
                    position = 0
                elif self.queue.has_turns:  # Its tenant moved back, so that others are at positions already tried.
                    position = 0
            elif result is Blocked.OVER_SHARE:  # None of its tenant is tried any more.
                self.queue.look()
                position, num_looks = 0, num_looks + 1
            else:
                position, num_looks = position + 1, num_looks + 1
            if not self._fleet.has_opening:
                return placed
        holder = self._hold.holder
        if (
            holder is not None
            and holder.request_id not in looked_at
            and holder.request_id in self.queue
            and self._may_run(holder)
        ):
            position = self.queue.position(holder.urgency, holder.tenant.share, holder.tenant.num_kept)
            result = self._try_queued(holder, now, position)
            if isinstance(result, Dispatch):
                self._take_out(holder)
                return [*placed, result, *self.place(now)]
        return placed

    def needs_pass(self) -> bool:
        """Whether a waiting request may be placeable after the latest events."""
        if not self.queue:
            return False
        fleet = self._fleet
        if self._must_look or fleet.num_openings != self._seen_openings:
            return True
        lacks_room = self._least_lacking is not None or self._least_lacking_unheld is not None
        waits_for_release = lacks_room or self.queue.skipped_a_tenant
        return waits_for_release and fleet.num_releases != self._seen_releases

    def _queued_ms(self, position: int) -> float:
        """Milliseconds of prefill of the prompts before a position, divided by the number of workers that compute
        prompts."""
        num_workers = self._fleet.backlog()[1] if position else 0
        return self.queue.work_before(position) / num_workers if num_workers else 0.0

    def _mark_seen(self) -> None:
        """Note that the events so far need no other pass."""
        self._must_look = False
        self._tenants.begin_pass()
        self._least_lacking = self._least_lacking_unheld = None
        self._seen_openings, self._seen_releases = self._fleet.num_openings, self._fleet.num_releases

    def _try_start(self, record: RequestRecord, now: float, position: int) -> Dispatch | Blocked:
        queued_ms = self._queued_ms(position) if position else 0.0
        kept = () if self._hold.holder is None else self._hold.kept_from(record)
        tenant = record.tenant
        result = self._attempts.try_start(record, now, queued_ms, kept, self._tenants.may_have)
        if isinstance(result, Dispatch):
            self._tenants.started(tenant, record.running.kv_tokens)
            if not record.is_charged:
                record.is_charged = True
                self.queue.charge(tenant.share, record.cost)
        return result

    def _try_queued(self, record: RequestRecord, now: float, position: int) -> Dispatch | Blocked:
        """Try a request of the queue. If it is not placed, note what it waits for."""
        result = self._try_start(record, now, position)
        if isinstance(result, Dispatch):
            record.tenant.num_waiting -= 1
        elif result is Blocked.NO_ROOM and not record.avoid_until:
            self._note_lacking(record, now)
            self._note_large(record, now)
        elif record.lacks_room_since is not None:
            self._note_room(record, now)
        return result

    def _may_run(self, record: RequestRecord) -> bool:
        """Whether the tenant of a new request may have one more running."""
        if record.tenant.is_unlimited or self._tenants.may_run(record.tenant.name):
            return True
        self.queue.skipped_a_tenant = True
        return False

    def _may_fit(self, record: RequestRecord) -> bool:
        """Whether a request needs fewer tokens than those for which there is no room, so that it is worth a try."""
        if self._least_lacking is None and self._least_lacking_unheld is None:
            return True
        needed = self._attempts.room_needed(record)
        if (
            self._least_lacking_unheld is not None
            and needed >= self._least_lacking_unheld
            and self._hold.kept_from(record)
        ):
            return False
        return self._least_lacking is None or needed < self._least_lacking

    def _note_lacking(self, record: RequestRecord, now: float) -> None:
        """Note that no worker has room for a queued request."""
        needed = self._attempts.room_needed(record)
        self._seen_releases = self._fleet.num_releases
        if self._hold.kept_from(record):
            self._least_lacking_unheld = min(needed, self._least_lacking_unheld or needed)
            return
        self._least_lacking = min(needed, self._least_lacking or needed)
        if not self._fleet.has_opening:  # Without a free slot it would wait however many blocks are free.
            return
        if record.lacks_room_since is None:
            record.lacks_room_since = now
            self._timers.add(now + self._config.bypass_s, record.request_id)
        if self._hold.is_for(record, now) and not record.is_pooled:  # a decode worker would be held
            self._hold.keep(record, self._attempts.demand(record, now), self._attempts.answer_tokens)

    def _note_large(self, record: RequestRecord, now: float) -> None:
        """Note that a request waits because it is large, if there is room for half its size. Others pass it, so its
        prompt is not counted as work before them."""
        if not record.is_overtaken and self._attempts.has_room_for_half(record, now):
            record.is_overtaken = True
            self.queue.set_work(record.request_id, 0.0)

    def _note_room(self, record: RequestRecord, now: float) -> None:
        """Note that there is room for a queued request again, and it waits for something else."""
        record.lacks_room_since = None
        if record.is_overtaken:
            record.is_overtaken = False
            self.queue.set_work(record.request_id, self._work_ms(record, now))

    def _take_out(self, record: RequestRecord) -> bool:
        """Remove a request from the queue. Returns whether a worker was held for it."""
        self.queue.remove(record.request_id)
        record.lacks_room_since, record.is_overtaken = None, False
        return self._hold.release(record)

    def _move_if_unschedulable(self, record: RequestRecord, now: float) -> bool:
        """Mark a request as unschedulable if no present worker could hold it even if empty. Returns whether it is."""
        if self._could_fit(record):
            return False
        self._unschedulable[record.request_id] = record
        record.unservable_since = now
        self._is_grace_over(record, now, now)
        return True

    def _could_fit(self, record: RequestRecord) -> bool:
        """Whether a present worker could hold a request if it were empty."""
        fleet, num_tokens = self._fleet, record.num_tokens
        if record.is_pooled:
            return num_tokens <= fleet.longest_new_pooled
        if record.version is not None and not fleet.has_only(record.version):
            return num_tokens < fleet.longest_of_version(record.version)
        if num_tokens < fleet.longest_new_sequence:
            return True
        return bool(record.output.released) and num_tokens < fleet.longest_continued_sequence

    def _push(self, record: RequestRecord, now: float) -> None:
        in_s = self._late_in_s(record, now)
        if in_s == 0.0:
            record.cannot_meet_ttft = True
            record.due += record.due - record.trace.arrival
        elif in_s < math.inf:
            self._timers.add(now + in_s, record.request_id)
        cost = 0 if record.is_charged else record.cost
        self.queue.push(record.request_id, record.urgency, self._work_ms(record, now), record.tenant.share, cost)

    def _late_in_s(self, record: RequestRecord, now: float) -> float:
        """Seconds from now until a request misses its TTFT target even if it is computed at once. Infinite if that is
        already noted, or it has no such target."""
        if not self._late_last or record.cannot_meet_ttft or record.trace.ttft_slo_s is None or record.output.released:
            return math.inf
        return max(0.0, record.due - self._work_ms(record, now) / 1000 - now)

    def _work_ms(self, record: RequestRecord, now: float) -> float:
        return work_ms(self._fleet, record.block_hashes, record.num_tokens, now)


class WorkerHold:
    """Workers that are held for one request: the first in the queue that has waited for KV blocks for `bypass_s`, while
    smaller ones passed it.

        lacks room ──bypass_s──> a decode worker is held: no new sequences ──its sequences end──> placed there
                                    └─ it has room for the answer now, but no worker for the prompt: a prefill worker
                                    too

    So a large request waits at most `bypass_s` and the rest of the sequences on one worker, and the other workers go
    on. Requests of a higher priority, those that had an attempt, and those of tenants whose turn is not behind that of
    its tenant may use the held workers: a tenant that keeps all blocks in use has one request after the other for which
    a worker could be held. A router holds workers against its own requests only: where several gateways share the
    workers, the others' requests may be placed there.

    Args:
        fleet: the workers.
        bypass_s: how long a request lets others pass.
        level: what a tenant's turn goes by, see `RequestQueue.level`.
    """

    def __init__(self, fleet: Fleet, bypass_s: float, level: Callable[[Share], float]) -> None:
        self._fleet = fleet
        self._bypass_s = bypass_s
        self._level = level
        self.holder: RequestRecord | None = None
        """The request for which workers are held."""
        self._decode: Worker | None = None
        self._kept: frozenset[WorkerId] = frozenset()

    def kept_from(self, record: RequestRecord) -> Collection[WorkerId]:
        """The workers that this request must not use."""
        holder = self.holder
        if holder is None or record is holder:
            return ()
        urgency, its_urgency = record.urgency[:2], holder.urgency[:2]
        if urgency != its_urgency:
            return () if urgency < its_urgency else self._kept
        share, its_share = record.tenant.share, holder.tenant.share
        is_before = share is not its_share and self._level(share) <= self._level(its_share)
        return () if is_before else self._kept

    def is_for(self, record: RequestRecord, now: float) -> bool:
        """Whether `keep` is due for a request without room: it is the holder, or may become it."""
        if self.holder is not None:
            return record is self.holder
        since = record.lacks_room_since
        return since is not None and now >= since + self._bypass_s

    def keep(self, record: RequestRecord, demand: Demand, output_tokens: float) -> None:
        """Hold workers for the request. The decode worker is the one with room soonest, with answers of `output_tokens`
        tokens; it stays the same, so that it empties, until a circuit breaker excludes it. A prefill worker is held
        only while nothing else lacks room: it would be idle until then."""
        self.holder = record
        if self._decode is not None and self._fleet.is_excluded(self._decode.worker_id):
            self._decode = None
        if self._decode is None:
            self._decode = self._fleet.soonest_decode(demand, output_tokens)
        decode = self._decode
        if decode is None:
            return
        kept = {decode.worker_id}
        if self._fleet.candidate(demand, decode.worker_id) is not None:
            prefill = self._fleet.emptiest_prefill(demand.num_tokens, decode)
            if prefill is not None:
                kept.add(prefill.worker_id)
        self._kept = frozenset(kept)

    def release(self, record: RequestRecord) -> bool:
        """End the hold for a request that no longer waits. Returns whether it was the holder."""
        if record is not self.holder:
            return False
        self.holder = None
        self.workers_changed()
        return True

    def workers_changed(self) -> None:
        """Choose the workers again in the next pass, because workers or costs have changed."""
        self._decode, self._kept = None, frozenset()
