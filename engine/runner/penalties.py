"""Penalties for tokens that a text has already, at the cost of what is new in it.

A sequence counts its own ids (`TextCounts`): all of them once, when it is first penalized here, then each new token as
it comes. Nothing of that leaves the worker: wherever a sequence is made anew (after a hand-over, for another attempt),
it counts its ids again, so that the counts are a function of the text alone. A preempted sequence keeps them.

Repetition (Keskar et al., CTRL, 2019): positive logits of ids of the prompt or the output are divided by the penalty,
others multiplied. Presence and frequency: subtracted once, and once per occurrence, for ids of the output.

Shapes: R rows, V vocabulary, U different ids of a text.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from disagg.engine.request import Sequence
from disagg.engine.sampling_rules import penalizes
from disagg.engine.text_counts import TextCounts


def counts_of(sequence: Sequence) -> TextCounts:
    """The counts of its ids, brought up to date."""
    if sequence.text_counts is None:
        sequence.text_counts = TextCounts(sequence.token_ids, sequence.num_prompt_tokens)
    sequence.text_counts.extend(sequence.token_ids)
    return sequence.text_counts


def penalize_rows(logits_RV: Tensor, sequences: Seq[Sequence]) -> None:
    """Change the fp32 rows of those that ask for it, in place. Row i belongs to `sequences[i]`."""
    rows = [row for row, sequence in enumerate(sequences) if penalizes(sequence.spec.sampling)]
    if not rows:
        return
    # What is not finite is found where a token is chosen.
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        if logits_RV.device.type == "cpu":
            _penalize_on_host(logits_RV.numpy(), sequences, rows)
        else:
            _penalize_on_device(logits_RV, sequences, rows)


def _penalize_on_host(logits_RV: NDArray[np.float32], sequences: Seq[Sequence], rows: Seq[int]) -> None:
    for row in rows:
        ids_U, amounts_U = _what_to_take(sequences[row])
        logits_V = logits_RV[row]
        logits_V[ids_U] = _penalized(logits_V[ids_U], sequences[row], amounts_U)


def _what_to_take(sequence: Sequence) -> tuple[NDArray[np.int64], NDArray[np.float32] | None]:
    """The ids whose logits change, and what is subtracted from each; None for nothing."""
    counts, sampling = counts_of(sequence), sequence.spec.sampling
    ids_U, outputs_U = counts.ids, counts.outputs
    if not (sampling.presence_penalty or sampling.frequency_penalty):
        return ids_U, None
    if sampling.repetition_penalty == 1.0:
        of_output_U = outputs_U > 0
        ids_U, outputs_U = ids_U[of_output_U], outputs_U[of_output_U]
    amounts_U = np.minimum(outputs_U, np.float32(1))
    amounts_U *= np.float32(sampling.presence_penalty)
    amounts_U += outputs_U * np.float32(sampling.frequency_penalty)
    return ids_U, amounts_U


def _penalized(
    values_U: NDArray[np.float32], sequence: Sequence, amounts_U: NDArray[np.float32] | None
) -> NDArray[np.float32]:
    penalty = np.float32(sequence.spec.sampling.repetition_penalty)
    if penalty != 1.0:
        below_U = np.minimum(values_U, np.float32(0))
        np.maximum(values_U, np.float32(0), out=values_U)
        below_U *= penalty
        values_U /= penalty
        values_U += below_U  # one of the two is 0
    if amounts_U is not None:
        values_U -= amounts_U
    return values_U


def _penalize_on_device(logits_RV: Tensor, sequences: Seq[Sequence], rows: Seq[int]) -> None:
    """All rows at once: the ids cross to the device as one copy."""
    vocab_size, device = logits_RV.shape[1], logits_RV.device
    places, penalties, amounts = [], [], []
    for row in rows:
        ids_U, amounts_U = _what_to_take(sequences[row])
        places.append(ids_U + row * vocab_size)
        penalties.append(np.full(len(ids_U), sequences[row].spec.sampling.repetition_penalty, dtype=np.float32))
        amounts.append(np.zeros(len(ids_U), dtype=np.float32) if amounts_U is None else amounts_U)
    places_N = torch.from_numpy(np.concatenate(places)).to(device)
    penalties_N, amounts_N = torch.from_numpy(np.stack((np.concatenate(penalties), np.concatenate(amounts)))).to(device)
    flat = logits_RV.view(-1)
    values_N = flat[places_N]
    flat[places_N] = torch.where(values_N > 0, values_N / penalties_N, values_N * penalties_N) - amounts_N
