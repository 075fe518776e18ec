"""The public gRPC service for operators: the views of router and controller, side by side; changes go to the
controller."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, get_args

import grpc
from typing_extensions import override

from disagg.gateway.auth.audit import Audit
from disagg.gateway.auth.auth import Caller
from disagg.gateway.auth.shell.rights import Rights, usage_of
from disagg.gateway.models.pair_check import PairChecker
from disagg.gateway.operators.admin_answers import (
    adapter_answer,
    adapters_in,
    apply_answer,
    explanation,
    placement_facts,
    pool_states,
    state_in,
    usage_answer,
)
from disagg.gateway.operators.decode_placement_log import MAX_CHARS, DecodePlacementLog, check, why
from disagg.gateway.operators.history import Sample, sample_of
from disagg.gateway.operators.load_codec import encode_arrival
from disagg.gateway.operators.requests_list import FoundRequests, RequestFilter, request_line
from disagg.gateway.operators.shell.state_feed import StateFeed
from disagg.gateway.operators.unknown_tenants import unknown_tenant
from disagg.gateway.requests.refusals import Refusals
from disagg.gateway.status import abort_on_error
from disagg.gateway.usage.counts import DEFAULT_DAYS, MAX_DAYS, MAX_ROWS, NO_USAGE, UsageView
from disagg.proto.block_hash import tenant_tag
from disagg.proto.clock.process_clock import process_clock
from disagg.proto.control import (
    AddAdapter,
    ApplyRequest,
    ControlReply,
    ControlRequest,
    ControlState,
    DrainRequest,
    ForgetRequest,
    ListAdapters,
    PoolKind,
    PoolName,
    RemoveAdapter,
    ScaleRequest,
    StateRequest,
)
from disagg.proto.errors import InvalidRequestError, RequestNotFoundError, UnavailableError
from disagg.proto.ids import RequestId, WorkerId, kind_of
from disagg.proto.messages import StartPhase
from disagg.router.api import RequestTrace, RouterViews
from disagg.router.config import Decodes, is_decodes
from disagg.router.telemetry.recent_load import arrival_of
from disagg.v1 import inference_pb2 as pb
from disagg.v1 import inference_pb2_grpc as pb_grpc

logger = logging.getLogger(__name__)

Control = Callable[[ControlRequest], Awaitable[ControlReply]]
"""Calls the controller; raises `UnavailableError` when it does not answer."""

NO_CONTROLLER: Final = "no_controller"
DEFAULT_READY_TIMEOUT_S = 300.0
MAX_READY_TIMEOUT_S = 86_400.0
DEFAULT_INTERVAL_MS = 1000
MIN_INTERVAL_MS = 100
DEFAULT_LISTED = 20
MAX_LISTED = 1000
DEFAULT_LOAD = 600
_AT_ONCE = 50
"""Number of requests of `GetLoad` that are written without a pause."""
MAX_AGE_S = 0.1
"""Maximum age in seconds of a state for callers other than admins: together they cost the controller one call in this
time."""
SAMPLE_AGE_S: Final = 0.5
"""Maximum age in seconds of a state that becomes a sample of the history."""
SAMPLE_TIMEOUT_S: Final = 0.5
"""Seconds after which a sample is taken without the counts of other gateways."""
_POOL: Final = re.compile(r"([A-Za-z0-9_-]{1,32}/)?[a-z]{1,16}")
MAX_SHOWN_SIZES = 8
"""Maximum number of pool sizes of a scale request that the audit log shows."""

Context = grpc.aio.ServicerContext[Any, Any]


async def no_controller(request: ControlRequest) -> ControlReply:
    """A `Control` for gateways without a controller."""
    raise UnavailableError("this gateway has no controller", NO_CONTROLLER)


class AdminService(pb_grpc.AdminServiceServicer):
    """`disagg.v1.AdminService`, for operators.

    Args:
        router: what is looked at: all of the gateway's.
        control: calls the controller.
        pair_checker: sends prompts through pairs of workers, for `disagg doctor`.
        rights: authorization; without it, as authenticated.
        audit: logs changes.
        clock: the router's clock.
        wall_clock: seconds since the epoch.
        name: of this gateway.
        start_phases: of the gateway's process.
        models: the names of the served ones, now.
        model_names: by key the names of those that this gateway has, now.
        usage: what keys used; None where it is not known.
        refusals: the calls that no router had.
        has_peers: whether other gateways serve at the same ports, whose requests are counted, too.
    """

    def __init__(
        self,
        router: RouterViews,
        control: Control = no_controller,
        pair_checker: PairChecker | None = None,
        rights: Rights | None = None,
        *,
        audit: Audit,
        clock: Callable[[], float] | None = None,
        wall_clock: Callable[[], float] = time.time,
        name: str = "gateway",
        start_phases: Sequence[StartPhase] = (),
        models: Callable[[], Sequence[str]] = tuple,
        model_names: Callable[[], Mapping[str, str]] = dict,
        usage: UsageView | None = None,
        refusals: Refusals | None = None,
        has_peers: bool = False,
    ) -> None:
        self._has_peers = has_peers
        self._usage = usage
        self._refusals = refusals
        self._router = router
        self._models = models
        self._control = control
        self._pair_checker = pair_checker
        self._rights = rights or Rights()
        self._audit = audit
        self._clock = clock = process_clock().now if clock is None else clock
        self._feed = StateFeed(self._known, router.view, clock, name, start_phases, model_names)
        self._wall_clock = wall_clock
        self._decode_placement_log = DecodePlacementLog(wall_clock())

    @override
    async def GetClusterState(self, request: pb.GetClusterStateRequest, context: Context) -> pb.GetClusterStateResponse:
        async with abort_on_error(context):
            caller = self._rights.caller(context)
            found = await (self._feed.now() if caller.is_admin else self._feed.latest(MAX_AGE_S))
            return found.message(caller).state

    @override
    async def WatchClusterState(self, request: pb.WatchClusterStateRequest, context: Context) -> None:
        async with abort_on_error(context):
            interval_ms = request.interval_ms if request.HasField("interval_ms") else DEFAULT_INTERVAL_MS
            if interval_ms < MIN_INTERVAL_MS:
                raise InvalidRequestError("interval_ms", f"must be at least {MIN_INTERVAL_MS}, not {interval_ms}")
            interval_s, caller = interval_ms / 1000, self._rights.caller(context)
            with self._feed.watching(caller):
                while True:
                    found = await self._feed.latest(interval_s / 2)
                    await context.write(found.message(caller))
                    await asyncio.sleep(interval_s)
                    caller = self._rights.authenticate_again(context)

    @override
    async def ExplainRequest(self, request: pb.ExplainRequestRequest, context: Context) -> pb.ExplainRequestResponse:
        async with abort_on_error(context):
            return self.explain(RequestId(request.request_id), self._rights.caller(context))

    @override
    async def ListRequests(self, request: pb.ListRequestsRequest, context: Context) -> pb.ListRequestsResponse:
        async with abort_on_error(context):
            self._rights.require_admin(context)
            limit = request.limit if request.HasField("limit") else DEFAULT_LISTED
            if limit > MAX_LISTED:
                raise InvalidRequestError("limit", f"at most {MAX_LISTED}, not {limit}")
            response = pb.ListRequestsResponse()
            async for found in self.recent(limit):
                response.requests.append(found)
            return response

    @override
    async def SetPoolSizes(self, request: pb.SetPoolSizesRequest, context: Context) -> pb.SetPoolSizesResponse:
        async with abort_on_error(context), self._change(context, _scaling(request)):
            sizes: dict[PoolName, int] = {}
            for entry in request.sizes:
                name = _pool_name(entry.pool)
                if name is None:
                    pools = [pool.name for pool in (await self._known()).pools] or get_args(PoolKind)
                    message = f"there is no pool {entry.pool[:MAX_CHARS]!r}; this cluster has {', '.join(pools)}"
                    raise InvalidRequestError("sizes.pool", message)
                if name in sizes:
                    raise InvalidRequestError(f"sizes.{name}", "it is named twice")
                sizes[name] = entry.size
            return pb.SetPoolSizesResponse(pools=pool_states(state_in(await self._control(ScaleRequest(sizes=sizes)))))

    @override
    async def DrainWorker(self, request: pb.DrainWorkerRequest, context: Context) -> pb.DrainWorkerResponse:
        async with abort_on_error(context), self._change(context, f"drain {request.worker_id}"):
            deadline_s = request.deadline_s if request.HasField("deadline_s") else None
            state_in(await self._control(DrainRequest(worker_id=WorkerId(request.worker_id), deadline_s=deadline_s)))
            return pb.DrainWorkerResponse()

    @override
    async def ForgetTenant(self, request: pb.ForgetTenantRequest, context: Context) -> pb.ForgetTenantResponse:
        async with abort_on_error(context), self._change(context, f"forget tenant {request.tenant[:MAX_CHARS]}"):
            told = self._router.forget(request.tenant)
            await self._note_forgotten(request.tenant)
            if problem := unknown_tenant(request.tenant, self._rights.tenants()):
                missed = sorted(worker_id for worker_id, is_told in told.items() if not is_told)
                later = f", {', '.join(missed)} when they register" if missed else ""
                raise InvalidRequestError("tenant", f"{problem}; all workers drop what they may have of it{later}")
            return pb.ForgetTenantResponse(
                workers=sorted(worker_id for worker_id, is_told in told.items() if is_told),
                missed=sorted(worker_id for worker_id, is_told in told.items() if not is_told),
            )

    async def _note_forgotten(self, tenant: str) -> None:
        """Have the controller tell workers that do not run now. Raises `UnavailableError` where it cannot be asked."""
        try:
            state_in(await self._control(ForgetRequest(tenant_tag=tenant_tag(tenant))))
        except UnavailableError as error:
            if error.code != NO_CONTROLLER:
                text = f"{error.message}; workers that start later are not told: repeat this"
                raise UnavailableError(text, error.code) from error

    @override
    async def ApplyConfig(self, request: pb.ApplyConfigRequest, context: Context) -> pb.ApplyConfigResponse:
        async with abort_on_error(context), self._change(context, "apply a configuration"):
            timeout_s = request.ready_timeout_s if request.HasField("ready_timeout_s") else DEFAULT_READY_TIMEOUT_S
            if not 0.0 < timeout_s <= MAX_READY_TIMEOUT_S:
                message = f"must be above 0 and at most {MAX_READY_TIMEOUT_S:g} s, not {timeout_s:g}"
                raise InvalidRequestError("ready_timeout_s", message)
            asked = ApplyRequest(
                config=request.config_json,
                dry_run=request.dry_run,
                surge=not request.no_surge,
                restart=request.restart,
                ready_timeout_s=timeout_s,
            )
            return apply_answer(await self._control(asked))

    @override
    async def AddAdapter(self, request: pb.AddAdapterRequest, context: Context) -> pb.AddAdapterResponse:
        async with abort_on_error(context), self._change(context, f"add adapter {request.name[:MAX_CHARS]}"):
            asked = AddAdapter(name=request.name, path=request.path, base=request.base)
            found = adapters_in(await self._control(asked))
            added = [adapter_answer(record) for record in found.adapters if record.name == request.name]
            return pb.AddAdapterResponse(adapter=added[0] if added else None, notes=found.notes)

    @override
    async def RemoveAdapter(self, request: pb.RemoveAdapterRequest, context: Context) -> pb.RemoveAdapterResponse:
        async with abort_on_error(context), self._change(context, f"remove adapter {request.name[:MAX_CHARS]}"):
            return pb.RemoveAdapterResponse(
                notes=adapters_in(await self._control(RemoveAdapter(name=request.name))).notes
            )

    @override
    async def ListAdapters(self, request: pb.ListAdaptersRequest, context: Context) -> pb.ListAdaptersResponse:
        async with abort_on_error(context):
            self._rights.require_admin(context)
            found = adapters_in(await self._control(ListAdapters()))
            return pb.ListAdaptersResponse(adapters=[adapter_answer(record) for record in found.adapters])

    @override
    async def GetLoad(self, request: pb.GetLoadRequest, context: Context) -> pb.GetLoadResponse:
        async with abort_on_error(context):
            self._rights.require_admin(context)
            limit = request.limit if request.HasField("limit") else DEFAULT_LOAD
            if limit > MAX_LISTED:
                raise InvalidRequestError("limit", f"at most {MAX_LISTED}, not {limit}")
            self._require_one_model()
            self._decode_placement_log.read_load(self._wall_clock())
            response = placement_facts(self._router.view())
            response.now_s = self._clock()
            for number, trace in enumerate(self._router.recent(limit)):
                if not trace.is_probe:
                    response.requests.append(encode_arrival(arrival_of(trace)))
                if number % _AT_ONCE == 0:
                    await asyncio.sleep(0)  # as in `ListRequests`
            return response

    @override
    async def SetDecodes(self, request: pb.SetDecodesRequest, context: Context) -> pb.SetDecodesResponse:
        async with abort_on_error(context):
            self._rights.require_admin(context)
            self._require_one_model()
            before, after = self._router.view().placement.decodes, _decodes(request.decodes)
            if before is None:
                raise InvalidRequestError("decodes", "the placement policy of this cluster has no such setting")
            check(request.comparison, before)
            now = self._wall_clock()
            if request.HasField("comparison"):
                self._decode_placement_log.note(request.comparison, now)
            if after != before:
                caller = self._rights.caller(context)
                by = f"tenant {caller.tenant}" if caller.tenant else "a caller without a key"
                reason = why(request.comparison) if request.HasField("comparison") else ""
                async with self._change(context, f"set decodes {after}"):
                    self._router.set_decodes(after)
                logger.info("%s", self._decode_placement_log.changed(before, after, by, reason, now))
            return pb.SetDecodesResponse()

    @override
    async def GetShape(self, request: pb.GetShapeRequest, context: Context) -> pb.GetShapeResponse:
        async with abort_on_error(context):
            self._rights.require_admin(context)
            self._require_one_model()
            placement = self._router.view().placement
            latest = self._router.recent(MAX_LISTED)
            num_targeted = sum(
                not trace.is_probe
                and not trace.is_background
                and (trace.ttft_slo_s is not None or trace.tpot_slo_s is not None)
                for trace in latest
            )
            return self._decode_placement_log.answer(placement.policy, placement.decodes, num_targeted)

    @override
    async def GetUsage(self, request: pb.GetUsageRequest, context: Context) -> pb.GetUsageResponse:
        async with abort_on_error(context):
            days = request.days if request.HasField("days") else DEFAULT_DAYS
            limit = request.limit if request.HasField("limit") else MAX_ROWS
            for name, value, most in (("days", days, MAX_DAYS), ("limit", limit, MAX_ROWS)):
                if not 1 <= value <= most:
                    raise InvalidRequestError(name, f"must be from 1 to {most}, not {value}")
            whose = usage_of(self._rights.caller(context), request.key)
            if self._usage is None:
                raise UnavailableError("this gateway keeps no usage", NO_USAGE)
            return usage_answer(await self._usage.read(days, whose, limit))

    @override
    async def ProbePair(self, request: pb.ProbePairRequest, context: Context) -> pb.ProbePairResponse:
        async with abort_on_error(context), self._change(context, f"probe {request.prefill_worker}"):
            if self._pair_checker is None:
                raise UnavailableError("this gateway has no probe", "no_probe")
            try:
                result = await self._pair_checker.run(WorkerId(request.prefill_worker), WorkerId(request.decode_worker))
            except UnavailableError as error:
                error.message = error.detail  # its caller is an operator
                raise
            return pb.ProbePairResponse(
                kv_bytes=result.kv_bytes,
                expected_bytes=result.expected_bytes,
                exposed_ms=result.exposed_s * 1000,
                transport=result.transport,
            )

    async def state(self, caller: Caller, max_age_s: float) -> pb.GetClusterStateResponse:
        """The cluster at most `max_age_s` seconds ago, as `caller` may see it. The caller must not change the
        message."""
        return (await self._feed.latest(max_age_s)).message(caller).state

    def explain(self, request_id: RequestId, caller: Caller) -> pb.ExplainRequestResponse:
        """A running or recent request. Raises `RequestNotFoundError` if there is none or `caller` may not see it."""
        trace = self._router.trace(request_id)
        if trace is None and self._refusals is not None:
            trace = self._refusals.traces.get(request_id)
        if trace is None or not caller.may_see(trace.tenant):
            raise RequestNotFoundError("request_id: no such request runs or is remembered")
        found = explanation(trace, self._clock_to_epoch_s())
        if not caller.is_admin:
            found.ClearField("detail")  # it may name hosts
        if not caller.sees_counts:  # costs are made of what others have under way
            found.ClearField("chosen")
            found.ClearField("options")
            found.ClearField("ways")
        return found

    async def recent(self, limit: int) -> AsyncIterator[pb.ExplainRequestResponse]:
        """The latest requests of all tenants, newest first; for admins only."""
        offset_s = self._clock_to_epoch_s()
        for trace in self._latest(limit):
            yield explanation(trace, offset_s)
            await asyncio.sleep(0)  # a thousand take a good part of a second, in which streams must not wait

    def find(self, wanted: RequestFilter, limit: int) -> FoundRequests:
        """The latest requests of all tenants that a filter lets through, newest first; for admins only."""
        searched, offset_s = self._latest(MAX_LISTED), self._clock_to_epoch_s()
        found = [trace for trace in searched if wanted.lets_through(trace)]
        return FoundRequests([request_line(trace, offset_s) for trace in found[:limit]], len(found), len(searched))

    async def sample(self) -> Sample:
        """The cluster now, for the history. The controller is called only for the counts of other gateways, and not
        waited for where it does not answer."""
        view = None
        if self._has_peers:
            with suppress(TimeoutError):
                async with asyncio.timeout(SAMPLE_TIMEOUT_S):
                    view = (await self._feed.latest(SAMPLE_AGE_S)).view
        return sample_of(self._router.view() if view is None else view, self._wall_clock())

    def _latest(self, limit: int) -> list[RequestTrace]:
        """The latest requests, those that no router had among them."""
        known = self._router.recent(limit)
        if self._refusals is None:
            return known
        known_ids = {each.request_id for each in known}
        refused = [trace for trace in self._refusals.traces.latest(limit) if trace.request_id not in known_ids]
        return sorted([*known, *refused], key=lambda trace: -trace.arrival)[:limit]

    async def close(self) -> None:
        """Cancel the state feed's call to the controller."""
        await self._feed.close()

    @asynccontextmanager
    async def _change(self, context: Context, what: str) -> AsyncIterator[None]:
        """Log the change that an admin makes inside. Raises `PermissionDeniedError` for other callers."""
        with self._audit.change(what, self._rights.caller(context), context.peer()):
            self._rights.require_admin(context)
            yield

    def _require_one_model(self) -> None:
        """Raises `InvalidRequestError` if several models are served: a twin replays the load of one."""
        if len(names := self._models()) > 1:
            raise InvalidRequestError("model", f"this is for a cluster of one model; here are {', '.join(names)}")

    async def _known(self) -> ControlState:
        try:
            return state_in(await self._control(StateRequest()))
        except UnavailableError:
            return ControlState(pools=(), workers=(), gateways=())

    def _clock_to_epoch_s(self) -> float:
        return self._wall_clock() - self._clock()


def _scaling(request: pb.SetPoolSizesRequest) -> str:
    return "scale " + " ".join(f"{entry.pool}={entry.size}" for entry in request.sizes[:MAX_SHOWN_SIZES])


def _decodes(text: str) -> Decodes:
    if not is_decodes(text):
        raise InvalidRequestError(
            "decodes", f"must be spread, gather or split:N (N workers that take no prompts), not {text[:MAX_CHARS]!r}"
        )
    return text


def _pool_name(text: str) -> PoolName | None:
    """The text as a pool name if it has the form of one. Only the controller knows which pools exist."""
    return text if _POOL.fullmatch(text) and kind_of(text) in get_args(PoolKind) else None
