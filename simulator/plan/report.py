"""The report of `disagg plan` as data: needs and performance of the model on the device, and the pools for the load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from disagg.autoscaler.queueing import decode_context
from disagg.autoscaler.transfer import bandwidth_to_hide, exposed_s, hidden_from, transfer_s
from disagg.proto.wording import counted
from disagg.simulator.durations.parallelism import Parallelism
from disagg.simulator.plan.candidates import Answer, Judged
from disagg.simulator.plan.intensity import (
    critical_batch,
    critical_prompt,
    decode_intensity,
    prefill_intensity,
)
from disagg.simulator.plan.load import Load
from disagg.simulator.plan.memory import WorkerMemory, weight_bytes, worker_memory
from disagg.simulator.plan.pools import Planner
from disagg.simulator.plan.sweep import SweepRow, batch_sweep
from disagg.simulator.plan.workers import Site
from disagg.step_times.interface import LinkTimes, decode_s, prefill_s


@dataclass(frozen=True, kw_only=True)
class WidthFacts:
    """The capacity and speed of a worker by its stages and ranks."""

    tp: int
    pp: int
    ep: bool
    token_budget: int
    """Tokens of a step, by which its TTFT is computed."""
    memory: WorkerMemory
    kv_tokens: int
    sequences: int
    """Number of sequences of the load's mean length that fit at once."""
    ttft_s: float
    """TTFT of the mean prompt on an idle worker."""
    tpot_s: float
    """TPOT of a single sequence."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts that follow from shapes and data sheets, and from the mean lengths of the load."""

    parameters: int
    weight_bytes: float
    kv_bytes_per_token: int
    ridge: float
    """FLOP per byte from which on computing takes longer than reading."""
    prefill_intensity: float
    """FLOP per byte of the mean prompt."""
    critical_prompt: int
    decode_intensity: float
    """FLOP per byte of one sequence with the mean context."""
    critical_batch: int | None
    """The least batch size that is limited by arithmetic, with the mean context."""
    critical_batch_without_context: int | None
    prompt_kv_bytes: float
    transfer_s: float
    exposed_s: float
    hide_bytes_per_s: float
    """Bytes per second at which the mean prompt's transfer takes as long as its prefill."""
    hidden_from_tokens: int | None
    widths: tuple[WidthFacts, ...]
    sweep_tp: int
    sweep_pp: int
    sweep: tuple[SweepRow, ...]
    """The rows for a worker of `sweep_pp` stages of `sweep_tp` ranks."""


