"""The command line. Every command loads what it needs when it runs, so that `disagg --help` is quick.

Exit status: 0 done; 1 it failed; 2 the command line, configuration or model is wrong; 130 interrupted. Errors are one
line with the cause and, where there is one, the next command; `DISAGG_DEBUG=1` adds the traceback.
"""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from disagg import __version__
from disagg.cluster.address import DEFAULT_ADDRESS
from disagg.cluster.load_cli import load_app
from disagg.cluster.ray_cli import app as cluster_app

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(
    name="disagg",
    help="A disaggregated prefill/decode serving cluster for large language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
model_app = typer.Typer(help="Models on this machine: import, list.", no_args_is_help=True)
app.add_typer(model_app, name="model")
app.add_typer(cluster_app, name="cluster")
app.add_typer(load_app, name="load")


class LauncherName(StrEnum):
    """What starts the processes."""

    ray = "ray"
    processes = "processes"


ConfigOption = Annotated[Path | None, typer.Option("--config", "-c", help="YAML configuration; defaults without one.")]
LauncherOption = Annotated[LauncherName, typer.Option(help="What starts and holds the processes.")]
ModelOption = Annotated[str | None, typer.Option("--model", "-m", help="Name of an imported model, folder, or 'fake'.")]
PortOption = Annotated[int | None, typer.Option(help="Port of the gateway; 0 takes any free one.", min=0, max=65535)]
PrefillOption = Annotated[int | None, typer.Option("--prefill", help="Number of prefill workers.", min=1)]
DecodeOption = Annotated[int | None, typer.Option("--decode", help="Number of decode workers.", min=1)]
ColocatedOption = Annotated[bool, typer.Option("--colocated", help="One pool of workers that do both.")]
LogDirOption = Annotated[Path | None, typer.Option(help="Keep the processes' logs here (launcher processes).")]
WaitOption = Annotated[bool, typer.Option("--wait/--no-wait", help="Return when it is done, or when it is noted.")]
TimeoutOption = Annotated[float, typer.Option("--timeout", help="Seconds to wait for it.", min=0)]
AddressOption = Annotated[
    str, typer.Option("--address", "-a", envvar="DISAGG_ADDRESS", help="host:port of the gateway.")
]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"disagg {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Options before the command."""


@app.command()
def up(
    config: ConfigOption = None,
    colocated: ColocatedOption = False,
    launcher: LauncherOption = LauncherName.ray,
    port: PortOption = None,
    model: ModelOption = None,
    prefill: PrefillOption = None,
    decode: DecodeOption = None,
    log_dir: LogDirOption = None,
) -> None:
    """Start a cluster on this machine and serve until Ctrl-C."""
    from disagg.cluster.up import build_config, run_up

    settings = build_config(config, colocated=colocated, model=model, port=port, prefill=prefill, decode=decode)
    raise typer.Exit(run_up(settings, launcher.value, _console(), log_dir))


@app.command()
def demo(
    launcher: LauncherOption = LauncherName.ray,
    model: ModelOption = None,
    prefill: PrefillOption = None,
    decode: DecodeOption = None,
    log_dir: LogDirOption = None,
) -> None:
    """Start a small cluster, show a prompt being handed from a prefill to a decode worker, and stop."""
    from disagg.cluster.config import override
    from disagg.cluster.up import DEMO_KV_CACHE_BYTES, build_config, run_demo

    settings = override(
        build_config(None, model=model, port=0, prefill=prefill, decode=decode),
        {
            "placement.local_prefill": "never",
            "pools.prefill.kv_cache_bytes": DEMO_KV_CACHE_BYTES,
            "pools.decode.kv_cache_bytes": DEMO_KV_CACHE_BYTES,
        },
    )
    raise typer.Exit(run_demo(settings, launcher.value, _console(), log_dir))


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; '-' reads it from standard input.")],
    address: AddressOption = DEFAULT_ADDRESS,
    chat: Annotated[
        bool, typer.Option("--chat/--raw", help="As a user's turn of a chat, or as plain text to be continued.")
    ] = True,
    model: Annotated[str | None, typer.Option("--model", "-m", help="The only one served, if unset.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.", min=1, max=2**32 - 1)] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0.0, max=100.0)] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.", min=0, max=2**64 - 1)] = None,
) -> None:
    """Generate text on a running cluster; the answer is streamed to standard output."""
    from disagg.cluster.generate import run_generate

    text = sys.stdin.buffer.read() if prompt == "-" else os.fsencode(prompt)
    run_generate(address, text, chat=chat, model=model, max_tokens=max_tokens, temperature=temperature, seed=seed)


@app.command()
def status(address: AddressOption = DEFAULT_ADDRESS) -> None:
    """Show the pools and workers of a running cluster."""
    from disagg.cluster.operate import run_status

    run_status(address, _console())


@app.command()
def scale(
    sizes: Annotated[list[str], typer.Argument(metavar="POOL=SIZE...", help="Such as: prefill=3 decode=2")],
    address: AddressOption = DEFAULT_ADDRESS,
    wait: WaitOption = True,
    timeout: TimeoutOption = 600.0,
) -> None:
    """Make pools of a running cluster larger or smaller. Workers that leave finish their sequences first."""
    from disagg.cluster.operate import parse_sizes, run_scale

    run_scale(address, parse_sizes(sizes), _console(), timeout if wait else None)


@app.command()
def drain(
    worker: Annotated[str, typer.Argument(help="Such as decode-0.")],
    address: AddressOption = DEFAULT_ADDRESS,
    wait: WaitOption = True,
    timeout: TimeoutOption = 600.0,
) -> None:
    """Replace a worker by a new process, after its sequences have ended."""
    from disagg.cluster.operate import run_drain

    run_drain(address, worker, _console(), timeout if wait else None)


@model_app.command("import")
def model_import(
    source: Annotated[str, typer.Argument(help="'smollm2-135m', a .gguf file, a checkpoint folder, or a hub id.")],
    name: Annotated[str | None, typer.Option(help="Its name here; by default made from the source.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a model of that name.")] = False,
) -> None:
    """Bring a model into the model cache; afterwards no network is needed."""
    from disagg.cluster.models import import_model

    console = _console()
    folder = import_model(
        source, name=name, force=force, progress=lambda text: console.print(f"  {text}", markup=False)
    )
    console.print(f"{folder.name} is in {folder}\nnext: disagg up --model {folder.name}", highlight=False, markup=False)


@model_app.command("list")
def model_list() -> None:
    """List the models in the model cache."""
    from disagg.cluster.models import DEFAULT_MODEL, cache_dir, list_models

    entries = list_models()
    if not entries:
        typer.echo(f"no models in {cache_dir()}; next: disagg model import {DEFAULT_MODEL}")
    for entry in entries:
        typer.echo(f"{entry.name}  {entry.architecture}  {entry.nbytes / 1e6:.0f} MB  from {entry.source}")


def _console() -> Console:
    from rich.console import Console

    return Console()


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
    from disagg.cluster.errors import LaunchError
    from disagg.proto.errors import ConfigError, DisaggError

    if isinstance(error, (ConfigError, LaunchError, DisaggError)):
        typer.echo(f"error: {error}", err=True)
        return 2 if isinstance(error, ConfigError) else 1
    typer.echo(f"error: {type(error).__name__}: {error}\n(DISAGG_DEBUG=1 shows where)", err=True)
    return 1
