"""What a worker would load from its own tiers, or get from another worker, for a request, if that is quicker than
computing it. Pure.

    compute   wait, and prefill of all that is not cached
    a tier    max(wait, load) and prefill of what is behind it
    a peer    max(wait, fetch) and prefill of what is behind it, and the delay of the source's sequences

A fetch from a peer takes a few steps of both ends, the time to form the connection, and the transfer. The worker
decides by itself whether it loads from its tiers when the request is there (`engine/tiers/load_times.py`); a fetch is
asked for with the dispatch. Either counts only if it wins clearly, because what is reported of workers is a
little old. Where a link was too slow for long enough, a prompt that is computed fetches one extent as a trial, for a
small part of its time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from disagg.proto.block_hash import HASH_BLOCK_TOKENS, max_cached_tokens
from disagg.proto.ids import WorkerId
from disagg.proto.messages import EXTENT_TOKENS, TierName
from disagg.router.placement.forecast import prefill_ms
from disagg.router.placement.placement import Candidate, Demand, FetchPlan
from disagg.router.workers.fetch_links import FetchLinks
from disagg.router.workers.prefix_index import PrefixMatch, TierMatch
from disagg.router.workers.worker import Worker

WON_BY, WON_BY_MS = 1.1, 5.0
"""A load or a fetch must save more than the time it takes by this factor, and these milliseconds more."""
_WON_BEYOND = WON_BY - 1.0
MAX_HOLDERS, MAX_SOURCES = 4, 2
"""Most workers with the longest prefixes among which sources are looked for, and most sources that are compared."""
STEPS_OF_EACH_END = 2
"""Steps of each end for which a fetch waits: at the source until it has pinned the KV, and until it copies it; at the
other end until room is reserved, and until the KV is copied into it."""
_SLOW = 2.0
"""A link is tried whose latest fetches took more than so many times as long as its fit says."""
_TRIAL_SHARE = 0.05
"""Share of the time of a prompt that is computed which a trial may take, beside `WON_BY_MS`."""
_GATHER_BYTE_MS = 0.33e-6
"""Milliseconds for which a source's engine is held up by the copy of a byte: 3 GB/s (ADR 92); never longer than by the
whole transfer, which on GPUs is quicker."""


class Source(NamedTuple):
    """A worker that has a prefix of the request in its device cache or in host memory and can give it to others."""

    worker: Worker
    tokens: int
    """Leading tokens that it has: a multiple of `EXTENT_TOKENS`."""
    step_ms: float
    """Milliseconds of a step there, see `step_ms`."""
    load_ms: float
    """Milliseconds to load what is in host memory only."""
    formed: AbstractSet[WorkerId]
    """The workers with which it has a connection for fetches."""


def step_ms(worker: Worker) -> float:
    """Milliseconds of a step of the worker as it is now; 0 where it runs none."""
    if worker.outstanding_tokens > 0:
        num_tokens = min(worker.outstanding_tokens, worker.prompt_room)
        return worker.around_ms + num_tokens * worker.prefill_token_ms
    return worker.token_ms if worker.num_decodes else 0.0


def best_sources(demand: Demand, holders: Sequence[tuple[Worker, int, int]], links: FetchLinks) -> Sequence[Source]:
    """The best sources among workers, the numbers of leading blocks that each has in its device cache, and of leading
    extents in host memory: the deepest, and of those that are as deep the ones that send soonest."""
    limit = max_cached_tokens(demand.num_tokens) // EXTENT_TOKENS
    found = []
    for worker, num_blocks, num_host in holders:
        num_extents, load_ms = min(limit, num_blocks * HASH_BLOCK_TOKENS // EXTENT_TOKENS), 0.0
        if (end := min(limit, num_host)) > num_extents and "host" in worker.extent_ms:
            num_extents, load_ms = end, _load_ms(worker, "host", end - num_extents)
        if num_extents:
            formed = links.formed_with(worker.worker_id)
            found.append(Source(worker, num_extents * EXTENT_TOKENS, step_ms(worker), load_ms, formed))
    if len(found) > 1:
        found.sort(key=lambda source: (-source.tokens, source.step_ms + source.load_ms, source.worker.num_decodes))
    return found[:MAX_SOURCES]


def deepest_tokens(demand: Demand, matched: PrefixMatch) -> int:
    """The most tokens that a source could have of the request: a multiple of `EXTENT_TOKENS`."""
    num_extents = matched.ends[-1][0] * HASH_BLOCK_TOKENS // EXTENT_TOKENS if matched.ends else 0
    if matched.tiers is not None:
        num_extents = max(num_extents, matched.tiers.ends[-1][0])
    return min(num_extents, max_cached_tokens(demand.num_tokens) // EXTENT_TOKENS) * EXTENT_TOKENS


def may_fetch(demand: Demand, candidate: Candidate, links: FetchLinks) -> bool:
    """Whether a fetch could win on the candidate from the best source that is possible: one that has all of the prompt,
    runs no steps, sends in no time and has a connection with the candidate if any worker has."""
    worker = candidate.worker
    if not worker.fetches:
        return False
    before_ms, wait_ms = STEPS_OF_EACH_END * step_ms(worker), worker.backlog_ms
    if not links.has_formed(worker.worker_id):
        before_ms += links.pair_setup_ms
    own_ms = wait_ms + prefill_ms(worker, candidate.cached_tokens, demand.num_tokens)
    return own_ms - max(before_ms, wait_ms) > before_ms * _WON_BEYOND + WON_BY_MS


def plan_fetch(
    demand: Demand, candidate: Candidate, tiers: TierMatch | None, sources: Sequence[Source], links: FetchLinks
) -> None:
    """Set what the candidate, which would compute the prompt, would load or fetch, and what that was compared with.
    `sources`: the deepest first. A fetch that would not win if its transfer took no time is not compared further."""
    worker, cached, num_tokens = candidate.worker, candidate.cached_tokens, demand.num_tokens
    loads = () if tiers is None else _loads(worker, cached, num_tokens, tiers)
    has_source = worker.fetches and sources and sources[0].tokens > cached
    if not (loads or has_source):
        return
    compute_ms, wait_ms = prefill_ms(worker, cached, num_tokens), worker.backlog_ms
    ways: list[FetchPlan] = []
    best: FetchPlan | None = None
    best_ms, own_ms = compute_ms, wait_ms + compute_ms
    for load in loads:
        ways.append(load)
        ready_ms = load.ms + load.prefill_ms
        if compute_ms - load.prefill_ms > load.ms * WON_BY + WON_BY_MS and ready_ms < best_ms:
            best, best_ms, own_ms = load, ready_ms, max(wait_ms, load.ms) + load.prefill_ms
    if has_source:
        own_step_ms, best_ms, worker_id = step_ms(worker), math.inf, worker.worker_id
        for source in sources:
            if source.tokens <= cached or source.worker is worker:
                continue
            before_ms = STEPS_OF_EACH_END * (source.step_ms + own_step_ms) + source.load_ms
            if worker_id not in source.formed:
                before_ms += links.pair_setup_ms
            begin_ms, margin_ms = before_ms if before_ms > wait_ms else wait_ms, before_ms * _WON_BEYOND + WON_BY_MS
            if own_ms - begin_ms <= margin_ms:  # Even if nothing were left to compute: mostly a connection not formed.
                continue
            rest_ms = prefill_ms(worker, source.tokens, num_tokens)
            if own_ms - (begin_ms + rest_ms) <= margin_ms:
                continue
            fetch = _fetch(demand, candidate, source, links, before_ms, rest_ms)
            ways.append(fetch)
            cost_ms = max(wait_ms, fetch.ms) + rest_ms + fetch.delay_ms
            if cost_ms < best_ms and own_ms - cost_ms > fetch.ms * _WON_BEYOND + WON_BY_MS:
                best, best_ms = fetch, cost_ms
    if has_source and best is None:
        candidate.trial = _trial(demand, candidate, sources, links, own_ms * _TRIAL_SHARE + WON_BY_MS)
    if ways:
        compute = FetchPlan("compute", cached, 0.0, prefill_ms=compute_ms)
        candidate.fetch, candidate.ways = best, (compute, *ways)


def _loads(worker: Worker, cached: int, num_tokens: int, tiers: TierMatch) -> Sequence[FetchPlan]:
    """Loads of what is in host memory, and of what is there or on disk."""
    most, start = max_cached_tokens(num_tokens) // EXTENT_TOKENS, cached // EXTENT_TOKENS
    num_host, num_disk = tiers.extents_of(worker.host_bit)
    num_host, num_disk = min(most, num_host), min(most, num_disk)
    found = []
    if num_host > start:
        found.append(_load("host", worker, num_tokens, num_host, _load_ms(worker, "host", num_host - start)))
    if num_disk > max(start, num_host):
        from_host = max(0, num_host - start)
        ms = _load_ms(worker, "host", from_host) + _load_ms(worker, "disk", num_disk - start - from_host)
        found.append(_load("disk", worker, num_tokens, num_disk, ms))
    return found


def _load(tier: TierName, worker: Worker, num_tokens: int, end: int, ms: float) -> FetchPlan:
    tokens = end * EXTENT_TOKENS
    return FetchPlan(tier, tokens, ms, prefill_ms=prefill_ms(worker, tokens, num_tokens))


def _load_ms(worker: Worker, tier: TierName, num_extents: int) -> float:
    """Predicted milliseconds; infinite for a tier of which the worker has told nothing yet."""
    if num_extents <= 0:
        return 0.0
    return num_extents * worker.extent_ms.get(tier, math.inf) + worker.tier_queue_ms.get(tier, 0.0)


def _trial(
    demand: Demand, candidate: Candidate, sources: Sequence[Source], links: FetchLinks, limit_ms: float
) -> FetchPlan | None:
    """A fetch of one extent over a link of which nothing newer than a slow fetch is known. It is over in time if the
    link is as quick as usual, and the steps of both ends leave time for it."""
    worker, cached = candidate.worker, candidate.cached_tokens
    tokens = (cached // EXTENT_TOKENS + 1) * EXTENT_TOKENS
    for source in sources:
        peer = source.worker.worker_id
        if source.tokens < tokens or source.worker is worker or not links.may_try(peer, worker.worker_id, demand.now):
            continue
        before_ms = STEPS_OF_EACH_END * (source.step_ms + step_ms(worker)) + source.load_ms
        if worker.worker_id not in source.formed:
            before_ms += links.pair_setup_ms
        kv_bytes = worker.kv_layout.bytes_of(tokens, cached)
        slow_ms = links.transfer_ms(peer, worker.worker_id, kv_bytes, demand.now)
        usual_ms = links.usual_ms(peer, worker.worker_id, kv_bytes, demand.now)
        if before_ms + usual_ms <= limit_ms and slow_ms > _SLOW * usual_ms:
            return FetchPlan("peer", tokens, limit_ms, peer, kv_bytes, before_ms)
    return None


def _fetch(
    demand: Demand, candidate: Candidate, source: Source, links: FetchLinks, before_ms: float, rest_ms: float
) -> FetchPlan:
    worker, peer, tokens = candidate.worker, source.worker, source.tokens
    kv_bytes = worker.kv_layout.bytes_of(tokens, candidate.cached_tokens)
    transfer_ms = links.transfer_ms(peer.worker_id, worker.worker_id, kv_bytes, demand.now)
    return FetchPlan(
        "peer",
        tokens,
        before_ms + transfer_ms,
        peer.worker_id,
        kv_bytes,
        before_ms,
        peer.num_decodes * min(transfer_ms, kv_bytes * _GATHER_BYTE_MS),
        rest_ms,
    )
