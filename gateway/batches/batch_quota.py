"""How many answers to lines of batches may start at a model, and whose: what interactive requests leave, in turn for
the tenants. (pure)"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from disagg.router.api import ClusterView, WorkerView

TPOT_SHARE: Final = 0.6
"""Share of the configured TPOT target that a decode step with lines may be predicted to take. The rest is left for new
interactive requests and for errors of the prediction."""
TTFT_SHARE: Final = 0.1
"""Share of the configured TTFT target that prompts of lines, not computed yet, may be predicted to take each worker."""
_GUESSED_TOKENS: Final = 256.0
"""Assumed tokens of a prompt or of a sequence's context, where none is known."""


NO_TENANTS: Final[Mapping[str, tuple[int, int]]] = {}


class BatchQuota(NamedTuple):
    """The number of answers and lines that may start now at one model."""

    num_answers: int
    """Maximum number of answers, each of which takes a decode place."""
    num_prompts: int
    """Maximum number of lines: all answers to a line share its prompt."""
    tenants: Mapping[str, tuple[int, int]] = NO_TENANTS
    """Requests of each tenant, lines included, as (waiting for a worker, running). No line of a tenant starts while one
    of its requests waits."""
    is_paced: bool = False
    """Whether there will be more room soon, when prompts of started lines are computed."""

    def num_for(self, tenant: str, most_running: int | None, num_lines: int) -> int:
        """The number of answers of one tenant that may start.

        Args:
            tenant: whose.
            most_running: how many may run at a time by its limits; None for any number.
            num_lines: answers to its lines that have started. The router may not have all of them yet.
        """
        num_waiting, num_running = self.tenants.get(tenant, (0, 0))
        if num_waiting:
            return 0
        if most_running is None:
            return self.num_answers
        return min(self.num_answers, most_running - max(num_running, num_lines))


class StepBounds(NamedTuple):
    """Bounds on the time of a worker that lines may take, in milliseconds; None for no bound."""

    decode_ms: float | None = None
    """Maximum predicted duration of a decode step with one more line."""
    prefill_ms: float | None = None
    """Maximum predicted time for which each worker computes prompts of lines that are not computed yet."""


NO_BOUNDS: Final = StepBounds()


def bounds_for(ttft_s: float | None, tpot_s: float | None, max_step_ms: float | None) -> StepBounds:
    """The bounds that follow from the configured targets; `max_step_ms` replaces the one from the TPOT target."""
    decode_ms = 1000 * TPOT_SHARE * tpot_s if max_step_ms is None and tpot_s is not None else max_step_ms
    return StepBounds(decode_ms, None if ttft_s is None else 1000 * TTFT_SHARE * ttft_s)


def num_admissible(num_free: int, num_waiting: int, reserve: int, num_running: int, most: int) -> int:
    """The number of further answers to lines that may start now.

    Args:
        num_free: decode places that nothing uses.
        num_waiting: interactive requests that wait for a place; while there are any, no line starts.
        reserve: free places that are left to interactive requests.
        num_running: answers to lines that run.
        most: of these, at a time.
    """
    if num_waiting:
        return 0
    return max(0, min(num_free - reserve, most - num_running))


