"""What is left out of the state of a cluster for callers with fewer rights. Pure.

Load is left out as a whole, not rounded: a rounded figure tells the exact one to whoever can add known requests of its
own and see when it changes, and with that how long another tenant's request is.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

from disagg.proto.ids import model_of
from disagg.v1 import inference_pb2 as pb

_OF_THE_CLUSTER: Final = (
    *("queued_requests", "running_requests", "stages", "slos", "transfers"),
    *("requests_per_s", "output_tokens_per_s"),
)
_OF_A_WORKER: Final = (
    *("sequences", "kv_blocks_active", "kv_blocks_cached", "kv_blocks_reserved"),
    *("tokens_per_step", "drafted_tokens", "accepted_tokens"),
    *("prompt_tokens", "loaded_tokens", "fetched_tokens"),
)
_OF_THE_AUTOSCALER: Final = (
    *("pools", "requests_per_s", "forecast_per_s", "prompt_tokens_per_s", "output_tokens_per_s"),
)
_IN_WORDS: Final = ("doing", "next")
"""Texts on a rollout that name workers and pools."""


def leave_out_load(state: pb.GetClusterStateResponse) -> None:
    """Keep what there is: workers, their KV in all, pools, gateways."""
    state.load_left_out = True
    for name in _OF_THE_CLUSTER:
        state.ClearField(name)
    for worker in state.workers:
        for name in _OF_A_WORKER:
            worker.ClearField(name)
    if state.HasField("autoscaler"):
        for name in _OF_THE_AUTOSCALER:
            state.autoscaler.ClearField(name)


def leave_out_models(state: pb.GetClusterStateResponse, keys: Collection[str]) -> None:
    """Keep what names no other model than those of `keys`."""
    _keep(state.workers, "worker_id", keys)
    _keep(state.pools, "name", keys)
    _keep(state.transfers, "prefill_worker", keys)
    if state.HasField("autoscaler"):
        _keep(state.autoscaler.pools, "pool", keys)
    state.ClearField("notes")
    if state.HasField("rollout"):
        for name in _IN_WORDS:
            state.rollout.ClearField(name)


def _keep(entries: Any, field: str, keys: Collection[str]) -> None:
    """Those of the models, in a repeated field of a protobuf."""
    kept = [entry for entry in entries if model_of(getattr(entry, field)) in keys]
    del entries[:]
    entries.extend(kept)
