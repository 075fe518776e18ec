"""How evenly tokens are divided among the experts of a model, from the counters of its layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

STEPS_BETWEEN = 256
"""Steps after which the counters are read again: reading them takes as long as a short kernel, and waits for a GPU."""


class ExpertUse:
    """The imbalance of each layer, read now and then. Owner: the engine thread."""

    def __init__(self, counts: Sequence[Tensor]) -> None:
        """`counts`: of each layer with experts, the tokens that each expert had so far, int64 [E]."""
        self._counts = counts
        self._num_steps = 0
        self.imbalance: tuple[float, ...] = ()
        """Of each layer with experts, the tokens of its busiest expert over those of an average one; 1 where all have
        as many. Empty before the first reading, and for a model without experts."""

    def note_step(self) -> None:
        """A step was launched."""
        self._num_steps += 1
        if self._counts and self._num_steps % STEPS_BETWEEN == 1:
            self.imbalance = tuple(_imbalance(counts_E) for counts_E in torch.stack(list(self._counts)).cpu())


def _imbalance(counts_E: Tensor) -> float:
    total = int(counts_E.sum())
    return int(counts_E.max()) * len(counts_E) / total if total else 1.0
