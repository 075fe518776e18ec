"""The setting of where answers decode, with its last change and the latest comparisons. Pure.

A twin (docs/twin.md) sends a comparison with each setting, and the gateway keeps the latest ones for operators.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator

from disagg.proto.errors import InvalidRequestError
from disagg.router.config import Decodes
from disagg.v1 import inference_pb2 as pb

MAX_KEPT = 20
"""Number of comparisons that are kept."""
MAX_OPTIONS, MAX_RATES = 8, 8
STALE = "comparison.present"
"""Field of the error for a comparison during which the setting was changed."""
MAX_CHARS = 200
"""Maximum characters of a text in a comparison."""


class DecodePlacementLog:
    """The changes of one gateway. Owner: its `AdminService`. Times are seconds since the epoch."""

    def __init__(self, started: float) -> None:
        self._since = started
        self._changed_by = ""
        self._load_read = 0.0
        self._comparisons: deque[pb.ShapeComparison] = deque(maxlen=MAX_KEPT)

    def changed(self, before: Decodes, after: Decodes, by: str, why: str, now: float) -> str:
        """Record a change of the setting. Returns the line for the log: who changed what, the time since the last
        change, and the effect."""
        earlier = f"{before} for {now - self._since:.0f} s, set by {self._changed_by or 'configuration'}"
        self._since, self._changed_by = now, by
        return (
            f"answers decode with {after} from the next placement on (was {earlier}); set by {by}: "
            f"{why or 'no figures were given'}; running requests stay where they are"
        )

    def note(self, comparison: pb.ShapeComparison, now: float) -> None:
        """Keep a comparison that `check` has accepted."""
        kept = pb.ShapeComparison()
        kept.CopyFrom(comparison)
        kept.at = now
        self._comparisons.appendleft(kept)

    def read_load(self, now: float) -> None:
        """Record that a twin read the recent load."""
        self._load_read = now

    def answer(self, policy: str, decodes: Decodes | None, num_targeted: int) -> pb.GetShapeResponse:
        """The state for operators. `num_targeted` is the number of the latest requests that have targets."""
        return pb.GetShapeResponse(
            policy=policy,
            decodes=decodes or "",
            since=self._since,
            changed_by=self._changed_by,
            comparisons=self._comparisons,
            load_read=self._load_read,
            targeted_requests=num_targeted,
        )


def check(comparison: pb.ShapeComparison, before: Decodes) -> None:
    """Raises `InvalidRequestError` for a comparison that is too large, has a number that is not finite, or was made
    under another setting than the present one, `before`. A comparison without `present` is not checked for that."""
    if len(comparison.options) > MAX_OPTIONS:
        raise InvalidRequestError("comparison.options", f"at most {MAX_OPTIONS}, not {len(comparison.options)}")
    for option in comparison.options:
        if len(option.predictions) > MAX_RATES:
            raise InvalidRequestError(
                "comparison.options.predictions", f"at most {MAX_RATES}, not {len(option.predictions)}"
            )
    for name in ("cause", "present", "chosen", "reason"):
        _check_text(f"comparison.{name}", getattr(comparison, name))
    for option in comparison.options:
        _check_text("comparison.options.decodes", option.decodes)
    if not all(map(math.isfinite, _numbers(comparison))):
        raise InvalidRequestError("comparison", "every number must be finite")
    if comparison.present and comparison.present != before:
        raise InvalidRequestError(STALE, f"it is {before} by now, not {comparison.present}")


def why(comparison: pb.ShapeComparison) -> str:
    """Summary of a comparison in one line."""
    predicted = ", ".join(
        f"{option.decodes} {'/'.join(f'{each.attainment:.3f}' for each in option.predictions)}"
        for option in comparison.options
    )
    return (
        f"{comparison.reason} ({comparison.cause}; predicted on {comparison.requests} requests: {predicted}; "
        f"difference {comparison.difference:+.3f}, error {comparison.error:.3f})"
    )


def _check_text(name: str, text: str) -> None:
    if len(text) > MAX_CHARS or not text.isprintable():
        raise InvalidRequestError(name, f"must be printable and have at most {MAX_CHARS} characters")


def _numbers(comparison: pb.ShapeComparison) -> Iterator[float]:
    yield from (comparison.difference, comparison.error, comparison.needed, comparison.measured)
    for option in comparison.options:
        for each in option.predictions:
            yield from (each.rate_factor, each.attainment)