def facts_of(planner: Planner) -> Facts:
    """Collect the facts. The widths are those of workers that decode, and those of prefill workers with more stages."""
    site, load = planner.site, planner.load
    model, device, precision = site.model, site.device, site.precision
    prompt, output = max(1, round(load.mean_prompt)), max(1, round(load.mean_output))
    budget = max(site.token_budgets)
    context = decode_context(load.kinds)
    staged = [pool for pool in planner.prefillers if pool.pp > planner.decoders[0].pp]
    shown = [
        *[(each, budget) for each in planner.decoders],
        *[(pool.parallelism, pool.token_budget) for pool in staged],
    ]
    widths = tuple(_width(planner, each, prompt, output, tokens) for each, tokens in shown)
    first = widths[0]
    times = planner.worker(planner.decoders[0], budget).times
    num_devices = planner.decoders[0].num_devices
    kv_bytes = float(model.kv_layout(precision.kv_dtype).bytes_of(prompt))
    num_chunks = -(-prompt // budget)

    def prompt_s(tokens: int) -> float:
        return prefill_s(times, tokens, budget)

    return Facts(
        parameters=model.num_parameters,
        weight_bytes=weight_bytes(model, precision),
        kv_bytes_per_token=model.kv_bytes_per_token(precision.kv_dtype),
        ridge=device.ridge(precision.matrix_dtype),
        prefill_intensity=prefill_intensity(model, prompt, precision),
        critical_prompt=critical_prompt(model, device, precision),
        decode_intensity=decode_intensity(model, 1, context, precision),
        critical_batch=critical_batch(model, device, context, precision),
        critical_batch_without_context=critical_batch(model, device, 0, precision),
        prompt_kv_bytes=kv_bytes,
        transfer_s=transfer_s(kv_bytes, site.link),
        exposed_s=exposed_s(kv_bytes, first.ttft_s, num_chunks, site.link),
        hide_bytes_per_s=bandwidth_to_hide(kv_bytes, first.ttft_s),
        hidden_from_tokens=_hidden_from(site, prompt_s, site.link),
        widths=widths,
        sweep_tp=first.tp,
        sweep_pp=first.pp,
        sweep=tuple(
            batch_sweep(
                times,
                prompt_tokens=prompt,
                output_tokens=output,
                token_budget=budget,
                most_sequences=first.sequences,
                price_per_hour=site.price_per_hour * num_devices,
                power_w=device.power_w * num_devices,
            )
        ),
    )


def _hidden_from(site: Site, prompt_s: Any, link: LinkTimes) -> int | None:
    layout = site.model.kv_layout(site.precision.kv_dtype)
    return hidden_from(layout.bytes_of, prompt_s, link, min(site.model.max_positions, 1 << 15))


def _width(planner: Planner, parallelism: Parallelism, prompt: int, output: int, budget: int) -> WidthFacts:
    site = planner.site
    tp, pp, ep = parallelism
    memory = worker_memory(site.model, site.device, tp, site.precision, site.limits(budget), pp=pp, ep=ep)
    times = planner.worker(parallelism, budget).times
    return WidthFacts(
        tp=tp,
        pp=pp,
        ep=ep,
        token_budget=budget,
        memory=memory,
        kv_tokens=memory.kv_tokens,
        sequences=memory.sequences(prompt + output),
        ttft_s=prefill_s(times, prompt, budget),
        tpot_s=decode_s(times, 1, prompt + output / 2),
    )


def verdict(answer: Answer, load: Load) -> str:
    """The answer in a sentence."""
    best, other = answer.best, answer.best_other
    share = f"{100 * best.judgement.attainment:.1f} %"
    if not answer.is_met:
        return (
            f"no pools within --max-gpus meet the limits for {100 * load.min_attainment:g} % of the requests; "
            f"{best.candidate} comes closest ({share})"
        )
    lead = "disaggregate" if best.candidate.is_disaggregated else "do not disaggregate"
    text = f"{lead}: {_with_devices(best)} meet the limits of {share} of the requests"
    if other is None:
        return text
    if other.judgement.attainment < load.min_attainment:
        return f"{text}; {_with_devices(other)} do not"
    same = ", the same price" if other.price_per_hour == best.price_per_hour else ""
    return f"{text}; the other way takes {_with_devices(other, same)}"


def _with_devices(judged: Judged, price: str = "") -> str:
    return f"{judged.candidate} ({counted(judged.candidate.num_devices, 'device')}{price})"


def price_per_million_output(judged: Judged, load: Load) -> float:
    """Price of a million output tokens at the load's rate, whole pools paid."""
    return judged.price_per_hour / 3600.0 / (load.rate_per_s * load.mean_output) * 1e6


def joules_per_million_output(judged: Judged, load: Load, power_w: float) -> float:
    """Energy in joules of a million output tokens at the full power of all boards: an upper bound."""
    return judged.candidate.num_devices * power_w / (load.rate_per_s * load.mean_output) * 1e6


def to_json(
    facts: Facts, answer: Answer | None, load: Load, power_w: float, reasons: Sequence[str] = ()
) -> dict[str, Any]:
    """The report as plain values. Infinite and unknown ones are null. `reasons`: for the stages and ranks of the best
    candidate."""
    report: dict[str, Any] = {"facts": asdict(facts)}
    if answer is not None:
        report["verdict"] = verdict(answer, load)
        report["reasons"] = list(reasons)
        report["meets_limits"] = answer.is_met
        report["best"] = _judged(answer.best, load, power_w)
        report["others"] = [_judged(each, load, power_w) for each in answer.judged]
    plain: dict[str, Any] = _finite(report)
    return plain


def _judged(judged: Judged, load: Load, power_w: float) -> dict[str, Any]:
    candidate = judged.candidate
    return {
        "prefill": None if candidate.prefill is None else candidate.prefill._asdict(),
        "decode" if candidate.is_disaggregated else "colocated": candidate.decode._asdict(),
        "num_devices": candidate.num_devices,
        "price_per_hour": judged.price_per_hour,
        "price_per_million_output_tokens": price_per_million_output(judged, load),
        "joules_per_million_output_tokens": joules_per_million_output(judged, load, power_w),
        "judgement": asdict(judged.judgement),
        "estimate": asdict(judged.estimate) | {"attainment": judged.estimate.attainment},
    }


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
