"""A step of a decoder that has the layers of one of several stages: what comes from the stage before, and what goes on.

    first stage    embedding ── layers ──> rows of all tokens
    a stage        rows ── layers ──> rows of all tokens                 each rank to the rank of its place in the next
    last stage     rows ── layers, final norm, head ──> to rank 0        logits of the rows that sample, by columns
    rank 0         launch(batch): its part of the first stage; then `StageOutput.wait` for what the last one gives

Rank 0 may launch a step before it has waited for the one before: the first stage computes the next chunk while another
one computes this one. Whoever sends and whoever receives know all sizes from the step's arrays. A step that samples
nothing sends nothing back.

Steps are computed op by op, on a GPU as well: what stages exchange is not part of a captured step.

Shapes: T tokens, R rows that sample, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from disagg.engine.batch_arrays import BatchArrays
from disagg.engine.runner.collectives import Collective, Receiving, receivers, senders
from disagg.engine.runner.model.batch import to_batch
from disagg.engine.runner.model.decoder import Decoder


@dataclass(frozen=True, slots=True)
class StageOutput:
    """What the last stage gives for a step that was launched. Those of one stage are waited for in their order."""

    _decoder: Decoder
    _rows: Callable[[], Tensor] | None
    _logits: Sequence[Receiving]

    @torch.inference_mode()
    def wait(self) -> tuple[Tensor | None, Tensor]:
        """(rows behind the final norm [R, H], None where they are not wanted; logits [R, V], no rows likewise).

        Raises:
            RuntimeError: if a rank is lost.
        """
        decoder = self._decoder
        rows_RH = None if self._rows is None else self._rows()
        parts = [part.wait() for part in self._logits]
        return rows_RH, decoder.joined(parts) if parts else decoder.no_logits()


class StageDecoder:
    """A decoder and its links to other stages. Owner: the model runner."""

    def __init__(self, decoder: Decoder, collective: Collective) -> None:
        shard = collective.shard
        self._decoder = decoder
        self._collective = collective
        self._before, self._behind = senders(shard, "rows"), receivers(shard, "rows")
        self._scorers = senders(shard, "results")
        self._gives_rows = shard.is_last and shard.rank == 0

    @torch.inference_mode()
    def launch(self, arrays: BatchArrays) -> StageOutput:
        """On rank 0: compute its part, and begin to receive what the last stage gives.

        Raises:
            RuntimeError: if a rank is lost.
        """
        self._compute(arrays)
        num_rows, decoder, collective = arrays.num_rows, self._decoder, self._collective
        rows: Callable[[], Tensor] | None = None
        if arrays.wants_rows:
            place_RH = decoder.new_rows(num_rows)
            rows = collective.receive(place_RH, self._scorers[0], "results").wait if num_rows else lambda: place_RH
        scorers = self._scorers if arrays.wants_logits and num_rows else ()
        logits = [collective.receive(decoder.new_logits_part(num_rows), rank, "results") for rank in scorers]
        return StageOutput(decoder, rows, logits)

    @torch.inference_mode()
    def compute(self, arrays: BatchArrays) -> None:
        """On another rank: compute its part and pass it on.

        Raises:
            RuntimeError: if a rank is lost.
        """
        rows_RH = self._compute(arrays)
        if rows_RH is None:
            return
        if arrays.wants_rows and self._gives_rows:
            self._collective.send(rows_RH, 0, "results")
        if arrays.wants_logits:
            self._collective.send(self._decoder.logits_part(rows_RH), 0, "results")

    def _compute(self, arrays: BatchArrays) -> Tensor | None:
        """What the rank's layers give: on the last stage the rows that sample, if there are any; the others pass theirs
        on."""
        decoder, collective = self._decoder, self._collective
        batch = to_batch(arrays, decoder.attention)
        if self._before:
            place_TH = decoder.new_rows(len(arrays.token_ids_T))
            residual_TH = collective.receive(place_TH, self._before[0], "rows").wait()
        else:
            residual_TH = decoder.embedded(batch.token_ids_T)
        rows = decoder.through(batch, residual_TH)
        if not self._behind:
            return rows
        assert rows is not None, "only the last stage leaves rows out"
        collective.send(rows, self._behind[0], "rows")
        return None
