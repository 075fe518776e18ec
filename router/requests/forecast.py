"""When a request's first token can be expected: the prompts in front of it over the rate of the fleet, then its own.

    nobody waits before it     the backlog of the worker that would be looked at first
    others wait before it      (all backlogs + the prefills queued before it) / number of workers that prefill

When a place to decode opens is `openings`' part; admission takes the later of the two.

The second line is the queueing term: without it a router takes in whatever comes, and answers it minutes late.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from disagg.proto.block_hash import HASH_BLOCK_TOKENS, max_cached_tokens
from disagg.proto.ids import BlockHash
from disagg.router.placement.fleet import Fleet
from disagg.router.placement.times import prefill_ms
from disagg.router.queueing.queue import RequestQueue


class Forecast(NamedTuple):
    """Milliseconds from now."""

    wait_ms: float
    prefill_ms: float


def forecast(
    fleet: Fleet, queue: RequestQueue, position: int, hashes: Sequence[BlockHash], num_tokens: int, now: float
) -> Forecast | None:
    """For a request of `num_tokens` that would stand at `position` in the queue. None while no worker that could
    compute it was measured."""
    worker = fleet.fastest()
    if worker is None or not worker.is_measured:
        return None
    wait_ms = worker.backlog_ms
    if position:
        backlog_ms, num_workers = fleet.backlog()
        wait_ms = (backlog_ms + queue.work_before(position)) / num_workers
    return Forecast(wait_ms, work_ms(fleet, hashes, num_tokens, now))


def work_ms(fleet: Fleet, hashes: Sequence[BlockHash], num_tokens: int, now: float) -> float:
    """How long a prompt takes where most of it is cached. 0 where there is no worker."""
    worker = fleet.fastest()
    if worker is None:
        return 0.0
    num_blocks = max((blocks for _, blocks in fleet.matched(hashes, now).best(1)), default=0) if hashes else 0
    cached = min(num_blocks * HASH_BLOCK_TOKENS, max_cached_tokens(num_tokens))
    return prefill_ms(worker, cached, num_tokens)
