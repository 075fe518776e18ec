"""`disagg twin`: look at a cluster every few seconds, compare settings when that is due, set the better one.

It runs with niceness 19, behind every other process, and has limits on memory and on the processor time of each look.
Beyond them it is killed by the kernel, which harms nothing: the cluster keeps its present setting. `message_of` is the
protobuf in which it tells the gateway of a comparison.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
from collections.abc import Callable

from rich.console import Console
from rich.markup import escape

from disagg.cli.address import UNREACHABLE, check_address
from disagg.client import Client, RecentLoad, ShapeComparison
from disagg.client.types import RatePrediction, ShapeOption
from disagg.cluster.system.process_tools import StopFlag
from disagg.gateway.operators.decode_placement_log import STALE
from disagg.gateway.operators.load_codec import decode
from disagg.proto.errors import ConfigError, InvalidRequestError, UnavailableError
from disagg.router.telemetry.recent_load import Load
from disagg.simulator.twin.comparison import Comparison
from disagg.simulator.twin.twin import EVERY_S, LEAD_IN, LEAST, MOST, Twin

LOOK_S = 10.0
"""Seconds between two looks."""
MOST_PAUSE_S = 60.0
"""Longest pause between two tries to reach a gateway, in seconds."""
NICENESS = 19
MEMORY_BYTES = 1 << 30
"""Limit on data memory in bytes; beyond it there is a `MemoryError`."""
LOOK_CPU_S = 120
"""Limit on the processor time of one look, in seconds; beyond it the kernel ends the process."""


def run_twin(address: str, console: Console, api_key: str | None = None) -> None:
    """Run the twin until SIGINT or SIGTERM. `api_key` is an admin's; without it, that of the environment is used.

    Raises:
        ConfigError: if the cluster has no such setting.
        DisaggError: if the gateway refuses, such as for want of an admin's key.
    """
    be_modest()
    stop = StopFlag(signal.SIGINT, signal.SIGTERM)
    try:
        with Client(check_address(address), api_key) as client:
            look_again_and_again(client, stop.wait, console, address)
    finally:
        stop.close()


def be_modest() -> None:
    """Set the lowest priority, and bound the memory."""
    os.nice(NICENESS - os.nice(0))
    for limit, value in ((resource.RLIMIT_DATA, MEMORY_BYTES), (resource.RLIMIT_CORE, 0)):
        _, hard = resource.getrlimit(limit)
        allowed = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (allowed, hard))


def look_again_and_again(client: Client, wait: Callable[[float], bool], console: Console, address: str) -> None:
    """Look at the cluster until `wait`, which gets the seconds to the next look, returns True. A gateway that does not
    answer is tried again, less and less often. Raises as `run_twin`."""
    twin, seen_s, pause_s = Twin(), -float("inf"), LOOK_S
    answers: bool | None = None
    while True:
        try:
            response = client.load(MOST + LEAD_IN)
            if not answers:
                _show(console, _first_line(response, address))
            answers = True
            load = decode(response)
            if load.now_s < seen_s:  # another machine's clock, or that of another start
                twin = Twin()
            seen_s = load.now_s
            if (comparison := _compare(twin, load)) is not None and _send(client, comparison) and comparison.is_change:
                _show(console, line_of(comparison))
            pause_s = LOOK_S
        except UnavailableError as error:
            if error.code != UNREACHABLE:
                raise
            if answers is not False:
                _show(console, f"twin: no gateway answers at {address}; trying again until one does")
            answers = False
            pause_s = min(2 * pause_s, MOST_PAUSE_S)
        if wait(pause_s):
            return


def _first_line(response: RecentLoad, address: str) -> str:
    """First line of the output, for people. Raises `ConfigError` where the cluster has no such setting."""
    if not response.decodes:
        raise ConfigError("this cluster has no setting for a twin: it is for mode elastic, policy elastic")
    return (
        f"twin: reads the load of {address}; answers decode with {response.decodes}; comparisons begin with {LEAST} "
        "requests that have targets"
    )


def _compare(twin: Twin, load: Load) -> Comparison | None:
    _bound_look()
    gc.disable()  # a replay leaves no cycles, and has very many objects
    try:
        return twin.look(load)
    finally:
        gc.enable()


def _send(client: Client, comparison: Comparison) -> bool:
    """Send a change. Returns whether the gateway accepted it: not if the setting was changed meanwhile, which the next
    look finds."""
    try:
        client.set_decodes(comparison.chosen, message_of(comparison))
    except InvalidRequestError as error:
        if error.field != STALE:
            raise
        return False
    return True


def _show(console: Console, line: str) -> None:
    console.print(escape(line), highlight=False, soft_wrap=True)


def line_of(comparison: Comparison) -> str:
    """Text about a change, for people."""
    predicted = ", ".join(
        f"{each.decodes} {' / '.join(f'{share:.1%}' for _, share in each.by_rate)}" for each in comparison.attained
    )
    return (
        f"twin: answers decode with {comparison.chosen} instead of {comparison.present}: {comparison.cause}; predicted "
        f"on {comparison.num_requests} requests: {predicted} (difference {comparison.difference:+.1%}, error "
        f"{comparison.error:.1%}); compared again within {EVERY_S:.0f} s, changed again before that only if the load "
        "changes"
    )


def _bound_look() -> None:
    """Bound the processor time of the process to what it may have used at the end of this look."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + 1 + LOOK_CPU_S
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def message_of(comparison: Comparison) -> ShapeComparison:
    """The protobuf of a comparison."""
    return ShapeComparison(
        cause=comparison.cause,
        requests=comparison.num_requests,
        present=comparison.present,
        chosen=comparison.chosen,
        options=[
            ShapeOption(
                decodes=each.decodes,
                predictions=[RatePrediction(rate_factor=rate, attainment=share) for rate, share in each.by_rate],
            )
            for each in comparison.attained
        ],
        difference=comparison.difference,
        error=comparison.error,
        needed=comparison.needed,
        reason=comparison.reason,
        measured=comparison.measured,
        measured_requests=comparison.num_measured,
    )
