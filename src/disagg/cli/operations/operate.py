"""`disagg status`, `scale` and `drain`: what operators see of a running cluster and change about it, through its
gateway."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Sequence

from rich.console import Console
from rich.markup import escape

from disagg.cli.address import check_address, reaching
from disagg.client import AutoscalerState, Client, ClusterState
from disagg.client.types import WorkerState
from disagg.cluster.system.children import LaunchError
from disagg.cluster.system.terminal import table
from disagg.proto.errors import ConfigError
from disagg.proto.ids import model_of
from disagg.router.api import QUARANTINED

POLL_INTERVAL_S = 0.2
LOAD_LEFT_OUT = "load is shown to keys with the scope metrics or admin"

Workers = dict[str, tuple[str, str]]
"""Worker id -> phase and incarnation."""


def parse_sizes(texts: Sequence[str]) -> dict[str, int]:
    """Sizes from `prefill=3`. Raises `ConfigError`."""
    sizes: dict[str, int] = {}
    for text in texts:
        match = re.fullmatch(r"((?:[A-Za-z0-9_-]+/)?[a-z]+)=(\d{1,9})", text)
        if match is None:
            raise ConfigError(f"{text}: expected POOL=SIZE, such as decode=2, or MODEL/POOL=SIZE")
        if match[1] in sizes:
            raise ConfigError(f"{text}: {match[1]} is named twice")
        sizes[match[1]] = int(match[2])
    return sizes


def run_status(address: str, console: Console) -> None:
    """Print pools and workers. Raises `LaunchError` if there is no gateway."""
    with open_client(address) as client:
        show_state(state_of(client, address), console)


def run_scale(address: str, sizes: dict[str, int], console: Console, wait_s: float | None) -> None:
    """Set the sizes; with `wait_s`, wait until the pools have them, and print each change.

    Raises:
        DisaggError: if the sizes are refused.
        LaunchError: if there is no gateway, or the pools are not that large after `wait_s` seconds.
    """
    with open_client(address) as client:
        before = state_of(client, address)
        client.scale(sizes)
        if wait_s is not None:
            models = {model_of(pool) for pool in sizes}
            wait_settled(lambda: state_of(client, address), before, console, wait_s, models)


_SECONDS = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|h)?")
_UNITS = {None: 1.0, "s": 1.0, "min": 60.0, "h": 3600.0}


def parse_seconds(option: str, text: str) -> float:
    """A time such as `30s`, `2min` or `1h`; a bare number is of seconds. Raises `ConfigError` that names the option."""
    found = _SECONDS.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"{option}: expected a time such as 30s or 2min; got {text!r}")
    return float(found[1]) * _UNITS[found[2]]


def run_drain(
    address: str, worker_id: str, console: Console, wait_s: float | None, deadline_s: float | None = None
) -> None:
    """Replace a worker, at the latest `deadline_s` seconds from now; with `wait_s`, wait until the new one is there.
    Raises as `run_scale` does."""
    with open_client(address) as client:
        before = state_of(client, address)
        client.drain(worker_id, deadline_s)
        if wait_s is not None:
            models = {model_of(worker_id)}
            wait_settled(lambda: state_of(client, address), before, console, wait_s, models)


def run_forget(address: str, tenant: str, console: Console) -> None:
    """Have all workers drop the KV of a tenant, those that are not reached when they register."""
    with open_client(address) as client:
        workers, missed = client.forget(tenant)
    told = "1 worker drops what it keeps" if len(workers) == 1 else f"{len(workers)} workers drop what they keep"
    later = f"; told when they register: {', '.join(missed)}" if missed else ""
    console.print(f"{told} of it{later}", highlight=False)


def wait_settled(
    look: Callable[[], ClusterState],
    before: ClusterState,
    console: Console,
    wait_s: float,
    models: Collection[str] = ("",),
) -> None:
    """Wait until every pool is as large as it should be and every worker is ready; print a line for each change.
    `models`: see `is_settled`."""
    deadline = time.monotonic() + wait_s
    earlier = workers_in(before, models)
    while True:
        state = look()
        workers = workers_in(state, models)
        details = {worker.worker_id: worker.detail for worker in state.workers}
        for line in changes(earlier, workers, details):
            console.print(line, highlight=False, soft_wrap=True)
        if is_settled(state, models):
            return
        if time.monotonic() >= deadline:
            missing = ", ".join(f"{name} is {phase}" for name, (phase, _) in workers.items() if phase != "ready")
            raise LaunchError(f"not done after {wait_s:g} s: {missing or 'workers are missing'}; it goes on")
        earlier = workers
        time.sleep(POLL_INTERVAL_S)


def is_settled(state: ClusterState, models: Collection[str] = ("",)) -> bool:
    """Whether the observed state is the desired one. `models`: keys of the models that count, among several; with the
    empty key, all of them."""
    return (
        len(state.pools) > 0
        and not ("" in models and state.HasField("rollout"))
        and all(pool.ready == pool.desired for pool in state.pools if _is_of(pool.name, models))
        and all(worker.phase == "ready" for worker in state.workers if _is_of(worker.worker_id, models))
    )


def workers_in(state: ClusterState, models: Collection[str] = ("",)) -> Workers:
    """The workers of a state; `models` as in `is_settled`."""
    return {
        worker.worker_id: (worker.phase, worker.incarnation)
        for worker in state.workers
        if _is_of(worker.worker_id, models)
    }


def _is_of(name: str, models: Collection[str]) -> bool:
    """Whether a pool or a worker belongs to one of these models."""
    return "" in models or model_of(name) in models


def changes(before: Workers, after: Workers, details: dict[str, str]) -> list[str]:
    """A line for each worker whose phase or process has changed. `details`: reasons by worker."""
    lines = []
    for name, (phase, incarnation) in after.items():
        earlier_phase, earlier_incarnation = before.get(name, ("", ""))
        if phase != earlier_phase or (phase == "ready" and incarnation != earlier_incarnation):
            why = f" ({escape(details[name])})" if phase in ("lost", "failed") and details[name] else ""
            lines.append(f"  {phase:<9} {escape(name)}{why}")
    return lines + [f"  {'gone':<9} {escape(name)}" for name in before if name not in after]


def show_state(state: ClusterState, console: Console) -> None:
    """Print the pools, the workers, and what else the state has."""
    pools = table("pool", "ready", "desired")
    for pool in state.pools:
        pools.add_row(pool.name, str(pool.ready), str(pool.desired))
    has_ranks = any(ranks_text(worker) for worker in state.workers)
    ranks = ["ranks"] if has_ranks else []
    workers = table("worker", "phase", *ranks, "pid", "address", "sequences", "KV blocks", "starts")
    for worker in state.workers:
        workers.add_row(
            escape(worker.worker_id),
            escape(worker.phase or "unknown"),
            *([ranks_text(worker)] if has_ranks else []),
            str(worker.pid or ""),
            worker.address,
            "" if state.load_left_out else str(worker.sequences),
            _kv_blocks(worker, state.load_left_out),
            str(worker.starts or ""),
        )
    if state.pools:
        console.print(pools)
        console.print()
    elif not state.gateways:  # a key that is for other models sees no pools either
        console.print("the controller does not answer; this is what the gateway sees\n")
    console.print(workers)
    for worker in state.workers:
        if worker.detail and (worker.phase != "ready" or worker.detail.startswith(QUARANTINED)):
            console.print(f"{escape(worker.worker_id)}: {escape(worker.detail)}", highlight=False, soft_wrap=True)
    for note in state.notes:
        console.print(f"[yellow]note[/yellow] {escape(note)}", highlight=False, soft_wrap=True)
    if state.HasField("rollout"):
        console.print(rollout_line(state), highlight=False, soft_wrap=True)
    if state.HasField("rolled_back"):
        text = f"generation {state.rolled_back.generation} was taken back: {escape(state.rolled_back.why)}"
        console.print(text, highlight=False, soft_wrap=True)
    if len(state.gateways) > 1:
        show_gateways(state, console)
    show_starts(state, console)
    if state.HasField("autoscaler"):
        show_autoscaler(state.autoscaler, console, load_left_out=state.load_left_out)
    load = f"{state.running_requests} requests run, {state.queued_requests} wait"
    console.print(f"\n{LOAD_LEFT_OUT if state.load_left_out else load}", highlight=False)


def ranks_text(worker: WorkerState) -> str:
    """Such as `tp 2, pp 4, ep`; empty for a worker of one rank."""
    widths = [("tp", worker.tp), ("pp", worker.pp)]
    parts = [f"{name} {width}" for name, width in widths if width > 1]
    return ", ".join([*parts, "ep"] if worker.ep and parts else parts)


def _kv_blocks(worker: WorkerState, load_left_out: bool) -> str:
    if load_left_out or not worker.kv_blocks_total:
        return str(worker.kv_blocks_total or "")
    return f"{worker.kv_blocks_active} of {worker.kv_blocks_total}"


def rollout_line(state: ClusterState) -> str:
    """Progress of a rollout: since when, which generation, how many workers of how many, what happens, what is next."""
    rollout = state.rollout
    what = "back to generation" if rollout.is_back else "generation"
    parts = [
        f"{rollout.running_s:.0f} s: {what} {rollout.generation}, {rollout.stage}: {rollout.done} of {rollout.total} "
        "workers have it",
        escape(rollout.doing),
        f"next: {escape(rollout.next)}" if rollout.next else "",
        f"because {escape(rollout.why)}" if rollout.why else "",
    ]
    return "; ".join(part for part in parts if part)


def show_gateways(state: ClusterState, console: Console) -> None:
    """Print several gateways at one address, and where each is reached alone: for its metrics, and to explain its
    requests."""
    gateways = table("gateway", "phase", "pid", "own address", "own HTTP address")
    for gateway in state.gateways:
        pid = str(gateway.pid or "")
        gateways.add_row(gateway.name, gateway.phase, pid, gateway.own_address, gateway.own_http_address)
    console.print()
    console.print(gateways)
    for gateway in state.gateways:
        if gateway.detail and gateway.phase != "ready":
            console.print(f"{gateway.name}: {escape(gateway.detail)}", highlight=False, soft_wrap=True)


def show_starts(state: ClusterState, console: Console) -> None:
    """Print how long the last start of each process took, in seconds, phase by phase."""
    starts = [(worker.worker_id, worker.start_phases) for worker in state.workers]
    starts.append(("gateway", state.gateway_start_phases))
    for name, phases in starts:
        if phases:
            total_s = sum(phase.seconds for phase in phases)
            parts = ", ".join(f"{escape(phase.name)} {phase.seconds:.2f}" for phase in phases if phase.seconds >= 0.005)
            console.print(f"{escape(name)} started in {total_s:.2f} s: {parts}", highlight=False, soft_wrap=True)


def show_autoscaler(found: AutoscalerState, console: Console, *, load_left_out: bool = False) -> None:
    """Print why pools are as large as they are, and what would change that."""
    mode = ", dry run: nothing is resized" if found.dry_run else ""
    console.print(f"\nautoscaler: policy {escape(found.policy)}{mode}", highlight=False)
    if load_left_out:
        return
    if not found.pools:
        console.print("  it has not decided yet: no gateway has reported its load", highlight=False)
        return
    if found.prompt_tokens_per_s or found.output_tokens_per_s:
        console.print(
            f"  {found.requests_per_s:.3g} requests/s arrive, {found.forecast_per_s:.3g} are forecast; "
            f"{found.prompt_tokens_per_s:.0f} prompt and {found.output_tokens_per_s:.0f} output tokens/s",
            highlight=False,
        )
    for pool in found.pools:
        size = f"{pool.size}" if pool.size == pool.wanted else f"{pool.size}, wanted {pool.wanted}"
        console.print(
            f"  {escape(pool.pool)}: {size}, because {escape(pool.reason)}; {escape(pool.change)}",
            highlight=False,
            soft_wrap=True,
        )


def open_client(address: str) -> Client:
    """Make a client for an address from the command line. Raises `ConfigError`."""
    return Client(check_address(address))


def state_of(client: Client, address: str) -> ClusterState:
    """The state of the cluster behind a gateway. Raises `LaunchError` if there is none."""
    with reaching(address):
        return client.cluster_state()
