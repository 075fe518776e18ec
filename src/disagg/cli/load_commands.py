"""What `disagg load run`, `sweep` and `compare` do; the options are declared in load.py."""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from disagg.cli.up import build_config
from disagg.client.credentials import is_local
from disagg.cluster.system.temp_folders import temp_folder
from disagg.loadtests.campaign import compare as load_compare
from disagg.loadtests.campaign import report as load_report
from disagg.loadtests.campaign import sweep as load_sweep
from disagg.loadtests.campaign.points import Measurer
from disagg.loadtests.campaign.shapes import ClusterShape, parse_shape, parse_shapes
from disagg.loadtests.generator.load_generator import (
    GeneratorOptions,
    check_credentials,
    end,
    gateway_cores,
    locust_command,
    locust_environment,
    play,
    slo_arguments,
)
from disagg.loadtests.records import read_file
from disagg.loadtests.scenario import Overrides, Scenario, load_scenario, scenario_path
from disagg.loadtests.verdict.goodput import DEFAULT_MIN_ATTAINMENT, Slo, evaluate, slo_grid
from disagg.loadtests.verdict.plots import check_installed as check_plots
from disagg.loadtests.verdict.report import is_met
from disagg.loadtests.verdict.search import SearchConfig
from disagg.proto.errors import ConfigError

EXIT_MET = 0
EXIT_MISSED = 1
EXIT_INVALID = 2
EXIT_INTERRUPTED = 130
PATH_BYTES = 24
"""Bytes of randomness in the path of Locust's page. It goes to Locust in the environment, which other users cannot
read."""

TTFT_SCALES = (0.25, 0.5, 1.0, 2.0)
TPOT_SCALES = (0.75, 1.0, 1.5, 2.0, 4.0)
"""Factors on a scenario's limits that a comparison is scored for, unless limits are named."""


@dataclass(frozen=True, kw_only=True)
class Common:
    """Options of all load commands."""

    scenario: str
    """File or name of the scenario."""
    overrides: Overrides = field(default_factory=Overrides)
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    """Limits in place of the scenario's, `ttft_ms` and `tpot_ms`, in milliseconds."""
    min_attainment: float = DEFAULT_MIN_ATTAINMENT
    generator: GeneratorOptions = field(default_factory=GeneratorOptions)
    html: Path | None = None
    json: Path | None = None

    def load(self) -> tuple[Scenario, Slo]:
        """The scenario and the limits; raises `ConfigError`, also if a report is wanted that could not be drawn."""
        if self.html is not None:
            check_plots()
        try:
            scenario = load_scenario(self.scenario, self.overrides)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        ttft_s = scenario.slo.ttft_s if self.ttft_ms is None else self.ttft_ms / 1e3
        tpot_s = scenario.slo.tpot_s if self.tpot_ms is None else self.tpot_ms / 1e3
        return scenario, Slo(ttft_s=ttft_s, tpot_s=tpot_s)

    @property
    def name(self) -> str:
        """Name of the scenario, for reports."""
        return scenario_path(self.scenario).stem


def run(options: Common, address: str, record: Path | None, console: Console) -> int:
    """Make one run against a running cluster. The exit status is 0 if enough requests met their limits."""
    scenario, slo = options.load()
    with temp_folder("disagg-load-") if record is None else nullcontext() as folder:
        path = folder / "run.jsonl" if folder is not None else record
        assert path is not None
        info = play(scenario, address, path, options.generator, slo=slo, label=options.name)
        records = read_file(path)
    score = evaluate(records, slo, info.window_s)
    load_report.print_run(console, options.name, score, options.min_attainment)
    if options.html is not None:
        page = load_report.run_html(options.name, records, slo, info, options.min_attainment)
        load_report.write_html(options.html, page)
    if options.json is not None:
        load_report.write_json(options.json, [], load_report.run_summary(score))
    if not score.is_valid:
        return EXIT_INVALID
    return EXIT_MET if is_met(score, options.min_attainment) else EXIT_MISSED


def web(options: Common, address: str, record: Path | None, port: int, console: Console) -> int:
    """Serve Locust's page under a random path, with the options filled in, until Ctrl-C."""
    _, slo = options.load()
    check_credentials(address)
    given = options.overrides
    numbers = (
        ("rate", given.rate_per_s),
        ("duration", given.duration_s),
        ("requests", given.num_requests),
        ("seed", given.seed),
    )
    command = [
        *locust_command(),
        f"--host={address}",
        "--web-host=127.0.0.1",
        f"--web-port={port}",
        f"--scenario={scenario_path(options.scenario).resolve()}",
        f"--min-attainment={options.min_attainment:g}",
        *(f"--{name}={value:g}" for name, value in numbers if value is not None),
        *slo_arguments(slo),
        *options.generator.arguments(),
    ]
    if record is not None:
        command.append(f"--record={record.resolve()}")
    path = f"/{secrets.token_urlsafe(PATH_BYTES)}"
    process = subprocess.Popen(command, env={**locust_environment(), "LOCUST_WEB_BASE_PATH": path})
    try:
        console.print(
            f"Locust's page: http://127.0.0.1:{port}{path}/ (Ctrl-C ends it)", highlight=False, soft_wrap=True
        )
        return process.wait()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    finally:
        end(process)


