"""Answers about files, batches, usage and the state of the cluster."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from disagg.gateway.operators.requests_list import RequestState


class StoredFile(Struct, forbid_unknown_fields=True):
    """The input of a batch, or its output."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["processed"]


class FilePage(Struct, forbid_unknown_fields=True):
    """A page of files, the latest first."""

    object: Literal["list"]
    data: list[StoredFile]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(Struct, forbid_unknown_fields=True):
    """A file that is no more."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


class BatchError(Struct, forbid_unknown_fields=True):
    """Why a batch failed or waits."""

    code: str
    message: str
    param: str | None
    line: int | None


class BatchErrors(Struct, forbid_unknown_fields=True):
    """The list of a batch's errors."""

    object: Literal["list"]
    data: list[BatchError]


class RequestCounts(Struct, forbid_unknown_fields=True):
    """Number of the lines of a batch."""

    total: int
    completed: int
    failed: int


class StoredBatch(Struct, forbid_unknown_fields=True):
    """A batch of requests."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: Literal["24h"]
    status: Literal[
        "validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int
    request_counts: RequestCounts
    metadata: dict[str, str] | None
    completed_at: int | UnsetType | None = UNSET
    failed_at: int | UnsetType | None = UNSET
    expired_at: int | UnsetType | None = UNSET
    cancelled_at: int | UnsetType | None = UNSET


class BatchPage(Struct, forbid_unknown_fields=True):
    """A page of batches, the latest first."""

    object: Literal["list"]
    data: list[StoredBatch]
    first_id: str | None
    last_id: str | None
    has_more: bool


class UsageRow(Struct, forbid_unknown_fields=True):
    """What a key used of a model on a day."""

    object: Literal["usage"]
    date: str
    key: str
    model: str
    num_requests: int
    num_failed: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class UsagePage(Struct, forbid_unknown_fields=True):
    """Usage by day, the latest first."""

    object: Literal["list"]
    data: list[UsageRow]
    first_date: str
    last_date: str
    has_more: bool


class ShownUsage(Struct, forbid_unknown_fields=True):
    """Usage as the page shows it; `data` alone, and null, where none is recorded."""

    data: list[UsageRow] | None
    object: Literal["list"] | UnsetType = UNSET
    first_date: str | UnsetType = UNSET
    last_date: str | UnsetType = UNSET
    has_more: bool | UnsetType = UNSET


class Health(Struct, forbid_unknown_fields=True):
    """Whether some worker can serve."""

    status: str
    decode_workers: int
    tiers_off: dict[str, str] | UnsetType = UNSET
    """Tiers of KV that workers have turned off because they failed, and why; left out if there are none."""


class State(Struct, forbid_unknown_fields=True):
    """State of the gateway: `ready`, or why new requests should go elsewhere."""

    status: str


class Alive(Struct, forbid_unknown_fields=True):
    """The gateway's process answers."""

    status: Literal["alive"]


class Version(Struct, forbid_unknown_fields=True):
    """Version of the gateway."""

    version: str


class PoolState(Struct, forbid_unknown_fields=True):
    """A pool of workers."""

    name: str
    desired: int
    ready: int


class WorkerState(Struct, forbid_unknown_fields=True):
    """A worker, with its blocks of the KV cache."""

    id: str
    roles: list[str]
    phase: str
    detail: str
    sequences: int
    blocks: int
    active: int
    reserved: int
    cached: int
    tokens_per_step: float
    drafted: int
    accepted: int
    prompt: int
    loaded: int
    fetched: int


class PairState(Struct, forbid_unknown_fields=True):
    """KV transfers between two workers."""

    src: str
    dst: str
    transport: str
    transfers: int
    bytes: int
    failures: int


class RequestLine(Struct, forbid_unknown_fields=True):
    """One of the latest requests."""

    id: str
    arrived_at: float
    state: RequestState
    outcome: str
    reason: str
    model: str
    prefill: str
    decode: str
    prompt_tokens: int
    completion_tokens: int
    kv_bytes: int
    ttft_ms: float | None
    total_ms: float | None
    is_probe: bool


class HistorySample(Struct, forbid_unknown_fields=True):
    """The cluster in one second, for the charts of the page."""

    at: int
    requests_per_s: float
    output_tokens_per_s: float
    targets: dict[str, float]
    kv: dict[str, int] | UnsetType = UNSET


class ClusterState(Struct, forbid_unknown_fields=True):
    """The cluster as the caller may see it."""

    now: float
    models: list[str]
    pools: list[PoolState]
    workers: list[WorkerState]
    num_workers: int
    pairs: list[PairState]
    num_pairs: int
    has_controller: bool
    has_load: bool
    queued: int
    running: int
    stages: dict[str, int]
    targets: dict[str, list[int]]
    requests_per_s: float
    output_tokens_per_s: float
    requests: list[RequestLine] | None
    history: list[HistorySample]
    num_matching: int | UnsetType = UNSET
    num_searched: int | UnsetType = UNSET
