"""Which workers run a request: a pure function of the request and of the few workers that are worth a look.

    fleet.shortlists(...) -> Shortlist per model group, what cannot take the request filtered out
    choose(policy, demand, shortlists) -> Choice | None          None: nobody has room now

A `Choice` is a pair (P, D), or one worker that does all of it: one with both roles (colocated mode), or a decode
worker that computes the prompt itself (local prefill). Only workers of one model group (equal model fingerprint and
KV layout) form a pair.

The best choice may be one that has no slot just now. Then the request waits for it, if the policy thinks that waiting
is cheaper than what is free: see `Choice.has_slot`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import msgspec

from disagg.proto.ids import WorkerId
from disagg.proto.messages import WorkerInfo
from disagg.proto.splitmix import splitmix64
from disagg.router.placement.forecast import num_pairs
from disagg.router.workers.assignments import Assignment
from disagg.router.workers.worker import Worker

Draw = Callable[[int, int], int]
"""(counter, count) -> an index below `count`. A function, so that a core stays a function of its events."""

MAX_SIDE = 3
"""Of each role only this many, the best by themselves, are looked at in pairs."""


class Demand(msgspec.Struct, kw_only=True, gc=False):
    """What a placement must provide for. It, a candidate and a weight hold nothing that leads back to them, and are
    kept with the trace of a request, so the garbage collector need not walk through them."""

    num_tokens: int
    """Known tokens: prompt, and output of earlier attempts."""
    reserve_tokens: int = 0
    """Output tokens to book blocks for."""
    most_output_tokens: int = 0
    """Output tokens that there can be."""
    output_tokens: float = 1.0
    """Output tokens that are expected; at least 1."""
    ttft_left_ms: float = math.inf
    """What is left of the TTFT target."""
    tpot_ms: float = math.inf
    """The TPOT target."""
    queued_ms: float = 0.0
    """How long the prompts before it in the queue keep the workers that are there for prompts."""
    reuse: float = 0.0
    """Share of prompt tokens that were found cached lately: how likely it is that what is cached will be used."""
    is_continued: bool = False
    """Whether tokens of the answer were released: a decode worker may compute them and the prompt where no prefill
    worker can hold them, whatever `RouterConfig.local_prefill` says."""
    turn: int = 0
    """Number of placements so far; feeds the draws."""
    num_steps: float = 0.0
    """Decode steps that are expected: the first token comes from the prefill."""
    context: float = 0.0
    """Tokens that such a step attends to, on average. Like `num_steps` it follows from the others."""

    def __post_init__(self) -> None:
        self.num_steps = self.output_tokens - 1
        self.context = self.num_tokens + self.output_tokens / 2


class Candidate(msgspec.Struct, eq=False, gc=False):
    """One worker that could play one role for one request."""

    worker: Worker
    cached_tokens: int = 0
    """Leading tokens of the request whose KV it has; always less than all of them."""
    num_blocks: int = 0
    """KV blocks that the request would write on it in that role."""
    assigned_blocks: int = 0
    """KV blocks that are no longer free for others there: these, and cached ones that no sequence holds yet."""
    shared_blocks: int = 0
    """Cached ones that other sequences hold; on a worker that decodes."""
    as_decode: Weight | None = None
    """What speaks against it as the D of a pair, where that is known already."""


class Weight(msgspec.Struct, frozen=True, gc=False):
    """What speaks against one side of a choice. The sides of a pair add up."""

    cost: float
    """Milliseconds where the policy knows times; else in units of its own."""
    num_misses: int = 0
    """Targets of the request that would be missed."""
    wait_ms: float = 0.0
    """Until its prefill begins."""
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    """All its decode steps."""
    delay_ms: float = 0.0
    """What others lose, summed over them."""
    barrier_ms: float = 0.0
    """What the KV utilization after joining is worth."""
    step_ms: float = 0.0
    """One of its decode steps."""


class Shortlist(NamedTuple):
    """Candidates of one model group that could take the request, by role."""

    prefills: list[Candidate]
    decodes: list[Candidate]
    colocated: list[Candidate]
    local: bool
    """Whether the decodes may also do all of it."""
    blocked_pairs: Collection[tuple[WorkerId, WorkerId]] = ()
    """Pairs (P, D) that are not used as long as there is another."""
    partners: Sequence[Candidate] = ()
    """Others that could be the D of a pair: one of the prefills has a formed pair with each."""


class Choice(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Where a request runs. Without `prefill`, `decode` does all of it."""

    prefill: Candidate | None
    decode: Candidate
    has_slot: bool
    """False: this is the best place, but it has no slot now; wait for it."""
    prefill_weight: Weight | None
    decode_weight: Weight
    link_ms: float
    setup_ms: float
    """Of the pair, where it is not formed."""
    num_options: int
    weighed: tuple[Any, ...]
    """What it was among, for those who want to know afterwards: for each model group how many sides could be the P,
    the D, and the one that does all of it, then the weight and the candidate of each. Flat, so that it is one object,
    which the garbage collector forgets when it first sees it."""


