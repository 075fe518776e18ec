"""The choice of the workers that run a request: a pure function of the request and of a few candidates.

    fleet.shortlists(...) -> one Shortlist per model group: candidates with room for the request
    choose(policy, demand, shortlists) -> Choice | None          None: no worker has room now

A `Choice` is a pair (P, D), or one worker that computes prompt and answer ("colocated" below): a worker with both
roles, or a decode worker that computes the prompt itself (local prefill). Only workers of one model group (equal model
fingerprint and KV layout) form a pair; an elastic worker can be either side of one.

The best choice may be one that has no slot just now. Then the request waits for it, if by the policy's cost waiting
is cheaper than the free workers: see `Choice.has_slot`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from itertools import chain
from operator import itemgetter
from typing import Any, Literal, NamedTuple, NewType, Protocol

import msgspec

from disagg.proto.block_hash import HASH_BLOCK_TOKENS
from disagg.proto.ids import BlockHash, WorkerId
from disagg.proto.messages import KvLayout, TierName, WorkerInfo
from disagg.proto.splitmix import splitmix64
from disagg.router.config import Decodes
from disagg.router.placement.forecast import num_pairs
from disagg.router.workers.assignments import Assignment, marks_of, num_held
from disagg.router.workers.worker import Worker

Draw = Callable[[int, int], int]
"""(counter, count) -> an index below `count`. It is a parameter so that the core is deterministic."""

VERSION_CHARS = 16
"""Number of hexadecimal digits of a `Version`."""

MAX_SIDE = 3
"""Number of best candidates of each role that are combined to pairs, besides `Shortlist.partners`."""


Version = NewType("Version", str)
"""Hash of a model's fingerprint and KV layout. Workers of one version can use each other's KV, and continue each
other's answers."""


def version_of(info: WorkerInfo) -> Version:
    """The version of the worker's model."""
    return _version(info.fingerprint, info.kv_layout)


@lru_cache(maxsize=256)
def _version(fingerprint: str, layout: KvLayout) -> Version:
    return Version(hashlib.sha256(msgspec.json.encode((fingerprint, layout))).hexdigest()[:VERSION_CHARS])


class Demand(msgspec.Struct, kw_only=True, gc=False):
    """What a placement must provide for. Demands, candidates and weights are in no reference cycle and are kept with
    the trace of a request, so the garbage collector does not track them."""

    num_tokens: int
    """Number of known tokens: prompt, and output of earlier attempts."""
    reserve_tokens: int = 0
    """Number of output tokens to assign KV blocks for."""
    most_output_tokens: int = 0
    """Upper limit of the output tokens."""
    output_tokens: float = 1.0
    """Expected number of output tokens; at least 1."""
    ttft_left_ms: float = math.inf
    """Milliseconds left of the TTFT target."""
    tpot_ms: float = math.inf
    """TPOT target in milliseconds."""
    queued_ms: float = 0.0
    """Milliseconds of prefill of the prompts before it in the queue, divided by the number of workers that compute
    prompts."""
    reuse: float = 0.0
    """Share of the prompt tokens of recent placements that were cached: the probability that cached KV will be
    reused."""
    is_continued: bool = False
    """Whether tokens of the answer were released. Then a decode worker may compute them and the prompt if no prefill
    worker can hold them, also with `local_prefill: never`."""
    turn: int = 0
    """Number of placements so far; the counter of `Draw`."""
    now: float = 0.0
    answer_tokens: float = 1.0
    """Mean number of tokens of recent answers."""
    is_pooled: bool = False
    """Whether there is no answer: a worker that computes prompts runs it alone."""
    adapter: str = ""
    """Fingerprint of its adapter; empty for the base model."""
    adapter_ms: float = 0.0
    """Predicted milliseconds to load the adapter on a worker that does not have it."""
    version: Version | None = None
    """Version of the model with which the answer began; no other one may continue it. None before the first token."""
    num_steps: float = 0.0
    """Expected number of decode steps: the first token comes from the prefill."""
    context: float = 0.0
    """Mean number of tokens that a decode step of this request attends to. Computed from the other fields, like
    `num_steps`."""

    def __post_init__(self) -> None:
        self.num_steps = self.output_tokens - 1
        self.context = self.num_tokens + self.output_tokens / 2


