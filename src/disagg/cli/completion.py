"""Values that the shell completes: workers, models and requests of the running cluster, imported models, devices,
scenarios.

A cluster has `TIMEOUT_S` seconds to answer. Where it does not, or refuses, there is nothing to complete and no message.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import typer

from disagg.cli.address import DEFAULT_ADDRESS

if TYPE_CHECKING:
    from disagg.client import Client

TIMEOUT_S = 2.0
"""Longest time in seconds that a completion takes, with the time to load the client."""
NUM_REQUESTS = 50
"""Number of latest requests that are completed."""


def workers(ctx: typer.Context, incomplete: str) -> list[str]:
    """The workers of the running cluster."""
    return _of_cluster(ctx, incomplete, lambda client: [each.worker_id for each in client.cluster_state().workers])


def served_models(ctx: typer.Context, incomplete: str) -> list[str]:
    """The models that the running cluster serves."""
    return _of_cluster(ctx, incomplete, lambda client: [each.name for each in client.models()])


def requests(ctx: typer.Context, incomplete: str) -> list[str]:
    """The latest requests of the running cluster."""
    return _of_cluster(ctx, incomplete, lambda client: [each.request_id for each in client.requests(NUM_REQUESTS)])


def imported_models(incomplete: str) -> list[str]:
    """The models in the model cache."""
    from disagg.cluster.models.catalog import list_models

    return _begin_with(incomplete, lambda: [each.name for each in list_models()])


def usable_models(incomplete: str) -> list[str]:
    """The models in the model cache, and the one of tests."""
    from disagg.cluster.models.catalog import FAKE_MODEL

    return [*imported_models(incomplete), *_begin_with(incomplete, lambda: [FAKE_MODEL])]


def planned_models(incomplete: str) -> list[str]:
    """The models that `disagg plan` knows, and those in the model cache."""
    from disagg.simulator.durations.model_shapes import MODEL_SHAPES

    return list(dict.fromkeys([*_begin_with(incomplete, lambda: MODEL_SHAPES), *imported_models(incomplete)]))


def devices(incomplete: str) -> list[str]:
    """The devices that `disagg plan` knows."""
    from disagg.simulator.durations.devices import DEVICES

    return _begin_with(incomplete, lambda: DEVICES)


def scenarios(incomplete: str) -> list[str]:
    """The scenarios that come with disagg."""
    from disagg.loadtests.scenario import built_in_names

    return _begin_with(incomplete, built_in_names)


def _of_cluster(ctx: typer.Context, incomplete: str, ask: Callable[[Client], Iterable[str]]) -> list[str]:
    """What a gateway answers in time, at the address that the command line has so far."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    address = ctx.params.get("address") or os.environ.get("DISAGG_ADDRESS") or DEFAULT_ADDRESS
    found: list[str] = []
    asking = threading.Thread(target=_ask, args=(str(address), ask, found), daemon=True)
    asking.start()
    asking.join(TIMEOUT_S)
    return _begin_with(incomplete, lambda: list(found))


def _ask(address: str, ask: Callable[[Client], Iterable[str]], found: list[str]) -> None:
    try:
        from disagg.client import Client

        with Client(address) as client:
            found += ask(client)
    except Exception:
        return  # a completion has no place for an error


def _begin_with(incomplete: str, names: Callable[[], Iterable[Any]]) -> list[str]:
    try:
        return [name for name in names() if name.startswith(incomplete)]
    except Exception:
        return []  # the same
