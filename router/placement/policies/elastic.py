"""`elastic`: placement by the TPOT targets of all requests, for workers that compute prompts and answers.

The time that sequences have saved by their targets is available for prompts (`step_times/pace.py`), and engines with
scheduling `slack` spend it. So a prompt delays no sequence as long as those on its worker can spare its time, and the
cost of a placement is the capacity that it takes from later prompts. In milliseconds:

    prompt    the time until it is computed: with the whole worker as long as the sequences that decode there can spare
              the time; the rest with the share of the worker that their steps leave, 1 - MARGIN * step / target
    answer    the time by which all its steps on D would be later than 1.1 times the target, for each sequence there;
              with `gather` also the time of its steps, which prompts cannot have any more: a first sequence costs a
              worker the whole fixed part of its steps, a further one little
    link      the exposed time of the transfer

With `gather`, workers without decodes are spared for prompts: if an option leaves a tenth of the time to the TTFT
target, its time counts a tenth, and a prompt beside decodes counts its computation once more.

With `split:2` the first two workers by name take no prompts (`Fleet.split`), so that no long prompt delays what decodes
there, and cached prefixes stay where prompts are computed. Answers go there by what they add to the steps of all; the
other workers get some only where steps would be late there.

`spread` suits tight TTFT targets, `gather` tight TPOT targets, a split tight TPOT targets with long prompts. Static
shapes are not needed: `gather` with a busy cluster is prefill and decode workers, `spread` is colocated workers, and
with a long queue either takes from the other.

A request without a TPOT target is placed as by `joint`.
"""

from __future__ import annotations

import math

from typing_extensions import override

from disagg.router.config import Decodes, num_split
from disagg.router.placement.forecast import compute_ms, prefill_ms
from disagg.router.placement.placement import Candidate, Demand, Weight
from disagg.router.placement.policies.joint import Joint, adapter_ms, evicted_ms
from disagg.router.workers.cost_model import LinkModel
from disagg.router.workers.pairs import Pairs
from disagg.router.workers.worker import Worker
from disagg.step_times.pace import MARGIN

_LATE = 1.1
"""Multiple of the target above which steps count as late: a batch is large for a while, but a target is a mean over the
whole answer."""
_LEAST_SHARE = 0.01
"""Least share of a worker that its prompts are assumed to get, so that their end is always predicted."""
_IN_TIME = 0.9
"""Share of the time to the TTFT target within which a prompt counts as in time with some margin."""
_SPARED = 0.1
"""Factor, with `gather`, of the time of a prompt that ends in time."""
_LATE_PRICE, _PROMPT_PRICE = 2.0, 10.0
"""Factors, with a split, of the delay by late steps, and of the time that an answer takes from prompts on a worker that
computes some. Such a worker gets answers only if steps would be late on the others."""