WayName = Literal["compute", TierName, "peer"]
"""How a worker gets KV of a prompt that is not in its device cache."""


class FetchPlan(msgspec.Struct, frozen=True, gc=False):
    """KV of the request that a worker would load from its own tiers, or get from another worker, instead of computing
    it."""

    kind: WayName
    """Slowest tier that some of a load comes from. `compute` for the way with which others are compared."""
    tokens: int
    """Number of leading tokens whose KV the worker has then."""
    ms: float
    """Predicted milliseconds of the load or the fetch."""
    source: WorkerId | None = None
    """The worker that a fetch is from."""
    kv_bytes: int = 0
    """Bytes of a fetch."""
    before_ms: float = 0.0
    """The part of `ms` before the transfer of a fetch begins."""
    delay_ms: float = 0.0
    """Sum of the milliseconds that a fetch adds to the sequences of its source."""
    prefill_ms: float = 0.0
    """Predicted milliseconds to compute the rest of the prompt."""


class Candidate(msgspec.Struct, eq=False, gc=False):
    """One worker that could play one role for one request."""

    worker: Worker
    cached_tokens: int = 0
    """Number of leading tokens of the request whose KV the worker has; always less than all of them."""
    num_blocks: int = 0
    """Number of KV blocks that the request would write on the worker in that role."""
    assigned_blocks: int = 0
    """Number of KV blocks to assign: those to write, and cached ones that no sequence holds yet."""
    shared_blocks: int | None = 0
    """Number of cached KV blocks that other sequences hold, on a worker that decodes. None before `count_shared` if
    there is room without that; `assigned_blocks` includes them until then."""
    as_decode: Weight | None = None
    """Its weight as the D of a pair, if already computed."""
    fetch: FetchPlan | None = None
    """What it would load or fetch before it computes the prompt; None where it would compute all that is not cached."""
    ways: tuple[FetchPlan, ...] = ()
    """All ways that were compared, `compute` first, for `explain`; empty where there was no other."""

    trial: FetchPlan | None = None
    """Where it loads and fetches nothing: a fetch that shows whether a link is still slow, on which nothing counts; its
    `ms` is the time limit."""

    @property
    def asked(self) -> FetchPlan | None:
        """The load, the fetch or the trial."""
        return self.trial if self.fetch is None else self.fetch

    @property
    def ready_tokens(self) -> int:
        """Number of leading tokens that it need not compute: cached, loaded, or fetched."""
        return self.cached_tokens if self.fetch is None else self.fetch.tokens


class Weight(msgspec.Struct, frozen=True, gc=False):
    """The cost of one side of a choice. The sides of a pair add up."""

    cost: float
    """Milliseconds if the policy predicts times, else in units of its own."""
    num_misses: int = 0
    """Number of targets of the request that would be missed."""
    wait_ms: float = 0.0
    """Milliseconds until the prefill begins."""
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    """Milliseconds of all decode steps."""
    delay_ms: float = 0.0
    """Sum of the milliseconds that it adds to other sequences."""
    barrier_ms: float = 0.0
    """The barrier term of the KV utilization after joining."""
    step_ms: float = 0.0
    """Milliseconds of one token: of a decode step, divided by the tokens that it gives to a sequence."""
    adapter_ms: float = 0.0
    """Part of the cost: milliseconds until the request's adapter is loaded."""


class Shortlist(NamedTuple):
    """Candidates of one model group with room for the request, by role."""

    prefills: list[Candidate]
    decodes: list[Candidate]
    colocated: list[Candidate]
    local: bool
    """Whether `decodes` may also compute the prompt (local prefill)."""
    blocked_pairs: Collection[tuple[WorkerId, WorkerId]] = ()
    """Pairs (P, D) behind an open circuit breaker, which are used only if there is no other pair."""
    partners: Sequence[Candidate] = ()
    """Further candidates for the D of a pair; each has a formed pair with one of `prefills`."""


