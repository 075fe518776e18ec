"""Why the pools of a plan have the stages and ranks that they have, in a sentence for each pool: what a prompt or a
token takes with them, and what it would take with another choice for as many devices, or for half as many."""

from __future__ import annotations

from dataclasses import dataclass

from disagg.autoscaler.queueing import Lengths, decode_context
from disagg.simulator.durations.parallelism import Parallelism
from disagg.simulator.durations.roofline import RooflineStepTimes
from disagg.simulator.durations.stages import StagedStepTimes
from disagg.simulator.plan.candidates import Judged, Pool
from disagg.simulator.plan.memory import expert_choices
from disagg.simulator.plan.pools import Planner
from disagg.step_times.interface import StepWork, busy_s, chunks_s, decode_s, prefill_s


def reasons(planner: Planner, judged: Judged) -> list[str]:
    """One sentence for each pool of a candidate."""
    candidate = judged.candidate
    if candidate.prefill is None:
        return [_decode_reason(planner, candidate.decode, judged.estimate.mean_batch, "colocated")]
    return [
        _prefill_reason(planner, candidate.prefill),
        _decode_reason(planner, candidate.decode, judged.estimate.mean_batch, "decode"),
    ]


# ---------------------------------------------------------------- prompts


def _prefill_reason(planner: Planner, pool: Pool) -> str:
    kind = _mean_kind(planner)
    chosen = _prompt_text(planner, pool.parallelism, pool.token_budget, kind)
    text = f"prefill with {pool.parallelism}: a prompt of {kind.computed} tokens takes {chosen}"
    other = _other_prefill(planner, pool)
    if other is None:
        return text
    budget = max(planner.site.token_budgets)
    if other.pp > 1:
        budget = min(planner.site.token_budgets, key=lambda each: _prompt_s(planner, other, each, kind))
    return f"{text}; with {other} {_prompt_text(planner, other, budget, kind)}"


def _mean_kind(planner: Planner) -> Lengths:
    load = planner.load
    cached = round(sum(kind.cached for kind in load.kinds) / len(load.kinds))
    prompt = max(1, round(load.mean_prompt))
    return Lengths(prompt, max(1, round(load.mean_output)), min(cached, prompt - 1))


def _prompt_s(planner: Planner, parallelism: Parallelism, budget: int, kind: Lengths) -> float:
    return prefill_s(planner.site.times_of(parallelism), kind.computed, budget, kind.cached)


def _prompt_text(planner: Planner, parallelism: Parallelism, budget: int, kind: Lengths) -> str:
    """The time of a prompt, and the part of it that the division among devices costs."""
    times = planner.site.times_of(parallelism)
    seconds = prefill_s(times, kind.computed, budget, kind.cached)
    parts = []
    if parallelism.pp > 1:
        busy = busy_s(times, kind.computed, budget, kind.cached)
        parts.append(f"filling and draining the stages {_ms(seconds - busy)} in chunks of {budget}")
    if parallelism.tp > 1 and isinstance(times, RooflineStepTimes | StagedStepTimes):
        reduced = chunks_s(_AllReduces(times), kind.computed, budget, kind.cached) / parallelism.pp
        parts.append(f"all-reduces {_where(planner, parallelism)} {_ms(reduced)}")
    return _ms(seconds) + (f", of which {' and '.join(parts)}" if parts else "")


def _other_prefill(planner: Planner, pool: Pool) -> Parallelism | None:
    """The other way to divide a prompt among as many devices: by ranks alone, or by stages alone; of one device, among
    two. None where the model cannot be divided so, or times of other ways are not known."""
    site, number = planner.site, pool.parallelism.num_devices
    if not isinstance(site.times_of(pool.parallelism), RooflineStepTimes | StagedStepTimes):
        return None
    if pool.pp > 1 or (number == 1 and 2 in site.tps):
        for ep in expert_choices(site.model, max(2, number)):
            return Parallelism(max(2, number), 1, ep)
        return None
    if number > 1 and number in site.pps and number <= site.model.num_layers:
        return Parallelism(1, number)
    return None


# ---------------------------------------------------------------- tokens


def _decode_reason(planner: Planner, pool: Pool, mean_batch: float, name: str) -> str:
    batch, context = max(1, round(mean_batch)), decode_context(planner.load.kinds)
    chosen = _token_text(planner, pool.parallelism, batch, context)
    text = f"{name} with {pool.parallelism}: a token of {batch} sequences takes {chosen}"
    narrower = [each for each in planner.decoders if each.num_devices < pool.parallelism.num_devices]
    wider = [each for each in planner.decoders if each.num_devices > pool.parallelism.num_devices]
    if narrower:
        other = max(narrower, key=lambda each: each.num_devices)
        text = f"{text}; with {other} {_token_text(planner, other, batch, context)}"
    elif wider:
        other = min(wider, key=lambda each: each.num_devices)
        text = f"{text}; with {other} {_token_text(planner, other, batch, context)}"
    if pool.pp > 1:
        text += "; fewer stages have no room for weights and one sequence"
    return text


def _token_text(planner: Planner, parallelism: Parallelism, batch: int, context: float) -> str:
    times = planner.site.times_of(parallelism)
    text = _ms(decode_s(times, batch, context))
    if parallelism.tp > 1 and isinstance(times, RooflineStepTimes | StagedStepTimes):
        reduced = decode_s(_AllReduces(times), batch, context)
        text += f", of which all-reduces {_where(planner, parallelism)} {_ms(reduced)}"
    return text


# ---------------------------------------------------------------- parts


@dataclass(frozen=True)
class _AllReduces:
    """The part of a step's time that all-reduces take, in all stages together."""

    times: RooflineStepTimes | StagedStepTimes

    def step_s(self, work: StepWork) -> float:
        """Seconds of the all-reduces."""
        stages = self.times.stages if isinstance(self.times, StagedStepTimes) else (self.times,)
        return sum([stage.parts(work).all_reduces for stage in stages])


def _where(planner: Planner, parallelism: Parallelism) -> str:
    return "over the network" if parallelism.tp > planner.site.device.max_tp else "within a node"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.{1 if seconds < 0.1 else 0}f} ms"
