"""`disagg up`: launch a cluster, show its progress, serve until a signal stops it, leave no process behind."""

from __future__ import annotations

import json
import os
import shlex
import signal
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.markup import escape

from disagg.cli.address import DEFAULT_ADDRESS
from disagg.cli.launch.cpu_choice import choose_cpu_dtype
from disagg.cli.launch.progress import LaunchDisplay
from disagg.cluster.config.cluster_config import ClusterConfig, GatewaySection, Mode, load_config, models_of, override
from disagg.cluster.control.cluster import Cluster, Progress
from disagg.cluster.core import state_diff
from disagg.cluster.models.catalog import FAKE_MODEL, resolve_model
from disagg.cluster.system.process_tools import StopFlag, Stopped
from disagg.cluster.system.program import command, python
from disagg.cluster.system.service_manager import READY, STOPPING, notify
from disagg.cluster.system.terminal import table
from disagg.engine.checkpoint.checkpoint import is_pooled
from disagg.engine.config import Dtype
from disagg.gateway.config import serves_page
from disagg.proto.errors import ConfigError
from disagg.proto.ids import model_of
from disagg.proto.messages import WorkerInfo
from disagg.step_times.pace import note_of_target
from disagg.step_times.step_model import StepModel

Launcher = Literal["ray", "processes"]

EXIT_OK = 0
EXIT_INTERRUPTED = 130
WATCH_INTERVAL_S = 0.5
MAX_CLEAN_STOP_SIGNALS = 3
"""Number of signals that wait for a clean stop. One more ends this process at once: its children then end by
themselves."""


def build_config(
    file: Path | None,
    *,
    colocated: bool = False,
    elastic: bool = False,
    workers: int | None = None,
    model: str | None = None,
    port: int | None = None,
    prefill: int | None = None,
    decode: int | None = None,
) -> ClusterConfig:
    """The configuration of a file with the command line's options on top; raises `ConfigError`."""
    config = load_config(file)
    if colocated and elastic:
        raise ConfigError("--colocated, --elastic: choose one")
    mode: Mode | None = "colocated" if colocated else "elastic" if elastic else None
    chosen_mode = config.mode if mode is None else mode
    if chosen_mode != "disaggregated" and (prefill is not None or decode is not None):
        raise ConfigError(f"--prefill, --decode: a cluster of mode {chosen_mode} has one pool; its size is --workers")
    if chosen_mode == "disaggregated" and workers is not None:
        raise ConfigError("--workers: is for the modes colocated and elastic; use --prefill and --decode")
    values: dict[str, object] = {
        "mode": mode,
        "gateway.port": port,
        "pools.workers.size" if chosen_mode == "elastic" else "pools.colocated.size": workers,
        "pools.prefill.size": prefill,
        "pools.decode.size": decode,
    }
    chosen = {path: value for path, value in values.items() if value is not None}
    if model is not None:
        is_path = model == FAKE_MODEL or "/" in model
        chosen |= {"model.name": None if is_path else model, "model.path": model if is_path else None}
    return override(config, chosen)


def make_cluster(
    config: ClusterConfig, launcher: Launcher, progress: Progress, log_dir: Path | None, cpu_dtype: Dtype
) -> Cluster:
    """A cluster, not started. `cpu_dtype`: what `model.dtype: auto` is on its CPUs. Raises `ConfigError`, also where
    the model is missing."""
    if launcher == "processes":
        from disagg.cluster.hosts.processes import ProcessCluster

        return ProcessCluster(config, progress=progress, log_dir=log_dir, cpu_dtype=cpu_dtype)
    if log_dir is not None:
        raise ConfigError(
            "--log-dir: Ray keeps its own logs; set ray.temp_dir in the file, or use --launcher processes"
        )
    from disagg.cluster.on_ray.cluster import RayCluster

    return RayCluster(config, progress=progress, cpu_dtype=cpu_dtype)


