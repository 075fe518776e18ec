"""What callers may see of a cluster's load who may not see exact counts over all tenants: by the difference of two, one
could tell how long another tenant's request was. Pure.
"""

from __future__ import annotations

import math
from typing import Final

from disagg.v1 import inference_pb2 as pb

_PARTS: Final = 8
"""In which the KV blocks of a worker are told."""
_TENTHS: Final = 10
_COUNTS: Final = ("queued_requests", "running_requests")
_RATES: Final = ("requests_per_s", "output_tokens_per_s")
_BLOCKS: Final = ("kv_blocks_active", "kv_blocks_cached", "kv_blocks_reserved")
_LOAD: Final = ("requests_per_s", "forecast_per_s", "prompt_tokens_per_s", "output_tokens_per_s")


def make_coarse(state: pb.GetClusterStateResponse) -> None:
    """Counts and rates become the next power of two, blocks eighths of a worker's, attainment tenths; what was
    transferred, and why the autoscaler decided, is left out."""
    _round(state, _COUNTS, _RATES)
    for stage in state.stages:
        stage.requests = _power(stage.requests)
    for slo in state.slos:
        slo.met, slo.total = (round(_TENTHS * slo.met / slo.total), _TENTHS) if slo.total else (0, 0)
    for worker in state.workers:
        worker.sequences = _power(worker.sequences)
        for name in _BLOCKS:
            setattr(worker, name, _in_parts(getattr(worker, name), worker.kv_blocks_total))
    state.ClearField("transfers")
    if state.HasField("autoscaler"):
        _round(state.autoscaler, (), _LOAD)
        for pool in state.autoscaler.pools:
            pool.ClearField("reason")
            pool.ClearField("change")


def _round(
    message: pb.GetClusterStateResponse | pb.AutoscalerState, counts: tuple[str, ...], rates: tuple[str, ...]
) -> None:
    for name in counts:
        setattr(message, name, _power(getattr(message, name)))
    for name in rates:
        rate = getattr(message, name)
        setattr(message, name, 2.0 ** math.ceil(math.log2(rate)) if rate > 0 else 0.0)


def _power(count: int) -> int:
    """The next power of two; 0 stays."""
    return 1 << (count - 1).bit_length() if count else 0


def _in_parts(count: int, total: int) -> int:
    """The next eighth of `total`."""
    return min(total, math.ceil(_PARTS * count / total) * total // _PARTS) if total else 0
