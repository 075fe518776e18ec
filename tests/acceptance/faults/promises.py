"""Every promise about faults against a real `disagg up` with two prefill and two decode workers, under open-loop load.

    python -m tests.acceptance.faults [--rows kill_decode,overload_10x] [--model tiny|fake] [--transport nixl]
        [--json FILE]

Each row is one promise: streams completed, output against the reference (greedy, fp32), longest gap between tokens,
time to recover, what is held afterwards. Rows of one configuration share a cluster. Exit status 1 where one is not met.
Workers are paced by a failpoint (10 ms more a step), so that two cores hold clients, gateway and four workers.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.acceptance.faults import connections, messages
from tests.acceptance.faults.clients import bad_input, disconnect, slow_reader
from tests.acceptance.faults.cluster import Up
from tests.acceptance.faults.connections import silent_connections
from tests.acceptance.faults.kills import (
    FAILPOINTS,
    MOVES_LAST,
    failing_worker,
    kill_decode,
    kill_gateway,
    kill_prefill,
    kill_source,
    kill_target,
    only_decode,
    only_prefill,
    stop_decode,
    stop_prefill,
)
from tests.acceptance.faults.load import Model, TinyModel
from tests.acceptance.faults.messages import worst_messages
from tests.acceptance.faults.overload import overload_decode, overload_kv, overload_prefill
from tests.acceptance.faults.row import Row, show
from tests.acceptance.faults.standstill import still_for
from tests.acceptance.faults.surroundings import (
    checkpoint_at_restart,
    checkpoint_at_start,
    clock_jump,
    clock_shim,
    disk_full,
    full_logs,
    gcs_killed,
)
from tests.support.reports import report, write_json

RowFunction = Callable[[Up, Model], Awaitable[Row]]


@dataclass(frozen=True)
class Group:
    """Rows that share a cluster."""

    rows: Mapping[str, RowFunction]
    prefill: int = 2
    decode: int = 2
    pool: Mapping[str, Any] = field(default_factory=dict)
    decode_pool: Mapping[str, Any] = field(default_factory=dict)
    """On top of `pool`."""
    sections: Mapping[str, Any] = field(default_factory=dict)
    options: Callable[[], dict[str, Any]] = dict
    """More arguments of `Up`."""
    max_model_len: int | None = None
    step_ms: float = 10.0
    is_fake: bool = False
    """Whether the model without weights serves, whatever was asked for."""

    def config(self, model: Model) -> dict[str, Any]:
        """For `disagg up`."""
        pool = {"kv_cache_bytes": 64 << 20, "num_blocks": 2048, **self.pool}
        pools = {"prefill": {"size": self.prefill, **pool}, "decode": {"size": self.decode, **pool, **self.decode_pool}}
        served = {"path": model.path, "dtype": model.dtype, "max_model_len": self.max_model_len}
        return {"model": served, "pools": pools, **self.sections}


STILL = {"still_5s": 5.0, "still_40s": 40.0, "still_300s": 300.0}

GROUPS = (
    Group(
        {
            "kill_decode": kill_decode,
            "kill_prefill": kill_prefill,
            "stop_decode": stop_decode,
            "stop_prefill": stop_prefill,
            "kill_gateway": kill_gateway,
            "disconnect": disconnect,
            "checkpoint_at_restart": checkpoint_at_restart,
        }
    ),
    Group(
        {"kill_source": kill_source, "kill_target": kill_target},
        sections={"placement": {"local_prefill": "never"}, "transfer": {"transport": "shm"}},
        options=lambda: {"failpoints": [MOVES_LAST]},
        is_fake=True,
    ),
    Group({"only_decode": only_decode}, prefill=1, decode=1, sections={"placement": {"local_prefill": "never"}}),
    Group({"only_prefill": only_prefill}, prefill=1, decode=2),
    Group(
        {"failing_worker": failing_worker},
        prefill=3,
        decode=2,
        sections={"placement": {"local_prefill": "never"}, "transfer": {"transport": "shm"}},
        options=lambda: {"failpoints": FAILPOINTS},
        is_fake=True,
    ),
    Group(
        {"bad_input": bad_input, "slow_reader": slow_reader},
        pool={"num_blocks": 8192},
        max_model_len=16_384,
        is_fake=True,
        step_ms=2.0,
    ),
    Group({"worst_messages": worst_messages}, is_fake=True, step_ms=20.0, options=lambda: {"keys": messages.KEYS}),
    Group({"overload_10x": overload_prefill}, pool={"token_budget": 64}, step_ms=100.0, is_fake=True),
    Group(
        {"silent_connections": silent_connections},
        is_fake=True,
        options=lambda: {"keys": connections.KEYS},
        step_ms=0.0,
    ),
    Group({"overload_decode_10x": overload_decode}, decode_pool={"max_num_seqs": 4}, step_ms=20.0, is_fake=True),
    Group({"overload_kv_10x": overload_kv}, decode_pool={"num_blocks": 150}, step_ms=20.0, is_fake=True),
    Group({name: still_for(seconds, name) for name, seconds in STILL.items()}, is_fake=True, step_ms=50.0),
    Group(
        {f"{name}_ray": still_for(seconds, f"{name}_ray") for name, seconds in STILL.items()},
        is_fake=True,
        step_ms=50.0,
        options=lambda: {"launcher": "ray"},
    ),
    Group({"clock_jump": clock_jump}, is_fake=True, options=clock_shim),
    Group({"disk_full": disk_full}, is_fake=True, options=full_logs),
    Group({"checkpoint_at_start": checkpoint_at_start}, options=lambda: {"is_broken": True}),
    Group({"gcs_killed": gcs_killed}, prefill=1, is_fake=True, options=lambda: {"launcher": "ray"}),
)


async def run(names: Sequence[str], model: Model, transport: str | None = None) -> list[Row]:
    """The rows of these names, in order; KV by `transport` instead of each row's own."""
    rows = []
    for group in GROUPS:
        wanted = [name for name in group.rows if name in names]
        if not wanted:
            continue
        served = Model() if group.is_fake else model
        config, options = group.config(served), group.options()
        if transport is not None:
            config["transfer"] = {**config.get("transfer", {}), "transport": transport}
        if options.pop("is_broken", False):  # there is no cluster to wait for
            rows += [await _one(name, group.rows[name], Up(config, **options), served) for name in wanted]
            continue
        async with Up(config, step_ms=group.step_ms, **options) as up:
            rows += [await _one(name, group.rows[name], up, served) for name in wanted]
    return rows