class Policy(Protocol):
    """How workers are compared; see `policies/`. Holds no state of its own."""

    name: str
    uses_prefixes: bool
    """Whether workers that have the longest prefixes are looked at, and not only the least of `rank`."""
    waits: bool
    """Whether it may be best to wait for a worker that has no slot."""
    weighs_setup: bool
    """Whether it tells pairs that are formed from those that are not."""
    weighs_local: bool
    """Whether local prefill is an option beside pairs. Else it is the way out where there is no prefill worker."""

    def equal_up_to(self, cost: float) -> float:
        """Up to which cost an option is as good as one of this cost: predictions are not that exact. Never falls when
        the cost rises. Among equals the one with the fewest sequences is taken, where this is more than `cost`."""
        ...

    def rank(self, worker: Worker) -> float:
        """Who is looked at first, before the request is known. Changes only with the worker's books and reports."""
        ...

    def start(self, turn: int, count: int) -> int:
        """The position in the order of ranks (of `count` workers) from which to look."""
        ...

    def weigh_prefill(self, demand: Demand, candidate: Candidate) -> Weight:
        """As the P of a pair."""
        ...

    def weigh_decode(self, demand: Demand, candidate: Candidate) -> Weight:
        """As the D of a pair."""
        ...

    def weigh_colocated(self, demand: Demand, candidate: Candidate) -> Weight:
        """As the one that does all of it."""
        ...

    def weigh_link(self, demand: Demand, prefill: Candidate, decode: Candidate) -> float:
        """What moving the KV adds to the two sides of a pair; never negative."""
        ...

    def weigh_setup(self, prefill: Candidate, decode: Candidate) -> float:
        """What forming the pair adds, 0 where it is formed; never negative."""
        ...


def uniform_draw(counter: int, count: int) -> int:
    """An index below `count` (at least 1), each equally likely; neighbouring counters give independent-looking ones."""
    return splitmix64(0, counter) % count


