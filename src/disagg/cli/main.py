"""The command line. Every command loads what it needs when it runs, so that `disagg --help` is quick.

Exit status: 0 done; 1 it failed; 2 the command line, configuration or model is wrong; 130 interrupted. Errors are one
line with the cause and, where there is one, the next command; `DISAGG_DEBUG=1` adds the traceback.

Each command's help ends with examples that can be typed as they stand.
"""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from disagg import __version__
from disagg.cli import completion
from disagg.cli.address import DEFAULT_ADDRESS, DEFAULT_HTTP_ADDRESS
from disagg.cli.cluster import app as cluster_app
from disagg.cli.load import load_app
from disagg.cli.model import model_app
from disagg.cli.operations.commands import adapter_app, batch_app
from disagg.cli.operations.commands import register as register_usage
from disagg.cli.planning import commands as planning
from disagg.cluster.system.terminal import AddressOption, console, examples

SERVE, OPERATE, MEASURE, MODELS = "Serve", "Operate", "Measure", "Models"
"""Groups of commands in the help."""

app = typer.Typer(
    name="disagg",
    help="A disaggregated prefill/decode serving cluster for large language models.",
    epilog="Begin with `disagg demo`, which shows it at work, then `disagg up`. `disagg doctor` looks for what is not "
    "well. Completion for your shell: `disagg --install-completion`.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
key_app = typer.Typer(help="API keys, which clients bring to a gateway.", no_args_is_help=True)
trace_app = typer.Typer(help="Timelines of the latest requests.", no_args_is_help=True)
app.add_typer(cluster_app, name="cluster", rich_help_panel=OPERATE)
app.add_typer(trace_app, name="trace", rich_help_panel=OPERATE)
app.add_typer(load_app, name="load", rich_help_panel=MEASURE)
app.add_typer(batch_app, name="batch", rich_help_panel=OPERATE)
app.add_typer(adapter_app, name="adapter", rich_help_panel=OPERATE)
app.add_typer(key_app, name="key", rich_help_panel=OPERATE)
app.add_typer(model_app, name="model", rich_help_panel=MODELS)
register_usage(app, OPERATE)


class LauncherName(StrEnum):
    """Launcher that starts the processes."""

    ray = "ray"
    processes = "processes"


class EngineName(StrEnum):
    """Kind of the simulated engine."""

    exact = "exact"
    fast = "fast"


ConfigOption = Annotated[Path | None, typer.Option("--config", "-c", help="YAML configuration; defaults without one.")]
LauncherOption = Annotated[LauncherName, typer.Option(help="What starts and holds the processes.")]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", help="Name of an imported model, folder, or 'fake'.", autocompletion=completion.usable_models
    ),
]
PortOption = Annotated[int | None, typer.Option(help="Port of the gateway; 0 takes any free one.", min=0, max=65535)]
PrefillOption = Annotated[int | None, typer.Option("--prefill", help="Number of prefill workers.", min=1)]
DecodeOption = Annotated[int | None, typer.Option("--decode", help="Number of decode workers.", min=1)]
ColocatedOption = Annotated[bool, typer.Option("--colocated", help="One pool of workers that do both.")]
ElasticOption = Annotated[bool, typer.Option("--elastic", help="One pool; the router divides each request.")]
WorkersOption = Annotated[int | None, typer.Option("--workers", help="Size of the pool, with one pool.", min=1)]
LogDirOption = Annotated[Path | None, typer.Option(help="Keep the processes' logs here (launcher processes).")]
WaitOption = Annotated[bool, typer.Option("--wait/--no-wait", help="Return when it is done, or when it is recorded.")]
TimeoutOption = Annotated[float, typer.Option("--timeout", help="Seconds to wait for it.", min=0)]
JsonOption = Annotated[bool, typer.Option("--json", help="As JSON, for programs.")]
LimitOption = Annotated[int, typer.Option("--limit", "-n", help="Requests, the latest ones.", min=1, max=1000)]


