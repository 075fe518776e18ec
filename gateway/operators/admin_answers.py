"""The views of router and controller as protobufs for operators. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any, Final

from google.protobuf.json_format import MessageToDict

from disagg.gateway.operators.load_codec import encode_capacity
from disagg.gateway.operators.requests_list import outcome_of
from disagg.gateway.rpc.callers_view import leave_out_load, leave_out_models
from disagg.gateway.usage.counts import Page, date_of
from disagg.proto.autoscaling import Decision
from disagg.proto.control import (
    AdapterList,
    AdapterRecord,
    ApplyReply,
    ControlRefused,
    ControlReply,
    ControlState,
    GatewayCounts,
    GatewayRecord,
    WorkerRecord,
)
from disagg.proto.errors import AdapterNotFoundError, InternalError, InvalidRequestError
from disagg.proto.ids import WorkerId
from disagg.proto.messages import StartPhase, WorkerInfo, WorkerMetrics
from disagg.router.api import QUARANTINED, ClusterView, Option, RequestTrace, Way, WorkerView
from disagg.router.statistics import Rates
from disagg.router.telemetry.recent_load import capacities_of
from disagg.router.telemetry.spans import spans_of
from disagg.v1 import inference_pb2 as pb

_OF_THE_MACHINE: Final = ("address", "incarnation", "pid", "detail")
"""Fields of a worker that only admins see."""


def cluster_state(
    view: ClusterView,
    known: ControlState,
    *,
    with_addresses: bool = True,
    with_counts: bool = True,
    models: Collection[str] | None = None,
    start_phases: Iterable[StartPhase] = (),
) -> pb.GetClusterStateResponse:
    """The cluster as the router and the controller see it.

    Args:
        view: of the router.
        known: the state of the controller.
        with_addresses: where workers listen, their processes, and details, which may name hosts and paths.
        with_counts: the load, from which the size of another tenant's request can be computed.
        models: keys of those that are shown; `None` for all.
        start_phases: of the gateway's process.
    """
    seen = {worker.info.worker_id: worker for worker in view.workers}
    counters = view.counters
    workers = [
        _worker_state(record.info, record, seen.get(record.worker_id), counters.get(record.worker_id))
        for record in known.workers
    ]
    others = seen.keys() - {record.worker_id for record in known.workers}
    workers += [
        _worker_state(worker.info, None, worker, counters.get(worker.info.worker_id))
        for worker in view.workers
        if worker.info.worker_id in others
    ]
    if not with_addresses:
        for state in workers:
            for field in _OF_THE_MACHINE:
                state.ClearField(field)
    found = pb.GetClusterStateResponse(
        workers=workers,
        queued_requests=view.num_queued,
        running_requests=view.num_running,
        pools=pool_states(known),
        stages=[pb.StageCount(stage=stage, requests=count) for stage, count in view.stages.items()],
        slos=[pb.SloState(slo=slo, met=met, total=total) for slo, (met, total) in view.slos.items()],
        transfers=[each for src, metrics in view.counters.items() for each in _transfers(src, metrics)],
        requests_per_s=view.rates.requests_per_s,
        output_tokens_per_s=view.rates.output_tokens_per_s,
        autoscaler=_autoscaler(known),
        generation=known.generation if known.pools else 0,
        rollout=_rollout(known, with_details=with_addresses),
        rolled_back=_rolled_back(known) if with_addresses else None,
        http_address=next((g.http_address for g in known.gateways if g.http_address), ""),
        gateways=[_gateway_state(gateway, with_addresses) for gateway in known.gateways],
        gateway_start_phases=_start_phases(start_phases),
        notes=view.notes,
    )
    if not with_counts:
        leave_out_load(found)
    if models is not None:
        leave_out_models(found, models)
    return found


def counts_of(view: ClusterView) -> GatewayCounts:
    """The counts that this gateway sends to the other gateways."""
    return GatewayCounts(
        num_queued=view.num_queued,
        num_running=view.num_running,
        stages=dict(view.stages),
        slos=dict(view.slos),
        requests_per_s=view.rates.requests_per_s,
        output_tokens_per_s=view.rates.output_tokens_per_s,
    )


def with_others(view: ClusterView, known: ControlState, name: str) -> ClusterView:
    """The view of the gateway `name`, with what the other gateways counted half a second ago."""
    for gateway in known.gateways:
        counts = gateway.counts
        if counts is None or gateway.name == name:
            continue
        stages, slos = Counter(view.stages), dict(view.slos)
        stages.update(counts.stages)
        for slo, (met, total) in counts.slos.items():
            before = slos.get(slo, (0, 0))
            slos[slo] = (before[0] + met, before[1] + total)
        rates = Rates(
            view.rates.requests_per_s + counts.requests_per_s,
            view.rates.output_tokens_per_s + counts.output_tokens_per_s,
        )
        view = replace(
            view,
            num_queued=view.num_queued + counts.num_queued,
            num_running=view.num_running + counts.num_running,
            stages=stages,
            slos=slos,
            rates=rates,
        )
    return view


def _gateway_state(record: GatewayRecord, with_addresses: bool) -> pb.GatewayState:
    state = pb.GatewayState(name=record.name, phase=record.phase)
    if with_addresses:
        state.detail, state.pid = record.detail, record.pid
        state.own_address, state.own_http_address = record.own_address, record.own_http_address
    return state


def _start_phases(phases: Iterable[StartPhase]) -> list[pb.StartPhase]:
    return [pb.StartPhase(name=phase.name, seconds=phase.seconds) for phase in phases]


def pool_states(state: ControlState) -> list[pb.PoolState]:
    """The pools of the controller's state."""
    return [pb.PoolState(name=pool.name, desired=pool.desired, ready=pool.ready) for pool in state.pools]


