"""The requests that wait for a worker: in the queue while somebody could take them, set aside while nobody could even
if empty.

    add ──> queue ──a look finds room──> placed
              │  ^
       nobody │  │ a worker comes
       could  v  │
            set aside ──the grace is over──> the core fails it

Looks go from the head on. Nobody overtakes a head that waits for room: else large requests would starve. One that
waits for reasons of its own lets others pass: it avoids a worker, or the best worker for it has no slot just now and
waiting is cheaper than what is free. At most `MAX_LOOKS` requests are looked at for one event, and none when nothing
happened that could have made room, so an event costs the same however long the queue.

Owner: the router core.
"""

from __future__ import annotations

from collections.abc import Mapping

from disagg.proto.ids import RequestId
from disagg.router.attempts import Attempts, Blocked
from disagg.router.config import RouterConfig
from disagg.router.events import Dispatch
from disagg.router.fleet import Fleet
from disagg.router.forecast import work_ms
from disagg.router.queue import RequestQueue
from disagg.router.record import RequestRecord
from disagg.router.wakeups import Wakeups

MAX_LOOKS = 16
"""From the head of the queue, in one event."""


class Waiting:
    """See the module docstring.

    Args:
        config: how long to wait for a worker that could take a request at all.
        records: the requests that have not ended; read only.
        fleet: the workers.
        attempts: places requests.
        wakeups: gets the end of the grace.
    """

    def __init__(
        self,
        config: RouterConfig,
        records: Mapping[RequestId, RequestRecord],
        fleet: Fleet,
        attempts: Attempts,
        wakeups: Wakeups,
    ) -> None:
        self.queue = RequestQueue()
        self._config = config
        self._records = records
        self._fleet = fleet
        self._attempts = attempts
        self._wakeups = wakeups
        self._aside: dict[RequestId, RequestRecord] = {}
        self._must_look = False
        self._lacks_room = False
        """Whether the head waits for room."""
        self._seen_openings = 0
        self._seen_releases = 0

    def __len__(self) -> int:
        return len(self.queue) + len(self._aside)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self.queue or request_id in self._aside

    def add(self, record: RequestRecord, now: float) -> Dispatch | None:
        """A new request: placed at once, or queued."""
        position = 0
        if self.queue:
            position = self.queue.position(record.urgency)
        else:
            self._all_seen()
        if self._set_aside(record, now):
            return None
        if position < MAX_LOOKS and not (position and self._lacks_room):
            result = self._attempts.try_start(record, now, self._queued_ms(position))
            if isinstance(result, Dispatch):
                return result
            if position == 0:
                self._note_head(result, record)
        self._push(record, now)
        return None

    def put_back(self, record: RequestRecord, now: float) -> None:
        """A request whose attempt was lost."""
        self._push(record, now)
        self._must_look = True

    def remove(self, request_id: RequestId) -> None:
        """A waiting request ended."""
        if self._aside.pop(request_id, None) is None:
            self.queue.remove(request_id)
            self._must_look = True

    def workers_changed(self, now: float) -> None:
        """A worker came, went or drains."""
        self._must_look = True
        if not self._aside:
            return
        longest = self._fleet.longest_new_sequence
        for record in [record for record in self._aside.values() if record.num_tokens < longest]:
            del self._aside[record.request_id]
            record.unservable_since = None
            self._push(record, now)

    def wake(self, record: RequestRecord, now: float) -> bool:
        """A waiting request's time has come. Returns whether it waited long enough for a worker that could take it."""
        self._must_look = True
        since = record.unservable_since
        return since is not None and now >= since + self._config.no_worker_grace_s

    def place(self, now: float) -> list[Dispatch]:
        """Place whom there is room for."""
        self._all_seen()
        placed: list[Dispatch] = []
        position = 0
        while position < min(len(self.queue), MAX_LOOKS):
            record = self._records[self.queue[position]]
            if self._set_aside(record, now):
                self.queue.remove(record.request_id)
                continue
            result = self._attempts.try_start(record, now, self._queued_ms(position))
            if isinstance(result, Dispatch):
                self.queue.remove(record.request_id)
                placed.append(result)
            elif result is Blocked.WAITS or record.avoid_until:
                position += 1
            else:
                self._note_head(result, record)
                break
            if not self._fleet.has_opening:
                break
        return placed

    def has_reason_to_look(self) -> bool:
        """Whether something happened that could let a waiting request in."""
        if not self.queue:
            return False
        fleet = self._fleet
        if self._must_look or fleet.num_openings != self._seen_openings:
            return True
        return self._lacks_room and fleet.num_releases != self._seen_releases

    def _queued_ms(self, position: int) -> float:
        """How long the prompts before a position keep the workers that are there for prompts."""
        num_workers = self._fleet.backlog()[1] if position else 0
        return self.queue.work_before(position) / num_workers if num_workers else 0.0

    def _all_seen(self) -> None:
        """What happened so far is no reason to look again."""
        self._must_look = self._lacks_room = False
        self._seen_openings, self._seen_releases = self._fleet.num_openings, self._fleet.num_releases

    def _note_head(self, blocked: Blocked, record: RequestRecord) -> None:
        if blocked is Blocked.NO_ROOM and not record.avoid_until:
            self._lacks_room = True
            self._seen_releases = self._fleet.num_releases

    def _set_aside(self, record: RequestRecord, now: float) -> bool:
        """Set a request aside if no present worker could take it even if empty."""
        if record.num_tokens < self._fleet.longest_new_sequence:
            return False
        self._aside[record.request_id] = record
        record.unservable_since = now
        self._wakeups.add(now + self._config.no_worker_grace_s, record.request_id)
        return True

    def _push(self, record: RequestRecord, now: float) -> None:
        duration_ms = work_ms(self._fleet, record.block_hashes, record.num_tokens, now)
        self.queue.push(record.request_id, record.urgency, duration_ms)