def _print_version(is_set: bool) -> None:
    if is_set:
        typer.echo(f"disagg {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Options before the command."""


@app.command(
    rich_help_panel=SERVE,
    epilog=examples(
        "disagg up",
        "disagg up --prefill 2 --decode 3 --launcher processes",
        "disagg up --config cluster.yaml --model smollm2-135m",
    ),
)
def up(
    config: ConfigOption = None,
    colocated: ColocatedOption = False,
    elastic: ElasticOption = False,
    launcher: LauncherOption = LauncherName.ray,
    port: PortOption = None,
    model: ModelOption = None,
    prefill: PrefillOption = None,
    decode: DecodeOption = None,
    workers: WorkersOption = None,
    log_dir: LogDirOption = None,
) -> None:
    """Start a cluster on this machine and serve until Ctrl-C."""
    from disagg.cli.up import build_config, run_up

    sizes = {"prefill": prefill, "decode": decode, "workers": workers}
    settings = build_config(config, colocated=colocated, elastic=elastic, model=model, port=port, **sizes)
    raise typer.Exit(run_up(settings, launcher.value, console(), log_dir))


@app.command(rich_help_panel=SERVE, epilog=examples("disagg demo", "disagg demo --launcher processes"))
def demo(
    launcher: LauncherOption = LauncherName.ray,
    model: ModelOption = None,
    prefill: PrefillOption = None,
    decode: DecodeOption = None,
    transport: Annotated[str, typer.Option(help="What moves the KV, as `transfer.transport`.")] = "auto",
    log_dir: LogDirOption = None,
) -> None:
    """Start a small cluster, show a prompt being handed from a prefill to a decode worker, and stop."""
    from disagg.cli.demo import demo_config, run_demo

    settings = demo_config(model=model, prefill=prefill, decode=decode, transport=transport)
    raise typer.Exit(run_demo(settings, launcher.value, console(), log_dir))


@app.command(
    rich_help_panel=SERVE,
    epilog=examples(
        'disagg generate "What is a cache?"',
        "echo 'The capital of France is' | disagg generate --raw --max-tokens 8 -",
    ),
)
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; '-' reads it from standard input.")],
    address: AddressOption = DEFAULT_ADDRESS,
    chat: Annotated[
        bool, typer.Option("--chat/--raw", help="As a user's turn of a chat, or as plain text to be continued.")
    ] = True,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="The only one served, if unset.", autocompletion=completion.served_models),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.", min=1, max=2**32 - 1)] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0.0, max=100.0)] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.", min=0, max=2**64 - 1)] = None,
) -> None:
    """Generate text on a running cluster; the answer is streamed to standard output."""
    from disagg.cli.generate import run_generate

    text = sys.stdin.buffer.read() if prompt == "-" else os.fsencode(prompt)
    run_generate(address, text, chat=chat, model=model, max_tokens=max_tokens, temperature=temperature, seed=seed)


@app.command(
    rich_help_panel=SERVE,
    epilog=examples("disagg chat", "disagg chat --model smollm2-135m", "echo 'What is a cache?' | disagg chat"),
)
def chat(
    address: AddressOption = DEFAULT_ADDRESS,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="The only one served, if unset.", autocompletion=completion.served_models),
    ] = None,
) -> None:
    """Talk with a model on a running cluster; /help lists the commands. A pipe is one message, answered once."""
    _quiet_grpc()
    from disagg.cli.chat.command import run_chat

    run_chat(address, model, console())


@app.command(rich_help_panel=OPERATE, epilog=examples("disagg status", "disagg status --address 10.0.0.5:8470"))
def status(address: AddressOption = DEFAULT_ADDRESS) -> None:
    """Show the pools and workers of a running cluster."""
    from disagg.cli.operations.operate import run_status

    run_status(address, console())


@app.command(
    rich_help_panel=OPERATE,
    epilog=examples(
        "disagg health", "disagg health --address 10.0.0.5:8470", "disagg health --live --url https://127.0.0.1:8471"
    ),
)
def health(
    url: Annotated[
        str | None,
        typer.Option("--url", help=f"URL of the gateway's HTTP; http://{DEFAULT_HTTP_ADDRESS} without --address."),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            "-a",
            envvar="DISAGG_ADDRESS",
            help="host:port of the gateway (gRPC). With a key that may see its state, it is asked for its URL.",
        ),
    ] = None,
    live: Annotated[bool, typer.Option("--live", help="Ask whether it is alive, not whether it is ready.")] = False,
) -> None:
    """Ask a gateway whether it takes requests. Exit status 0 if so, 1 if not: for probes. Needs no key."""
    from disagg.cli.doctor.health import ALIVE, READY, run_health, run_health_at

    path = ALIVE if live else READY
    if url is None and address is not None:
        raise typer.Exit(run_health_at(address, path, os.environ, console()))
    raise typer.Exit(run_health(url or f"http://{DEFAULT_HTTP_ADDRESS}", path, os.environ, console()))


