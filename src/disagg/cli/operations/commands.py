"""The options of `disagg batch run`, `disagg adapter`, `disagg forget` and `disagg usage`, which batch.py, adapters.py,
operate.py and usage.py implement."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from disagg.cli.address import DEFAULT_ADDRESS, DEFAULT_HTTP_ADDRESS, check_http_address
from disagg.cluster.system.terminal import AddressOption, console, examples

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


adapter_app = typer.Typer(help="LoRA adapters, which requests name as models.", no_args_is_help=True)


@adapter_app.command("add", epilog=examples("disagg adapter add sql sql-lora"))
def adapter_add(
    name: Annotated[str, typer.Argument(help="The name that requests use.")],
    path: Annotated[str, typer.Argument(help="Its folder below adapters.folder of the configuration.")],
    model: Annotated[str, typer.Option(help="Its base model, where several take adapters.")] = "",
    address: AddressOption = DEFAULT_ADDRESS,
) -> None:
    """Serve an adapter once all workers have loaded it; one of that name is replaced."""
    from disagg.cli.operations.adapters import run_add

    run_add(address, name, path, model, console())


@adapter_app.command("remove", epilog=examples("disagg adapter remove sql"))
def adapter_remove(
    name: Annotated[str, typer.Argument(help="Its name.")], address: AddressOption = DEFAULT_ADDRESS
) -> None:
    """Refuse requests for an adapter from now on. Answers that run end with it."""
    from disagg.cli.operations.adapters import run_remove

    run_remove(address, name, console())


@adapter_app.command("list", epilog=examples("disagg adapter list"))
def adapter_list(address: AddressOption = DEFAULT_ADDRESS) -> None:
    """Show all adapters, with those of the configuration that could not be loaded."""
    from disagg.cli.operations.adapters import run_list

    run_list(address, console())


def register(app: typer.Typer, panel: str) -> None:
    """Add the commands to `app`, in this panel of its help."""
    app.command("forget", rich_help_panel=panel, epilog=examples("disagg forget team-a"))(_forget)
    app.command(
        "usage", rich_help_panel=panel, epilog=examples("disagg usage", "disagg usage --days 30 --key team-a --json")
    )(_usage)


def _forget(
    tenant: Annotated[str, typer.Argument(help="Its name, as its keys have it; '' without keys.")],
    address: AddressOption = DEFAULT_ADDRESS,
) -> None:
    """Drop the KV that workers keep of a tenant, in memory and in files. What running requests use is kept."""
    from disagg.cli.operations.operate import run_forget

    run_forget(address, tenant, console())


def _usage(
    address: AddressOption = DEFAULT_ADDRESS,
    days: Annotated[int, typer.Option("--days", help="Days in UTC, today included.", min=1, max=3660)] = 7,
    key: Annotated[str, typer.Option("--key", help="Of one key, by its tenant's name.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
) -> None:
    """Show what keys used by day and model: an admin sees all keys, another key itself. Needs gateway.usage."""
    from disagg.cli.operations.usage import run_usage

    run_usage(address, days, key, console(), as_json=as_json)
