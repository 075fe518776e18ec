"""The options of `disagg load run | sweep | compare`. What they do is in load_commands.py."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from disagg.cluster.address import DEFAULT_ADDRESS
from disagg.cluster.terminal import AddressOption, console, examples

load_app = typer.Typer(
    help="Load tests: goodput against limits on TTFT and TPOT (needs the extra `load`).", no_args_is_help=True
)

ScenarioOption = Annotated[str, typer.Option("--scenario", "-s", help="File, or name of one that comes with disagg.")]
RateOption = Annotated[float | None, typer.Option("--rate", help="Requests per second, instead of the scenario's.")]
DurationOption = Annotated[float | None, typer.Option("--duration", help="Seconds of arrivals.")]
RequestsOption = Annotated[int | None, typer.Option("--requests", help="Number of requests.", min=1)]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Of prompts and arrivals.")]
TtftOption = Annotated[float | None, typer.Option("--slo-ttft-ms", help="Limit of the time to first token.")]
TpotOption = Annotated[float | None, typer.Option("--slo-tpot-ms", help="Limit of the time per further token.")]
AttainmentOption = Annotated[
    float, typer.Option("--min-attainment", help="Share of requests that must meet both.", min=0.01, max=1.0)
]
CoresOption = Annotated[
    str, typer.Option("--generator-cores", help="'auto' (the gateway's, if it is on this machine), 'none', or 0,1.")
]
NiceOption = Annotated[int, typer.Option("--generator-nice", help="Niceness of the generator.", min=-20, max=19)]
TimeoutOption = Annotated[float | None, typer.Option("--request-timeout-s", help="Deadline of each request.")]
HtmlOption = Annotated[Path | None, typer.Option("--html", help="Write the report with plots to this file.")]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")]
ConfigOption = Annotated[Path | None, typer.Option("--config", "-c", help="Configuration that all shapes share.")]
ModelOption = Annotated[str | None, typer.Option("--model", "-m", help="Name of an imported model, or 'fake'.")]
OutOption = Annotated[Path, typer.Option("--out", "-o", help="Folder of recordings; complete ones are kept.")]
AttemptsOption = Annotated[int, typer.Option("--attempts", help="At most so many tries of a run that was late.", min=1)]

DEFAULT_SCENARIO = "interactive"


@load_app.command(
    epilog=examples(
        "disagg load run --scenario interactive --rate 2 --html run.html",
        "disagg load run --scenario shared-prefix --web",
    )
)
def run(
    scenario: ScenarioOption = DEFAULT_SCENARIO,
    address: AddressOption = DEFAULT_ADDRESS,
    rate: RateOption = None,
    duration: DurationOption = None,
    requests: RequestsOption = None,
    seed: SeedOption = None,
    slo_ttft_ms: TtftOption = None,
    slo_tpot_ms: TpotOption = None,
    min_attainment: AttainmentOption = 0.9,
    record: Annotated[Path | None, typer.Option("--record", help="Keep the records in this .jsonl file.")] = None,
    html: HtmlOption = None,
    json: JsonOption = None,
    web: Annotated[bool, typer.Option("--web", help="Open Locust's page instead of running at once.")] = False,
    web_port: Annotated[int, typer.Option("--web-port", help="Of Locust's page.", min=1, max=65535)] = 8089,
    generator_cores: CoresOption = "auto",
    generator_nice: NiceOption = -10,
    request_timeout_s: TimeoutOption = None,
) -> None:
    """Play a scenario against a running cluster. Exit status: 0 limits met, 1 missed, 2 not valid."""
    from disagg.cluster import load_commands as commands
    from disagg.cluster.load_generator import GeneratorOptions
    from disagg.loadtests.scenario import Overrides

    options = commands.Common(
        scenario=scenario,
        overrides=Overrides(rate_per_s=rate, duration_s=duration, num_requests=requests, seed=seed),
        ttft_ms=slo_ttft_ms,
        tpot_ms=slo_tpot_ms,
        min_attainment=min_attainment,
        generator=GeneratorOptions(
            cores=commands.cores_of(generator_cores, address), nice=generator_nice, request_timeout_s=request_timeout_s
        ),
        html=html,
        json=json,
    )
    status = (
        commands.web(options, address, record, web_port, console())
        if web
        else commands.run(options, address, record, console())
    )
    raise typer.Exit(status)


@load_app.command(epilog=examples("disagg load sweep --shape 1p1d --out build/sweep"))
def sweep(
    out: OutOption,
    shape: Annotated[
        str | None, typer.Option("--shape", help="Start clusters of this shape, such as 1p1d, instead of --address.")
    ] = None,
    address: AddressOption = DEFAULT_ADDRESS,
    config: ConfigOption = None,
    model: ModelOption = None,
    scenario: ScenarioOption = DEFAULT_SCENARIO,
    requests: RequestsOption = 300,
    seed: SeedOption = None,
    slo_ttft_ms: TtftOption = None,
    slo_tpot_ms: TpotOption = None,
    min_attainment: AttainmentOption = 0.9,
    start_rate: Annotated[float, typer.Option("--start-rate", help="The first rate, in requests per second.")] = 1.0,
    max_rate: Annotated[float, typer.Option("--max-rate", help="The largest rate that is tried.")] = 1000.0,
    tolerance: Annotated[float, typer.Option("--tolerance", help="How closely the rate is bracketed.")] = 0.05,
    attempts: AttemptsOption = 2,
    html: HtmlOption = None,
    json: JsonOption = None,
    generator_cores: CoresOption = "auto",
    generator_nice: NiceOption = -10,
) -> None:
    """Find the largest rate at which enough requests meet their limits."""
    from disagg.cluster import load_commands as commands
    from disagg.cluster.load_generator import GeneratorOptions
    from disagg.loadtests.scenario import Overrides

    where = address if shape is None else commands.shape_of(shape, config, model)
    options = commands.Common(
        scenario=scenario,
        overrides=Overrides(num_requests=requests, seed=seed),
        ttft_ms=slo_ttft_ms,
        tpot_ms=slo_tpot_ms,
        min_attainment=min_attainment,
        generator=GeneratorOptions(
            cores=commands.cores_of(generator_cores, address if shape is None else None), nice=generator_nice
        ),
        html=html,
        json=json,
    )
    search = commands.search_of(start_rate, max_rate, tolerance, min_attainment)
    raise typer.Exit(commands.sweep(options, where, search, out, attempts, console()))


@load_app.command(epilog=examples("disagg load compare 1p1d 2x1-chunked:256 --rates 0.5,1 --out build/compare"))
def compare(
    shapes: Annotated[
        list[str],
        typer.Argument(help="The subject first: 1p1d, 2x1-chunked:256, 2x1-prefill-first, 1x2-static, FILE.yaml, ..."),
    ],
    out: OutOption,
    rates: Annotated[str, typer.Option("--rates", help="Requests per second, such as 0.5,1,1.5.")],
    repeats: Annotated[int, typer.Option("--repeats", help="Times that each point is measured.", min=1)] = 2,
    slo: Annotated[
        list[str] | None,
        typer.Option("--slo", help="TTFT_MS:TPOT_MS to score for; by default a grid around the scenario's."),
    ] = None,
    config: ConfigOption = None,
    model: ModelOption = None,
    scenario: ScenarioOption = DEFAULT_SCENARIO,
    requests: RequestsOption = 300,
    seed: SeedOption = None,
    slo_ttft_ms: TtftOption = None,
    slo_tpot_ms: TpotOption = None,
    min_attainment: AttainmentOption = 0.9,
    attempts: AttemptsOption = 2,
    html: HtmlOption = None,
    json: JsonOption = None,
    generator_cores: CoresOption = "auto",
    generator_nice: NiceOption = -10,
) -> None:
    """Compare shapes of a cluster under the same requests at the same times. Goes on where it was stopped."""
    from disagg.cluster import load_commands as commands
    from disagg.cluster.load_generator import GeneratorOptions
    from disagg.loadtests.scenario import Overrides

    options = commands.Common(
        scenario=scenario,
        overrides=Overrides(num_requests=requests, seed=seed),
        ttft_ms=slo_ttft_ms,
        tpot_ms=slo_tpot_ms,
        min_attainment=min_attainment,
        generator=GeneratorOptions(cores=commands.cores_of(generator_cores, None), nice=generator_nice),
        html=html,
        json=json,
    )
    status = commands.compare(
        options,
        commands.shapes_of(shapes, config, model),
        commands.numbers_of(rates, "--rates"),
        repeats,
        commands.slos_of(slo or []),
        out,
        attempts,
        console(),
    )
    raise typer.Exit(status)