def run_up(config: ClusterConfig, launcher: Launcher, console: Console, log_dir: Path | None = None) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit status. Raises `LaunchError` when the cluster's controller is
    gone."""

    def serve(cluster: Cluster, stop: StopFlag) -> int:
        print_ready(console, cluster, config)
        notify(READY, os.environ)
        try:
            return _watch(cluster, stop, console)
        finally:
            notify(STOPPING, os.environ)

    return with_cluster(config, launcher, console, log_dir, serve)


def with_cluster(
    config: ClusterConfig,
    launcher: Launcher,
    console: Console,
    log_dir: Path | None,
    body: Callable[[Cluster, StopFlag], int],
) -> int:
    """Start a cluster, run `body` on it, stop it. Returns the status of `body`; `EXIT_INTERRUPTED` after a signal."""
    display = LaunchDisplay(console)
    with display.busy:
        return _with_display(config, launcher, console, log_dir, body, display)


def _with_display(
    config: ClusterConfig,
    launcher: Launcher,
    console: Console,
    log_dir: Path | None,
    body: Callable[[Cluster, StopFlag], int],
    display: LaunchDisplay,
) -> int:
    display("CPU kernels", "found, or compiled once")
    cpu_dtype = choose_cpu_dtype(config, console)
    display("CPU kernels", "stopped")
    cluster = make_cluster(config, launcher, display, log_dir, cpu_dtype)
    for warning in cluster.warnings:
        console.print(f"  [bold red]WARNING[/bold red] {escape(warning)}", highlight=False, soft_wrap=True)
    for note in cluster.notes:
        console.print(f"  [yellow]note[/yellow]   {escape(note)}", highlight=False, soft_wrap=True)
    stop = StopFlag(*_stop_signals(), max_signals=MAX_CLEAN_STOP_SIGNALS)
    try:
        cluster.start(stop.check)
        return body(cluster, stop)
    except Stopped:
        return EXIT_INTERRUPTED
    finally:
        display.close()
        cluster.stop()
        stop.close()


def _stop_signals() -> list[signal.Signals]:
    """The signals of Ctrl-C, a service manager's stop, and the terminal's end unless that is ignored (`nohup`)."""
    signals = [signal.SIGINT, signal.SIGTERM]
    return signals if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [*signals, signal.SIGHUP]


def _watch(cluster: Cluster, stop: StopFlag, console: Console) -> int:
    """Print each change of a process until a signal stops it; the controller restarts what is lost."""
    state = cluster.state()
    while not stop.wait(WATCH_INTERVAL_S):
        before, state = state, cluster.state()
        for change in state_diff.diff(before, state):
            colour = "red" if change.what in ("lost", "failed") else "green" if change.what == "ready" else "yellow"
            detail = f": {escape(change.detail)}" if change.detail else ""
            console.print(f"[{colour}]{change.what}[/{colour}] {change.name}{detail}", highlight=False, soft_wrap=True)
    console.print("stopping")
    return EXIT_OK


def print_ready(console: Console, cluster: Cluster, config: ClusterConfig) -> None:
    """Print what is running where, and lines to try it."""
    workers = table("worker", "roles", "pid", "address", "KV blocks")
    for info in cluster.workers:
        blocks = f"{info.num_blocks} x {info.block_size} tokens"
        workers.add_row(info.worker_id, ", ".join(info.roles), str(info.pid), info.address, blocks)
    names = [alone.model.served_name for alone in models_of(config).values()]
    http_address = cluster.http_address
    http = f", [bold]{http_address}[/bold] (HTTP)" if http_address else ""
    console.print(
        f"\nserving [bold]{escape(', '.join(names))}[/bold] on [bold]{cluster.address}[/bold] (gRPC){http}",
        highlight=False,
        soft_wrap=True,
    )
    page = page_url(http_address, config.gateway)
    console.print(f"page: [bold]{page}[/bold]\n" if page else "", highlight=False, soft_wrap=True)
    console.print(workers)
    for note in _target_notes(cluster.workers, config):
        console.print(f"  [yellow]note[/yellow]   {escape(note)}", highlight=False, soft_wrap=True)
    console.print("\ntry it from another terminal:", style="dim")
    for line in lines_to_try(cluster.address, http_address, names, config.gateway, _names_of_pooled(config)):
        console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)
    console.print("\nCtrl-C stops the cluster", style="dim")


def page_url(http_address: str, gateway: GatewaySection) -> str:
    """URL of the gateway's page; empty where it serves none."""
    if not http_address or not serves_page(gateway):
        return ""
    return f"{'https' if gateway.tls else 'http'}://{http_address}/"