def prefill_blocks(demand: Demand, info: WorkerInfo) -> int:
    """KV blocks that a P has in use for the request: for its known tokens and for the one that is sampled."""
    return -(-(demand.num_tokens + 1) // info.block_size)


def decode_blocks(demand: Demand, info: WorkerInfo) -> int:
    """KV blocks that a D has in use for the request: for its known tokens and for the reserve, the larger one of the
    router's and the worker's own."""
    reserve_tokens = max(demand.reserve_tokens, min(demand.most_output_tokens, info.decode_reserve_tokens))
    return -(-min(demand.num_tokens + reserve_tokens, info.max_model_len) // info.block_size)


def prefill_assignment(demand: Demand, candidate: Candidate) -> Assignment:
    """What the request takes of the P of a pair."""
    cached = candidate.cached_tokens
    return Assignment(
        tokens=demand.num_tokens - cached, pairs=num_pairs(cached, demand.num_tokens), blocks=candidate.assigned_blocks
    )


def decode_assignment(demand: Demand, candidate: Candidate, *, computes_prompt: bool) -> Assignment:
    """What the request takes of the worker that decodes; the uncached suffix too where it prefills."""
    if not computes_prompt:
        return Assignment(blocks=candidate.assigned_blocks, context=demand.num_tokens)
    assignment = prefill_assignment(demand, candidate)
    assignment.context = demand.num_tokens
    return assignment


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
        for side in chain(prefills, decodes, colocated):
            weighed += side[4:]
    if not best.options:
        return None
    ties = best.ties()
    _, lacks_slot, prefill, decode, link = ties[draw(demand.turn, len(ties)) if len(ties) > 1 else 0]
    return Choice(
        prefill=prefill[5] if prefill else None,
        decode=decode[5],
        has_slot=not lacks_slot,
        prefill_weight=prefill[4] if prefill else None,
        decode_weight=decode[4],
        link_ms=link,
        setup_ms=policy.weigh_setup(prefill[5], decode[5]) if prefill else 0.0,
        num_options=num_options,
        weighed=tuple(weighed),
    )


def choose_pair(policy: Policy, demand: Demand, prefill: Candidate, decode: Candidate) -> Choice:
    """This pair, with what the policy thinks of it; whether P has a slot does not matter."""
    prefill_weight, decode_weight = policy.weigh_prefill(demand, prefill), policy.weigh_decode(demand, decode)
    return Choice(
        prefill=prefill,
        decode=decode,
        has_slot=True,
        prefill_weight=prefill_weight,
        decode_weight=decode_weight,
        link_ms=policy.weigh_link(demand, prefill, decode),
        setup_ms=policy.weigh_setup(prefill, decode),
        num_options=1,
        weighed=(1, 1, 0, prefill_weight, prefill, decode_weight, decode),
    )


Side = tuple[int, float, bool, int, Weight, Candidate]
"""One candidate in one role: (missed targets, cost, has no slot now, a number that makes it unique, weight,
candidate)."""


_Option = tuple[float, bool, "Side | None", "Side", float]
"""(cost, has no slot now, P or none, D, cost of the link)."""


class _Best:
    """The best options so far, and those that are as good as the best."""

    __slots__ = ("_equal_up_to", "_least", "limit", "misses", "options")

    def __init__(self, equal_up_to: Callable[[float], float]) -> None:
        self._equal_up_to = equal_up_to
        self._least = math.inf
        self.misses = _MAX_MISSES
        self.limit = math.inf
        """Of the cost; dearer options are not as good."""
        self.options: list[_Option] = []
        """Those that were within the limit when they came."""

    def offer(
        self, misses: int, cost: float, lacks_slot: bool, prefill: Side | None, decode: Side, link_ms: float
    ) -> None:
        """Take an option if it is as good as the best so far."""
        if misses != self.misses:
            if misses > self.misses:
                return
            self.misses, self._least = misses, math.inf
            self.options.clear()
        elif cost > self.limit:
            return
        if cost < self._least:
            self._least, self.limit = cost, self._equal_up_to(cost)
        self.options.append((cost, lacks_slot, prefill, decode, link_ms))

    def ties(self) -> list[_Option]:
        """The best: all of them have a slot, or none has one."""
        limit = self.limit
        near = [option for option in self.options if option[0] <= limit]
        if len(near) == 1:
            return near
        near = [option for option in near if not option[1]] or near
        if len(near) > 1 and limit > min([option[0] for option in near]):
            return _with_fewest_sequences(near)
        return near


def _with_fewest_sequences(options: Sequence[_Option]) -> list[_Option]:
    """Those with the fewest sequences that would be assigned on their workers: of two idle ones, one worker alone has
    fewer."""
    fewest, found = math.inf, []
    for option in options:
        _, _, prefill, decode, _ = option
        num_sequences = decode[5].worker.num_sequences + 1
        if prefill is not None:
            num_sequences += prefill[5].worker.num_sequences + 1
        if num_sequences < fewest:
            fewest, found = num_sequences, [option]
        elif num_sequences == fewest:
            found.append(option)
    return found


def _weigh_pairs(policy: Policy, demand: Demand, shortlist: Shortlist, best: _Best) -> tuple[list[Side], list[Side]]:
    """Returns the sides of the pairs."""
    prefills = _sides(policy.weigh_prefill, demand, shortlist.prefills, may_lack_slot=policy.waits, needs_slot=True)
    if not prefills:
        return [], []
    decodes = _sides(policy.weigh_decode, demand, shortlist.decodes, may_lack_slot=True, needs_slot=False)
    if shortlist.partners:
        decodes += _sides(policy.weigh_decode, demand, shortlist.partners, may_lack_slot=True, needs_slot=False)
        decodes.sort(key=_MISSES_AND_COST)
    weigh_link, weigh_setup = policy.weigh_link, policy.weigh_setup
    blocked_pairs = _blocked_pairs(shortlist.blocked_pairs, prefills, decodes) if shortlist.blocked_pairs else ()
    for prefill in prefills:
        p_misses, p_cost, lacks_slot, _, _, p_candidate = prefill
        for decode in decodes:
            misses, cost = p_misses + decode[0], p_cost + decode[1]
            if misses > best.misses or (misses == best.misses and cost > best.limit):
                break  # Links cost something or nothing, and those that follow are no better.
            if blocked_pairs and (p_candidate.worker.worker_id, decode[5].worker.worker_id) in blocked_pairs:
                continue
            link = weigh_link(demand, p_candidate, decode[5])
            cost += link + weigh_setup(p_candidate, decode[5])
            best.offer(misses, cost, lacks_slot, prefill, decode, link)
    return prefills, decodes


def _blocked_pairs(
    shut: Collection[tuple[WorkerId, WorkerId]], prefills: Sequence[Side], decodes: Sequence[Side]
) -> Collection[tuple[WorkerId, WorkerId]]:
    """Those of these sides that are shut; none where all are."""
    pairs = {(p[5].worker.worker_id, d[5].worker.worker_id) for p in prefills for d in decodes}
    found = pairs.intersection(shut)
    return () if found == pairs else found


def _weigh_colocated(policy: Policy, demand: Demand, shortlist: Shortlist, best: _Best) -> list[Side]:
    """Returns the workers that could do all of it."""
    candidates = shortlist.colocated + shortlist.decodes if shortlist.local else shortlist.colocated
    sides = _sides(policy.weigh_colocated, demand, candidates, may_lack_slot=policy.waits, needs_slot=True)
    for side in sides:
        misses, cost = side[0], side[1]
        if misses > best.misses or (misses == best.misses and cost > best.limit):
            break  # Those that follow are no better.
        best.offer(misses, cost, side[2], None, side, 0.0)
    return sides


def _sides(
    weigh: Callable[[Demand, Candidate], Weight],
    demand: Demand,
    candidates: Sequence[Candidate],
    *,
    may_lack_slot: bool,
    needs_slot: bool,
) -> list[Side]:
    """The best of the candidates, best first; `needs_slot` is for the roles that compute prompts, and need a slot for
    that."""
    sides: list[Side] = []
    for candidate in candidates:
        lacks_slot = needs_slot and not candidate.worker.has_slot
        if lacks_slot and not may_lack_slot:
            continue
        weight = weigh(demand, candidate)
        sides.append((weight.num_misses, weight.cost, lacks_slot, len(sides), weight, candidate))
    sides.sort()
    del sides[MAX_SIDE:]
    return sides


_MAX_MISSES = 1 << 30
_MISSES_AND_COST = itemgetter(0, 1)
