"""The section `autoscaler` of the configuration."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from disagg.proto.config import Count, Seconds, Share

PolicyName = Literal["attainment", "threshold"]
MAX_COLD_START_S = 3600.0


class ThresholdOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`autoscaler.threshold`: for policy `threshold`."""

    kv_use: Share = 0.7
    """Share of a pool's KV blocks in use that it is sized for."""
    waiting: Count = 2
    """Requests that wait, in the router and on the workers, for each worker of a pool, that it is sized for."""
    tolerance: Share = 0.1
    """Ratios of measured to wanted that are as near to 1 change nothing."""


class AutoscalerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`autoscaler`: resizes pools between their `min_size` and `max_size`."""

    enabled: bool = False
    policy: PolicyName = "attainment"
    """`attainment`: as few workers as meet the targets of requests, by arrivals, step times and a queueing estimate.
    `threshold`: by KV use and queue; there to be compared with."""
    dry_run: bool = False
    """Only say what would be done: in `disagg status`, the log and metrics."""
    interval_s: Annotated[float, msgspec.Meta(ge=0.1, le=3600)] = 5.0
    """Between two decisions."""
    attainment: Annotated[float, msgspec.Meta(gt=0, le=0.999)] = 0.95
    """Policy `attainment`: the share of requests that are to meet their targets."""
    max_utilization: Annotated[float, msgspec.Meta(gt=0, le=0.99)] = 0.85
    """Policy `attainment`: pools are no busier than that, whatever the targets."""
    down_after_s: Seconds = 120.0
    """How long fewer workers must have been enough before one is removed."""
    zero_after_s: Seconds = 300.0
    """How long nothing may have come before pools with `min_size: 0` are emptied."""
    cold_start_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_COLD_START_S)] = 30.0
    """From the start of a worker until it serves, until one has been measured."""
    warm_after_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 20.0
    """Step times of a worker are ignored so long after its start."""
    threshold: ThresholdOptions = ThresholdOptions()
