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
    """Share of a pool's KV blocks in use at which the pool has the right size."""
    waiting: Count = 2
    """Waiting requests (in the router and on the workers) for each worker of a pool at which it has the right size."""
    tolerance: Share = 0.1
    """A ratio of measured to wanted that differs from 1 by no more than this changes nothing."""


class AutoscalerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`autoscaler`: resizes pools between their `min_size` and `max_size`."""

    enabled: bool = False
    policy: PolicyName = "attainment"
    """`attainment`: as few workers as meet the targets of requests, by arrivals, step times and a queueing estimate.
    `threshold`: by KV use and queue length, for comparison."""
    dry_run: bool = False
    """Resize nothing. Decisions are only shown in `disagg status`, the log and metrics."""
    interval_s: Annotated[float, msgspec.Meta(ge=0.1, le=3600)] = 5.0
    """Seconds between two decisions."""
    attainment: Annotated[float, msgspec.Meta(gt=0, le=0.999)] = 0.95
    """Policy `attainment`: the share of requests that are to meet their targets."""
    max_utilization: Annotated[float, msgspec.Meta(gt=0, le=0.99)] = 0.85
    """Policy `attainment`: the largest utilization of a pool, whatever the targets."""
    down_after_s: Seconds = 120.0
    """Seconds for which fewer workers must have been enough before one is removed."""
    zero_after_s: Seconds = 300.0
    """Seconds without a request after which pools with `min_size: 0` are emptied."""
    cold_start_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_COLD_START_S)] = 30.0
    """Seconds from the start of a worker until it serves, assumed until one start has been measured."""
    warm_after_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 20.0
    """Seconds after a worker's start during which its step times are ignored."""
    threshold: ThresholdOptions = ThresholdOptions()
