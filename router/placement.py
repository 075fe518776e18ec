"""Which workers run a request: a pure function of the request and of the workers as they are now.

    policy(demand, candidates) -> Choice | None          None: nobody has room now

A `Choice` is a pair (P, D), or one worker that does all of it: one with both roles (colocated mode), or a decode
worker that computes a short uncached suffix itself (local prefill). Only workers of equal model fingerprint and KV
layout form a pair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from disagg.proto.ids import WorkerId
from disagg.proto.messages import WorkerInfo
from disagg.router.books import Booking
from disagg.router.config import RouterConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a placement must provide for."""

    num_tokens: int
    """Known tokens: prompt, and output of earlier attempts."""
    reserve_tokens: int
    """Output tokens to book blocks for."""
    turn: int = 0
    """Number of placements so far. Ties go round the candidates with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One worker as it is now, for one request."""

    info: WorkerInfo
    cached_tokens: int = 0
    """Leading tokens of the request whose KV it has; always less than all of them."""
    outstanding_tokens: int = 0
    """Prompt tokens that it was given and has not computed."""
    num_sequences: int = 0
    used_blocks: int = 0
    """Booked, or reported as held, whichever is more."""

    @property
    def worker_id(self) -> WorkerId:
        """The worker."""
        return self.info.worker_id


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a request runs. Without `prefill`, `decode` does all of it."""

    prefill: Candidate | None
    decode: Candidate


class Policy(Protocol):
    """Chooses workers; holds no state."""

    def __call__(self, demand: Demand, candidates: Sequence[Candidate]) -> Choice | None:
        """The best placement, or None while nobody has room."""
        ...


def prefills_only(info: WorkerInfo) -> bool:
    """Whether this worker is a P."""
    return set(info.roles) == {"prefill"}


def decodes_only(info: WorkerInfo) -> bool:
    """Whether this worker is a D."""
    return set(info.roles) == {"decode"}


def has_both_roles(info: WorkerInfo) -> bool:
    """Whether this worker does whole requests."""
    return {"prefill", "decode"} <= set(info.roles)


def can_pair(prefill: WorkerInfo, decode: WorkerInfo) -> bool:
    """Whether KV of one means the same on the other."""
    return prefill.fingerprint == decode.fingerprint and prefill.kv_layout == decode.kv_layout


def longest_sequence(info: WorkerInfo) -> int:
    """The most tokens, prompt and answer, that one sequence can ever have on this worker."""
    return min(info.max_model_len, info.num_blocks * info.block_size)


def has_short_suffix(candidate: Candidate, num_tokens: int, short_suffix_tokens: int) -> bool:
    """Whether a D computes what it lacks of `num_tokens` known tokens itself; it needs no P for that."""
    return decodes_only(candidate.info) and num_tokens - candidate.cached_tokens <= short_suffix_tokens


def prefill_booking(demand: Demand, candidate: Candidate) -> Booking:
    """What the request takes of a P: the uncached suffix, and blocks for it and for the token that is sampled."""
    blocks = _blocks(candidate.info, demand.num_tokens + 1) - candidate.cached_tokens // candidate.info.block_size
    return Booking(tokens=demand.num_tokens - candidate.cached_tokens, blocks=blocks)


def decode_booking(demand: Demand, candidate: Candidate, *, computes_prompt: bool) -> Booking:
    """What the request takes of a D: blocks for what it lacks and for the reserve; the uncached suffix where it
    prefills."""
    end = min(demand.num_tokens + demand.reserve_tokens, candidate.info.max_model_len)
    blocks = _blocks(candidate.info, end) - candidate.cached_tokens // candidate.info.block_size
    return Booking(tokens=demand.num_tokens - candidate.cached_tokens if computes_prompt else 0, blocks=blocks)


@dataclass(frozen=True, slots=True)
class LeastLoaded:
    """P by the least work in front of the request, its own uncached suffix included; D by the least KV utilization
    after joining, less what a cached prefix is worth. Independent of each other; ties go round."""

    config: RouterConfig

    def __call__(self, demand: Demand, candidates: Sequence[Candidate]) -> Choice | None:
        """See the class and `Policy`."""
        fitting = [candidate for candidate in candidates if demand.num_tokens + 1 <= longest_sequence(candidate.info)]
        decodes = [
            c for c in fitting if decodes_only(c.info) and self._has_decode_room(demand, c, computes_prompt=False)
        ]
        local = [c for c in decodes if has_short_suffix(c, demand.num_tokens, self.config.short_suffix_tokens)]
        if local:
            return Choice(None, self._best_decode(demand, local))
        whole = [
            c
            for c in fitting
            if has_both_roles(c.info) and self._has_slot(c) and self._has_decode_room(demand, c, computes_prompt=True)
        ]
        pair = self._best_pair(demand, fitting, decodes)
        if whole:
            alone = _first_by(lambda c: prefill_cost(demand, c), whole, demand.turn)
            if (
                pair is None
                or pair.prefill is None
                or prefill_cost(demand, alone) <= prefill_cost(demand, pair.prefill)
            ):
                return Choice(None, alone)
        return pair

    def _best_pair(self, demand: Demand, fitting: list[Candidate], decodes: list[Candidate]) -> Choice | None:
        prefills = [
            c for c in fitting if prefills_only(c.info) and self._has_slot(c) and self._has_prefill_room(demand, c)
        ]
        prefills = [p for p in prefills if any(can_pair(p.info, d.info) for d in decodes)]
        if not prefills:
            return None
        prefill = _first_by(lambda c: prefill_cost(demand, c), prefills, demand.turn)
        return Choice(prefill, self._best_decode(demand, [d for d in decodes if can_pair(prefill.info, d.info)]))

    def _best_decode(self, demand: Demand, decodes: list[Candidate]) -> Candidate:
        return _first_by(lambda c: self.decode_cost(demand, c), decodes, demand.turn)

    def decode_cost(self, demand: Demand, candidate: Candidate) -> float:
        """KV utilization of a D after joining, less the worth of its cached prefix."""
        blocks = candidate.used_blocks + decode_booking(demand, candidate, computes_prompt=False).blocks
        worth = self.config.prefix_weight * candidate.cached_tokens / demand.num_tokens
        return blocks / candidate.info.num_blocks - worth

    def _has_slot(self, candidate: Candidate) -> bool:
        return candidate.outstanding_tokens < self.config.prefill_chunks * candidate.info.token_budget

    def _has_prefill_room(self, demand: Demand, candidate: Candidate) -> bool:
        return self._has_room(candidate, prefill_booking(demand, candidate))

    def _has_decode_room(self, demand: Demand, candidate: Candidate, *, computes_prompt: bool) -> bool:
        return self._has_room(candidate, decode_booking(demand, candidate, computes_prompt=computes_prompt))

    def _has_room(self, candidate: Candidate, booking: Booking) -> bool:
        """An empty worker takes whatever fits into it at all; else a request near its size would wait forever."""
        if candidate.num_sequences == 0:
            return True
        room = candidate.info.num_blocks - int(candidate.info.num_blocks * self.config.watermark)
        return candidate.num_sequences < candidate.info.max_num_seqs and candidate.used_blocks + booking.blocks <= room


def prefill_cost(demand: Demand, candidate: Candidate) -> float:
    """Tokens that must be computed on this worker until the request's prompt is."""
    return candidate.outstanding_tokens + demand.num_tokens - candidate.cached_tokens


def _first_by(cost: Callable[[Candidate], float], candidates: Sequence[Candidate], turn: int) -> Candidate:
    """The cheapest; among equals the first one from position `turn` on, going round."""
    start = turn % len(candidates)
    return min([*candidates[start:], *candidates[:start]], key=cost)


def _blocks(info: WorkerInfo, num_tokens: int) -> int:
    return -(-num_tokens // info.block_size)
