"""`disagg plan`: reads what is given by name or file, and prints what `simulator/plan/` makes of it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from disagg.autoscaler.queueing import Lengths, representative
from disagg.cli.planning.calibrate import read_recording
from disagg.cli.planning.perf_tables import read_perf_tables
from disagg.cli.planning.tables import plan_page, pools_table, sweep_table, width_table
from disagg.cluster.models.catalog import resolve_model
from disagg.engine.checkpoint.checkpoint import read_config_file, read_model_config
from disagg.loadtests.scenario import Overrides, Scenario, load_scenario
from disagg.loadtests.verdict.goodput import Slo
from disagg.loadtests.verdict.plots import check_installed
from disagg.loadtests.verdict.report import print_table
from disagg.loadtests.workload.workload import Outline, TraceWorkload, outline
from disagg.proto.errors import ConfigError
from disagg.proto.wording import counted
from disagg.simulator.durations.calibration_file import StepRecording
from disagg.simulator.durations.devices import Device, find_device
from disagg.simulator.durations.fitted import fit
from disagg.simulator.durations.model_shapes import MODEL_SHAPES, MXFP4, ModelShape, known_shape, shape_of
from disagg.simulator.durations.parallelism import Parallelism
from disagg.simulator.durations.perf_tables import PerfTables
from disagg.simulator.durations.roofline import RooflineStepTimes, check_parallelism
from disagg.simulator.durations.stages import StagedStepTimes, stage_layers
from disagg.simulator.plan.candidates import Answer, Candidate, Judge, Judgement
from disagg.simulator.plan.judge import PLAN_ENGINE, SimulatedJudge, lengths_of, steady_requests
from disagg.simulator.plan.load import Load
from disagg.simulator.plan.memory import BLOCK_TOKENS, GB, Precision, expert_choices, stage_counts, widths
from disagg.simulator.plan.pools import Planner
from disagg.simulator.plan.reasons import reasons
from disagg.simulator.plan.report import Facts, facts_of, to_json, verdict
from disagg.simulator.plan.search import best_pools
from disagg.simulator.plan.workers import Site, TimesOf
from disagg.simulator.world.settings import EngineKind
from disagg.step_times.interface import LinkTimes, StepTimes

LINK_LATENCY_S = 1e-4
"""Assumed latency of a message between workers, in seconds."""
GPU_BUDGETS: tuple[int, ...] = (512, 2048, 8192)
CPU_BUDGETS: tuple[int, ...] = (128, 256, 512)
"""Token budgets of a step that are tried."""
EXIT_MET, EXIT_MISSED = 0, 1


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The options as they were typed."""

    model: str
    device: str
    tp: str | None = None
    pp: str | None = None
    ep: int = 1
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    scenario: str | None = None
    requests: int | None = None
    rate: float | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    min_attainment: float = 0.9
    max_gpus: int = 64
    price: float | None = None
    dtype: str = "bfloat16"
    weight_dtype: str | None = None
    kv_dtype: str | None = None
    perf_tables: Path | None = None
    step_times: Path | None = None
    step_overhead_ms: float | None = None
    link_gb_s: float | None = None
    token_budgets: str | None = None
    mode: str = "any"
    max_simulated: int = 12
    simulate: bool = True
    json: Path | None = None
    html: Path | None = None


