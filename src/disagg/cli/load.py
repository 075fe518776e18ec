"""The options of `disagg load run | sweep | compare`. What they do is in load_commands.py.

An API key and certificates are no options: they come from the environment, as for every command that talks to a
gateway.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from disagg.cli import completion
from disagg.cli.address import DEFAULT_ADDRESS, check_address
from disagg.cluster.system.terminal import AddressOption, console, examples

if TYPE_CHECKING:
    from disagg.cli.load_commands import Common

load_app = typer.Typer(
    help="Load tests: goodput against limits on TTFT and TPOT (needs the extra `load`).", no_args_is_help=True
)


@load_app.callback()
def root(context: typer.Context) -> None:
    """Whatever ends a load test, its generator and its clusters end with it."""
    from disagg.cluster.system.process_tools import sigterm_raises

    context.with_resource(sigterm_raises())


ScenarioOption = Annotated[
    str,
    typer.Option(
        "--scenario", "-s", help="File, or name of one that comes with disagg.", autocompletion=completion.scenarios
    ),
]
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
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", help="Name of an imported model, or 'fake'.", autocompletion=completion.usable_models
    ),
]
OutOption = Annotated[Path, typer.Option("--out", "-o", help="Folder of recordings; complete ones are kept.")]
AttemptsOption = Annotated[int, typer.Option("--attempts", help="At most so many tries of a run that was late.", min=1)]

DEFAULT_SCENARIO = "interactive"


@dataclass(frozen=True, kw_only=True)
class Shared:
    """The options that all three commands have."""

    scenario: ScenarioOption = DEFAULT_SCENARIO
    seed: SeedOption = None
    slo_ttft_ms: TtftOption = None
    slo_tpot_ms: TpotOption = None
    min_attainment: AttainmentOption = 0.9
    html: HtmlOption = None
    json: JsonOption = None
    generator_cores: CoresOption = "auto"
    generator_nice: NiceOption = -10

    def common(
        self,
        address: str | None,
        requests: int | None,
        *,
        rate: float | None = None,
        duration: float | None = None,
        request_timeout_s: float | None = None,
    ) -> Common:
        """The common options as values. `address` is None for commands that start clusters of their own. Raises
        `ConfigError`."""
        from disagg.cli import load_commands as commands
        from disagg.loadtests.generator.load_generator import GeneratorOptions
        from disagg.loadtests.scenario import Overrides

        return commands.Common(
            scenario=self.scenario,
            overrides=Overrides(rate_per_s=rate, duration_s=duration, num_requests=requests, seed=self.seed),
            ttft_ms=self.slo_ttft_ms,
            tpot_ms=self.slo_tpot_ms,
            min_attainment=self.min_attainment,
            generator=GeneratorOptions(
                cores=commands.cores_of(self.generator_cores, address),
                nice=self.generator_nice,
                request_timeout_s=request_timeout_s,
            ),
            html=self.html,
            json=self.json,
        )


def with_shared(command: Callable[..., None]) -> Callable[..., None]:
    """Make the command for Typer: its own options, then those of `Shared`, its first parameter."""

    @functools.wraps(command)
    def run(**given: Any) -> None:
        shared = {field.name: given.pop(field.name) for field in fields(Shared)}
        command(Shared(**shared), **given)

    _, *own = inspect.signature(command, eval_str=True).parameters.values()
    hints = get_type_hints(Shared, include_extras=True)
    added = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in fields(Shared)
    ]
    run.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
    return run


@load_app.command(
    epilog=examples(
        "disagg load run --scenario interactive --rate 2 --html run.html",
        "disagg load run --scenario shared-prefix --web",
    )
)
@with_shared
def run(
    shared: Shared,
    address: AddressOption = DEFAULT_ADDRESS,
    rate: RateOption = None,
    duration: DurationOption = None,
    requests: RequestsOption = None,
    record: Annotated[Path | None, typer.Option("--record", help="Keep the records in this .jsonl file.")] = None,
    web: Annotated[bool, typer.Option("--web", help="Open Locust's page instead of running at once.")] = False,
    web_port: Annotated[int, typer.Option("--web-port", help="Of Locust's page.", min=1, max=65535)] = 8089,
    request_timeout_s: TimeoutOption = None,
) -> None:
    """Play a scenario against a running cluster. Exit status: 0 limits met, 1 missed, 2 not valid."""
    from disagg.cli import load_commands as commands

    check_address(address)
    options = shared.common(address, requests, rate=rate, duration=duration, request_timeout_s=request_timeout_s)
    status = (
        commands.web(options, address, record, web_port, console())
        if web
        else commands.run(options, address, record, console())
    )
    raise typer.Exit(status)


@load_app.command(epilog=examples("disagg load sweep --shape 1p1d --out build/sweep"))
@with_shared
def sweep(
    shared: Shared,
    out: OutOption,
    shape: Annotated[
        str | None, typer.Option("--shape", help="Start clusters of this shape, such as 1p1d, instead of --address.")
    ] = None,
    address: AddressOption = DEFAULT_ADDRESS,
    config: ConfigOption = None,
    model: ModelOption = None,
    requests: RequestsOption = 300,
    start_rate: Annotated[float, typer.Option("--start-rate", help="The first rate, in requests per second.")] = 1.0,
    max_rate: Annotated[float, typer.Option("--max-rate", help="The largest rate that is tried.")] = 1000.0,
    attempts: AttemptsOption = 2,
) -> None:
    """Find the largest rate at which enough requests meet their limits."""
    from disagg.cli import load_commands as commands

    where = check_address(address) if shape is None else commands.shape_of(shape, config, model)
    options = shared.common(address if shape is None else None, requests)
    search = commands.search_of(start_rate, max_rate, shared.min_attainment)
    raise typer.Exit(commands.sweep(options, where, search, out, attempts, console()))


@load_app.command(epilog=examples("disagg load compare 1p1d 2x1-chunked:256 --rates 0.5,1 --out build/compare"))
@with_shared
def compare(
    shared: Shared,
    shapes: Annotated[
        list[str],
        typer.Argument(
            help="The subject first: 1p1d, 2x1-chunked:256, 2x1-prefill-first@0.25,0.5 (its own rates), FILE.yaml, ..."
        ),
    ],
    out: OutOption,
    rates: Annotated[str, typer.Option("--rates", help="Requests per second, such as 0.5,1,1.5.")],
    repeats: Annotated[int, typer.Option("--repeats", help="Times that each point is measured.", min=1)] = 2,
    slo: Annotated[
        list[str] | None,
        typer.Option("--slo", help="TTFT_MS:TPOT_MS to score for; by default a grid around the scenario's."),
    ] = None,
    targets: Annotated[
        bool,
        typer.Option(
            "--targets",
            help="The subject's requests bring the limits as targets; it is measured for each pair of them.",
        ),
    ] = False,
    config: ConfigOption = None,
    model: ModelOption = None,
    requests: RequestsOption = 300,
    attempts: AttemptsOption = 2,
) -> None:
    """Compare shapes of a cluster under the same requests at the same times. Goes on where it was stopped."""
    from disagg.cli import load_commands as commands
    from disagg.loadtests.campaign.shapes import numbers_of

    options = shared.common(None, requests)
    status = commands.compare(
        options,
        commands.shapes_of(shapes, config, model),
        numbers_of(rates, "--rates"),
        repeats,
        commands.slos_of(slo or []),
        out,
        attempts,
        console(),
        has_targets=targets,
    )
    raise typer.Exit(status)
