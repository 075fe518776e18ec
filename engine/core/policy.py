"""The scheduler's policy as pure functions: when and why an answer ends, which sequence goes first, how long a prompt
chunk is; and `LazyHeap`, the priority queue for waiting sequences and for deadlines.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Hashable
from typing import Generic, Literal, TypeVar

from disagg.engine.plan import RowFault, ScheduledSequence
from disagg.engine.request import Sequence
from disagg.proto.errors import GRAMMAR_TOO_LARGE

_log = logging.getLogger(__name__)

UNSAMPLABLE = "the bias, masks, penalties and temperature leave no token with a finite logit"


def finish_reason(sequence: Sequence, max_model_len: int) -> Literal["stop", "length"] | None:
    """Why the last known token ends the sequence, or None. A stop id counts from `min_tokens` output tokens on."""
    sampling, token_ids = sequence.spec.sampling, sequence.token_ids
    if token_ids[-1] in sampling.stop_token_ids and sequence.num_output_tokens >= max(1, sampling.min_tokens):
        return "stop"
    return "length" if is_full(sequence, max_model_len) else None


def is_full(sequence: Sequence, max_model_len: int, num_pending: int = 0) -> bool:
    """Whether the answer is as long as it may be, with `num_pending` tokens whose ids are not known yet."""
    num_tokens = len(sequence.token_ids) + num_pending
    max_tokens = sequence.num_prompt_tokens + sequence.spec.sampling.max_tokens
    return num_tokens >= max_tokens or num_tokens >= max_model_len


def faulty_end(sequence: Sequence, fault: RowFault) -> tuple[Literal["invalid", "failed"], str]:
    """Reason and detail with which a sequence ends whose row gave no token; logged."""
    state = sequence.grammar_state
    if fault == "request" and state is not None and state.matcher is None:
        _log.warning("%s: its grammar went beyond a limit; ending it, other sequences continue", sequence.key)
        return "invalid", GRAMMAR_TOO_LARGE
    if fault == "request":
        _log.warning(
            "%s: its sampling settings left no finite logit; ending it, other sequences continue", sequence.key
        )
        return "invalid", UNSAMPLABLE
    _log.error("%s: the model's logits of its row are not finite; ending it, other sequences continue", sequence.key)
    return "failed", "step: the model's logits are not finite"


_WORTH_A_TAIL = 8
"""A tail costs the overhead of a step. It pays where this many times its tokens travel behind it."""


PASS_S = 1.0
"""On a prefill worker a prompt that takes several steps lets those pass that take one and arrive within this time after
it. Otherwise they would wait for all of its steps."""


def queue_order(sequence: Sequence, token_budget: int) -> SortKey:
    """The order of admission: larger priority, then preempted ones, then those that can meet their TTFT target
    (scheduling `slack` only), then the earlier arrival, where a prompt that is computed for another worker and has more
    than `token_budget` tokens counts as if it had come `PASS_S` later. What comes after that time goes behind it, so
    that it does not starve."""
    is_long = sequence.hold_after_prefill and sequence.num_given_tokens > token_budget
    is_first, arrival = sequence.num_preemptions == 0, sequence.arrival + PASS_S * is_long
    return (-sequence.spec.priority, is_first, sequence.cannot_meet_ttft, arrival)


def chunk_length(start: int, num_uncomputed: int, budget: int, block_size: int, *, first: bool) -> int:
    """How many of `num_uncomputed` tokens from `start` on to compute within `budget`.

    A chunk that does not finish the prompt ends at a block boundary. Where the budget does not reach one, the step's
    first chunk takes what there is, so that prefill always advances; later ones get nothing.
    """
    if num_uncomputed <= budget:
        return num_uncomputed
    aligned = (start + budget) // block_size * block_size - start
    if aligned > 0:
        return aligned
    return budget if first else 0


def before_tail(start: int, num_tokens: int, tail_tokens: int, block_size: int) -> int:
    """How many of the last `num_tokens` tokens of a prompt to compute first, when their KV is to be handed over.

    The rest, `tail_tokens` or up to a block more, is a short step of its own, behind which the KV of the others
    travels. All of them where that would not pay, where no block ends before the tail, or where `tail_tokens` is 0.
    """
    if not tail_tokens or num_tokens < _WORTH_A_TAIL * tail_tokens:
        return num_tokens
    num_before = (start + num_tokens - tail_tokens) // block_size * block_size - start
    return num_before if num_before > 0 else num_tokens


def is_at_tail(entry: ScheduledSequence, tail_tokens: int, block_size: int) -> bool:
    """Whether the entry is a prompt's tail, or all before it. Nothing may lengthen these steps: token 0 waits."""
    sequence = entry.sequence
    if not (tail_tokens and sequence.hold_after_prefill):
        return False
    longest = tail_tokens + block_size - 1
    if entry.samples:
        return entry.start > sequence.cached_tokens and entry.num_tokens <= longest
    return sequence.num_tokens - entry.end <= longest


K = TypeVar("K", bound=Hashable)

SortKey = tuple[float, ...]
"""Smaller comes first; equal ones leave in the order in which they came."""

_MIN_STALE = 64


class LazyHeap(Generic[K]):
    """Items in the order of their `SortKey`; any of them can be removed in O(1). Not thread-safe.

    A discarded entry stays in the heap, stale, until it comes to the top, or until most entries are stale and the heap
    is rebuilt. So every operation costs O(log n) amortized, and memory stays in proportion to the live entries.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[SortKey, int, K]] = []
        self._serial_of: dict[K, int] = {}
        self._next_serial = 0

    def __len__(self) -> int:
        return len(self._serial_of)

    def __contains__(self, item: K) -> bool:
        return item in self._serial_of

    def push(self, order: SortKey, item: K) -> None:
        """Add `item`, or give it a new place."""
        self._serial_of[item] = self._next_serial
        heapq.heappush(self._heap, (order, self._next_serial, item))
        self._next_serial += 1
        self._rebuild_if_mostly_stale()

    def discard(self, item: K) -> None:
        """Take `item` out; nothing happens where it is not in."""
        self._serial_of.pop(item, None)

    def peek(self) -> tuple[SortKey, K] | None:
        """The first entry, or None when empty."""
        while self._heap:
            order, serial, item = self._heap[0]
            if self._serial_of.get(item) == serial:
                return order, item
            heapq.heappop(self._heap)
        return None

    def _rebuild_if_mostly_stale(self) -> None:
        if len(self._heap) > 2 * len(self._serial_of) + _MIN_STALE:
            self._heap = [entry for entry in self._heap if self._serial_of.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)