def run_plan(options: PlanOptions, console: Console) -> int:
    """Print the plan, and return the exit status: 0, or 1 where no pools meet the limits. Raises `ConfigError` that
    names the flag."""
    _check_numbers(options)
    if options.html is not None:
        check_installed()
    site, source = site_of(options)
    load, requests = load_of(options, site.model)
    planner = Planner(site, load)
    facts = facts_of(planner)
    lines = lines_of(planner, facts, source, is_example_price=options.price is None)
    print_facts(console, lines, facts, load)
    answer: Answer | None = None
    engine: EngineKind | None = None
    why: list[str] = []
    if options.rate is not None or options.scenario is not None:
        judge = _judge(options, planner, requests, console)
        engine = None if judge is None else PLAN_ENGINE
        answer = best_pools(planner, judge, options.max_simulated)
        why = reasons(planner, answer.best)
        print_answer(console, answer, load, engine, why)
    else:
        say(console, "next: --rate, --ttft-ms and --tpot-ms, for the pools that serve a load")
    if options.json is not None:
        report = to_json(facts, answer, load, site.device.power_w, why)
        _write(options.json, json.dumps(report, indent=1) + "\n", "--json")
    if options.html is not None:
        title = f"{site.model.name} on {site.device.name}"
        _write(options.html, plan_page(title, lines, facts, answer, load, engine, why), "--html")
    return EXIT_MET if answer is None or answer.is_met else EXIT_MISSED


