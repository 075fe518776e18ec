"""The policies by name."""

from __future__ import annotations

from collections.abc import Mapping

from disagg.autoscaler.attainment import AttainmentPolicy
from disagg.autoscaler.config import AutoscalerOptions
from disagg.autoscaler.policy import Policy, PoolLimits
from disagg.autoscaler.threshold import ThresholdPolicy


def make_policy(options: AutoscalerOptions, limits: Mapping[str, PoolLimits]) -> Policy:
    """The configured policy for pools with these limits."""
    return (ThresholdPolicy if options.policy == "threshold" else AttainmentPolicy)(options, limits)