@app.command(
    rich_help_panel=OPERATE, epilog=examples("disagg scale decode=2", "disagg scale prefill=2 decode=3 --no-wait")
)
def scale(
    sizes: Annotated[list[str], typer.Argument(metavar="POOL=SIZE...", help="Such as: prefill=3 decode=2")],
    address: AddressOption = DEFAULT_ADDRESS,
    wait: WaitOption = True,
    timeout: TimeoutOption = 600.0,
) -> None:
    """Make pools of a running cluster larger or smaller. Workers that leave finish their sequences first."""
    from disagg.cli.operations.operate import parse_sizes, run_scale

    run_scale(address, parse_sizes(sizes), console(), timeout if wait else None)


@app.command(rich_help_panel=OPERATE, epilog=examples("disagg drain decode-0", "disagg drain decode-0 --deadline 30s"))
def drain(
    worker: Annotated[str, typer.Argument(help="Such as decode-0.", autocompletion=completion.workers)],
    address: AddressOption = DEFAULT_ADDRESS,
    wait: WaitOption = True,
    timeout: TimeoutOption = 600.0,
    deadline: Annotated[
        str | None,
        typer.Option(
            "--deadline",
            help="Replace it after this time whatever it has left, such as 30s: that is computed again elsewhere.",
        ),
    ] = None,
) -> None:
    """Replace a worker by a new process, after its sequences have moved to other workers or ended."""
    from disagg.cli.operations.operate import parse_seconds, run_drain

    deadline_s = None if deadline is None else parse_seconds("--deadline", deadline)
    run_drain(address, worker, console(), timeout if wait else None, deadline_s)


@app.command(
    rich_help_panel=OPERATE,
    epilog=examples("disagg apply cluster.yaml --dry-run", "disagg apply cluster.yaml --ready-timeout 2min"),
)
def apply(
    file: Annotated[Path, typer.Argument(help="The YAML configuration that the cluster is to have.", dir_okay=False)],
    address: AddressOption = DEFAULT_ADDRESS,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what becomes of each field.")] = False,
    surge: Annotated[
        bool,
        typer.Option("--surge/--no-surge", help="One worker more in each pool meanwhile, or one less: without room."),
    ] = True,
    restart: Annotated[
        bool, typer.Option("--restart", help="Replace all workers, also where nothing differs: new weights, new code.")
    ] = False,
    ready_timeout: Annotated[
        str, typer.Option("--ready-timeout", help="What a new worker may take to be ready; then all goes back.")
    ] = "300s",
    wait: WaitOption = True,
    timeout: TimeoutOption = 3600.0,
) -> None:
    """Give a running cluster another configuration: in place where that is possible, else worker by worker, without a
    request that fails. Exit status: 0 applied; 1 taken back, because new workers do not become ready; 2 refused."""
    from disagg.cli.operations.apply import ApplyOptions, run_apply
    from disagg.cli.operations.operate import parse_seconds

    options = ApplyOptions(
        dry_run=dry_run,
        surge=surge,
        restart=restart,
        ready_timeout_s=parse_seconds("--ready-timeout", ready_timeout),
        wait_s=timeout if wait else None,
    )
    run_apply(address, file, console(), options)


@app.command(
    rich_help_panel=OPERATE,
    epilog=examples("disagg top", "disagg top --once"),
)
def top(
    address: AddressOption = DEFAULT_ADDRESS,
    once: Annotated[bool, typer.Option("--once", help="Print once and exit.")] = False,
    interval: Annotated[float, typer.Option("--interval", help="Seconds between updates.", min=0.1)] = 1.0,
) -> None:
    """Watch a running cluster: pools, KV of each worker, requests by stage, targets met, transfers. q ends it."""
    _quiet_grpc()
    from disagg.cli.top import run_top

    raise typer.Exit(run_top(address, console(), once=once, interval_s=interval))


@app.command(rich_help_panel=OPERATE, epilog=examples("disagg twin", "disagg twin --address 10.0.0.5:8470"))
def twin(address: AddressOption = DEFAULT_ADDRESS) -> None:
    """Choose where answers decode in a cluster of mode elastic: replay what came lately, and set what is better.
    With placement.decodes: auto the controller starts one by itself. Ctrl-C ends it."""
    from disagg.cli.twin.command import run_twin

    run_twin(address, console())


