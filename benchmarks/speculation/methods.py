"""What is compared: the engine without drafts, with lookup and the number of drafts that it chooses, and with lookup
and one number of drafts in every step."""

from __future__ import annotations

from collections.abc import Sequence

from disagg.engine.config import WorkerConfig
from disagg.engine.core.engine_core import EngineCore
from disagg.engine.plan import ModelRunner
from disagg.proto.messages import StepSample

OFF, LOOKUP = "off", "lookup"
FIXED = (1, 2, 3, 4, 6, 8)
"""Numbers of drafts a step of the sweep."""
KNOWN = (OFF,)
"""Methods that the engine has."""


def fixed_name(num_drafts: int) -> str:
    """Name of the method with so many drafts a step."""
    return f"fixed {num_drafts}"


def make_core(method: str, runner: ModelRunner, config: WorkerConfig, calibration: Sequence[StepSample]) -> EngineCore:
    """A core of its own for a method.

    Raises:
        ValueError: there is no such method.
    """
    if method != OFF:
        raise ValueError(f"the engine has no method {method}")
    return EngineCore(runner, config=config, calibration=calibration)
