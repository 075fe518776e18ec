"""How evenly tokens are divided among the experts of a model, from the counters of its layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

STEPS_BETWEEN = 256
"""Steps from one reading of the counters to the next, which takes as long as a short kernel and waits for a GPU."""


class ExpertUse:
    """The imbalance of each layer, read now and then. Owner: the engine thread."""

    def __init__(self, counts: Sequence[Tensor]) -> None:
        """`counts`: of each layer with experts, the tokens that each expert had so far, int64 [E]."""
        self._counts = counts
        self._num_steps = 0
        self._last: Tensor | None = None
        """What the counters had at the last reading, [layers, E]."""
        self.imbalance: tuple[float, ...] = ()
        """Of each layer with experts, the tokens of its busiest expert over those of an average one, in the steps
        between the last two readings; 1 where all have as many. Empty before the second reading, because warm-up and
        calibration are over before the first one, and for a model without experts."""

    def note_step(self) -> None:
        """A step was launched."""
        self._num_steps += 1
        if self._counts and self._num_steps % STEPS_BETWEEN == 0:
            counts = torch.stack(list(self._counts)).cpu()
            if self._last is not None:
                self.imbalance = tuple(_imbalance(counts_E) for counts_E in counts - self._last)
            self._last = counts


def _imbalance(counts_E: Tensor) -> float:
    total = int(counts_E.sum())
    return int(counts_E.max()) * len(counts_E) / total if total else 1.0