class Choice(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The workers that run a request. Without `prefill`, `decode` computes prompt and answer."""

    prefill: Candidate | None
    decode: Candidate
    has_slot: bool
    """Whether the choice has a free slot now. If not, the request should wait for it."""
    prefill_weight: Weight | None
    decode_weight: Weight
    link_ms: float
    setup_ms: float
    """Expected milliseconds to form the pair; 0 if it is formed."""
    num_options: int
    weighed: tuple[Any, ...]
    """All options that were compared, for `explain`: for each model group the numbers of P, D and colocated sides, then
    weight and candidate of each side. One flat tuple, which the garbage collector stops tracking at its first pass."""


class Policy(Protocol):
    """How workers are compared; see `policies/`. Holds no state of its own."""

    name: str
    uses_prefixes: bool
    """Whether workers with the longest cached prefixes are candidates besides those of least `rank`."""
    waits: bool
    """Whether waiting for a worker without a free slot may be the best choice."""
    weighs_setup: bool
    """Whether the cost of a pair depends on its being formed."""
    decodes: Decodes | None
    """Where answers decode, for policies that have this setting. May be changed between two placements."""
    weighs_fetches: bool
    """Whether its cost counts the time of a fetch from another worker. Else none is made: nobody would have compared it
    with computing the prompt on another worker."""
    late_last: bool
    """Whether requests that can no longer meet their TTFT target go behind the others of the queue."""
    weighs_local: bool
    """Whether local prefill competes with pairs. Else it is used only if there is no prefill worker."""
    draws: bool
    """Whether candidates begin at the position `start` among the ranked workers, not at the first."""

    def equal_up_to(self, cost: float) -> float:
        """The highest cost that counts as equal to `cost`, because predictions are not exact. Must not fall when `cost`
        rises. Where it is more than `cost`, the fewest sequences decide among equals."""
        ...

    def rank(self, worker: Worker) -> float:
        """The number by which candidates are ordered, independent of the request. Changes only with the worker's
        assignments and reports."""
        ...

    def start(self, turn: int, count: int) -> int:
        """The position among `count` ranked workers, at least one, at which candidates begin, if the policy `draws`."""
        ...

    def weigh_prefill(self, demand: Demand, candidate: Candidate) -> Weight:
        """The cost of computing the prompt on this P of a pair."""
        ...

    def weigh_decode(self, demand: Demand, candidate: Candidate) -> Weight:
        """The cost of generating the answer on this D of a pair."""
        ...

    def weigh_colocated(self, demand: Demand, candidate: Candidate) -> Weight:
        """The cost of computing both prompt and answer on this worker."""
        ...

    def weigh_pair(self, demand: Demand, prefill: Candidate, decode: Candidate) -> tuple[float, float]:
        """The costs of a pair besides the weights of its sides, never negative: of moving the KV, and of forming the
        pair (0 if it is formed)."""
        ...

    def known_pair(self, demand: Demand, prefill: Candidate, decode: Candidate) -> tuple[float, float]:
        """Like `weigh_pair`, by the latest fits without redoing them: for `explain`, which must not change later
        placements."""
        ...


def uniform_draw(counter: int, count: int) -> int:
    """An index below `count` (at least 1), each equally likely; neighbouring counters give independent-looking ones."""
    return splitmix64(0, counter) % count


def draw_of(gateway_id: str) -> Draw:
    """Like `uniform_draw`, for one of several gateways, so that each draws other indices than those beside it."""
    salt = int.from_bytes(hashlib.blake2b(gateway_id.encode(), digest_size=8).digest(), "little")
    return lambda counter, count: splitmix64(salt, counter) % count


def prefill_blocks(demand: Demand, info: WorkerInfo) -> int:
    """Number of KV blocks of the request on a P: for its known tokens and the sampled one."""
    return -(-(demand.num_tokens + 1) // info.block_size)


def decode_blocks(demand: Demand, info: WorkerInfo) -> int:
    """Number of KV blocks of the request on a D: for its known tokens and the output reserve, the larger of the
    router's and the worker's."""
    reserve_tokens = demand.reserve_tokens
    if info.decode_reserve_tokens > reserve_tokens:
        reserve_tokens = max(reserve_tokens, min(demand.most_output_tokens, info.decode_reserve_tokens))
    num_tokens = demand.num_tokens + reserve_tokens
    return -(-(num_tokens if num_tokens < info.max_model_len else info.max_model_len) // info.block_size)


def num_shared(worker: Worker, hashes: Sequence[BlockHash], cached_tokens: int) -> int:
    """Number of cached blocks of a request that other sequences hold, in the worker's block size."""
    num_blocks = num_held(hashes, cached_tokens // HASH_BLOCK_TOKENS, worker.assigned.held)
    return num_blocks * HASH_BLOCK_TOKENS // worker.info.block_size


def count_shared(candidate: Candidate, hashes: Sequence[BlockHash]) -> int:
    """Determine `shared_blocks` of a candidate, for a request with this chain of blocks; returns it."""
    num_blocks = candidate.shared_blocks
    if num_blocks is None:
        num_blocks = candidate.shared_blocks = num_shared(candidate.worker, hashes, candidate.cached_tokens)
        candidate.assigned_blocks -= num_blocks
    return num_blocks


def prefill_assignment(demand: Demand, candidate: Candidate) -> Assignment:
    """The assignment of the P of a pair."""
    cached = candidate.ready_tokens
    return Assignment(
        tokens=demand.num_tokens - cached,
        pairs=num_pairs(cached, demand.num_tokens),
        blocks=candidate.assigned_blocks,
        is_handed_over=True,
    )


def decode_assignment(
    demand: Demand, candidate: Candidate, hashes: Sequence[BlockHash] = (), *, computes_prompt: bool
) -> Assignment:
    """The assignment of the worker that decodes a request with this chain of blocks; with the uncached suffix where it
    computes the prompt."""
    num_tokens, cached, ready = demand.num_tokens, candidate.cached_tokens, candidate.ready_tokens
    shared_blocks = count_shared(candidate, hashes)
    num_matched = cached // HASH_BLOCK_TOKENS
    return Assignment(
        tokens=num_tokens - ready if computes_prompt else 0,
        pairs=num_pairs(ready, num_tokens) if computes_prompt else 0,
        blocks=candidate.assigned_blocks,
        context=num_tokens,
        known_tokens=num_tokens,
        most_output_tokens=demand.most_output_tokens,
        tpot_ms=demand.tpot_ms,
        marks=marks_of(hashes, num_matched),
        num_matched=num_matched,
        shared_blocks=shared_blocks,
    )


def choose(policy: Policy, demand: Demand, shortlists: Sequence[Shortlist], draw: Draw) -> Choice | None:
    """The option that misses the fewest targets and, among these, costs least; among equals one that has a slot and few
    sequences, then the draw decides."""
    best = _Best(policy.equal_up_to)
    num_options = 0
    weighed: list[Any] = []
    for shortlist in shortlists:
        prefills, decodes = _weigh_pairs(policy, demand, shortlist, best)
        colocated = _weigh_colocated(policy, demand, shortlist, best)
        num_options += len(prefills) * len(decodes) + len(colocated)
        weighed += (len(prefills), len(decodes), len(colocated))
        for _, _, _, _, weight, candidate in chain(prefills, decodes, colocated):
            weighed.append(weight)
            weighed.append(candidate)
    if not best.options:
        return None
    ties = best.ties() if len(best.options) > 1 else best.options
    _, lacks_slot, prefill, decode, link, setup = ties[draw(demand.turn, len(ties)) if len(ties) > 1 else 0]
    return Choice(
        prefill=prefill[5] if prefill else None,
        decode=decode[5],
        has_slot=not lacks_slot,
        prefill_weight=prefill[4] if prefill else None,
        decode_weight=decode[4],
        link_ms=link,
        setup_ms=setup,
        num_options=num_options,
        weighed=tuple(weighed),
    )


def choose_pair(policy: Policy, demand: Demand, prefill: Candidate, decode: Candidate) -> Choice:
    """The choice of this pair with the policy's weights, whether P has a free slot or not."""
    prefill_weight, decode_weight = policy.weigh_prefill(demand, prefill), policy.weigh_decode(demand, decode)
    link_ms, setup_ms = policy.weigh_pair(demand, prefill, decode)
    return Choice(
        prefill=prefill,
        decode=decode,
        has_slot=True,
        prefill_weight=prefill_weight,
        decode_weight=decode_weight,
        link_ms=link_ms,
        setup_ms=setup_ms,
        num_options=1,
        weighed=(1, 1, 0, prefill_weight, prefill, decode_weight, decode),
    )


Side = tuple[int, float, bool, int, Weight, Candidate]
"""One candidate in one role: (missed targets, cost, lacks a slot now, a number that makes it unique, weight,
candidate)."""


_Option = tuple[float, bool, "Side | None", "Side", float, float]
"""(cost, lacks a slot now, P or None, D, cost of the link, cost of forming the pair)."""


class _Best:
    """The best options so far, and those that are as good as the best."""

    __slots__ = ("_equal_up_to", "_least", "limit", "misses", "options")

    def __init__(self, equal_up_to: Callable[[float], float]) -> None:
        self._equal_up_to = equal_up_to
        self._least = math.inf
        self.misses = _MAX_MISSES
        self.limit = math.inf
        """The highest cost that counts as equal to the best."""
        self.options: list[_Option] = []
        """Options that were within the limit when they were added."""

    def add(self, misses: int, option: _Option) -> None:
        """Keep an option that is as good as the best so far: it misses fewer targets, or as many and its cost is within
        the limit."""
        if misses != self.misses:
            self.misses, self._least = misses, math.inf
            self.options.clear()
        cost = option[0]
        if cost < self._least:
            self._least, self.limit = cost, self._equal_up_to(cost)
        self.options.append(option)

    def ties(self) -> list[_Option]:
        """The best options: all of them have a free slot, or none has."""
        limit = self.limit
        near = [option for option in self.options if option[0] <= limit]
        if len(near) > 1:
            near = self._as_good_as(min(near, key=_COST), near)
        if len(near) == 1:
            return near
        near = [option for option in near if not option[1]] or near
        if len(near) > 1 and limit > min([option[0] for option in near]):
            return _with_fewest_sequences(near)
        return near

    def _as_good_as(self, best: _Option, options: Sequence[_Option]) -> list[_Option]:
        """The options that count as equal to the best one by the costs that they do not share with it: a prediction
        that two options share is wrong for both by the same amount."""
        equal_up_to, least, found = self._equal_up_to, best[0], []
        prompt, decode = _part_costs(best)
        computes, decodes = _workers_of(best)
        for option in options:
            computes_other, decodes_other = _workers_of(option)
            differing = 0.0
            if computes is not computes_other:
                differing += prompt
            if decodes is not decodes_other:
                differing += decode
            if option[0] - least <= equal_up_to(differing) - differing:
                found.append(option)
        return found


def _part_costs(option: _Option) -> tuple[float, float]:
    """The cost of the prompt with its transfer to D, and that of the answer."""
    _, _, prefill, decode, link, setup = option
    if prefill is not None:
        return prefill[1] + link + setup, decode[1]
    after = decode[5].as_decode
    decode_cost = 0.0 if after is None else after.cost
    return decode[1] - decode_cost, decode_cost


def _workers_of(option: _Option) -> tuple[Worker, Worker]:
    """The workers that compute the prompt and the answer."""
    prefill, decode = option[2], option[3]
    worker = decode[5].worker
    return worker if prefill is None else prefill[5].worker, worker


def _with_fewest_sequences(options: Sequence[_Option]) -> list[_Option]:
    """The options with the fewest sequences on their workers, this request included: with idle workers a colocated
    option has fewer than a pair."""
    fewest, found = math.inf, []
    for option in options:
        prefill, decode = option[2], option[3]
        num_sequences = decode[5].worker.num_sequences + 1
        if prefill is not None:
            num_sequences += prefill[5].worker.num_sequences + 1
        if num_sequences < fewest:
            fewest, found = num_sequences, [option]
        elif num_sequences == fewest:
            found.append(option)
    return found


def _weigh_pairs(policy: Policy, demand: Demand, shortlist: Shortlist, best: _Best) -> tuple[list[Side], list[Side]]:
    """Weigh all pairs of a shortlist. Returns the sides of the pairs."""
    prefills = _sides(policy.weigh_prefill, demand, shortlist.prefills, may_lack_slot=policy.waits, needs_slot=True)
    if not prefills:
        return [], []
    decodes = _sides(policy.weigh_decode, demand, shortlist.decodes, may_lack_slot=True, needs_slot=False)
    if shortlist.partners:
        decodes += _sides(policy.weigh_decode, demand, shortlist.partners, may_lack_slot=True, needs_slot=False)
        decodes.sort(key=_MISSES_AND_COST)
    weigh_pair = policy.weigh_pair
    blocked_pairs = _blocked_pairs(shortlist.blocked_pairs, prefills, decodes) if shortlist.blocked_pairs else ()
    for prefill in prefills:
        p_misses, p_cost, lacks_slot, _, _, p_candidate = prefill
        for decode in decodes:
            d_misses, d_cost, _, _, _, d_candidate = decode
            if d_candidate.worker is p_candidate.worker:
                continue  # An elastic worker: alone, see `_weigh_colocated`.
            misses, cost = p_misses + d_misses, p_cost + d_cost
            if misses > best.misses or (misses == best.misses and cost > best.limit):
                break  # Links never have a negative cost, and the sides that follow are no better.
            if blocked_pairs and (p_candidate.worker.worker_id, d_candidate.worker.worker_id) in blocked_pairs:
                continue
            link, setup = weigh_pair(demand, p_candidate, d_candidate)
            cost += link + setup
            if misses < best.misses or cost <= best.limit:
                best.add(misses, (cost, lacks_slot, prefill, decode, link, setup))
    return prefills, decodes


def _blocked_pairs(
    shut: Collection[tuple[WorkerId, WorkerId]], prefills: Sequence[Side], decodes: Sequence[Side]
) -> Collection[tuple[WorkerId, WorkerId]]:
    """The blocked pairs of these sides; none if all of them are blocked."""
    pairs = {(p[5].worker.worker_id, d[5].worker.worker_id) for p in prefills for d in decodes}
    found = pairs.intersection(shut)
    return () if found == pairs else found


def _weigh_colocated(policy: Policy, demand: Demand, shortlist: Shortlist, best: _Best) -> list[Side]:
    """Weigh all single workers of a shortlist. Returns the colocated sides."""
    candidates = shortlist.colocated + shortlist.decodes if shortlist.local else shortlist.colocated
    if not candidates:
        return []
    sides = _sides(policy.weigh_colocated, demand, candidates, may_lack_slot=policy.waits, needs_slot=True)
    for side in sides:
        misses, cost = side[0], side[1]
        if misses > best.misses or (misses == best.misses and cost > best.limit):
            break  # The sides that follow are no better.
        best.add(misses, (cost, side[2], None, side, 0.0, 0.0))
    return sides


def _sides(
    weigh: Callable[[Demand, Candidate], Weight],
    demand: Demand,
    candidates: Sequence[Candidate],
    *,
    may_lack_slot: bool,
    needs_slot: bool,
) -> list[Side]:
    """The best of the candidates, best first. `needs_slot`: the role computes prompts; `may_lack_slot`: candidates
    without a free slot are kept."""
    sides: list[Side] = []
    lacks_slot = False
    for number, candidate in enumerate(candidates):
        if needs_slot:
            lacks_slot = not candidate.worker.has_slot
            if lacks_slot and not may_lack_slot:
                continue
        weight = weigh(demand, candidate)
        sides.append((weight.num_misses, weight.cost, lacks_slot, number, weight, candidate))
    if len(sides) > 1:
        sides.sort()
        del sides[MAX_SIDE:]
    return sides


_MAX_MISSES = 1 << 30
_MISSES_AND_COST = itemgetter(0, 1)
_COST = itemgetter(0)
