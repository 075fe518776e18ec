"""`disagg top`: the running cluster, drawn again every second.

    gateway ──WatchClusterState──> states ──picture(state, earlier)──> rich
                └── it goes away: the last picture stays, with a line about that, until it is back

`picture` is pure: a state and an earlier one make what is shown. `quits_on_q` reads the keys that are pressed
meanwhile.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from disagg.cli.operations.operate import LOAD_LEFT_OUT, open_client, ranks_text, state_of
from disagg.client import Client, ClusterState
from disagg.client.types import SloState, TransferState, WorkerState
from disagg.cluster.system.terminal import format_bytes, table
from disagg.proto.errors import RequestCancelledError, UnavailableError

RETRY_S = 1.0
_GOT = ("loaded", "fetched")
"""KV of prompts that workers did not compute and had not in their device cache; each is a column if there is any, with
the share of the prompt tokens since the start."""
BAR_CELLS = 24
MAX_PAIRS = 12
"""Largest number of pairs that are listed, those with the most bytes first."""
STAGES = ("queued", "prefill", "transfer", "decode")
_STYLES = {"ready": "green", "lost": "red", "failed": "red"}
"""Colours of phases; others are yellow."""
_MARKS = {False: ("█", "▒", "░", "·"), True: ("#", "+", "-", ".")}
"""Cells of a bar (active, reserved, cached, free), by whether only ASCII can be shown."""


@dataclass(frozen=True, slots=True)
class Earlier:
    """An earlier state: rates are the differences of its counters to those of the present one."""

    state: ClusterState
    elapsed_s: float
    """Seconds between the two states."""


def run_top(address: str, console: Console, *, once: bool, interval_s: float) -> int:
    """Draw until q or Ctrl-C; only one picture with `once`, or where standard output is no terminal. Returns the exit
    status.

    Raises:
        LaunchError: if there is no gateway when it begins.
        DisaggError: if the gateway refuses.
    """
    ascii_only = console.options.ascii_only
    with open_client(address) as client:
        state = state_of(client, address)
        if once or not console.is_terminal:
            console.print(picture(state, address, ascii_only=ascii_only))
            return 0
        try:
            with quits_on_q(sys.stdin), Live(console=console, screen=True, auto_refresh=False) as live:
                for drawn in pictures(client, address, interval_s, ascii_only=ascii_only):
                    live.update(drawn, refresh=True)
        except KeyboardInterrupt:
            pass  # the way to end it
    return 0


def pictures(client: Client, address: str, interval_s: float, *, ascii_only: bool) -> Iterator[RenderableType]:
    """One picture for each state, and one with a message whenever the gateway is away; never ends by itself."""
    state, seen_at = ClusterState(), 0.0
    earlier: Earlier | None = None
    while True:
        try:
            for state_now in client.watch(interval_s):
                now = time.monotonic()
                earlier = Earlier(state, now - seen_at) if seen_at else None
                state, seen_at = state_now, now
                yield picture(state, address, earlier, ascii_only=ascii_only)
        except (UnavailableError, RequestCancelledError):
            pass  # shown below
        seen_at = 0.0
        problem = f"no gateway answers at {address}; waiting for it (q ends this)"
        yield picture(state, address, problem=problem, ascii_only=ascii_only)
        time.sleep(RETRY_S)


# ---------------------------------------------------------------- what is shown


def picture(
    state: ClusterState,
    address: str,
    earlier: Earlier | None = None,
    *,
    problem: str = "",
    ascii_only: bool = False,
) -> Group:
    """Draw everything on one screen. `problem` is a line above the rest, which may then be out of date."""
    parts: list[RenderableType] = [Text(problem, style="bold red"), Text()] if problem else []
    parts += [_headline(state, address), Text(), _workers(state, ascii_only)]
    if state.load_left_out:
        parts += [Text(), Text(LOAD_LEFT_OUT, style="dim")]
    else:
        parts += [_legend(ascii_only), Text(), _requests(state), _targets(state.slos)]
    if state.transfers:
        parts += [Text(), *_transfers(state.transfers, earlier)]
    parts += [Text(f"{worker.worker_id}: {worker.detail}") for worker in state.workers if _is_unwell(worker)]
    return Group(*parts)


def _headline(state: ClusterState, address: str) -> Text:
    line = Text.assemble(("disagg", "bold"), f" {address}")
    if not (state.pools or state.gateways):
        return line.append("   the controller does not answer; this is what the gateway sees", style="yellow")
    for pool in state.pools:
        style = "green" if pool.ready == pool.desired else "yellow"
        line.append(f"   {pool.name} ").append(f"{pool.ready} of {pool.desired}", style=style)
    return line


def _workers(state: ClusterState, ascii_only: bool) -> Table:
    has_drafts = any(worker.drafted_tokens for worker in state.workers)
    drafts = ["tokens/step>", "accepted>"] if has_drafts else []
    kinds = [kind for kind in _GOT if any(getattr(worker, f"{kind}_tokens") for worker in state.workers)]
    has_ranks = any(ranks_text(worker) for worker in state.workers)
    ranks = ["ranks"] if has_ranks else []
    made = table(
        *("worker", "phase", *ranks, "seqs>", "KV blocks", "in use>", "cached>", "of>"),
        *(f"{kind}>" for kind in kinds),
        *drafts,
    )
    for worker in state.workers:
        phase = worker.phase or "unknown"
        load: list[str | Text] = ["", "", "", ""]
        if not state.load_left_out:
            in_use = worker.kv_blocks_active + worker.kv_blocks_reserved
            bar = kv_bar(worker, ascii_only=ascii_only)
            load = [str(worker.sequences), bar, str(in_use), str(worker.kv_blocks_cached)]
        made.add_row(
            Text(worker.worker_id),
            Text(phase, style=_STYLES.get(phase, "yellow")),
            *([ranks_text(worker)] if has_ranks else []),
            *load,
            str(worker.kv_blocks_total or ""),
            *(_share(getattr(worker, f"{kind}_tokens"), worker.prompt_tokens) for kind in kinds),
            *(_drafts(worker) if has_drafts else []),
        )
    return made


def _share(num_tokens: int, num_prompt_tokens: int) -> str:
    return f"{100 * num_tokens / num_prompt_tokens:.0f} %" if num_tokens and num_prompt_tokens else ""


def _drafts(worker: WorkerState) -> tuple[str, str]:
    """The present tokens a step of each sequence, and the share of drafts that were accepted since the start."""
    if not worker.drafted_tokens:
        return "", ""
    return f"{worker.tokens_per_step:.2f}", f"{100 * worker.accepted_tokens / worker.drafted_tokens:.0f} %"


def kv_bar(worker: WorkerState, *, cells: int = BAR_CELLS, ascii_only: bool = False) -> Text:
    """The KV blocks of a worker as a bar of `cells` cells, rounded up, so that a single used block shows."""
    bar = Text()
    total = worker.kv_blocks_total
    if not total:
        return bar
    active, reserved, cached, free = _MARKS[ascii_only]
    num_drawn = num_blocks = 0
    for mark, blocks, style in (
        (active, worker.kv_blocks_active, "cyan"),
        (reserved, worker.kv_blocks_reserved, "magenta"),
        (cached, worker.kv_blocks_cached, "blue"),
    ):
        num_blocks += blocks
        end = min(cells, -(-num_blocks * cells // total))
        bar.append(mark * (end - num_drawn), style=style)
        num_drawn = end
    return bar.append(free * (cells - num_drawn), style="dim")


def _legend(ascii_only: bool) -> Text:
    active, reserved, cached, free = _MARKS[ascii_only]
    return Text(f"KV: {active} in use  {reserved} promised  {cached} cached, can be had  {free} free", style="dim")


def _requests(state: ClusterState) -> Text:
    counts = {entry.stage: entry.requests for entry in state.stages}
    if not counts:
        counts = {"queued": state.queued_requests, "running": state.running_requests}
    names = [*(name for name in STAGES if name in counts), *(name for name in counts if name not in STAGES)]
    stages = "  ".join(f"{name} {counts[name]}" for name in names)
    return Text.assemble(
        ("requests ", "dim"), stages, f"   {state.requests_per_s:.1f}/s, {state.output_tokens_per_s:.0f} tokens/s"
    )


def _targets(slos: Sequence[SloState]) -> Text:
    line = Text.assemble(("targets  ", "dim"))
    met = [f"{slo.slo} {100 * slo.met / slo.total:.1f} % ({slo.met} of {slo.total})" for slo in slos if slo.total]
    return line.append("  ".join(met) if met else "no request that had some ended in the last minute")


def _transfers(transfers: Sequence[TransferState], earlier: Earlier | None) -> list[RenderableType]:
    before = {_pair(entry): entry.bytes for entry in earlier.state.transfers} if earlier is not None else {}
    made = table("from", "to", "transport", "hand-overs>", "KV>", "MB/s>", "failed>")
    busiest = sorted(transfers, key=lambda entry: (-entry.bytes, _pair(entry)))
    for entry in busiest[:MAX_PAIRS]:
        rate = ""
        if earlier is not None and earlier.elapsed_s > 0 and _pair(entry) in before:
            # A worker that was started anew counts from zero.
            rate = f"{max(0, entry.bytes - before[_pair(entry)]) / earlier.elapsed_s / 1e6:.1f}"
        made.add_row(
            Text(entry.prefill_worker),
            Text(entry.decode_worker),
            entry.transport,
            str(entry.transfers),
            format_bytes(entry.bytes),
            rate,
            Text(str(entry.failures), style="red" if entry.failures else ""),
        )
    left_out = len(busiest) - MAX_PAIRS
    return [made, Text(f"and {left_out} pairs more", style="dim")] if left_out > 0 else [made]


def _pair(entry: TransferState) -> tuple[str, str, str]:
    return (entry.prefill_worker, entry.decode_worker, entry.transport)


def _is_unwell(worker: WorkerState) -> bool:
    return bool(worker.detail) and worker.phase != "ready"


_QUIT = b"qQ"


@contextmanager
def quits_on_q(source: TextIO) -> Iterator[None]:
    """Let the key q do what Ctrl-C does, as in `top` and `less`, if `source` is a terminal. Called on the main thread;
    on leaving, the terminal is as it was."""
    if not source.isatty():
        yield
        return
    keys = source.fileno()
    before = termios.tcgetattr(keys)
    ended, end = os.pipe()
    watching = threading.Thread(target=_watch, args=(keys, ended), daemon=True)
    tty.setcbreak(keys)  # Ctrl-C stays a signal
    watching.start()
    try:
        yield
    finally:
        os.close(end)
        watching.join()
        os.close(ended)
        termios.tcsetattr(keys, termios.TCSADRAIN, before)


def _watch(keys: int, ended: int) -> None:
    """Wait for the key, or for the other end of the pipe to be closed."""
    main = threading.main_thread().ident
    while True:
        ready, _, _ = select.select([keys, ended], [], [])
        if ended in ready:
            return
        pressed = os.read(keys, 1)
        if pressed and pressed in _QUIT and main is not None:
            signal.pthread_kill(main, signal.SIGINT)
        if not pressed or pressed in _QUIT:
            return
