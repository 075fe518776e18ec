"""What `disagg simulate` does: a scenario, a configuration and step times in; the report of a load test out."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from disagg.cluster.config.cluster_config import ClusterConfig, PoolConfig, active_pools, load_config, override
from disagg.cluster.control.plan import router_config, worker_config
from disagg.cluster.system.provenance import commit
from disagg.engine.cache_groups import PoolLimits, most_blocks, window_pools
from disagg.engine.config import device_defaults, resolved_speculation
from disagg.loadtests.campaign.report import command_line, print_run, run_summary, write_html, write_json
from disagg.loadtests.records import RequestRecord, to_line
from disagg.loadtests.scenario import Overrides, load_scenario, scenario_path
from disagg.loadtests.verdict import report_html
from disagg.loadtests.verdict.goodput import Score, Slo, evaluate, meets
from disagg.loadtests.verdict.plots import Chart, Series, check_installed
from disagg.loadtests.verdict.report import is_met
from disagg.proto.errors import ConfigError
from disagg.proto.ids import WorkerId
from disagg.simulator.cluster import Result, Sample, SimulatedCluster
from disagg.simulator.world.phases import PlannedLoad, load_of_phases, load_of_scenario, make_phases
from disagg.simulator.world.settings import ClusterSpec, EngineKind, PoolSpec
from disagg.simulator.world.timing import Timing, read_timing
from disagg.simulator.world.users import LOAD_TEST, Habits, UserRequest

EXIT_MET, EXIT_MISSED = 0, 1
AS_PLANNED = Overrides()
MAX_BYTES = 64 << 20
"""Largest size of a file of step times, in bytes."""
_KEEPS_UP = 1.1
"""Factor on the time of the arrivals. If the last answer ends later than this plus the median latency, a queue has
grown."""


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """The options as they were typed."""

    scenario: str
    cluster: Path | None
    times: Path
    engine: EngineKind = "exact"
    policy: str | None = None
    overrides: Overrides = AS_PLANNED
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    min_attainment: float = 0.9
    habits: Habits = LOAD_TEST
    records: Path | None = None
    html: Path | None = None
    json: Path | None = None


def run_simulate(options: SimulateOptions, console: Console) -> int:
    """Simulate and report; returns the exit status: 0 where enough requests met their limits, else 1. Raises
    `ConfigError`."""
    if options.html is not None:
        check_installed()
    config = load_config(options.cluster)
    if options.policy is not None:
        config = override(config, {"placement.policy": options.policy})
    timing = read_times(options.times)
    spec = cluster_spec(config, timing, options.engine)
    load, slo = planned_load(options, spec)
    try:
        cluster = SimulatedCluster(spec, load.requests, options.habits)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    gc.disable()  # nothing of a run is garbage in a cycle, and there are millions of objects to look at
    try:
        result = cluster.run()
    finally:
        gc.enable()
    if result.problems:
        raise RuntimeError(f"the simulation is not sound: {'; '.join(result.problems[:5])}")
    return _report(options, load, slo, result, console)


# ---------------------------------------------------------------- what is simulated


def _cache_bytes(name: str, pool: PoolConfig) -> int:
    wanted = pool.kv_cache_bytes
    meant = device_defaults(pool.device).kv_cache_bytes if wanted == "auto" else wanted
    if meant == "auto":
        raise ConfigError(f"pools.{name}.kv_cache_bytes: auto is measured on a GPU; a simulation needs a number")
    return meant


def cluster_spec(config: ClusterConfig, timing: Timing, engine: EngineKind, sample_s: float = 1.0) -> ClusterSpec:
    """The cluster of a configuration. Workers of several ranks and stages have the memory of all of them, divided
    evenly, and step as one. Raises `ConfigError` for workers that cannot hold a single KV block, for several models,
    and for what the engine does not simulate."""
    if config.models:
        raise ConfigError("models: a simulation is of one model; give it a file with the model and pools of one")
    pools = []
    for name, pool in active_pools(config):
        worker = worker_config(config, name, 0, "fake", range(1024))
        speculation = resolved_speculation(pool.speculation, pool.device, is_fake=False)
        limits = PoolLimits(worker.num_places, worker.step_tokens)
        group_bytes = tuple(group.bytes_per_token * worker.block_size for group in timing.kv_layout.groups)
        pools_of_one = (1, *window_pools(timing.kv_layout, 1, worker.block_size, limits))
        block_bytes = sum(map(mul, pools_of_one, group_bytes))
        num_blocks = pool.num_blocks or most_blocks(
            timing.kv_layout, worker.block_size, limits, _cache_bytes(name, pool) * worker.num_ranks, group_bytes
        )
        if num_blocks < 1:
            raise ConfigError(
                f"pools.{name}.kv_cache_bytes: {_cache_bytes(name, pool)} bytes hold no block of {worker.block_size} "
                f"tokens of this model, which takes {block_bytes} bytes"
            )
        pools.append(
            PoolSpec(
                name=name,
                size=pool.size,
                worker=msgspec.structs.replace(worker, tp=1, pp=1),
                num_blocks=num_blocks,
                times=timing.of_pool(name, has_drafts=speculation.method != "off"),
                cold_start_s=timing.cold_start_s,
            )
        )
    longest = min(pool.num_blocks * pool.worker.block_size for pool in pools)
    try:
        return ClusterSpec(
            pools=pools,
            kv_layout=timing.kv_layout,
            max_model_len=min(longest, config.model.max_model_len or longest),
            router=router_config(config),
            link=timing.link,
            overheads=timing.overheads,
            tier_times=timing.tiers,
            sharing=timing.sharing,
            gateway_neighbour=WorkerId(f"{pools[0].name}-0"),
            engine=engine,
            sample_s=sample_s,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None


def planned_load(options: SimulateOptions, spec: ClusterSpec) -> tuple[PlannedLoad, Slo]:
    """The requests of users, and the limits that all of them are scored against (with phases: each its own). Raises
    `ConfigError`."""
    path = scenario_path(options.scenario)
    try:
        raw = _phases_of(path)
        if raw is not None:
            return load_of_phases(make_phases(raw), spec.max_model_len), Slo()
        scenario = load_scenario(options.scenario, options.overrides)
        slo = Slo(
            ttft_s=scenario.slo.ttft_s if options.ttft_ms is None else options.ttft_ms / 1e3,
            tpot_s=scenario.slo.tpot_s if options.tpot_ms is None else options.tpot_ms / 1e3,
        )
        return load_of_scenario(scenario, slo, spec.max_model_len), slo
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _phases_of(path: Path) -> object | None:
    """Value of the key `phases` of a file, or None. Other mistakes in the file are left to `load_scenario`."""
    try:
        raw: Any = msgspec.yaml.decode(path.read_bytes())
    except (OSError, UnicodeDecodeError, msgspec.DecodeError):
        return None
    return raw.get("phases") if isinstance(raw, dict) else None


def read_times(path: Path) -> Timing:
    """Read a file of step times; raises `ConfigError`."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"--times: {path} has more than {MAX_BYTES} bytes")
        return read_timing(msgspec.yaml.decode(path.read_bytes()))
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise ConfigError(f"--times: {path} cannot be read ({' '.join(str(error).split())})") from None
    except ValueError as error:
        raise ConfigError(f"--times: {path}: {error}") from None