def state_in(reply: ControlReply) -> ControlState:
    """The state in a reply; raises `InvalidRequestError` for a refusal, or `AdapterNotFoundError`."""
    if isinstance(reply, ControlRefused):
        if reply.is_missing:
            raise AdapterNotFoundError(reply.message)
        raise InvalidRequestError(reply.field, reply.message)
    if not isinstance(reply, ControlState):
        raise InternalError(f"the controller answered {type(reply).__name__}")
    return reply


def apply_answer(reply: ControlReply) -> pb.ApplyConfigResponse:
    """The changes that a configuration makes; raises `InvalidRequestError` for a refusal."""
    if not isinstance(reply, ApplyReply):
        state_in(reply)
        raise InternalError(f"the controller answered {type(reply).__name__}")
    changes = [
        pb.FieldChange(field=each.field, before=each.before, after=each.after, how=each.how, detail=each.detail)
        for each in reply.changes
    ]
    return pb.ApplyConfigResponse(generation=reply.generation, changes=changes, pools=reply.pools)


def adapters_in(reply: ControlReply) -> AdapterList:
    """The adapters in a reply; raises `InvalidRequestError` for a refusal."""
    if not isinstance(reply, AdapterList):
        state_in(reply)
        raise InternalError(f"the controller answered {type(reply).__name__}")
    return reply


def adapter_answer(record: AdapterRecord) -> pb.Adapter:
    """One adapter."""
    return pb.Adapter(
        name=record.name,
        path=record.path,
        base=record.base,
        phase=record.phase,
        detail=record.detail,
        fingerprint="" if record.served is None else record.served.fingerprint,
        bytes=record.num_bytes,
        in_file=record.is_in_file,
    )


def _rollout(state: ControlState, *, with_details: bool) -> pb.RolloutState | None:
    found = state.rollout
    if found is None:
        return None
    return pb.RolloutState(
        generation=found.generation,
        previous=found.previous,
        stage=found.stage,
        done=found.num_done,
        total=found.num_workers,
        running_s=found.running_s,
        doing=found.doing,
        next=found.next,
        is_back=found.is_back,
        why=found.why if with_details else "",
    )


def _rolled_back(state: ControlState) -> pb.RolledBack | None:
    found = state.rolled_back
    return None if found is None else pb.RolledBack(generation=found.generation, why=found.why)


def _autoscaler(state: ControlState) -> pb.AutoscalerState | None:
    found = state.autoscaler
    if found is None:
        return None
    decision = found.decision or Decision(pools=())
    return pb.AutoscalerState(
        policy=found.policy,
        dry_run=found.dry_run,
        age_s=found.age_s,
        pools=[
            pb.ScalingDecision(
                pool=pool.name, size=pool.size, wanted=pool.wanted, reason=pool.reason, change=pool.change
            )
            for pool in decision.pools
        ],
        requests_per_s=decision.requests_per_s,
        forecast_per_s=decision.forecast_per_s,
        prompt_tokens_per_s=decision.prompt_tokens_per_s,
        output_tokens_per_s=decision.output_tokens_per_s,
    )


def explanation(trace: RequestTrace, clock_to_epoch_s: float) -> pb.ExplainRequestResponse:
    """One request. `clock_to_epoch_s` is added to the gateway's clock to get seconds since the epoch."""
    decision = trace.decision
    response = pb.ExplainRequestResponse(
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
        outcome=outcome_of(trace),
        detail=trace.detail,
        prompt_tokens=trace.num_prompt_tokens,
        completion_tokens=trace.num_output_tokens,
        drafted_tokens=trace.drafted_tokens,
        accepted_tokens=trace.accepted_tokens,
        spans=_spans(trace),
        max_itl_ms=trace.max_itl_s * 1000,
        trace_parent=trace.trace_parent,
        arrived_at=trace.arrival + clock_to_epoch_s,
        is_probe=trace.is_probe,
        trial=trace.trial,
        model=trace.model,
        guardrails=[
            pb.GuardrailDecision(
                guardrail=guardrail, rule=rule, subject=subject, action=action, reason=reason, count=count
            )
            for (guardrail, rule, subject, action, reason), count in sorted(trace.guardrails.items())
        ],
    )
    if decision is not None:
        response.chosen.CopyFrom(_option(decision))
        response.policy = decision.policy
    if trace.placement is not None:
        response.options.extend(_option(option) for option in trace.placement.options())
        response.ways.extend(map(_way, trace.placement.ways()))
    if trace.marks and (fetched := trace.marks[-1].fetched) is not None:
        response.fetched.CopyFrom(
            pb.FetchedKv(
                source=fetched.source,
                outcome=fetched.outcome,
                tokens=fetched.tokens,
                bytes=fetched.kv_bytes,
                ms=fetched.transfer_s * 1000,
            )
        )
    return response


