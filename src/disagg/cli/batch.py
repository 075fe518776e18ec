"""The options of `disagg batch run`. What it does is in operations/batch.py."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from disagg.cli.address import DEFAULT_HTTP_ADDRESS, check_http_address
from disagg.cluster.system.terminal import console, examples

batch_app = typer.Typer(help="Batches: many requests in a file, answered as there is room.", no_args_is_help=True)


@batch_app.command("run", epilog=examples("disagg batch run requests.jsonl --output answers.jsonl"))
def batch_run(
    file: Annotated[Path, typer.Argument(help="One request a line, as OpenAI's batches.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Where answers go; FILE.out.jsonl.")] = None,
    address: Annotated[str, typer.Option(help="host:port of the gateway's HTTP.")] = DEFAULT_HTTP_ADDRESS,
) -> None:
    """Run the requests of a file and write their answers; errors go to a file beside them. Ctrl-C cancels the batch."""
    from disagg.cli.operations.batch import run_batch

    target = output or file.with_name(f"{file.name}.out.jsonl")
    raise typer.Exit(run_batch(check_http_address(address), file, target, console(stderr=True)))
