"""Room that is kept for one request: the first in the queue that has waited for room for `bypass_s`, while smaller ones
passed it.

    lacks room ──bypass_s──> a decode worker is kept: nothing new goes there ──its sequences end──> placed there
                                └─ there is room for the answer now, but none for the prompt: a prefill worker too

So a large request waits at most `bypass_s` and the rest of the sequences on one worker, and the other workers go on.
Requests of a higher priority, and those that had an attempt, are not kept off. A router keeps its own requests off
only: where several gateways share the workers, the others' may go there.

Owner: the waiting requests.
"""

from __future__ import annotations

from collections.abc import Collection

from disagg.proto.ids import WorkerId
from disagg.router.placement.fleet import Fleet
from disagg.router.placement.placement import Demand
from disagg.router.requests.record import RequestRecord
from disagg.router.workers.worker import Worker


class Reservation:
    """See the module docstring.

    Args:
        fleet: the workers.
        bypass_s: how long a request lets others pass.
    """

    def __init__(self, fleet: Fleet, bypass_s: float) -> None:
        self._fleet = fleet
        self._bypass_s = bypass_s
        self.holder: RequestRecord | None = None
        """For whom workers are kept."""
        self._decode: Worker | None = None
        self._kept: frozenset[WorkerId] = frozenset()

    def kept_from(self, record: RequestRecord) -> Collection[WorkerId]:
        """The workers that this request must not go to."""
        holder = self.holder
        if holder is None or record is holder or record.urgency[:2] < holder.urgency[:2]:
            return ()
        return self._kept

    def is_for(self, record: RequestRecord, now: float) -> bool:
        """Whether `keep` is due for a request for which there is no room: it is the holder, or may become it."""
        if self.holder is not None:
            return record is self.holder
        since = record.lacks_room_since
        return since is not None and now >= since + self._bypass_s

    def keep(self, record: RequestRecord, demand: Demand, output_tokens: float) -> None:
        """Keep workers for the request. The decode worker is the one where there is room soonest, with answers of so
        many tokens; it stays the same, so that it empties, until it is left out because it fails. A prefill worker is
        kept only while it alone is what lacks room: it would be idle until then."""
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
        """The request waits no longer. Returns whether it was the holder."""
        if record is not self.holder:
            return False
        self.holder = None
        self.workers_changed()
        return True

    def workers_changed(self) -> None:
        """A worker came, went or drains: choose again at the next look."""
        self._decode, self._kept = None, frozenset()
