"""The recent load of a router, the input of a twin: its latest requests, its workers, and how requests are
placed. Pure.

    views of a router ──load_of──> Load          of a real one by way of `AdminService.GetLoad`, whose message is made
                                                 and read by `gateway/operators/load_codec.py`

Times are seconds of the router's clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from disagg.proto.block_hash import HASH_BLOCK_TOKENS
from disagg.proto.messages import KvLayout, StepCoefficients, TierName, WindowKv
from disagg.router.api import ClusterView, RequestTrace, WorkerView
from disagg.router.config import Decodes
from disagg.router.telemetry.prefix_marks import MAX_MARKS, PLACES
from disagg.router.telemetry.telemetry import ANSWERED, met_targets
from disagg.step_times.step_model import DEFAULT_COEFFICIENTS

UNMEASURED = StepCoefficients(0.0, 0.0, 0.0, 0.0, 0.0)
MARK_BYTES = 8
"""Number of bytes of a block hash that are kept as a mark."""


class Arrival(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One request with its lengths and targets."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    """Number of output tokens so far."""
    is_complete: bool = True
    """Whether `output_tokens` is the whole answer: not while it runs, nor if it failed or was refused."""
    most_output_tokens: int
    ttft_s: float | None = None
    """Target for the first token."""
    tpot_s: float | None = None
    """Target for the mean time between tokens."""
    is_met: bool | None = None
    """Whether the request met all of its targets; None if unknown."""
    marks: tuple[int, ...] = ()
    """Shortened marks of the prompt; see `router/telemetry/prefix_marks.py`."""

    @property
    def has_targets(self) -> bool:
        """Whether the request has a target for TTFT or TPOT."""
        return self.ttft_s is not None or self.tpot_s is not None


class TierCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """A tier of KV that a worker has beside its device cache."""

    name: TierName
    num_bytes: int
    """The most that it keeps."""
    extent_ms: float
    """Milliseconds that it takes to load an extent."""


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """The capacity of one worker; fields as in `WorkerInfo`."""

    worker_id: str
    num_blocks: int
    block_size: int
    max_num_seqs: int
    token_budget: int
    max_model_len: int
    bytes_per_token: int
    decode_reserve_tokens: int = 0
    watermark_blocks: int = 0
    scheduling: str = "slack"
    max_itl_ms: float | None = None
    windows: tuple[WindowKv, ...] = ()
    """The part of `bytes_per_token` that layers with a window have."""
    fetches: bool = False
    """Whether it gets KV from other workers, and gives them its own."""
    steps: StepCoefficients = DEFAULT_COEFFICIENTS
    """The fitted step times; `UNMEASURED` while the worker has none."""
    tiers: tuple[TierCapacity, ...] = ()
    """Its tiers that are in use."""

    @property
    def is_measured(self) -> bool:
        """Whether the step times are known."""
        return self.steps.base_ms > 0

    @property
    def kv_layout(self) -> KvLayout:
        """Its KV for a replay. Raises `ValueError` for sizes that contradict each other."""
        return KvLayout.sized(self.bytes_per_token, self.windows)

    @property
    def size(self) -> tuple[object, ...]:
        """All fields except the times of steps and loads, which change a little all the time."""
        return *msgspec.structs.astuple(self)[:-2], *((tier.name, tier.num_bytes) for tier in self.tiers)


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """The workers of a cluster, its latest requests, and its present setting."""

    now_s: float
    arrivals: tuple[Arrival, ...]
    """The latest requests, the earliest first."""
    workers: tuple[Capacity, ...]
    decodes: Decodes | None
    """The present setting; None if the policy has none."""
    admission: bool = True
    link_latency_s: float = 1e-4
    link_byte_s: float = 1e-10


def load_of(view: ClusterView, traces: Iterable[RequestTrace], now_s: float) -> Load:
    """The load by a router's own views."""
    placement = view.placement
    return Load(
        now_s=now_s,
        arrivals=tuple(sorted(map(arrival_of, traces), key=lambda arrival: arrival.at_s)),
        workers=tuple(worker for worker in capacities_of(view) if worker.is_measured),
        decodes=placement.decodes,
        admission=placement.admission,
        link_latency_s=placement.link_latency_s,
        link_byte_s=placement.link_byte_s,
    )


def arrival_of(trace: RequestTrace) -> Arrival:
    """The arrival of one request by its trace."""
    return Arrival(
        at_s=trace.arrival,
        prompt_tokens=trace.num_prompt_tokens,
        output_tokens=trace.num_output_tokens,
        is_complete=trace.outcome in ANSWERED,
        most_output_tokens=trace.most_output_tokens,
        ttft_s=trace.ttft_slo_s,
        tpot_s=trace.tpot_slo_s,
        is_met=met_targets(trace),
        marks=tuple(int.from_bytes(mark[:MARK_BYTES], "little") for mark in trace.prefix_marks),
    )


def capacities_of(view: ClusterView) -> list[Capacity]:
    """The capacities of the workers that take requests."""
    return [capacity_of(worker) for worker in view.workers if worker.takes_requests]


def capacity_of(worker: WorkerView) -> Capacity:
    """The capacity of one worker by the router's view."""
    info = worker.info
    return Capacity(
        worker_id=info.worker_id,
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        max_num_seqs=info.max_num_seqs,
        token_budget=info.token_budget,
        max_model_len=info.max_model_len,
        bytes_per_token=info.kv_layout.bytes_per_token,
        decode_reserve_tokens=info.decode_reserve_tokens,
        watermark_blocks=info.watermark_blocks,
        scheduling=info.scheduling,
        max_itl_ms=info.max_itl_ms,
        windows=info.kv_layout.windows,
        fetches=info.fetches,
        steps=worker.steps or UNMEASURED,
        tiers=tuple(
            TierCapacity(name=tier.name, num_bytes=tier.capacity_bytes, extent_ms=tier.extent_ms)
            for tier in worker.tiers
            if 0 < tier.extent_ms < math.inf and not tier.off_reason
        ),
    )


def check_marks(arrival: Arrival) -> None:
    """Raises `ValueError` for more marks than the prompt has blocks for."""
    num = len(arrival.marks)
    if num > MAX_MARKS or (num and PLACES[num - 1] * HASH_BLOCK_TOKENS > arrival.prompt_tokens):
        raise ValueError(f"prefix_marks: {num} are too many for a prompt of {arrival.prompt_tokens} tokens")
