"""`disagg apply`: give a running cluster another configuration, and show its progress."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.markup import escape

from disagg.cli.operations.operate import (
    POLL_INTERVAL_S,
    changes,
    is_settled,
    open_client,
    rollout_line,
    state_of,
    workers_in,
)
from disagg.client import Applied, ClusterState
from disagg.cluster.config.cluster_config import load_config
from disagg.cluster.system.children import LaunchError
from disagg.cluster.system.program import command
from disagg.cluster.system.terminal import table
from disagg.proto.errors import ConfigError, InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyOptions:
    """The options of the command."""

    dry_run: bool = False
    surge: bool = True
    restart: bool = False
    ready_timeout_s: float = 300.0
    wait_s: float | None = None
    """Seconds to wait for the end; None returns as soon as the request is noted."""


def run_apply(address: str, file: Path, console: Console, options: ApplyOptions) -> None:
    """Apply a file to the cluster behind a gateway.

    Raises:
        ConfigError: for a file with a mistake, or a field that cannot be changed; then nothing was changed.
        LaunchError: if there is no gateway, the old configuration was restored, or it is not done after `wait_s`.
    """
    config = load_config(file)
    with open_client(address) as client:
        before = state_of(client, address)
        try:
            applied = client.apply(
                msgspec.to_builtins(config),
                dry_run=options.dry_run,
                surge=options.surge,
                restart=options.restart,
                ready_timeout_s=options.ready_timeout_s,
            )
        except InvalidRequestError as error:
            raise ConfigError(f"{error}; nothing was changed") from None
        show_changes(applied, console)
        if options.dry_run:
            console.print("dry run: nothing was changed", highlight=False)
        elif applied.generation == before.generation:
            console.print(f"generation {before.generation} is all that, and runs", highlight=False)
        elif options.wait_s is None:
            console.print(f"generation {applied.generation} is noted; see `{command('status')}`", highlight=False)
        else:
            wait_applied(lambda: state_of(client, address), before, applied.generation, console, options.wait_s)


def show_changes(applied: Applied, console: Console) -> None:
    """Print what becomes of each field."""
    if not applied.changes and not applied.pools:
        console.print("nothing differs", highlight=False)
        return
    fields = table("field", "before", "after", "changed")
    for each in applied.changes:
        detail = f" ({each.detail})" if each.detail else ""
        fields.add_row(*(escape(text) for text in (each.field, each.before, each.after, f"{each.how}{detail}")))
    if applied.changes:
        console.print(fields)
    if applied.pools:
        console.print(f"workers change in: {', '.join(applied.pools)}", highlight=False)


def wait_applied(
    look: Callable[[], ClusterState], before: ClusterState, generation: int, console: Console, wait_s: float
) -> None:
    """Wait until that generation is applied, and print a line for each change.

    Raises:
        LaunchError: if the previous generation is restored, or it is not done after `wait_s` seconds.
    """
    began = time.monotonic()
    workers, told = workers_in(before), ""
    while True:
        state = look()
        if state.pools:  # else the controller is away for a moment
            now = workers_in(state)
            details = {worker.worker_id: worker.detail for worker in state.workers}
            for line in changes(workers, now, details):
                console.print(line, highlight=False, soft_wrap=True)
            workers = now
            progress = rollout_line(state) if state.HasField("rollout") else ""
            if progress.partition(": ")[2] != told.partition(": ")[2]:
                told = progress
                console.print(progress, highlight=False, soft_wrap=True)
            if not state.HasField("rollout"):
                if state.rolled_back.generation == generation:
                    raise LaunchError(
                        f"generation {generation} was taken back: {state.rolled_back.why}; "
                        f"generation {state.generation} runs"
                    )
                if state.generation >= generation and is_settled(state):
                    taken_s = time.monotonic() - began
                    console.print(f"generation {generation} is applied ({taken_s:.1f} s)", highlight=False)
                    return
        if time.monotonic() >= began + wait_s:
            raise LaunchError(f"not done after {wait_s:g} s; it goes on, see `{command('status')}`")
        time.sleep(POLL_INTERVAL_S)
