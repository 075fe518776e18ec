"""A mean that forgets: of the last values, roughly.

Owner: whoever needs an expectation, such as the router's attempts.
"""

from __future__ import annotations

_MEMORY = 64
"""The mean is over about so many values."""


class RunningMean:
    """See the module docstring.

    Args:
        prior: the mean before there is any value.
        weight: as how many values it counts then; 0 or 1.
    """

    def __init__(self, prior: float, weight: int = 1) -> None:
        self.value = float(prior)
        self._num_seen = weight

    def observe(self, value: float) -> None:
        """One more."""
        self._num_seen = min(self._num_seen + 1, _MEMORY)
        self.value += (value - self.value) / self._num_seen