class Elastic(Joint):
    """The policy `elastic`; see the module docstring for its cost. Implements `placement.Policy`.

    Args:
        barrier_ms, links, pairs: as for `Joint`.
        decodes: may be changed at any time.
    """

    name = "elastic"
    late_last = True

    def __init__(self, barrier_ms: float, links: LinkModel, pairs: Pairs, decodes: Decodes) -> None:
        super().__init__(barrier_ms, links, pairs)
        self._decodes: Decodes | None = None
        self._gathers = self._splits = False
        self.decodes = decodes

    @property
    @override
    def decodes(self) -> Decodes | None:
        return self._decodes

    @decodes.setter
    def decodes(self, value: Decodes | None) -> None:
        self._decodes = value
        self._gathers, self._splits = value == "gather", num_split(value) > 0

    @override
    def weigh_prefill(self, demand: Demand, candidate: Candidate) -> Weight:
        """The time until the prompt is computed, and evictions."""
        if demand.tpot_ms == math.inf:
            return super().weigh_prefill(demand, candidate)
        return self._weigh_prompt(demand, candidate)

    @override
    def weigh_decode(self, demand: Demand, candidate: Candidate) -> Weight:
        """Late steps, lost capacity, and the barrier."""
        target = demand.tpot_ms
        if target == math.inf:
            return super().weigh_decode(demand, candidate)
        worker, num_steps = candidate.worker, demand.num_steps
        step = worker.token_ms + worker.joining_ms + demand.context * worker.attending_ms
        if self._splits:
            delay = self._split_delay(worker, num_steps, step, target)
        else:
            delay = 0.0
            if step > _LATE * target:
                delay = (worker.num_decodes + 1) * num_steps * (step - _LATE * target)
            if self._gathers:
                delay += num_steps * _taken_ms(worker, step, target)
        barrier = self._barrier_of(candidate.worker, candidate.num_blocks)
        load = adapter_ms(demand, worker) if demand.adapter else 0.0
        cost = load + delay + barrier
        candidate.as_decode = Weight(cost, 0, 0.0, 0.0, num_steps * step, delay, barrier, step, load)
        return candidate.as_decode

    @override
    def weigh_colocated(self, demand: Demand, candidate: Candidate) -> Weight:
        """The costs of prompt and answer, without a link."""
        if demand.tpot_ms == math.inf:
            return super().weigh_colocated(demand, candidate)
        after = candidate.as_decode or self.weigh_decode(demand, candidate)
        prompt = self._weigh_prompt(demand, candidate)
        return Weight(
            prompt.cost + after.cost - after.adapter_ms,  # it is loaded once
            prompt.num_misses,
            prompt.wait_ms,
            prompt.prefill_ms,
            after.decode_ms,
            prompt.delay_ms + after.delay_ms,
            after.barrier_ms,
            after.step_ms,
            after.adapter_ms,
        )

    def _weigh_prompt(self, demand: Demand, candidate: Candidate) -> Weight:
        worker, cached, num_tokens = candidate.worker, candidate.ready_tokens, demand.num_tokens
        num_new = num_tokens - candidate.cached_tokens
        delay = evicted_ms(demand, worker, num_new) if num_new > worker.free_tokens else 0.0
        wait = worker.backlog_ms
        if not worker.num_decodes:
            prefill = prefill_ms(worker, cached, num_tokens)
        else:
            compute = compute_ms(worker, cached, num_tokens)
            finish = wait + compute + worker.around_ms
            spare, pace = worker.saved(demand.now, demand.answer_tokens)
            if finish > spare:
                share = max(_LEAST_SHARE, 1 - MARGIN * worker.token_ms / pace)
                finish = spare + (finish - spare) / share
            prefill = max(0.0, finish - wait)
            if self._gathers:
                delay += compute
        wait += demand.queued_ms
        if candidate.fetch is not None:
            wait = max(wait, candidate.fetch.ms)
            delay += candidate.fetch.delay_ms
        load = adapter_ms(demand, worker) if demand.adapter else 0.0
        wait += load
        finish = wait + prefill
        misses = 1 if finish > demand.ttft_left_ms else 0
        is_spared = self._gathers and finish <= _IN_TIME * demand.ttft_left_ms
        cost = (_SPARED * finish if is_spared else finish) + delay
        return Weight(cost, misses, wait, prefill, 0.0, delay, adapter_ms=load)

    @staticmethod
    def _split_delay(worker: Worker, num_steps: float, step: float, target: float) -> float:
        delay = num_steps * (worker.num_decodes + 1) * (step - worker.token_ms)
        if step > target:
            delay += _LATE_PRICE * (worker.num_decodes + 1) * num_steps * (step - target)
        if worker.is_for_prompts:
            delay += _PROMPT_PRICE * num_steps * _taken_ms(worker, step, target)
        return delay


def _taken_ms(worker: Worker, step_ms: float, target_ms: float) -> float:
    """Milliseconds that one more sequence takes from prompts in each step. The first sequence also takes the fixed cost
    of the step."""
    before = worker.token_ms if worker.num_decodes else 0.0
    return min(step_ms, target_ms) - min(before, target_ms)
