"""The public gRPC service for operators: what the router sees and what the controller knows, side by side; changes go
to the controller."""

# ruff: noqa: N802 - the methods are named in the proto

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, get_args

import grpc

from disagg.proto.control import (
    ControlRefused,
    ControlReply,
    ControlRequest,
    ControlState,
    DrainRequest,
    PoolName,
    ScaleRequest,
    StateRequest,
    WorkerRecord,
)
from disagg.proto.errors import InternalError, InvalidRequestError, RequestNotFoundError, UnavailableError
from disagg.proto.ids import RequestId, WorkerId
from disagg.proto.messages import Load, WorkerInfo
from disagg.router.api import RequestTrace, Router
from disagg.router.gateway.status import answered
from disagg.v1 import inference_pb2 as pb
from disagg.v1 import inference_pb2_grpc as pb_grpc

Control = Callable[[ControlRequest], Awaitable[ControlReply]]
"""Asks the controller; raises `UnavailableError` when it does not answer."""

Context = grpc.aio.ServicerContext[Any, Any]


async def no_controller(request: ControlRequest) -> ControlReply:
    """A `Control` for gateways that stand alone."""
    raise UnavailableError("this gateway has no controller", "no_controller")


class AdminService(pb_grpc.AdminServiceServicer):
    """`disagg.v1.AdminService`, for operators."""

    def __init__(self, router: Router, control: Control = no_controller) -> None:
        self._router = router
        self._control = control

    async def GetClusterState(self, request: pb.GetClusterStateRequest, context: Context) -> pb.GetClusterStateResponse:
        """See the proto."""
        async with answered(context):
            try:
                known = _state(await self._control(StateRequest()))
            except UnavailableError:
                known = ControlState(pools=(), workers=(), gateways=())
            view = self._router.view()
            seen = {worker.info.worker_id: worker for worker in view.workers}
            workers = [
                _worker_state(record.info, record, worker.load if (worker := seen.get(record.worker_id)) else None)
                for record in known.workers
            ]
            others = seen.keys() - {record.worker_id for record in known.workers}
            workers += [_worker_state(w.info, None, w.load) for w in view.workers if w.info.worker_id in others]
            return pb.GetClusterStateResponse(
                workers=workers,
                queued_requests=view.num_queued,
                running_requests=view.num_running,
                pools=_pools(known),
            )

    async def ExplainRequest(self, request: pb.ExplainRequestRequest, context: Context) -> pb.ExplainRequestResponse:
        """See the proto."""
        async with answered(context):
            trace = self._router.trace(RequestId(request.request_id))
            if trace is None:
                raise RequestNotFoundError("request_id: no such request runs or is remembered")
            return _explanation(trace)

    async def SetPoolSizes(self, request: pb.SetPoolSizesRequest, context: Context) -> pb.SetPoolSizesResponse:
        """See the proto."""
        async with answered(context):
            sizes: dict[PoolName, int] = {}
            for entry in request.sizes:
                name = _pool_name(entry.pool)
                if name in sizes:
                    raise InvalidRequestError(f"sizes.{name}", "it is named twice")
                sizes[name] = entry.size
            return pb.SetPoolSizesResponse(pools=_pools(_state(await self._control(ScaleRequest(sizes=sizes)))))

    async def DrainWorker(self, request: pb.DrainWorkerRequest, context: Context) -> pb.DrainWorkerResponse:
        """See the proto."""
        async with answered(context):
            _state(await self._control(DrainRequest(worker_id=WorkerId(request.worker_id))))
            return pb.DrainWorkerResponse()


def _pool_name(text: str) -> PoolName:
    for name in get_args(PoolName):
        if name == text:
            return name  # type: ignore[no-any-return]  # get_args is untyped
    raise InvalidRequestError("sizes.pool", f"there is no pool {text!r}; there are {', '.join(get_args(PoolName))}")


def _state(reply: ControlReply) -> ControlState:
    """The state in a reply; raises `InvalidRequestError` for a refusal."""
    if isinstance(reply, ControlRefused):
        raise InvalidRequestError(reply.field, reply.message)
    if not isinstance(reply, ControlState):
        raise InternalError(f"the controller answered {type(reply).__name__}")
    return reply


def _pools(state: ControlState) -> list[pb.PoolState]:
    return [pb.PoolState(name=pool.name, desired=pool.desired, ready=pool.ready) for pool in state.pools]


def _worker_state(info: WorkerInfo | None, record: WorkerRecord | None, load: Load | None) -> pb.WorkerState:
    state = pb.WorkerState()
    if record is not None:
        state.worker_id, state.phase, state.detail = record.worker_id, record.phase, record.detail
        state.starts = record.num_starts
    if info is not None:
        state.worker_id, state.address, state.incarnation, state.pid = (
            info.worker_id,
            info.address,
            info.incarnation,
            info.pid,
        )
        state.roles.extend(info.roles)
        state.kv_blocks_total = info.num_blocks
    if load is not None:
        state.sequences = load.num_running + load.num_waiting
        state.kv_blocks_total, state.kv_blocks_active = load.blocks_total, load.blocks_active
        state.kv_blocks_cached, state.kv_blocks_reserved = load.blocks_cached, load.blocks_reserved
    return state


def _explanation(trace: RequestTrace) -> pb.ExplainRequestResponse:
    return pb.ExplainRequestResponse(
        request_id=trace.request_id,
        prefill_worker=trace.prefill_worker or "",
        decode_worker=trace.decode_worker or "",
        transport=trace.transport,
        kv_bytes=trace.kv_bytes,
        prefill_cached_tokens=trace.prefill_cached_tokens,
        decode_cached_tokens=trace.decode_cached_tokens,
        attempts=trace.attempts,
        stages=[
            pb.StageTime(stage=stage, at_ms=(ended - trace.arrival) * 1000) for stage, ended in trace.stages.items()
        ],
    )
