"""Decode steps that are queued on a GPU; each reads the tokens of the one before it on the device.

    host      enqueue n ───────── enqueue n+1 ─ result n ── enqueue n+2 ─ result n+1 ── ...
    device             [ step n ─────────────][ step n+1 ─────────────][ step n+2 ...

A step is a copy of its numbers, a captured graph, the choice of a token for each row, and a copy of the ids to pinned
memory behind which an event is recorded. All of it is queued on the stream of the steps, and so is every copy of KV, so
that each sees what the ones before it wrote. The ids stay on the device for the step behind.

Shapes: S sequences of a step, R of the one before it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from disagg.engine.batch_arrays import BatchBuilder
from disagg.engine.plan import NO_TOKEN, QueuedStep, RowFault, StepPlan, StepQueue, StepResult
from disagg.engine.request import SequenceState
from disagg.engine.runner.model.device_draws import DeviceDraws
from disagg.engine.runner.model.device_inputs import NO_SOURCE, Mark, Pending
from disagg.engine.runner.model.replay import ReplayedDecoder
from disagg.engine.sampling_rules import is_greedy


class DeviceStepQueue(StepQueue):
    """Replays captured decode steps whose ids are sampled on the device. Owner: the model runner, whose decoder,
    batches and draws these are."""

    def __init__(
        self, decoder: ReplayedDecoder, batches: BatchBuilder, draws: DeviceDraws, device: torch.device
    ) -> None:
        self._decoder = decoder
        self._batches = batches
        self._draws = draws
        pinned = device.type == "cuda"
        self._copies = tuple(_IdsOnHost(draws.max_rows, pinned=pinned) for _ in range(2))
        """One step at most is queued before the ids of the last one are read."""
        self._current = 0

    @property
    @override
    def max_decodes(self) -> int:
        """0 after a capture has failed."""
        return min(self._decoder.max_queued, self._draws.max_rows)

    @override
    def enqueue(self, plan: StepPlan, after: QueuedStep | None) -> QueuedStep:
        assert after is None or isinstance(after, _DeviceStep)
        sequences = [entry.sequence for entry in plan.decodes]
        num_pending = [entry.end - sequence.num_tokens for entry, sequence in zip(plan.decodes, sequences, strict=True)]
        pending = None if after is None else Pending(_sources(plan, num_pending, after.plan), after.ids_S)
        scored = self._decoder.queue(self._batches.arrays(plan), pending)
        ids_S = scored.largest_S
        if ids_S is None or not all(is_greedy(sequence.spec.sampling) for sequence in sequences):
            ids_S = self._draws.draw(scored.logits_SV, sequences, num_pending)
        self._current ^= 1
        on_host = self._copies[self._current]
        on_host.copy(ids_S)
        return _DeviceStep(plan, ids_S, on_host)


def _sources(plan: StepPlan, num_pending: list[int], after: StepPlan) -> np.ndarray[Any, np.dtype[np.int64]]:
    """For each entry, the row of `after` that samples its token."""
    rows = {entry.sequence: row for row, entry in enumerate(after.decodes)}
    sources = [
        rows[entry.sequence] if pending else NO_SOURCE for entry, pending in zip(plan.decodes, num_pending, strict=True)
    ]
    return np.array(sources, dtype=np.int64)


class _DeviceStep(QueuedStep):
    """A queued step, whose sampled ids are copied to the host behind it."""

    def __init__(self, plan: StepPlan, ids_S: Tensor, on_host: _IdsOnHost) -> None:
        self.plan = plan
        self.ids_S = ids_S
        """On the device. The next replay may overwrite it, behind whatever was queued before to read it."""
        self._on_host = on_host

    @override
    def result(self) -> StepResult:
        """The row of a sequence that has ended meanwhile is discarded, and may have no token; that is no fault. No
        logits are edited, so that every other row without a token is the model's fault."""
        sequences = [entry.sequence for entry in self.plan.decodes]
        token_ids = self._on_host.read(len(sequences))
        faults: dict[int, RowFault] = {
            row: "model"
            for row, sequence in enumerate(sequences)
            if token_ids[row] == NO_TOKEN and sequence.state is not SequenceState.ENDED
        }
        return StepResult(token_ids, faults=faults)


class _IdsOnHost:
    """The ids of one step, once they are there."""

    def __init__(self, most: int, *, pinned: bool) -> None:
        self._ids = torch.zeros(most, dtype=torch.int64, pin_memory=pinned)
        self._there = Mark(pinned=pinned)

    def copy(self, ids_S: Tensor) -> None:
        """Queue the copy of the ids to the host."""
        self._ids[: len(ids_S)].copy_(ids_S, non_blocking=True)
        self._there.set()

    def read(self, num_ids: int) -> list[int]:
        """Wait for the copy and return its first `num_ids` ids."""
        self._there.wait()
        ids: list[int] = self._ids[:num_ids].tolist()
        return ids