@app.command(
    rich_help_panel=OPERATE,
    epilog=examples("disagg explain", "disagg explain --list", "disagg explain --shape", "disagg explain --json"),
)
def explain(
    request_id: Annotated[
        str | None,
        typer.Argument(
            help="Id of the request, or how it begins; the latest one without.", autocompletion=completion.requests
        ),
    ] = None,
    address: AddressOption = DEFAULT_ADDRESS,
    show_list: Annotated[bool, typer.Option("--list", help="List the latest requests instead.")] = False,
    show_shape: Annotated[
        bool, typer.Option("--shape", help="Show where answers decode, and what was compared, instead.")
    ] = False,
    limit: LimitOption = 20,
    json: JsonOption = False,
) -> None:
    """Show where a request ran, why there, what was predicted and measured, and where its time went."""
    from disagg.cli.explain import run_explain, run_list
    from disagg.cli.twin.report import run_explain_shape

    if show_shape and (show_list or request_id is not None):
        raise typer.BadParameter("--shape is of the cluster; leave the request and --list away")
    if show_shape:
        run_explain_shape(address, console(), as_json=json)
    elif show_list:
        run_list(address, limit, console(), as_json=json)
    else:
        run_explain(address, request_id, console(), as_json=json)


@app.command(
    rich_help_panel=OPERATE,
    epilog=examples("disagg replay FILE", "disagg replay FILE --request ID", "disagg replay FILE --json"),
)
def replay(
    file: Annotated[Path, typer.Argument(help="A recording; see gateway.record_events.", dir_okay=False)],
    request: Annotated[str | None, typer.Option("--request", "-r", help="Show what happened to this request.")] = None,
    json: JsonOption = False,
) -> None:
    """Replay a recording of the router's events. Exit status: 0, or 1 if this version decides otherwise, 2 for a file
    that is damaged or no recording."""
    from disagg.cli.replay.command import run_replay

    raise typer.Exit(run_replay(file, request, console(), as_json=json))


@app.command(rich_help_panel=OPERATE, epilog=examples("disagg doctor", "disagg doctor --address 10.0.0.5:8470"))
def doctor(
    address: Annotated[
        str | None,
        typer.Option(
            "--address", "-a", envvar="DISAGG_ADDRESS", help="host:port of the gateway; the usual one if unset."
        ),
    ] = None,
) -> None:
    """Look for what is not well, on this machine and in the cluster; measure the KV transfer of every pair."""
    from disagg.cli.doctor.command import run_doctor

    raise typer.Exit(run_doctor(address, console()))


@app.command(
    rich_help_panel=MEASURE,
    epilog=examples(
        "disagg simulate interactive --cluster cluster.yaml --times steps.json",
        "disagg simulate mooncake --cluster cluster.yaml --times steps.json --engine fast --html run.html",
        "disagg simulate day.yaml --cluster cluster.yaml --times steps.json --policy round_robin",
    ),
)
def simulate(
    scenario: Annotated[
        str,
        typer.Argument(
            help="File, name of one that comes with disagg, or a file of phases.", autocompletion=completion.scenarios
        ),
    ],
    times: Annotated[Path, typer.Option("--times", "-t", help="How long steps and messages take: see docs.")],
    cluster: Annotated[
        Path | None, typer.Option("--cluster", "-c", help="YAML configuration of the cluster; defaults without one.")
    ] = None,
    engine: Annotated[EngineName, typer.Option(help="Every step, or jumps over steps.")] = EngineName.exact,
    policy: Annotated[str | None, typer.Option(help="Placement policy instead of the configured one.")] = None,
    rate: Annotated[
        float | None, typer.Option("--rate", help="Requests per second, instead of the scenario's.")
    ] = None,
    duration: Annotated[float | None, typer.Option("--duration", help="Seconds of arrivals.")] = None,
    requests: Annotated[int | None, typer.Option("--requests", help="Number of requests.", min=1)] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Of prompts and arrivals.")] = None,
    slo_ttft_ms: Annotated[
        float | None, typer.Option("--slo-ttft-ms", help="Limit of the time to first token.")
    ] = None,
    slo_tpot_ms: Annotated[
        float | None, typer.Option("--slo-tpot-ms", help="Limit of the time per further token.")
    ] = None,
    min_attainment: Annotated[
        float, typer.Option("--min-attainment", help="Share of requests that must meet both.", min=0.01, max=1.0)
    ] = 0.9,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", help="What requests allow; answers end before. Unset: their own length.", min=1),
    ] = None,
    records: Annotated[Path | None, typer.Option("--records", help="Write one line of JSON for each request.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write the report with plots to this file.")] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write figures and samples to this file.")] = None,
) -> None:
    """Run a load test in virtual time. Exit status: 0, or 1 if too few requests met their limits."""
    from disagg.cli.planning.simulate import SimulateOptions, run_simulate
    from disagg.loadtests.scenario import Overrides
    from disagg.simulator.world.users import Habits

    options = SimulateOptions(
        scenario=scenario,
        cluster=cluster,
        times=times,
        engine=engine.value,
        policy=policy,
        overrides=Overrides(rate_per_s=rate, duration_s=duration, num_requests=requests, seed=seed),
        ttft_ms=slo_ttft_ms,
        tpot_ms=slo_tpot_ms,
        min_attainment=min_attainment,
        habits=Habits(max_tokens=max_tokens),
        records=records,
        html=html,
        json=json,
    )
    raise typer.Exit(run_simulate(options, console()))