def _write(file: Path, text: str, flag: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{flag}: {file} cannot be written: {error.strerror}") from None


def say(console: Console, line: str) -> None:
    """Print one line as it is."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


# ---------------------------------------------------------------- what is given


def _check_numbers(options: PlanOptions) -> None:
    check_parallelism(ep=options.ep)
    for flag, limit_ms in (("--ttft-ms", options.ttft_ms), ("--tpot-ms", options.tpot_ms)):
        if limit_ms is not None and not 0.0 < limit_ms < math.inf:
            raise ConfigError(f"{flag}: expected a time above 0, not {limit_ms:g}")
    if options.price is not None and not 0.0 <= options.price < math.inf:
        raise ConfigError(f"--price: expected at least 0, not {options.price:g}")
    if options.link_gb_s is not None and not 0.0 < options.link_gb_s < math.inf:
        raise ConfigError(f"--link-gb-s: expected a bandwidth above 0, not {options.link_gb_s:g}")


def shape_named(name: str) -> ModelShape:
    """Shape of a well-known model, a `config.json`, a checkpoint folder, or an imported model. Raises `ConfigError`."""
    if (known := known_shape(name)) is not None:
        return known
    path = Path(name).expanduser()
    if path.is_file():
        return shape_of(read_config_file(path), path.parent.name or path.stem)
    if path.is_dir():
        return shape_of(read_model_config(path), path.resolve().name)
    try:
        folder = resolve_model(name)
    except ConfigError:
        raise ConfigError(
            f"--model: {name!r} is no file, no folder, and no imported model, and not one of {', '.join(MODEL_SHAPES)}"
        ) from None
    return shape_of(read_model_config(folder), name)


def numbers_of(text: str, flag: str) -> tuple[int, ...]:
    """Numbers from `1,2,4`; raises `ConfigError` that names the flag."""
    try:
        numbers = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise ConfigError(f"{flag}: expected whole numbers such as 1,2,4; got {text!r}") from None
    if any(number < 1 for number in numbers):
        raise ConfigError(f"{flag}: expected numbers of at least 1; got {text!r}")
    return numbers


def site_of(options: PlanOptions) -> tuple[Site, str]:
    """The available devices, and the source of their step times. Raises `ConfigError` that names the flag."""
    device = find_device(options.device)
    model = shape_named(options.model)
    precision = Precision(
        dtype=options.dtype,
        weight_dtype=options.weight_dtype or options.dtype,
        kv_dtype=options.kv_dtype or options.dtype,
    )
    if precision.weight_dtype == "fp8" and model.experts is not None:
        raise ConfigError(f"--weight-dtype: fp8 is not supported for experts, which {model.name} has")
    if precision.weight_dtype == MXFP4 and (model.experts is None or device.max_tp > 1):
        raise ConfigError(f"--weight-dtype: mxfp4 is for experts on a CPU, not for {model.name} on {device.name}")
    tps = tuple(widths(model, device)) if options.tp is None else numbers_of(options.tp, "--tp")
    for tp in tps:
        if not expert_choices(model, tp):
            model.check_tp(tp)
    if precision.weight_dtype == MXFP4 and tps != (1,):
        raise ConfigError("--tp: --weight-dtype mxfp4 is for workers of one rank")
    pps = _stages(options, model, device)
    times_of, source = _times(options, model, device, precision, tps)
    budgets = CPU_BUDGETS if device.max_tp == 1 else GPU_BUDGETS
    if options.token_budgets is not None:
        budgets = numbers_of(options.token_budgets, "--token-budgets")
    if min(budgets) < 2:
        raise ConfigError("--token-budgets: a step has at least 2 tokens")
    bandwidth = device.network_bandwidth if options.link_gb_s is None else options.link_gb_s * GB
    modes = {"any": (True, False), "disaggregated": (True,), "colocated": (False,)}
    if options.mode not in modes:
        raise ConfigError(f"--mode: expected {', '.join(modes)}; got {options.mode!r}")
    site = Site(
        model=model,
        device=device,
        times_of=times_of,
        link=LinkTimes(bandwidth_bytes_per_s=bandwidth, latency_s=LINK_LATENCY_S),
        tps=tps,
        token_budgets=budgets,
        price_per_hour=device.example_price_per_hour if options.price is None else options.price,
        max_devices=options.max_gpus,
        pps=pps,
        precision=precision,
        modes=modes[options.mode],
    )
    return site, source


def _stages(options: PlanOptions, model: ModelShape, device: Device) -> tuple[int, ...]:
    """The numbers of stages that may be used. Raises `ConfigError`."""
    if options.pp is None:
        is_one = options.step_times is not None or options.weight_dtype == MXFP4
        return (1,) if is_one else tuple(stage_counts(model, device))
    pps = numbers_of(options.pp, "--pp")
    if options.weight_dtype == MXFP4 and pps != (1,):
        raise ConfigError("--pp: --weight-dtype mxfp4 is for workers of one stage")
    if options.step_times is not None and pps != (1,):
        raise ConfigError("--pp: --step-times was measured with one stage; leave one of them out")
    for pp in pps:
        stage_layers(model, pp)
    return pps


def _times(
    options: PlanOptions, model: ModelShape, device: Device, precision: Precision, tps: Sequence[int]
) -> tuple[TimesOf, str]:
    if options.step_times is not None:
        recording = read_recording(options.step_times)
        _check_recording(recording, options, model, precision, tps)
        fitted = fit(recording.samples, expert_share=recording.expert_share)
        name = getattr(fitted, "name", "")
        return (
            lambda parallelism: fitted,
            f"{len(recording.samples)} steps measured on {recording.machine} ({name} fit)",
        )
    tables = PerfTables()
    if options.perf_tables is not None:
        tables = read_perf_tables(options.perf_tables, kv_dtype=precision.kv_dtype)
    overhead_s = None if options.step_overhead_ms is None else options.step_overhead_ms / 1e3
    whole: dict[tuple[int, bool], RooflineStepTimes] = {}
    staged: dict[Parallelism, StagedStepTimes] = {}

    def times_of(parallelism: Parallelism) -> StepTimes:
        tp, pp, ep = parallelism
        if (tp, ep) not in whole:
            whole[tp, ep] = RooflineStepTimes(
                model,
                device,
                tp=tp,
                dtype=precision.dtype,
                weight_dtype=precision.weight_dtype,
                kv_dtype=precision.kv_dtype,
                tables=tables,
                step_s=overhead_s,
                ep=ep,
            )
        if pp == 1:
            return whole[tp, ep]
        if parallelism not in staged:
            staged[parallelism] = StagedStepTimes(whole[tp, ep], pp)
        return staged[parallelism]

    corrected: tuple[str, ...] = ()
    if tps:
        widest = max(tps)
        times_of(Parallelism(widest, 1, expert_choices(model, widest)[0]))
        (first,) = whole.values()
        corrected = first.corrected
    if not corrected:
        return times_of, "roofline of the data sheet's numbers"
    return times_of, f"roofline, corrected by {tables.source} for {', '.join(corrected)}"


def _check_recording(
    recording: StepRecording, options: PlanOptions, model: ModelShape, precision: Precision, tps: Sequence[int]
) -> None:
    """Check that the recording was measured with the planned model, dtype and ranks. Raises `ConfigError`."""
    name = f"--step-times: {options.step_times}"
    expected = model.kv_bytes_per_token(recording.dtype) if recording.dtype in ("bfloat16", "float16", "float32") else 0
    if recording.kv_bytes_per_token not in (0, expected):
        raise ConfigError(
            f"{name} was measured with {recording.model} ({recording.kv_bytes_per_token} bytes of KV a token), not "
            f"{model.name} ({expected})"
        )
    if recording.dtype != precision.dtype:
        raise ConfigError(f"{name} was measured with dtype {recording.dtype}; --dtype is {precision.dtype}")
    if tuple(tps) != (recording.tp,):
        raise ConfigError(f"{name} was measured with {counted(recording.tp, 'rank')}; give --tp {recording.tp}")


def load_of(options: PlanOptions, model: ModelShape) -> tuple[Load, Outline | None]:
    """The load that is planned for, and the very requests of a scenario. Raises `ConfigError` that names the flag."""
    limits = Slo(
        ttft_s=None if options.ttft_ms is None else options.ttft_ms / 1e3,
        tpot_s=None if options.tpot_ms is None else options.tpot_ms / 1e3,
    )
    if options.scenario is None:
        if options.prompt_tokens is None or options.output_tokens is None:
            raise ConfigError("--prompt-tokens, --output-tokens: give both, or --scenario")
        kinds: tuple[Lengths, ...] = (Lengths(options.prompt_tokens, options.output_tokens),)
        rate = 1.0 if options.rate is None else options.rate
        return Load(rate_per_s=rate, kinds=kinds, slo=limits, min_attainment=options.min_attainment), None
    if options.prompt_tokens is not None or options.output_tokens is not None:
        raise ConfigError("--scenario: it has its own lengths; leave --prompt-tokens and --output-tokens out")
    try:
        scenario = load_scenario(options.scenario, Overrides(rate_per_s=options.rate, num_requests=options.requests))
        requests = _outlined(scenario, model)
    except (ValueError, OSError) as error:
        raise ConfigError(f"--scenario: {error}") from None
    slo = Slo(ttft_s=limits.ttft_s or scenario.slo.ttft_s, tpot_s=limits.tpot_s or scenario.slo.tpot_s)
    kinds = representative(lengths_of(requests.requests))
    rate = len(requests.requests) / requests.window_s
    return Load(rate_per_s=rate, kinds=kinds, slo=slo, min_attainment=options.min_attainment), requests


def _outlined(scenario: Scenario, model: ModelShape) -> Outline:
    workload = scenario.workload
    if isinstance(workload, TraceWorkload) and not Path(workload.path).is_file():
        raise ConfigError(f"workload.path: there is no {workload.path}")
    return outline(workload, scenario.arrivals, max_model_len=model.max_positions)


def _judge(options: PlanOptions, planner: Planner, requests: Outline | None, console: Console) -> Judge | None:
    if not options.simulate:
        return None
    counted_from_s = 0.0
    if requests is None:
        requests, counted_from_s = steady_requests(planner.load)
    judge = SimulatedJudge(planner, requests, counted_from_s=counted_from_s)
    most = f"up to {options.max_simulated} candidates"
    if num_staged := planner.most_staged(options.max_simulated):
        most += f" and {num_staged} with more stages"
    say(console, f"simulating {most}, {len(requests.requests)} requests each")

    def judged(candidate: Candidate) -> Judgement:
        with console.status(str(candidate)):
            return judge(candidate)

    return judged


# ---------------------------------------------------------------- what is printed


def lines_of(planner: Planner, facts: Facts, source: str, *, is_example_price: bool) -> list[str]:
    """Needs of the model and performance of a worker, each as `subject: text`."""
    site = planner.site
    batch = "never with this context" if facts.critical_batch is None else f"from a batch of {facts.critical_batch} on"
    hidden = f"from {facts.hidden_from_tokens} tokens on" if facts.hidden_from_tokens else "at no length"
    price = f"{site.price_per_hour:g} an hour" + (" (an example; set --price)" if is_example_price else "")
    return [
        f"{site.model.name} on {site.device.name}: {facts.parameters / 1e9:.2f} billion parameters, "
        f"{facts.weight_bytes / GB:.1f} GB of weights, {facts.kv_bytes_per_token} bytes of KV a token"
        f"{_kept_of_old_tokens(site.model, site.precision)}",
        f"step times: {source}",
        f"price of a device: {price}",
        f"ridge: {facts.ridge:.0f} FLOP/byte; prompts are bound by arithmetic from {facts.critical_prompt} tokens on "
        f"(this one has {facts.prefill_intensity:.0f} FLOP/byte), decode {batch} "
        f"(from {facts.critical_batch_without_context} on without any)",
        f"KV of a prompt: {facts.prompt_kv_bytes / 1e6:.1f} MB, {facts.transfer_s * 1e3:.2f} ms at "
        f"{site.link.bandwidth_bytes_per_s / GB:g} GB/s; the part behind the last chunk, which a stream waits for, is "
        f"{facts.exposed_s * 1e3:.2f} ms; shorter than the prefill {hidden}, for this prompt from "
        f"{facts.hide_bytes_per_s / GB:.2f} GB/s on",
        *_tier_lines(site.model, site.precision, facts),
        *_memory_lines(facts),
    ]


def _tier_lines(model: ModelShape, precision: Precision, facts: Facts) -> list[str]:
    """What tiers hold of the KV, and how quick they, or other workers, have to be. None for models with windows, which
    have neither."""
    if len(model.kv_layout(precision.kv_dtype).groups) > 1:
        return []
    return [
        f"KV in tiers: 1 GiB of host memory or disk holds {(1 << 30) // facts.kv_bytes_per_token} tokens; a prompt is "
        f"loaded, or fetched from another worker, sooner than it is computed at more than "
        f"{facts.hide_bytes_per_s / GB:.2f} GB/s"
    ]


def _kept_of_old_tokens(model: ModelShape, precision: Precision) -> str:
    """What a model with windows keeps of a token that has left them."""
    groups = model.kv_layout(precision.kv_dtype).groups
    return f", {groups[0].bytes_per_token} of one that has left all windows" if len(groups) > 1 else ""


def _memory_lines(facts: Facts) -> list[str]:
    """The caches of each device for a model with windows, and what experts take."""
    lines = []
    for width in facts.widths:
        memory = width.memory
        parts = [
            f"KV of {f'the last {group.window}' if group.window else 'all'} tokens in {group.num_blocks} blocks "
            f"({group.num_blocks * BLOCK_TOKENS} tokens, {group.num_bytes / GB:.2f} GB)"
            for group in memory.groups
        ]
        if memory.scratch_bytes:
            parts.append(
                f"{memory.expert_bytes / GB:.2f} GB of experts and {memory.scratch_bytes / GB:.2f} GB to compute them"
            )
        if parts:
            name = Parallelism(width.tp, width.pp, width.ep)
            lines.append(f"memory of each device, {name}: {', '.join(parts)}")
    return lines


def print_facts(console: Console, lines: Sequence[str], facts: Facts, load: Load) -> None:
    """Print the needs of the model and the performance of a worker."""
    for line in lines:
        say(console, line)
    for shown in (width_table(facts, load), sweep_table(facts)):
        say(console, "")
        print_table(console, shown)


def print_answer(console: Console, answer: Answer, load: Load, engine: EngineKind | None, why: Sequence[str]) -> None:
    """Print the table of pools, the verdict, and the reasons for the stages and ranks of the best candidate."""
    say(console, "")
    print_table(console, pools_table(answer, load, engine))
    say(console, verdict(answer, load))
    for line in why:
        say(console, line)
