"""The workers as the router knows them: who is up, what each reported, what is booked on each, which prefix blocks it
has.

    up(info) ──> present ──report──> present ──lost(id)──> forgotten        a new incarnation is another life: lost,
    then up

Owner: the router core.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from disagg.proto.block_hash import HASH_BLOCK_TOKENS, max_cached_tokens
from disagg.proto.ids import BlockHash, Incarnation, WorkerId
from disagg.proto.messages import KvLayout, Load, PeerRef, RoleName, WorkerInfo, WorkerReport
from disagg.router.api import WorkerView
from disagg.router.books import Books
from disagg.router.placement import (
    Candidate,
    can_pair,
    decodes_only,
    has_both_roles,
    has_short_suffix,
    longest_sequence,
    prefills_only,
)
from disagg.router.prefix_index import PrefixIndex


@dataclass(slots=True)
class Fleet:
    """See the module docstring."""

    books: Books = field(default_factory=Books)
    index: PrefixIndex = field(default_factory=PrefixIndex)
    longest_sequence: int = 0
    """Tokens of the longest sequence (prompt and answer) that any placement on the present workers could hold."""
    _infos: dict[WorkerId, WorkerInfo] = field(default_factory=dict)
    _loads: dict[WorkerId, Load] = field(default_factory=dict)

    def up(self, info: WorkerInfo) -> None:
        """A worker is there. One that was there before in another life must have been lost first."""
        known = self._infos.get(info.worker_id)
        assert known is None or known.incarnation == info.incarnation, "the earlier life was not lost"
        self._infos[info.worker_id] = info
        if known is None:
            self._loads[info.worker_id] = Load()
            self.index.add_worker(info.worker_id, info.incarnation)
        self.longest_sequence = longest_of(self._infos.values())

    def lost(self, worker_id: WorkerId) -> None:
        """A worker is gone; its bookings must have been closed."""
        assert not self.books.account(worker_id).bookings, "bookings of a lost worker are still open"
        del self._infos[worker_id]
        del self._loads[worker_id]
        self.index.remove_worker(worker_id)
        self.longest_sequence = longest_of(self._infos.values())

    def incarnation(self, worker_id: WorkerId) -> Incarnation | None:
        """The life of the worker that is present, if any."""
        info = self._infos.get(worker_id)
        return info.incarnation if info else None

    def peer(self, worker_id: WorkerId) -> PeerRef:
        """How another worker reaches this one."""
        info = self._infos[worker_id]
        return PeerRef(worker_id=worker_id, incarnation=info.incarnation, address=info.address)

    def pairs_with(self, worker_id: WorkerId) -> list[tuple[WorkerId, PeerRef]]:
        """The pairs (prefill worker, decode worker) that this worker makes possible."""
        new = self._infos[worker_id]
        prefills = [new] if prefills_only(new) else list(filter(prefills_only, self._infos.values()))
        decodes = [new] if decodes_only(new) else list(filter(decodes_only, self._infos.values()))
        if new not in prefills + decodes:
            return []
        return [(p.worker_id, self.peer(d.worker_id)) for p in prefills for d in decodes if can_pair(p, d)]

    def report(self, report: WorkerReport) -> bool:
        """Take the report of a present life. Returns False when its KV events have a gap, see `PrefixIndex.apply`."""
        self._loads[report.worker_id] = report.load
        return self.index.apply(report)

    def missing_role(self) -> RoleName | None:
        """The role that nobody plays for the others; None when requests can be served."""
        if self.longest_sequence:
            return None
        only_decodes = self._infos and all(decodes_only(info) for info in self._infos.values())
        return "prefill" if only_decodes else "decode"

    def could_take(self, hashes: Sequence[BlockHash], num_tokens: int, short_suffix_tokens: int) -> bool:
        """Whether the present workers, if they were empty, could take a request of `num_tokens` known tokens: as a
        pair, as one with both roles, or as a decode worker that lacks at most `short_suffix_tokens` of them."""
        if num_tokens + 1 <= self.longest_sequence:
            return True
        return short_suffix_tokens > 0 and any(
            has_short_suffix(candidate, num_tokens, short_suffix_tokens)
            and num_tokens + 1 <= longest_sequence(candidate.info)
            for candidate in self.candidates(hashes, num_tokens, without=())
        )

    def candidates(
        self, hashes: Sequence[BlockHash], num_tokens: int, without: Collection[WorkerId]
    ) -> list[Candidate]:
        """Every present worker but those in `without`, as it is for a request of `num_tokens` known tokens."""
        matched = self.index.match(hashes)
        return [
            self._candidate(info, min(matched.get(worker_id, 0) * HASH_BLOCK_TOKENS, max_cached_tokens(num_tokens)))
            for worker_id, info in self._infos.items()
            if worker_id not in without
        ]

    def views(self) -> tuple[WorkerView, ...]:
        """The workers for an operator, by id."""
        return tuple(WorkerView(info, self._loads[worker_id]) for worker_id, info in sorted(self._infos.items()))

    def check_integrity(self) -> list[str]:
        """What does not fit together; empty when all is well."""
        strangers = {worker_id for worker_id, _ in self.books.entries()} - self._infos.keys()
        problems = [f"bookings on {worker_id}, which is not present" for worker_id in sorted(strangers)]
        return problems + self.books.check_integrity() + self.index.check_integrity()

    def _candidate(self, info: WorkerInfo, cached_tokens: int) -> Candidate:
        account = self.books.account(info.worker_id)
        load = self._loads[info.worker_id]
        return Candidate(
            info=info,
            cached_tokens=cached_tokens,
            outstanding_tokens=account.tokens,
            num_sequences=account.sequences,
            used_blocks=max(account.blocks, load.blocks_active + load.blocks_reserved),
        )


def longest_of(infos: Collection[WorkerInfo]) -> int:
    """Tokens of the longest sequence that a pair, or a worker with both roles, could hold; 0 when there is neither."""
    longest = max((longest_sequence(info) for info in infos if has_both_roles(info)), default=0)
    decodes: dict[tuple[str, KvLayout], int] = {}
    for info in filter(decodes_only, infos):
        kind = (info.fingerprint, info.kv_layout)
        decodes[kind] = max(decodes.get(kind, 0), longest_sequence(info))
    for info in filter(prefills_only, infos):
        longest = max(longest, min(longest_sequence(info), decodes.get((info.fingerprint, info.kv_layout), 0)))
    return longest