def quota_of(
    view: ClusterView,
    num_running: int,
    reserved_share: float,
    most: int,
    *,
    wakes_workers: bool = False,
    bounds: StepBounds = NO_BOUNDS,
) -> BatchQuota:
    """The quota at one model. Without a decode worker it is one line, if a request makes a worker start.

    Args:
        view: the model's workers and requests now. What this router has placed may be missing in a worker's report,
            and what others have placed is missing in this router's count: the larger one counts.
        num_running: answers to lines that run.
        reserved_share: see `BatchOptions`.
        most: answers to lines that may run at a time.
        wakes_workers: whether a request makes a worker start where there is none.
        bounds: see there.
    """
    workers = [worker for worker in view.workers if "decode" in worker.info.roles and worker.takes_requests]
    if not workers:
        return BatchQuota(int(wakes_workers and not num_running), 1, view.tenants)
    places = sum(worker.info.max_num_seqs for worker in workers)
    reported = sum(_num_sequences(worker) for worker in workers)
    num_used = max(reported, view.num_running)
    num_free = places - num_used
    num_interactive = view.num_queued - view.background.num_queued
    num_placed = num_running - min(num_running, view.background.num_queued)  # the others may be at a tenant's limit
    most_now = num_admissible(num_free, num_interactive, math.ceil(places * reserved_share), num_placed, most)
    if bounds.decode_ms is not None and most_now:
        fitting = sum(_places_by_step(worker, bounds.decode_ms) for worker in workers)
        most_now = max(0, min(most_now, fitting - num_used))
    if bounds.prefill_ms is None or not most_now:
        return BatchQuota(most_now, most_now, view.tenants)
    by_prompts = _num_by_prompts(view, bounds.prefill_ms)
    return BatchQuota(most_now, by_prompts, view.tenants, is_paced=by_prompts < most_now)


def lines_to_start(quota: BatchQuota, running: Sequence[int], waiting: Sequence[Sequence[int]]) -> list[int]:
    """The number of its next lines that each batch may start. The next line belongs to the batch with the fewest
    running answers. If the quota is too small for all answers to that line, no line starts until others have ended. If
    nothing else runs, the line starts anyway.

    Args:
        quota: see there.
        running: answers of each batch that run at this model.
        waiting: of each batch, how many answers each of its next lines has.
    """
    counts, busy = [0] * len(running), list(running)
    num_answers, num_prompts = quota.num_answers, quota.num_prompts
    while num_answers > 0 and num_prompts > 0:
        able = [i for i in range(len(counts)) if counts[i] < len(waiting[i])]
        if not able:
            break
        first = min(able, key=lambda i: busy[i])
        needed = waiting[first][counts[first]]
        if needed > num_answers and any(busy):
            break
        counts[first] += 1
        busy[first] += needed
        num_answers -= needed
        num_prompts -= 1
    return counts


def _num_by_prompts(view: ClusterView, prefill_ms: float) -> int:
    """The number of further prompts of lines that may be queued or computed; at least one while no worker computes any.
    Lines that are queued then wait for something else, such as a limit of their tenant."""
    workers = [worker for worker in view.workers if "prefill" in worker.info.roles and worker.takes_requests]
    known = [worker.steps.prefill_token_ms for worker in workers if worker.steps is not None]
    num_under_way = view.background.num_queued + view.background.num_prefill
    least = int(not view.background.num_prefill)
    if not known:
        return least
    tokens_each = view.background.prompt_tokens / num_under_way if num_under_way else _GUESSED_TOKENS
    each_ms = tokens_each * sum(known) / len(known)
    each_has = max(1, math.floor(prefill_ms / each_ms)) if each_ms > 0.0 else 1
    return max(least, each_has * len(workers) - num_under_way)


def _num_sequences(worker: WorkerView) -> int:
    load = worker.load
    return load.num_running + load.num_waiting + load.num_suspended


def _places_by_step(worker: WorkerView, max_step_ms: float) -> int:
    """The number of sequences with which a decode step of the worker is predicted to take at most `max_step_ms`. At
    least one, so that a batch also runs on a worker whose shortest step is longer."""
    times, num = worker.steps, worker.info.max_num_seqs
    if times is None:
        return num
    num_now = worker.load.num_running
    context = worker.load.blocks_active * worker.info.block_size / num_now if num_now else _GUESSED_TOKENS
    each_ms = times.decode_ms + times.context_ms * context
    if each_ms <= 0.0:
        return num
    if not times.experts_ms:
        return max(1, min(num, int((max_step_ms - times.base_ms) / each_ms)))
    fitting = [n for n in range(1, num + 1) if times.base_ms + n * each_ms + times.experts_of(n) <= max_step_ms]
    return max(fitting, default=1)