planning.register(app, MEASURE)


@trace_app.command("export", epilog=examples("disagg trace export trace.json", "disagg trace export trace.json -n 50"))
def trace_export(
    file: Annotated[Path, typer.Argument(help="What to write.", dir_okay=False)],
    address: AddressOption = DEFAULT_ADDRESS,
    limit: LimitOption = 1000,
) -> None:
    """Write the latest requests as a timeline for ui.perfetto.dev: a track for each request and each worker."""
    from disagg.cli.trace_export import run_export

    run_export(address, file, limit, console())


@key_app.command(
    "new",
    epilog=examples(
        "disagg key new team-a --file keys.yaml",
        "disagg key new operators --admin --file keys.yaml",
        "disagg key new batch --scope inference --model qwen3-8b --expires 2027-06-30",
    ),
)
def key_new(
    tenant: Annotated[str, typer.Argument(help="Whose key it is. Prefixes are cached per tenant.")],
    admin: Annotated[bool, typer.Option("--admin", help="May change the cluster and see all requests.")] = False,
    metrics: Annotated[bool, typer.Option("--metrics", help="May read /metrics; an admin may, too.")] = False,
    scope: Annotated[
        list[str] | None,
        typer.Option("--scope", help="inference, metrics or admin; may be repeated. Instead of --admin and --metrics."),
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option("--model", help="May use this model only; may be repeated. Default: all.")
    ] = None,
    expires: Annotated[
        str | None,
        typer.Option("--expires", help="Its last day in UTC (2027-06-30), or a time (2027-06-30T18:00:00Z)."),
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Add it to this file of gateway.api_keys.")] = None,
) -> None:
    """Make an API key. It is printed once; the file keeps its SHA-256."""
    from disagg.cli.keys import KeyRights, run_key_new

    rights = KeyRights(admin=admin, metrics=metrics, scopes=scope or (), models=model or (), expires=expires)
    raise typer.Exit(run_key_new(tenant, rights, file, console(stderr=True)))


def _quiet_grpc() -> None:
    """Keep gRPC's notes, such as that a gateway stops, off a screen that a command draws on. gRPC reads this when it is
    imported."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


def main() -> None:
    """Entry point of the `disagg` program."""
    try:
        app()
    except Exception as error:
        if os.environ.get("DISAGG_DEBUG"):
            raise
        sys.exit(_report(error))


def _report(error: Exception) -> int:
    """Print one error for a user (with the log that it may carry) and return the exit status."""
    from disagg.cluster.system.children import LaunchError
    from disagg.proto.errors import ConfigError, DisaggError

    if isinstance(error, (ConfigError, LaunchError)):
        typer.echo(f"error: {error}", err=True)
        return 2 if isinstance(error, ConfigError) else 1
    if isinstance(error, DisaggError):
        from disagg.cli.next_steps import with_next_step

        typer.echo(f"error: {with_next_step(error)}", err=True)
        return 1
    typer.echo(f"error: {type(error).__name__}: {error}\n(DISAGG_DEBUG=1 shows where)", err=True)
    return 1
