"""`elastic`: placement by the TPOT targets of all requests, for workers that compute prompts and answers.

What sequences have saved by their targets is time for prompts (`proto/step_times/pace.py`), and engines with scheduling
`slack` spend it. So a prompt delays nobody as long as the sequences there can spare its time, and what a placement
costs is the capacity that it takes from later prompts. In milliseconds:

    prompt    when it would be finished: at once as long as the sequences that decode there can spare the time; what is
              left then goes on at the share of the worker that their steps leave, 1 - MARGIN * step / target
    answer    the time by which all its steps on D would be later than 1.1 times the target, for each sequence there;
              with `gather` also the time of its steps, which prompts cannot have any more: a first sequence costs a
              worker the whole fixed part of its steps, a further one little
    link      the exposed time of the transfer

With `gather`, workers without decodes are spared for prompts: while an option leaves a tenth of the time to the TTFT
target, its finish counts a tenth, and a prompt beside decodes counts its computation once more.

`spread` suits tight TTFT targets, `gather` tight TPOT targets. Neither static shape is needed: `gather` with a busy
cluster is prefill and decode workers, `spread` is colocated workers, and with a long queue either takes from the other.

A request without a TPOT target is placed as by `joint`.
"""

from __future__ import annotations

import math

from typing_extensions import override

from disagg.proto.step_times.pace import MARGIN
from disagg.router.config import Decodes
from disagg.router.placement.forecast import compute_ms, prefill_ms
from disagg.router.placement.placement import Candidate, Demand, Weight
from disagg.router.placement.policies.joint import Joint, evicted_ms
from disagg.router.workers.cost_model import LinkModel
from disagg.router.workers.pairs import Pairs

_LATE = 1.1
"""Steps may take so many times the target before they count as late: a batch is large for a while, a target is a mean
over the whole answer."""
_LEAST_SHARE = 0.01
"""Of a worker for prompts, so that a finish is predicted whatever its steps take."""
_IN_TIME = 0.9
"""Of the time to the TTFT target: until then a prompt is in time, with some to spare."""
_SPARED = 0.1
"""What a finish in time counts with `gather`."""


class Elastic(Joint):
    """The policy `elastic`; see the module docstring for its cost. Implements `placement.Policy`.

    Args:
        barrier_ms, links, pairs: as for `Joint`.
        decodes: may be changed at any time.
    """

    name = "elastic"
    hopeless_last = True

    def __init__(self, barrier_ms: float, links: LinkModel, pairs: Pairs, decodes: Decodes) -> None:
        super().__init__(barrier_ms, links, pairs)
        self.decodes = decodes

    @override
    def weigh_prefill(self, demand: Demand, candidate: Candidate) -> Weight:
        """The finish, and evictions."""
        if demand.tpot_ms == math.inf:
            return super().weigh_prefill(demand, candidate)
        return self._weigh_prompt(demand, candidate)

    @override
    def weigh_decode(self, demand: Demand, candidate: Candidate) -> Weight:
        """Late steps, lost capacity, barrier."""
        target = demand.tpot_ms
        if target == math.inf:
            return super().weigh_decode(demand, candidate)
        worker, num_steps = candidate.worker, demand.num_steps
        step = worker.around_ms + worker.decode_ms + demand.context * worker.context_ms
        delay = 0.0
        if step > _LATE * target:
            delay = (worker.num_decodes + 1) * num_steps * (step - _LATE * target)
        if self.decodes == "gather":
            before = worker.around_ms if worker.num_decodes else 0.0
            delay += num_steps * (min(step, target) - min(before, target))
        barrier = self._barrier_of(candidate)
        candidate.as_decode = Weight(delay + barrier, 0, 0.0, 0.0, num_steps * step, delay, barrier, step)
        return candidate.as_decode

    @override
    def weigh_colocated(self, demand: Demand, candidate: Candidate) -> Weight:
        """Both, without a link."""
        if demand.tpot_ms == math.inf:
            return super().weigh_colocated(demand, candidate)
        after = candidate.as_decode or self.weigh_decode(demand, candidate)
        prompt = self._weigh_prompt(demand, candidate)
        return Weight(
            prompt.cost + after.cost,
            prompt.num_misses,
            prompt.wait_ms,
            prompt.prefill_ms,
            after.decode_ms,
            prompt.delay_ms + after.delay_ms,
            after.barrier_ms,
            after.step_ms,
        )

    def _weigh_prompt(self, demand: Demand, candidate: Candidate) -> Weight:
        worker, cached, num_tokens = candidate.worker, candidate.cached_tokens, demand.num_tokens
        num_new = num_tokens - cached
        delay = evicted_ms(demand, worker, num_new) if num_new > worker.free_tokens else 0.0
        wait = worker.backlog_ms
        if not worker.num_decodes:
            prefill = prefill_ms(worker, cached, num_tokens)
        else:
            compute = compute_ms(worker, cached, num_tokens)
            finish = wait + compute + worker.around_ms
            spare, pace = worker.saved(demand.now, demand.answer_tokens)
            if finish > spare:
                share = max(_LEAST_SHARE, 1 - MARGIN * worker.around_ms / pace)
                finish = spare + (finish - spare) / share
            prefill = max(0.0, finish - wait)
            if self.decodes == "gather":
                delay += compute
        wait += demand.queued_ms
        finish = wait + prefill
        misses = 1 if finish > demand.ttft_left_ms else 0
        is_spared = self.decodes == "gather" and finish <= _IN_TIME * demand.ttft_left_ms
        cost = (_SPARED * finish if is_spared else finish) + delay
        return Weight(cost, misses, wait, prefill, 0.0, delay)
