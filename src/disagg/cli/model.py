"""`disagg model import | verify | list`: the model cache. Every command loads what it needs when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from disagg.cli import completion
from disagg.cluster.system.program import command
from disagg.cluster.system.terminal import console, examples

model_app = typer.Typer(help="Models on this machine: import, verify, list.", no_args_is_help=True)


@model_app.command(
    "import",
    epilog=examples("disagg model import smollm2-135m", "disagg model import ./Llama-3.2-1B --name llama"),
)
def model_import(
    source: Annotated[
        str,
        typer.Argument(
            help="'smollm2-135m', a .gguf file, a checkpoint folder, or a hub id (owner/model, owner/model@commit)."
        ),
    ],
    name: Annotated[str | None, typer.Option(help="Its name here; by default made from the source.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a model of that name.")] = False,
) -> None:
    """Bring a model into the model cache; afterwards no network is needed."""
    from disagg.cli.launch.progress import StillBusy
    from disagg.cluster.models.catalog import import_model

    screen = console()
    with StillBusy(screen) as busy:
        folder = import_model(source, name=name, force=force, progress=busy.begin)
    step = command(f"up --model {folder.name}")
    screen.print(f"{folder.name} is in {folder}\nnext: {step}", highlight=False, markup=False, soft_wrap=True)


@model_app.command("verify", epilog=examples("disagg model verify smollm2-135m"))
def model_verify(
    name: Annotated[str, typer.Argument(help="Of an imported model.", autocompletion=completion.imported_models)],
) -> None:
    """Hash a model's files and compare with its import. Exit status: 0 all are the same, 1 not."""
    from disagg.cluster.models.catalog import verify_model

    wrong = verify_model(name)
    for line in wrong:
        typer.echo(line)
    if wrong:
        raise typer.Exit(1)
    typer.echo(f"{name} is as it was imported")


@model_app.command("list", epilog=examples("disagg model list"))
def model_list() -> None:
    """List the models in the model cache."""
    from disagg.cluster.models.catalog import DEFAULT_MODEL, cache_dir, list_models

    entries = list_models()
    if not entries:
        typer.echo(f"no models in {cache_dir()}; next: {command('model import ' + DEFAULT_MODEL)}")
    for entry in entries:
        kind = f"{entry.architecture} {entry.weight_format}".strip()
        typer.echo(f"{entry.name}  {kind}  {entry.nbytes / 1e6:.0f} MB  from {entry.source}")
