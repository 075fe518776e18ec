"""Requests of operators that the controller refuses, and the reasons. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from disagg.cluster.core.rollout import Plan
from disagg.cluster.core.workers import Worker, num_ready
from disagg.proto.control import (
    MAX_POOL_SIZE,
    AdapterRequest,
    ApplyRequest,
    ControlRefused,
    ControlRequest,
    DrainRequest,
    ForgetRequest,
    PoolName,
    ScaleRequest,
    StateRequest,
)
from disagg.proto.ids import WorkerId, model_of

MAX_DRAIN_S = 86400.0
"""The longest deadline of a drain, in seconds."""
_FIELD_OF = {ScaleRequest: "sizes", DrainRequest: "worker_id", ApplyRequest: "file"}


def refusal(
    request: ControlRequest,
    plan: Plan | None,
    sizes: Mapping[PoolName, int],
    workers: Mapping[WorkerId, Worker],
    *,
    is_adopting: bool,
) -> ControlRefused | None:
    """Reason why a request is refused, or None.

    Args:
        plan: plan of the present rollout, if there is one.
        sizes: the desired sizes.
        workers: all of them.
        is_adopting: whether the controller waits for the workers of an earlier one.
    """
    if isinstance(request, StateRequest | AdapterRequest | ForgetRequest):
        return None
    if isinstance(request, ApplyRequest) and request.dry_run:
        return None
    if plan is not None and (isinstance(request, ApplyRequest) or _models_of(request) & plan.models):
        what = f"{plan.old.generation} of the configuration is being taken back"
        if not plan.is_back:
            what = f"{plan.new.generation} of the configuration is being applied"
        if any(plan.models):
            what += f" ({', '.join(sorted(plan.models))})"
        message = f"generation {what}; try again after that, see `disagg status`"
        return ControlRefused(field=_FIELD_OF[type(request)], message=message)
    if isinstance(request, ApplyRequest):
        if is_adopting:
            message = "the controller was started again and waits for the workers; try again in some seconds"
            return ControlRefused(field="file", message=message)
        return None
    if isinstance(request, ScaleRequest):
        return _scale_refusal(request, sizes)
    return _drain_refusal(request, workers)


def _models_of(request: ScaleRequest | DrainRequest) -> set[str]:
    """Keys of the models whose pools would change."""
    return {model_of(name) for name in (request.sizes if isinstance(request, ScaleRequest) else (request.worker_id,))}


def _scale_refusal(request: ScaleRequest, sizes: Mapping[PoolName, int]) -> ControlRefused | None:
    if not request.sizes:
        return ControlRefused(field="sizes", message=f"name at least one pool of {', '.join(sizes)}")
    for name, size in request.sizes.items():
        if name not in sizes:
            return ControlRefused(field=f"sizes.{name}", message=f"this cluster has {', '.join(sizes)}")
        if not 1 <= size <= MAX_POOL_SIZE:
            return ControlRefused(field=f"sizes.{name}", message=f"expected 1 to {MAX_POOL_SIZE} workers; got {size}")
    return None


def _drain_refusal(request: DrainRequest, workers: Mapping[WorkerId, Worker]) -> ControlRefused | None:
    if request.deadline_s is not None and not 0.0 <= request.deadline_s <= MAX_DRAIN_S:
        message = f"expected 0 to {MAX_DRAIN_S:g} seconds; got {request.deadline_s:g}"
        return ControlRefused(field="deadline_s", message=message)
    worker = workers.get(request.worker_id)
    if worker is None:
        there = ", ".join(workers)
        return ControlRefused(field="worker_id", message=f"there is no {request.worker_id}; there is {there}")
    if worker.phase != "ready":
        message = f"{worker.worker_id} is {worker.phase}; only a worker that is ready can be drained"
        return ControlRefused(field="worker_id", message=message)
    if num_ready(workers.values(), worker.pool) == 1:
        message = f"{worker.worker_id} is the only ready worker of its pool; make the pool larger first"
        return ControlRefused(field="worker_id", message=message)
    return None
