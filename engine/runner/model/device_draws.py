"""Draws tokens on the device that has the logits, so that the host does not wait for them.

The same rows give the same tokens whether the host waits or not: on a device with such a kernel, every draw is made by
it. The sampling parameters of a step's rows cross to the device as one copy (`Staged`).

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from disagg.engine.draft_row import SampledRow
from disagg.engine.runner.model.device_inputs import Staged
from disagg.kernels.dispatch import draw_rows
from disagg.kernels.ops import Filters

_ROW_BYTES = 40


class DeviceDraws:
    """Draws for at most `max_rows` rows at a time, on a device that `dispatch.draws_on`. Owner: the model runner."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self.max_rows = max_rows
        self._vocab_size = vocab_size
        self._staged = Staged(_ROW_BYTES * max_rows, device, lambda memory: _views(memory, max_rows))

    def draw(self, logits_RV: Tensor, sequences: Seq[SampledRow], num_pending: Seq[int]) -> Tensor:
        """Queue the choice of a token for each row, int64 [R], behind so many tokens of its sequence whose ids are not
        known yet; -1 where a row holds NaN, +inf or nothing finite. Greedy rows take their largest logit."""
        num_rows = len(sequences)
        rules = [sequence.spec.sampling for sequence in sequences]
        host = _Rows(*self._staged.to_write())
        host.top_p[:num_rows] = [rule.top_p for rule in rules]
        host.min_p[:num_rows] = [rule.min_p for rule in rules]
        host.seeds[:num_rows] = [_signed(rule.seed) for rule in rules]
        host.indices[:num_rows] = [
            sequence.num_output_tokens + pending for sequence, pending in zip(sequences, num_pending, strict=True)
        ]
        host.temperatures[:num_rows] = [rule.temperature for rule in rules]
        host.top_k[:num_rows] = [max(0, rule.top_k) for rule in rules]
        self._staged.send()
        top_p, min_p, seeds, indices, temperatures, top_k = (view[:num_rows] for view in self._staged.on_device)
        filters = Filters(
            temperatures_R=temperatures, top_k_R=top_k, top_p_R=top_p, min_p_R=min_p, seeds_R=seeds, indices_R=indices
        )
        return draw_rows(logits_RV, self._vocab_size, filters)


class _Rows(NamedTuple):
    """The arrays of one piece of memory, on the host."""

    top_p: NDArray[Any]
    min_p: NDArray[Any]
    seeds: NDArray[Any]
    indices: NDArray[Any]
    temperatures: NDArray[Any]
    top_k: NDArray[Any]


def _signed(seed: int) -> int:
    """The 64-bit number with the bits of a seed."""
    bits = seed % (1 << 64)
    return bits - (1 << 64) if bits >> 63 else bits


def _views(memory: Tensor, most: int) -> tuple[Tensor, ...]:
    """(top-p, min-p, seeds, indices, temperatures, top-k) of a piece of memory, without a copy."""
    floats, integers = memory[: 16 * most].view(torch.float64), memory[16 * most : 32 * most].view(torch.int64)
    temperatures, top_k = memory[32 * most : 36 * most].view(torch.float32), memory[36 * most :].view(torch.int32)
    return floats[:most], floats[most:], integers[:most], integers[most:], temperatures, top_k
