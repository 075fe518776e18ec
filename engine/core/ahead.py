"""Which decode step can be queued behind one whose tokens are not known yet. Pure.

    step n     planned, launched                     its tokens are pending
    step n+1   planned by `plan_ahead`, launched     its inputs are the pending tokens, on the device
               tokens of step n are read, applied    while n+1 is computed

Only decodes go ahead, and only where nothing that is not known yet decides what they compute: log-probabilities and
edited logits wait for the tokens before them. So does a prompt for which there is room, and room for a token that only
a preemption makes. An answer that reaches its length with the pending token is not planned again; one that
ends by a stop id is found a step late: its row was computed in vain, and `Scheduler.apply` drops it. Its blocks may be
others' by then, who write to them behind that step.

While step n is under way the scheduler knows nothing of it: sequences are as they were before, plus room for what it
writes.
"""

from __future__ import annotations

from disagg.engine.core.batching import is_full
from disagg.engine.core.scheduler import Scheduler
from disagg.engine.core.scheduler_audit import check_plan
from disagg.engine.plan import ScheduledSequence, StepPlan
from disagg.engine.request import Sequence
from disagg.engine.sampling_rules import edits_logits

NOTHING = StepPlan()


def can_enqueue(plan: StepPlan, max_decodes: int) -> bool:
    """Whether a step needs nothing but its decodes' own last tokens."""
    if plan.prefills or not 0 < len(plan.decodes) <= max_decodes:
        return False
    return all(_needs_ids_alone(entry.sequence) for entry in plan.decodes)


def plan_ahead(scheduler: Scheduler, under_way: StepPlan, max_decodes: int) -> StepPlan:
    """The step behind `under_way`, which was launched and is not applied yet. Empty where that must come first, or
    where all its answers end with it. Blocks that it took for some sequences before it found that stay with them."""
    if len(scheduler.running) > max_decodes or (scheduler.scheduling != "static" and scheduler.would_admit()):
        return NOTHING
    pending = {entry.sequence for entry in under_way.decodes}
    planned: list[ScheduledSequence] = []
    for sequence in scheduler.running.values():
        num_pending = int(sequence in pending)
        if num_pending and is_full(sequence, scheduler.max_model_len, num_pending):
            continue
        if sequence.num_uncomputed_tokens != 1 or not _needs_ids_alone(sequence):
            return NOTHING
        end = sequence.num_tokens + num_pending
        if not scheduler.kv_cache.can_extend(sequence, end):
            return NOTHING
        scheduler.kv_cache.extend(sequence, end)
        planned.append(ScheduledSequence(sequence, end - 1, 1, samples=True))
    plan = StepPlan(decodes=tuple(planned))
    check_plan(scheduler, plan, pending)
    return plan


def _needs_ids_alone(sequence: Sequence) -> bool:
    """Whether its next tokens depend on nothing but the ids before them, which the device has. Once that is so it stays
    so: a sequence outgrows the mask of its stop ids."""
    return not (sequence.hold_after_prefill or sequence.spec.sampling.logprobs >= 0 or edits_logits(sequence))
