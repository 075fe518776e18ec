"""All present workers of one kind (model fingerprint and KV layout), so that KV of one means the same on each other.

Owner: the router's fleet.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from disagg.proto.ids import WorkerId
from disagg.proto.messages import KvLayout, PeerRef, WorkerInfo
from disagg.router.placement.placement import Candidate, Demand, Policy, Shortlist, decode_blocks, prefill_blocks
from disagg.router.placement.pools import Pool
from disagg.router.workers.pairs import Pairs
from disagg.router.workers.prefix_match import PrefixMatch
from disagg.router.workers.quarantine import LeftOut
from disagg.router.workers.worker import Worker, decodes_only, has_both_roles, longest_sequence, prefills_only

_Shape = tuple[int, ...]
_WITH_PARTNERS = 2
"""So many prefill workers are looked at for a decode worker that they have a formed pair with."""


class Kind:
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
        self._prefills: dict[_Shape, Pool] = {}
        self._decodes: dict[_Shape, Pool] = {}
        self._wholes: dict[_Shape, Pool] = {}

    def pool_for(self, info: WorkerInfo) -> Pool:
        """The pool of workers like this one."""
        pools = self._wholes
        num_blocks = decode_blocks
        if prefills_only(info):
            pools = self._prefills
            num_blocks = prefill_blocks
        elif decodes_only(info):
            pools = self._decodes
        sizes = (info.num_blocks, info.block_size, info.max_num_seqs, info.token_budget, info.max_model_len)
        shape = (*sizes, info.decode_reserve_tokens, info.watermark_blocks)
        pool = pools.get(shape)
        if pool is None:
            pool = pools[shape] = Pool(info, self._policy, self._watermark, num_blocks)
        return pool

    def computing_pools(self) -> list[Pool]:
        """The pools that are there to compute prompts; those of decode workers where there are no others."""
        pools = [pool for pools in (self._prefills, self._wholes) for pool in pools.values() if pool.members]
        return pools or list(self._decodes.values())

    def decoding_pools(self) -> list[Pool]:
        """The pools whose workers decode."""
        return [pool for pools in (self._decodes, self._wholes) for pool in pools.values() if pool.members]

    def shortlist(
        self,
        demand: Demand,
        without: Collection[WorkerId],
        matched: PrefixMatch | None,
        may_prefill_locally: bool,
        left_out: LeftOut | None = None,
    ) -> Shortlist:
        """The few workers of each role that are worth a look and have room. `without` are those that the request
        avoids, `left_out` those that all avoid now."""
        local = may_prefill_locally and self._policy.weighs_local
        if not local and (may_prefill_locally or demand.is_continued):
            local = next(_long_enough(self._prefills, demand.num_tokens), None) is None
        if left_out is not None:
            return self._without(left_out, demand, set(without), matched, local)
        prefills = _candidates(self._prefills, demand, without, matched)
        decodes = _candidates(self._decodes, demand, without, matched) if prefills or local else []
        partners = self._partners(prefills, decodes, demand, without, matched)
        return Shortlist(prefills, decodes, _candidates(self._wholes, demand, without, matched), local, (), partners)

    def _without(
        self, left_out: LeftOut, demand: Demand, without: set[WorkerId], matched: PrefixMatch | None, local: bool
    ) -> Shortlist:
        """A decode worker may be left out of pairs and do all of it nevertheless, so these are two lists."""
        prefills = _candidates(self._prefills, demand, without | left_out.prefills, matched)
        decodes = _candidates(self._decodes, demand, without | left_out.decodes, matched) if prefills else []
        alone = without | left_out.alone
        wholes = _candidates(self._wholes, demand, alone, matched)
        if local:
            wholes += _candidates(self._decodes, demand, alone, matched)
        partners = self._partners(prefills, decodes, demand, without | left_out.decodes, matched)
        return Shortlist(prefills, decodes, wholes, False, left_out.pairs, partners)

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
            best: tuple[float, Pool, Worker] | None = None
            for pool in self._decodes.values():
                for partner in self._pairs.partners(name):
                    worker = pool.members.get(partner)
                    if worker is None or worker.is_full or partner in without:
                        continue
                    rank = self._policy.rank(worker)
                    if best is None or rank < best[0]:
                        best = rank, pool, worker
            if best is not None and best[2].worker_id not in found:
                candidate = best[1].candidate(demand, best[2], matched)
                if candidate is not None:
                    found[best[2].worker_id] = candidate
        return list(found.values())

    def decoders(self, num_tokens: int, may_prefill_locally: bool) -> Iterator[Worker]:
        """The workers that could decode a request of that length if they were empty."""
        yield from _long_enough(self._wholes, num_tokens)
        if may_prefill_locally or next(_long_enough(self._prefills, num_tokens), None) is not None:
            yield from _long_enough(self._decodes, num_tokens)

    def computers(self, num_tokens: int, decode: Worker) -> Iterator[Worker]:
        """The prefill workers that could compute a prompt of that length for this decode worker."""
        return iter(()) if has_both_roles(decode.info) else _long_enough(self._prefills, num_tokens)

    def pairs_with(self, worker: Worker) -> list[tuple[Worker, PeerRef]]:
        """The pairs (P, D) that this worker of the kind makes possible."""
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
            kind = (info.fingerprint, info.kv_layout)
            decodes[kind] = max(decodes.get(kind, 0), longest_sequence(info))
    for info in filter(prefills_only, infos):
        longest = max(longest, min(longest_sequence(info), decodes.get((info.fingerprint, info.kv_layout), 0)))
    return longest


def _candidates(
    pools: dict[_Shape, Pool], demand: Demand, without: Collection[WorkerId], matched: PrefixMatch | None
) -> list[Candidate]:
    found: list[Candidate] = []
    for pool in pools.values():
        found += pool.candidates(demand, without, matched)
    return found


def _members(pools: dict[_Shape, Pool]) -> Iterator[Worker]:
    for pool in pools.values():
        yield from pool.members.values()


def _long_enough(pools: dict[_Shape, Pool], num_tokens: int) -> Iterator[Worker]:
    for pool in pools.values():
        if num_tokens < pool.longest:
            yield from pool.members.values()