# ---------------------------------------------------------------- what came out


def _report(options: SimulateOptions, load: PlannedLoad, slo: Slo, result: Result, console: Console) -> int:
    name = scenario_path(options.scenario).stem
    score = evaluate(result.records, slo, load.window_s)
    is_phased = any(request.targets != slo for request in load.requests)
    print_run(console, name, score, options.min_attainment)
    for line in _notes(load, result, score, is_phased=is_phased):
        console.print(line, markup=False, highlight=False)
    if options.records is not None:
        _write_records(options.records, result.records)
    if options.html is not None:
        write_html(options.html, _page(options, name, load, slo, result))
    if options.json is not None:
        rows = [sample._asdict() for sample in result.samples]
        write_json(options.json, rows, {**run_summary(score), "own_limits_attainment": own_attainment(load, result)})
    if is_phased:
        return EXIT_MET if own_attainment(load, result) >= options.min_attainment else EXIT_MISSED
    return EXIT_MET if is_met(score, options.min_attainment) else EXIT_MISSED


def own_attainment(load: PlannedLoad, result: Result) -> float:
    """Share of requests that met their own limits."""
    good = sum(meets(record, request.targets) for record, request in zip(result.records, load.requests, strict=True))
    return good / len(load.requests)


def _notes(load: PlannedLoad, result: Result, score: Score, *, is_phased: bool) -> list[str]:
    """Notes on what the tables do not show."""
    lines = [
        "placed: " + ", ".join(f"{count} {kind}" for kind, count in sorted(result.placements.items()) if count),
        f"simulated {result.end_s:.1f} s with {result.num_events} events; "
        f"{result.kv_bytes_moved / 1e9:.2f} GB of KV moved",
    ]
    if is_phased:
        lines.append(f"{own_attainment(load, result):.1%} of all requests met the limits of their phase")
        by_phase: dict[str, list[tuple[RequestRecord, UserRequest]]] = {}
        for record, request in zip(result.records, load.requests, strict=True):
            by_phase.setdefault(record.group, []).append((record, request))
        for phase, pairs in by_phase.items():
            share = sum(meets(record, request.targets) for record, request in pairs) / len(pairs)
            lines.append(f"{phase}: {share:.1%} of {len(pairs)} requests met {pairs[0][1].targets}")
    ended = max((record.end_s or 0.0 for record in result.records if record.status == "ok"), default=0.0)
    if score.num_ok == 0:
        lines.append("The cluster answered none of the requests.")
    elif score.num_refused > 0.01 * score.num_due or ended > load.window_s * _KEEPS_UP + score.e2e.p50:
        rate, served = score.num_due / load.window_s, score.num_ok / max(load.window_s, ended)
        lines.append(
            f"The cluster does not keep up: {rate:.3g} requests/s came, it answered {served:.3g}/s, refused "
            f"{score.num_refused} and took until {ended:.0f} s for what came in {load.window_s:.0f} s."
        )
    return lines