def sweep(
    options: Common, where: ClusterShape | str, search: SearchConfig, directory: Path, attempts: int, console: Console
) -> int:
    """Find the largest served rate of a shape or, given its address, of a running cluster."""
    scenario, slo = options.load()
    measurer = _measurer(options, directory, attempts, console)
    measure = (
        load_sweep.on_running(measurer, where, scenario)
        if isinstance(where, str)
        else load_sweep.on_shape(measurer, where, scenario)
    )
    result = load_sweep.sweep(measure, search, slo, measurer.log)
    load_report.print_sweep(console, result, slo, options.min_attainment)
    if options.html is not None:
        from disagg.loadtests.verdict.report_html import sweep_page

        facts = {"command": load_report.command_line()}
        page = sweep_page(options.name, result.probes, slo, options.min_attainment, facts)
        load_report.write_html(options.html, page)
    if options.json is not None:
        load_report.write_json(options.json, load_report.sweep_rows(result), load_report.sweep_summary(result))
    return EXIT_INVALID if result.invalid else EXIT_MET


def compare(
    options: Common,
    shapes: Sequence[ClusterShape],
    rates_per_s: Sequence[float],
    repeats: int,
    slos: Sequence[Slo],
    directory: Path,
    attempts: int,
    console: Console,
    *,
    has_targets: bool,
) -> int:
    """Measure all shapes, score them for all limits; with targets, the subject anew for each pair of limits. In fp32
    answers that differ are an error."""
    scenario, slo = options.load()
    measurer = _measurer(options, directory, attempts, console)
    grid = [slo, *(other for other in slos or slo_grid(slo, TTFT_SCALES, TPOT_SCALES) if other != slo)]
    parts = [(load_compare.for_limits(shapes, each), [each]) for each in grid] if has_targets else [(shapes, grid)]
    comparisons = []
    for compared, limits in parts:
        try:
            points = load_compare.plan_points(compared, scenario, rates_per_s, repeats)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        recordings = load_compare.measure_all(measurer, points)
        comparison = load_compare.compare(recordings, compared, limits, options.min_attainment)
        load_report.print_comparison(console, comparison, shapes[0].name, options.min_attainment)
        comparisons.append(comparison)
        if options.html is not None:
            page = load_report.comparison_html(comparison, options.name, shapes[0].name, options.min_attainment)
            number = f"-{len(comparisons)}" if has_targets else ""
            load_report.write_html(options.html.with_stem(options.html.stem + number), page)
    if options.json is not None:
        load_report.write_comparison_json(options.json, comparisons, options.name, options.min_attainment)
    is_exact = all(shape.config.model.dtype == "float32" for shape in shapes)
    if is_exact and any(each.difference.num_different for each in comparisons):
        console.print("error: answers in float32 must be the same from every shape", style="red", highlight=False)
        return EXIT_MISSED
    return EXIT_INVALID if any(each.invalid for each in comparisons) else EXIT_MET


def _measurer(options: Common, directory: Path, attempts: int, console: Console) -> Measurer:
    return Measurer(
        directory=directory,
        options=options.generator,
        log=lambda line: console.print(line, highlight=False, markup=False, soft_wrap=True),
        command=load_report.command_line(),
        attempts=attempts,
    )


# ---------------------------------------------------------------- what is given as text


def shapes_of(names: Sequence[str], config: Path | None, model: str | None) -> list[ClusterShape]:
    """Shapes on one base configuration; raises `ConfigError`."""
    return parse_shapes(list(names), build_config(config, model=model))


def shape_of(name: str, config: Path | None, model: str | None) -> ClusterShape:
    """One shape on that configuration; raises `ConfigError`."""
    return parse_shape(name, build_config(config, model=model))


def search_of(start_rate: float, max_rate: float, min_attainment: float) -> SearchConfig:
    """Options of the search; raises `ConfigError`."""
    try:
        return SearchConfig(
            start_rate_per_s=start_rate,
            min_rate_per_s=min(start_rate, SearchConfig.min_rate_per_s),
            max_rate_per_s=max_rate,
            min_attainment=min_attainment,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None


def slos_of(texts: Sequence[str]) -> list[Slo]:
    """Limits from texts `TTFT_MS:TPOT_MS`, with `-` for no limit; raises `ConfigError`."""
    return [_slo_of(text) for text in texts]


def _slo_of(text: str) -> Slo:
    parts = text.split(":")
    try:
        ttft_s, tpot_s = (None if part == "-" else float(part) / 1e3 for part in parts)
        return Slo(ttft_s=ttft_s, tpot_s=tpot_s)
    except ValueError:
        raise ConfigError(f"--slo: expected TTFT_MS:TPOT_MS such as 4000:12 or -:12; got {text!r}") from None


def cores_of(text: str, address: str | None) -> tuple[int, ...]:
    """Cores from `auto` (the gateway's core, if that is on this machine), `none`, or `0,1`; raises `ConfigError`."""
    if text == "auto":
        return gateway_cores() if address is None or is_local(address) else ()
    if text == "none":
        return ()
    try:
        return tuple(int(core) for core in text.split(","))
    except ValueError:
        raise ConfigError(f"--generator-cores: expected auto, none or numbers such as 0,1; got {text!r}") from None
