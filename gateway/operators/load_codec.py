"""The recent load of a router as the message of `AdminService.GetLoad`: made by a gateway, read by a twin. Pure.

    encode_arrival, encode_capacity     what the router knows -> protobufs
    decode(response) -> Load            the same again, checked; workers without measured steps are left out

A table for each message has the fields of both sides, so that what is written is what is read.
"""

from __future__ import annotations

import math
from typing import Any, Final, get_args

from disagg.proto.messages import KvLayout, StepCoefficients, TierName, WindowKv
from disagg.router.config import Decodes, is_decodes
from disagg.router.telemetry.recent_load import Arrival, Capacity, Load, TierCapacity, check_marks
from disagg.v1 import inference_pb2 as pb

Fields = dict[str, str]
"""The name of a field of the message, by that of the router's struct."""

_ARRIVAL: Final[Fields] = {
    "at_s": "arrival_s",
    "prompt_tokens": "prompt_tokens",
    "output_tokens": "completion_tokens",
    "is_complete": "is_complete",
    "most_output_tokens": "max_tokens",
    "ttft_s": "ttft_slo_s",
    "tpot_s": "tpot_slo_s",
    "is_met": "met_targets",
    "marks": "prefix_marks",
}
_CAPACITY: Final[Fields] = {
    "worker_id": "worker_id",
    "num_blocks": "kv_blocks",
    "block_size": "block_size",
    "max_num_seqs": "max_num_seqs",
    "token_budget": "token_budget",
    "max_model_len": "max_model_len",
    "bytes_per_token": "kv_bytes_per_token",
    "decode_reserve_tokens": "decode_reserve_tokens",
    "watermark_blocks": "watermark_blocks",
    "scheduling": "scheduling",
    "max_itl_ms": "max_itl_ms",
    "fetches": "fetches",
}
_TIER: Final[Fields] = {"name": "name", "num_bytes": "bytes", "extent_ms": "extent_ms"}


def encode_arrival(arrival: Arrival) -> pb.RecentRequest:
    """The message of one request."""
    return pb.RecentRequest(**_written(arrival, _ARRIVAL))


def encode_capacity(capacity: Capacity) -> pb.WorkerCapacity:
    """The message of one worker."""
    windows = [pb.WindowKv(window=each.window, bytes_per_token=each.bytes_per_token) for each in capacity.windows]
    tiers = [pb.TierCapacity(**_written(tier, _TIER)) for tier in capacity.tiers]
    return pb.WorkerCapacity(
        **_written(capacity, _CAPACITY), **capacity.steps._asdict(), kv_windows=windows, tiers=tiers
    )


def decode(response: pb.GetLoadResponse) -> Load:
    """The load in a gateway's answer, the earliest request first. Raises `ValueError` naming an invalid field."""
    arrivals = [Arrival(**_read(request, _ARRIVAL)) for request in response.requests]
    for arrival in arrivals:
        check_marks(arrival)
    capacities = [_capacity_of(worker) for worker in response.workers]
    return Load(
        now_s=response.now_s,
        arrivals=tuple(sorted(arrivals, key=lambda arrival: arrival.at_s)),
        workers=tuple(worker for worker in capacities if worker.is_measured),
        decodes=_decodes(response.decodes),
        admission=response.admission,
        link_latency_s=response.link_latency_s,
        link_byte_s=response.link_byte_s,
    )


def _written(struct: object, fields: Fields) -> dict[str, Any]:
    """The values of a message's fields; None leaves an optional one unset."""
    return {written: getattr(struct, name) for name, written in fields.items()}


def _read(message: Any, fields: Fields) -> dict[str, Any]:
    """The values of a struct's fields; None for an optional one that is not set."""
    described = message.DESCRIPTOR.fields_by_name
    found: dict[str, Any] = {}
    for name, written in fields.items():
        if described[written].has_presence and not message.HasField(written):
            found[name] = None
            continue
        value: Any = getattr(message, written)
        found[name] = tuple(value) if name == "marks" else value
    return found


def _capacity_of(worker: pb.WorkerCapacity) -> Capacity:
    windows = tuple(WindowKv(window=each.window, bytes_per_token=each.bytes_per_token) for each in worker.kv_windows)
    try:
        KvLayout.sized(worker.kv_bytes_per_token, windows)
    except ValueError as error:
        raise ValueError(f"kv_windows: {error}") from None
    tiers = tuple(_tier_of(tier) for tier in worker.tiers)
    return Capacity(**_read(worker, _CAPACITY), steps=_steps_of(worker), windows=windows, tiers=tiers)


def _tier_of(tier: pb.TierCapacity) -> TierCapacity:
    if tier.name not in get_args(TierName) or not tier.bytes or not 0 < tier.extent_ms < math.inf:
        raise ValueError(
            f"tiers: the gateway has {tier.name!r} of {tier.bytes} bytes with {tier.extent_ms} ms an extent"
        )
    return TierCapacity(**_read(tier, _TIER))


def _steps_of(worker: pb.WorkerCapacity) -> StepCoefficients:
    """The step times, whose fields have the same names in the message."""
    return StepCoefficients(*[getattr(worker, name) for name in StepCoefficients._fields])


def _decodes(text: str) -> Decodes | None:
    if text and not is_decodes(text):
        raise ValueError(f"decodes: the gateway has {text!r}, this version knows spread, gather and split:N")
    return text or None
