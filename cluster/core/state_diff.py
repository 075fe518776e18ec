"""The difference of two observed states of a cluster, for people: progress of a start, changes of a running one.
Pure."""

from __future__ import annotations

from typing import Literal, NamedTuple

from disagg.cluster.core.gateways import GATEWAY
from disagg.proto.control import ControlState, GatewayPhase, WorkerPhase

What = Literal["starting", "ready", "draining", "stopping", "lost", "failed", "gone"]

EMPTY_STATE = ControlState(pools=(), workers=(), gateways=())
"""The state of a cluster that was not started."""


class Change(NamedTuple):
    """A process that entered another phase."""

    name: str
    what: What
    detail: str = ""
    """Reason of `lost` and `failed`."""


class _Process(NamedTuple):
    phase: WorkerPhase | GatewayPhase
    incarnation: str
    """Incarnation, which differs between two processes of one name."""
    detail: str


def diff(before: ControlState | None, after: ControlState) -> list[Change]:
    """The changes, workers in the order of their pools, then the gateway. Without a `before`, everything is new.

    A process that was lost and is back between the two states is both `starting` and `ready`.
    """
    old, new = _processes(before or EMPTY_STATE), _processes(after)
    changes: list[Change] = []
    for name, process in new.items():
        earlier = old.get(name)
        if earlier is not None and (earlier.phase, earlier.incarnation) == (process.phase, process.incarnation):
            continue
        if process.phase == "ready" and (earlier is None or earlier.phase == "ready"):
            changes.append(Change(name, "starting"))
        changes.append(Change(name, process.phase, process.detail if process.phase in ("lost", "failed") else ""))
    return changes + [Change(name, "gone") for name in old if name not in new]


def _processes(state: ControlState) -> dict[str, _Process]:
    found = {
        str(record.worker_id): _Process(
            record.phase, record.info.incarnation if record.info is not None else "", record.detail
        )
        for record in state.workers
    }
    for gateway in state.gateways:
        found[gateway.name] = _Process(gateway.phase, gateway.gateway_id, gateway.detail)
    return found


def first_failure(state: ControlState) -> str | None:
    """The first process that cannot start, `prefill-0: why`; None while there is none."""
    for name, process in _processes(state).items():
        if process.phase == "failed" or (process.phase == "lost" and process.detail):
            return f"{name}: {process.detail}"
    return None


def timeout_message(state: ControlState, timeout_s: float) -> str:
    """Message for a start that took too long: what is missing."""
    missing = {name: process for name, process in _processes(state).items() if process.phase != "ready"}
    reasons = "; ".join(f"{name}: {process.detail}" for name, process in missing.items() if process.detail)
    return f"{', '.join(missing) or GATEWAY}: not ready after {timeout_s:g} s" + (f" ({reasons})" if reasons else "")


def gateway_address(state: ControlState) -> str:
    """host:port for clients; empty while there is no gateway."""
    return next((gateway.address for gateway in state.gateways if gateway.address), "")
