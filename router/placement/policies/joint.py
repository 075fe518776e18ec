"""`joint`: one cost in milliseconds for a pair (P, D) or for one worker alone: the time that this placement adds to
all requests.

    its own     wait + prefill of the uncached suffix + visible transfer + expected output tokens * time of a token;
                also the time to form the pair, if it is not formed yet
    of others   the added time of each token on D, for all its tokens, times the sequences there; if D computes the
                prompt, also the time of the prefill times the sequences there; and the time to compute again the
                tokens evicted from a full cache, times the probability of reuse
    barrier     barrier_ms * k / (1 - k), k being the KV utilization after joining, on both sides

The time of a token is that of a decode step, divided by the tokens that a step gives to a sequence: more than one where
drafts are accepted (`Worker.token_ms`).

The wait is the worker's backlog and, where the queue waits for it, the prompts in the queue before this one; at least
the time to load or fetch KV that the worker would not compute (`fetches.py`). A fetch delays the sequences of its
source. A worker that lacks the request's adapter, P or D, costs the time to load it besides.

Prefix affinity follows from the prefill time: a cached prefix is worth the time to compute it again (twice that where
caches are full of prefixes in use, so that they do not evict each other), and no more: a hot prefix spreads to other
workers when its holder's wait exceeds that. Local prefill follows from the second line: it is cheap on an idle D, and
expensive on one that decodes for many. There is no threshold for either.
"""

from __future__ import annotations

from disagg.router.config import Decodes
from disagg.router.placement.forecast import compute_ms, prefill_ms
from disagg.router.placement.placement import Candidate, Demand, Weight
from disagg.router.workers.cost_model import LinkModel
from disagg.router.workers.pairs import Pairs
from disagg.router.workers.worker import Worker

_SLACK_SHARE = 0.02
_SLACK_MS = 0.5
"""Milliseconds by which costs may differ and still count as equal. Else a worker whose steps were once measured a
little shorter would get all requests, and the others would never be measured again."""
_MOST_FULL = 0.99
"""The KV utilization at which the barrier stops growing, so that a worker with room can always be chosen."""


