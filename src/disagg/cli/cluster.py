"""`disagg cluster`: commands for a node of a running Ray cluster. Every command loads what it needs when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from disagg.cluster.system.terminal import console, examples

app = typer.Typer(help="A cluster detached in a running Ray cluster: start, stop, status, leave.", no_args_is_help=True)

RayAddressOption = Annotated[
    str | None,
    typer.Option(help="host:port of Ray's head, or 'auto'; by default the file's, or the Ray that this node is in."),
]


@app.command(epilog=examples("disagg cluster start --config deploy/ray/disagg.yaml --wait"))
def start(
    config: Annotated[Path | None, typer.Option("--config", "-c", help="YAML configuration.")] = None,
    ray_address: RayAddressOption = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Return when everything serves.")] = False,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds to wait for it.", min=0)] = 600,
) -> None:
    """Start controller and gateway on this node and the workers where Ray has room; changes the sizes of one that
    runs."""
    from disagg.cli.launch.cpu_choice import choose_cpu_dtype
    from disagg.cluster.config.cluster_config import load_config
    from disagg.cluster.control.cluster import notes_of
    from disagg.cluster.on_ray import detached as ray_operate
    from disagg.cluster.system.cores import available_cores

    settings = load_config(config)
    address = ray_operate.ray_address(settings, ray_address)
    cpu_dtype = choose_cpu_dtype(settings, console())
    ray_operate.run_start(settings, address, console(), timeout if wait else None, cpu_dtype)
    for note in notes_of(settings, "", len(available_cores())):
        console().print(note, style="dim", highlight=False, markup=False, soft_wrap=True)


@app.command(epilog=examples("disagg cluster stop"))
def stop(ray_address: RayAddressOption = None) -> None:
    """Stop the disagg cluster in the Ray cluster; Ray itself stays."""
    from disagg.cluster.on_ray import detached as ray_operate
    from disagg.cluster.on_ray.joined import AUTO

    ray_operate.run_stop(ray_address or AUTO, console())


@app.command(epilog=examples("disagg cluster leave", "disagg cluster leave --deadline 80s"))
def leave(
    ray_address: RayAddressOption = None,
    deadline: Annotated[
        str, typer.Option("--deadline", help="How long sequences may take to move or end; then they start elsewhere.")
    ] = "60s",
) -> None:
    """Have the workers on this node replaced elsewhere, before the node goes."""
    from disagg.cli.operations.operate import parse_seconds
    from disagg.cluster.on_ray import detached as ray_operate
    from disagg.cluster.on_ray.joined import AUTO

    ray_operate.run_leave(ray_address or AUTO, console(), parse_seconds("--deadline", deadline))


@app.command(epilog=examples("disagg cluster status", "disagg cluster status --ray-address 10.0.0.5:6379"))
def status(ray_address: RayAddressOption = None) -> None:
    """Show pools, workers and gateway, also while no gateway serves."""
    from disagg.cluster.on_ray import detached as ray_operate
    from disagg.cluster.on_ray.joined import AUTO

    ray_operate.run_status(ray_address or AUTO, console())
