"""All present workers of one group (model fingerprint and KV layout), so that KV of one means the same on each other.

Owner: the router's fleet.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from disagg.proto.ids import WorkerId
from disagg.proto.messages import KvLayout, PeerRef, WorkerInfo
from disagg.router.placement.placement import Candidate, Demand, Policy, Shortlist, decode_blocks, prefill_blocks
from disagg.router.placement.worker_buckets import WorkerBucket
from disagg.router.workers.circuit_breakers import Exclusions
from disagg.router.workers.pairs import Pairs
from disagg.router.workers.prefix_match import PrefixMatch
from disagg.router.workers.worker import Worker, decodes_only, has_both_roles, longest_sequence, prefills_only

_Shape = tuple[int, ...]
_WITH_PARTNERS = 2
"""So many prefill workers are looked at for a decode worker that they have a formed pair with."""


class ModelGroup:
    """See the module docstring.

    Args:
        policy: ranks the workers.
        watermark: share of the blocks that is left free.
        pairs: knows which pairs are formed.
    """

    def __init__(self, policy: Policy, watermark: float, pairs: Pairs) -> None:
        self._policy = policy
        self._pairs = pairs
        self._watermark = watermark
        self._prefills: dict[_Shape, WorkerBucket] = {}
        self._decodes: dict[_Shape, WorkerBucket] = {}
        self._colocated: dict[_Shape, WorkerBucket] = {}

    def bucket_for(self, info: WorkerInfo) -> WorkerBucket:
        """The bucket of workers like this one."""
        buckets = self._colocated
        num_blocks = decode_blocks
        if prefills_only(info):
            buckets = self._prefills
            num_blocks = prefill_blocks
        elif decodes_only(info):
            buckets = self._decodes
        sizes = (info.num_blocks, info.block_size, info.max_num_seqs, info.token_budget, info.max_model_len)
        shape = (*sizes, info.decode_reserve_tokens, info.watermark_blocks)
        bucket = buckets.get(shape)
        if bucket is None:
            bucket = buckets[shape] = WorkerBucket(info, self._policy, self._watermark, num_blocks)
        return bucket

    def prefill_buckets(self) -> list[WorkerBucket]:
        """The buckets that are there to compute prompts; those of decode workers where there are no others."""
        buckets = [
            bucket for buckets in (self._prefills, self._colocated) for bucket in buckets.values() if bucket.members
        ]
        return buckets or list(self._decodes.values())

    def decode_buckets(self) -> list[WorkerBucket]:
        """The buckets whose workers decode."""
        return [bucket for buckets in (self._decodes, self._colocated) for bucket in buckets.values() if bucket.members]

    def shortlist(
        self,
        demand: Demand,
        without: Collection[WorkerId],
        matched: PrefixMatch | None,
        may_prefill_locally: bool,
        excluded: Exclusions | None = None,
    ) -> Shortlist:
        """The few workers of each role that are worth a look and have room. `without` are those that the request
        avoids, `excluded` those that all avoid now."""
        local = may_prefill_locally and self._policy.weighs_local
        if not local and (may_prefill_locally or demand.is_continued):
            local = next(_long_enough(self._prefills, demand.num_tokens), None) is None
        if excluded is not None:
            return self._without(excluded, demand, set(without), matched, local)
        prefills = _candidates(self._prefills, demand, without, matched)
        decodes = _candidates(self._decodes, demand, without, matched) if prefills or local else []
        partners = self._partners(prefills, decodes, demand, without, matched)
        return Shortlist(prefills, decodes, _candidates(self._colocated, demand, without, matched), local, (), partners)

    def _without(
        self, excluded: Exclusions, demand: Demand, without: set[WorkerId], matched: PrefixMatch | None, local: bool
    ) -> Shortlist:
        """A decode worker may be left out of pairs and do all of it nevertheless, so these are two lists."""
        prefills = _candidates(self._prefills, demand, without | excluded.prefills, matched)
        decodes = _candidates(self._decodes, demand, without | excluded.decodes, matched) if prefills else []
        alone = without | excluded.colocated
        colocated = _candidates(self._colocated, demand, alone, matched)
        if local:
            colocated += _candidates(self._decodes, demand, alone, matched)
        partners = self._partners(prefills, decodes, demand, without | excluded.decodes, matched)
        return Shortlist(prefills, decodes, colocated, False, excluded.pairs, partners)

    def _partners(
        self,
        prefills: Sequence[Candidate],
        decodes: Sequence[Candidate],
        demand: Demand,
        without: Collection[WorkerId],
        matched: PrefixMatch | None,
    ) -> list[Candidate]:
        """For each of the best prefill workers that has a formed pair with none of the decode workers in the list, the
        best one that it has. Of many workers the best of each role seldom have a pair with each other."""
        if not self._policy.weighs_setup:
            return []
        found: dict[WorkerId, Candidate] = {}
        listed = {decode.worker.worker_id for decode in decodes}
        for prefill in prefills[:_WITH_PARTNERS]:
            name = prefill.worker.worker_id
            if not listed.isdisjoint(self._pairs.formed_with(name)):
                continue
            best: tuple[float, WorkerBucket, Worker] | None = None
            for bucket in self._decodes.values():
                for partner in self._pairs.partners(name):
                    worker = bucket.members.get(partner)
                    if worker is None or worker.is_full or partner in without:
                        continue
                    rank = self._policy.rank(worker)
                    if best is None or rank < best[0]:
                        best = rank, bucket, worker
            if best is not None and best[2].worker_id not in found:
                candidate = best[1].candidate(demand, best[2], matched)
                if candidate is not None:
                    found[best[2].worker_id] = candidate
        return list(found.values())

    def decoders(self, num_tokens: int, may_prefill_locally: bool) -> Iterator[Worker]:
        """The workers that could decode a request of that length if they were empty."""
        yield from _long_enough(self._colocated, num_tokens)
        if may_prefill_locally or next(_long_enough(self._prefills, num_tokens), None) is not None:
            yield from _long_enough(self._decodes, num_tokens)

    def computers(self, num_tokens: int, decode: Worker) -> Iterator[Worker]:
        """The prefill workers that could compute a prompt of that length for this decode worker."""
        return iter(()) if has_both_roles(decode.info) else _long_enough(self._prefills, num_tokens)

    def pairs_with(self, worker: Worker) -> list[tuple[Worker, PeerRef]]:
        """The pairs (P, D) that this worker of the group makes possible."""
        if prefills_only(worker.info):
            return [(worker, decode.peer) for decode in _members(self._decodes)]
        if decodes_only(worker.info):
            return [(prefill, worker.peer) for prefill in _members(self._prefills)]
        return []


def longest_of(infos: Collection[WorkerInfo], may_prefill_locally: bool) -> int:
    """Tokens of the longest sequence that a pair, a worker with both roles, or a decode worker that may prefill could
    hold; 0 when there is none of these."""
    longest = 0
    decodes: dict[tuple[str, KvLayout], int] = {}
    for info in infos:
        if has_both_roles(info) or (may_prefill_locally and decodes_only(info)):
            longest = max(longest, longest_sequence(info))
        if decodes_only(info):
            group = (info.fingerprint, info.kv_layout)
            decodes[group] = max(decodes.get(group, 0), longest_sequence(info))
    for info in filter(prefills_only, infos):
        longest = max(longest, min(longest_sequence(info), decodes.get((info.fingerprint, info.kv_layout), 0)))
    return longest


def _candidates(
    buckets: dict[_Shape, WorkerBucket], demand: Demand, without: Collection[WorkerId], matched: PrefixMatch | None
) -> list[Candidate]:
    found: list[Candidate] = []
    for bucket in buckets.values():
        found += bucket.candidates(demand, without, matched)
    return found


def _members(buckets: dict[_Shape, WorkerBucket]) -> Iterator[Worker]:
    for bucket in buckets.values():
        yield from bucket.members.values()


def _long_enough(buckets: dict[_Shape, WorkerBucket], num_tokens: int) -> Iterator[Worker]:
    for bucket in buckets.values():
        if num_tokens < bucket.longest:
            yield from bucket.members.values()