class Joint:
    """The policy `joint`; see the module docstring for its cost. Implements `placement.Policy`.

    Args:
        barrier_ms: the barrier of a worker whose KV blocks are half in use.
        links: predicts the exposed time of transfers.
        pairs: which pairs are formed.
    """

    name = "joint"
    uses_prefixes = True
    waits = True
    weighs_setup = True
    weighs_local = True
    weighs_fetches = True
    late_last = False
    draws = False
    decodes: Decodes | None = None

    def __init__(self, barrier_ms: float, links: LinkModel, pairs: Pairs) -> None:
        self._barrier_ms = barrier_ms
        self._most_barrier_ms = barrier_ms * _MOST_FULL / (1 - _MOST_FULL)
        self._links = links
        self._pairs = pairs

    def equal_up_to(self, cost: float) -> float:
        """The cost plus a share and a constant (`_SLACK_SHARE`, `_SLACK_MS`)."""
        return cost * (1 + _SLACK_SHARE) + _SLACK_MS

    def rank(self, worker: Worker) -> float:
        """The wait, the added cost of one more sequence in a step, and the barrier."""
        cost = worker.backlog_ms + self._barrier_of(worker, 0)
        if worker.decodes:
            cost += worker.token_ms + worker.num_decodes * worker.joining_ms
        return cost

    def start(self, turn: int, count: int) -> int:
        """Index 0, the worker of least rank."""
        return 0

    def weigh_prefill(self, demand: Demand, candidate: Candidate) -> Weight:
        """Wait, prefill, delay of the sequences that decode there (on an elastic worker), evictions, barrier."""
        worker, cached, num_tokens = candidate.worker, candidate.ready_tokens, demand.num_tokens
        num_new = num_tokens - candidate.cached_tokens
        wait, prefill = worker.backlog_ms + demand.queued_ms, prefill_ms(worker, cached, num_tokens)
        delay = evicted_ms(demand, worker, num_new) if num_new > worker.free_tokens else 0.0
        if worker.num_decodes:
            delay += worker.num_decodes * compute_ms(worker, cached, num_tokens)
        if candidate.fetch is not None:
            wait = max(wait, candidate.fetch.ms)
            delay += candidate.fetch.delay_ms
        load = adapter_ms(demand, worker) if demand.adapter else 0.0
        wait += load
        barrier = self._barrier_of(worker, candidate.num_blocks)
        misses = 1 if wait + prefill > demand.ttft_left_ms else 0
        return Weight(wait + prefill + delay + barrier, misses, wait, prefill, 0.0, delay, barrier, 0.0, load)

    def weigh_decode(self, demand: Demand, candidate: Candidate) -> Weight:
        """Decode steps, delay of the other sequences, barrier."""
        worker, num_steps = candidate.worker, demand.num_steps
        joining = worker.joining_ms + demand.context * worker.attending_ms
        step = worker.token_ms + joining
        decode = num_steps * step
        delay = num_steps * joining * worker.num_decodes
        barrier = self._barrier_of(worker, candidate.num_blocks)
        misses = 1 if step > demand.tpot_ms else 0
        load = adapter_ms(demand, worker) if demand.adapter else 0.0
        cost = load + decode + delay + barrier
        weight = candidate.as_decode = Weight(cost, misses, 0.0, 0.0, decode, delay, barrier, step, load)
        return weight

    def weigh_colocated(self, demand: Demand, candidate: Candidate) -> Weight:
        """Wait, prefill, decode steps, delay, barrier. The worker's sequences wait for the prefill too, without the
        steps' fixed cost."""
        worker, cached, num_tokens = candidate.worker, candidate.ready_tokens, demand.num_tokens
        num_new = num_tokens - candidate.cached_tokens
        wait, compute = worker.backlog_ms, compute_ms(worker, cached, num_tokens)
        if worker.is_for_prompts:
            wait += demand.queued_ms
        prefill = compute - (-(num_tokens - cached) // worker.prompt_room) * worker.around_ms
        after = candidate.as_decode or self.weigh_decode(demand, candidate)
        decode, barrier = after.decode_ms, after.barrier_ms
        others = worker.num_decodes * compute
        if num_new > worker.free_tokens:
            others += evicted_ms(demand, worker, num_new)
        if candidate.fetch is not None:
            wait = max(wait, candidate.fetch.ms)
            others += candidate.fetch.delay_ms
        wait += after.adapter_ms
        delay = after.delay_ms + others
        misses = after.num_misses + (wait + prefill > demand.ttft_left_ms)
        cost = wait + prefill + decode + delay + barrier
        return Weight(cost, misses, wait, prefill, decode, delay, barrier, after.step_ms, after.adapter_ms)

    def weigh_pair(self, demand: Demand, prefill: Candidate, decode: Candidate) -> tuple[float, float]:
        """The exposed time of the transfer, and the time that forming the pair's connection still takes."""
        worker, prefill_id = decode.worker, prefill.worker.worker_id
        kv_bytes = worker.kv_layout.bytes_of(demand.num_tokens, decode.cached_tokens)
        decode_id = worker.worker_id
        return self._links.exposed_ms(prefill_id, decode_id, kv_bytes, demand.now), self._pairs.setup_ms(
            prefill_id, decode_id
        )

    def known_pair(self, demand: Demand, prefill: Candidate, decode: Candidate) -> tuple[float, float]:
        """Like `weigh_pair`, by the latest fits without redoing them."""
        worker, prefill_id = decode.worker, prefill.worker.worker_id
        kv_bytes = worker.kv_layout.bytes_of(demand.num_tokens, decode.cached_tokens)
        decode_id = worker.worker_id
        return self._links.known_ms(prefill_id, decode_id, kv_bytes), self._pairs.setup_ms(prefill_id, decode_id)

    def _barrier_of(self, worker: Worker, num_blocks: int) -> float:
        """The barrier of the worker's KV utilization after `num_blocks` more are in use."""
        k = (worker.used_blocks + num_blocks) / worker.num_blocks
        return self._barrier_ms * k / (1 - k) if k < _MOST_FULL else self._most_barrier_ms


def adapter_ms(demand: Demand, worker: Worker) -> float:
    """Milliseconds until the worker has the request's adapter."""
    return worker.adapters.wait_ms(demand.adapter, demand.adapter_ms, demand.now)


def evicted_ms(demand: Demand, worker: Worker, num_new: int) -> float:
    """Milliseconds to compute again what a prompt's `num_new` uncached tokens evict beyond the free ones, times the
    probability of reuse."""
    return demand.reuse * (num_new - worker.free_tokens) * worker.prefill_token_ms