def _write_records(path: Path, records: Sequence[RequestRecord]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.writelines(map(to_line, records))


def _page(options: SimulateOptions, name: str, load: PlannedLoad, slo: Slo, result: Result) -> str:
    facts = {
        "simulated": f"engine {options.engine}, cluster {options.cluster or 'defaults'}, times {options.times}",
        "commit": commit(),
        "command": command_line(),
    }
    return report_html.run_page(
        f"{name} (simulated)",
        result.records,
        slo,
        load.window_s,
        min_attainment=options.min_attainment,
        facts=facts,
        more_charts=series_charts(result.samples),
    )


def series_charts(samples: Sequence[Sample]) -> list[Chart]:
    """Queue, KV, workers and reuse over time."""

    def series(label: str, value: str) -> Series:
        return Series(name=label, points=[(sample.time_s, float(getattr(sample, value))) for sample in samples])

    def chart(title: str, unit: str, *shown: Series) -> Chart:
        return Chart(title=title, x_label="time (s)", y_label=unit, series=shown)

    reuse = [(s.time_s, s.cached_tokens / s.prompt_tokens) for s in samples if s.prompt_tokens]
    return [
        chart("requests", "requests", series("waiting", "num_queued"), series("in flight", "num_in_flight")),
        chart("KV blocks", "share", series("held or promised", "kv_use"), series("cached", "kv_cached")),
        chart(
            "workers", "workers", series("up", "num_up"), series("busy", "num_busy"), series("starting", "num_starting")
        ),
        chart("prompt tokens found in a cache", "share", Series(name="so far", points=reuse)),
    ]