def _target_notes(workers: Sequence[WorkerInfo], config: ClusterConfig) -> list[str]:
    """Notes on configured TPOT targets that no worker can meet, according to its calibration."""
    notes = []
    for model, alone in models_of(config).items():
        steps = {
            info.worker_id: StepModel(info.calibration, info.expert_share).coefficients
            for info in workers
            if "decode" in info.roles and info.calibration and model_of(info.worker_id) == model
        }
        notes.append(note_of_target(alone.slo.tpot_ms, steps))
    return [note for note in notes if note]


def _names_of_pooled(config: ClusterConfig) -> set[str]:
    """Names of the models that give vectors or scores, and no answers."""
    models = [alone.model for alone in models_of(config).values() if alone.model.path != FAKE_MODEL]
    return {model.served_name for model in models if is_pooled(resolve_model(model.path or model.served_name))}


def lines_to_try(
    address: str, http_address: str, models: Sequence[str], gateway: GatewaySection, pooled: Collection[str] = ()
) -> list[str]:
    """Shell lines that use and show a cluster, of which the `pooled` models give no answers; without an HTTP address
    there is no line for curl."""
    at = "" if address == DEFAULT_ADDRESS else f" --address {address}"
    model = next((name for name in models if name not in pooled), None)
    lines = _exports(gateway)
    if model is None:
        if http_address:
            lines.append(curl_line(http_address, models[0], gateway, gives_answers=False))
        return [*lines, command(f"top{at}")]
    chosen = f" --model {shlex.quote(model)}" if len(models) > 1 else ""
    lines += [command(f"chat{chosen}{at}"), command(f'generate "What is a cache?"{chosen}{at}')]
    if http_address:
        lines.append(curl_line(http_address, model, gateway))
    return [*lines, client_line(address, model if len(models) > 1 else ""), command(f"top{at}")]


def _exports(gateway: GatewaySection) -> list[str]:
    """Shell lines that set the environment for the other lines."""
    names = ["DISAGG_API_KEY"] if gateway.api_keys is not None else []
    if gateway.tls is not None:
        names.append("DISAGG_CA_CERT")
        names += ["DISAGG_CLIENT_CERT", "DISAGG_CLIENT_KEY"] if gateway.tls.client_ca is not None else []
    return [f"export {' '.join(f'{name}=...' for name in names)}"] if names else []


def curl_line(http_address: str, model: str, gateway: GatewaySection, *, gives_answers: bool = True) -> str:
    """Shell line for a streamed chat over HTTP, or a rerank by a model that gives no answers."""
    path = "v1/chat/completions" if gives_answers else "rerank"
    words = ["curl -N", f"{'https' if gateway.tls else 'http'}://{http_address}/{path}"]
    if gateway.tls is not None:
        words.append('--cacert "$DISAGG_CA_CERT"')
        if gateway.tls.client_ca is not None:
            words.append('--cert "$DISAGG_CLIENT_CERT" --key "$DISAGG_CLIENT_KEY"')
    if gateway.api_keys is not None:
        words.append('-H "authorization: Bearer $DISAGG_API_KEY"')
    asked: dict[str, object] = {"query": "What is a cache?", "documents": ["Memory for what is used again.", "A dog."]}
    if gives_answers:
        asked = {"messages": [{"role": "user", "content": "What is a cache?"}], "max_tokens": 64, "stream": True}
    body = shlex.quote(json.dumps({"model": model, **asked}))
    words += ["-H 'content-type: application/json'", f"-d {body}"]
    return " ".join(words)


def client_line(address: str, model: str = "") -> str:
    """Shell line that calls the Python client."""
    chosen = f"model={model!r}, " if model else ""
    call = f"generate('The capital of France is', {chosen}max_tokens=16)"
    return f"""{python()} -c "from disagg.client import Client; print(Client('{address}').{call}.text)\""""