def explanation_json(request: pb.ExplainRequestResponse) -> dict[str, Any]:
    """All fields under their names in the proto. Ids of workers that took no part are empty."""
    found: dict[str, Any] = MessageToDict(
        request, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    found["kv_bytes"] = request.kv_bytes  # the JSON form of protobuf writes 64 bits as a string
    if request.HasField("fetched"):
        found["fetched"]["bytes"] = request.fetched.bytes
    return found


def placement_facts(view: ClusterView) -> pb.GetLoadResponse:
    """The facts that placement uses: the usable workers and the settings."""
    placement = view.placement
    return pb.GetLoadResponse(
        workers=[encode_capacity(capacity) for capacity in capacities_of(view)],
        policy=placement.policy,
        decodes=placement.decodes or "",
        admission=placement.admission,
        link_latency_s=placement.link_latency_s,
        link_byte_s=placement.link_byte_s,
    )


def _transfers(src: WorkerId, metrics: WorkerMetrics) -> list[pb.TransferState]:
    return [
        pb.TransferState(
            prefill_worker=src,
            decode_worker=count.decode_worker,
            transport=count.transport,
            transfers=count.num_transfers,
            bytes=count.num_bytes,
            failures=sum(count.failures.values()),
        )
        for count in metrics.transfers
    ]


def _option(option: Option) -> pb.PlacementOption:
    return pb.PlacementOption(
        prefill_worker=option.prefill_worker or "",
        decode_worker=option.decode_worker,
        cost=option.cost,
        missed_targets=option.num_misses,
        wait_ms=option.wait_ms,
        prefill_ms=option.prefill_ms,
        transfer_ms=option.transfer_ms,
        decode_ms=option.decode_ms,
        delay_ms=option.delay_ms,
        barrier_ms=option.barrier_ms,
        ttft_ms=option.ttft_ms,
        tpot_ms=option.tpot_ms,
        adapter_ms=option.adapter_ms,
    )


def _way(way: Way) -> pb.PromptWay:
    return pb.PromptWay(
        kind=way.kind,
        source=way.source or "",
        tokens=way.tokens,
        get_ms=way.get_ms if way.get_ms < math.inf else None,
        prefill_ms=way.prefill_ms,
        delay_ms=way.delay_ms,
        chosen=way.is_chosen,
    )


def _spans(trace: RequestTrace) -> list[pb.StageSpan]:
    return [
        pb.StageSpan(
            stage=stage,
            worker=worker_id or "",
            start_ms=(start - trace.arrival) * 1000,
            end_ms=None if end is None else (end - trace.arrival) * 1000,
        )
        for stage, worker_id, start, end in spans_of(trace)
    ]


def _worker_state(
    info: WorkerInfo | None, record: WorkerRecord | None, seen: WorkerView | None, counters: WorkerMetrics | None
) -> pb.WorkerState:
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
        state.kv_blocks_total, state.fingerprint = info.num_blocks, info.fingerprint
        state.tp, state.pp, state.ep = info.tp, info.shape.pp, info.ep
        state.start_phases.extend(_start_phases(info.start_phases))
    if seen is not None:
        load = seen.load
        if seen.open_breakers:
            state.detail = f"{QUARANTINED}: {'; '.join(seen.open_breakers)}"
        state.sequences = load.num_running + load.num_waiting
        state.kv_blocks_total, state.kv_blocks_active = load.blocks_total, load.blocks_active
        state.kv_blocks_cached, state.kv_blocks_reserved = load.blocks_cached, load.blocks_reserved
        if "decode" in seen.info.roles:
            state.tokens_per_step = load.tokens_per_step
    if counters is not None:
        state.drafted_tokens, state.accepted_tokens = counters.drafted_tokens, counters.accepted_tokens
        state.prompt_tokens = counters.prompt_tokens + counters.cached_tokens
        state.loaded_tokens, state.fetched_tokens = counters.loaded_tokens, counters.fetched_tokens
    return state


def usage_answer(page: Page) -> pb.GetUsageResponse:
    """A page of the usage of keys as a protobuf."""
    entries = [
        pb.KeyUsage(
            date=date_of(key.day),
            key=key.tenant,
            model=key.model,
            requests=counts.requests,
            failed=counts.failed,
            prompt_tokens=counts.prompt_tokens,
            cached_tokens=counts.cached_tokens,
            completion_tokens=counts.completion_tokens,
        )
        for key, counts in page.rows
    ]
    dates = date_of(page.first_day), date_of(page.last_day)
    return pb.GetUsageResponse(entries=entries, first_date=dates[0], last_date=dates[1], has_more=page.has_more)