async def _one(name: str, function: RowFunction, up: Up, model: Model) -> Row:
    began = time.monotonic()
    print(f"{name} ...", end=" ", flush=True, file=sys.stderr)
    try:
        row = await function(up, model)
    except Exception as error:  # one row must not cost the others
        row = Row(name=name, promise="", met=False, errors=(f"{type(error).__name__}: {error}",))
    row = replace(row, loop_longest_s=max(row.loop_longest_s, await _loop_longest_s(up)))
    print(f"{'met' if row.met else 'NOT MET'} ({time.monotonic() - began:.0f} s)", file=sys.stderr)
    return row


async def _loop_longest_s(up: Up) -> float:
    """Of the gateway that there is now; 0 where none answers. One that was killed in a row took its own with it."""
    try:
        return await up.metric("disagg_gateway_loop_longest_seconds", window="start")
    except OSError:
        return 0.0


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """How many promises are kept, and each row's figures."""
    flat: dict[str, float] = {
        "rows_met": sum(row.met for row in rows),
        "rows_total": len(rows),
        "loop_longest_ms": round(max((row.loop_longest_s for row in rows), default=0.0) * 1e3, 3),
    }
    for row in rows:
        for name in ("completed", "streams", "wrong", "longest_gap_s", "recovery_s", "left", "left_for_s"):
            flat[f"{row.name}_{name}"] = round(getattr(row, name), 3)
        flat |= {f"{row.name}_{name}": round(value, 3) for name, value in row.figures.items()}
    return flat


def main() -> int:
    """Run what was asked for; the exit status."""
    names = [name for group in GROUPS for name in group.rows]
    parser = argparse.ArgumentParser(
        prog="python -m tests.acceptance.faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", default=",".join(names), help=f"of {', '.join(names)}")
    parser.add_argument("--model", choices=("tiny", "fake"), default="tiny")
    parser.add_argument("--transport", help="what moves KV (default: what the rows and `auto` take)")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    wanted = arguments.rows.split(",")
    if unknown := sorted(set(wanted) - set(names)):
        parser.error(f"--rows: there is no {', '.join(unknown)}; there is {', '.join(names)}")
    model = TinyModel() if arguments.model == "tiny" else Model()
    try:
        rows = asyncio.run(run(wanted, model, arguments.transport))
    finally:
        model.close()
    show(rows)
    if arguments.json is not None:
        write_json(arguments.json, report([row.as_dict() for row in rows], summary(rows)))
    return 0 if all(row.met for row in rows) else 1
