"""What happens to the model's logits beside the choice of a token: edits before it, log-probabilities of it.

Edits (`edited_logits`), per row and in this order: logit bias; masks (stop ids until `min_tokens`, what a grammar does
not allow), which no bias can undo; penalties.

Penalties cost as much as what is new in the text. A sequence counts its own ids (`TextCounts`): all of them once, when
it is first penalized on this worker, then each new token. Counts are never sent: wherever a sequence is made anew
(after a hand-over, for another attempt), it counts its ids again, so that the counts are a function of the text alone.
A preempted sequence keeps them. Repetition (Keskar et al., CTRL, 2019): positive logits of ids of the prompt or the
output are divided by the penalty, others multiplied. Presence and frequency: subtracted once, and once per occurrence,
for ids of the output.

Log-probabilities (`sampled_logprobs`) are the log-softmax of the logits before any edit, only of rows whose sequences
request them. A row's numbers do not depend on the other rows.

Shapes: S sequences, V vocabulary, R rows that are edited or that request log-probabilities, U different ids of a
text, K likeliest tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from disagg.engine.draft_row import SampledRow
from disagg.engine.plan import NO_TOKEN
from disagg.engine.runner.token_masks import TokenMasks
from disagg.engine.sampling_rules import edits_logits, masks_stops, penalizes
from disagg.engine.text_counts import TextCounts
from disagg.proto.messages import Sampling, TokenLogprobs

# ---------------------------------------------------------------- edits


def edited_logits(logits_SV: Tensor, sequences: Seq[SampledRow], masks: TokenMasks | None = None) -> Tensor:
    """fp32 logits with bias, masks and penalties applied; a copy wherever something changes. Without `masks` a row with
    a grammar gets no finite logit."""
    edited = logits_SV.float()
    for row, sequence in enumerate(sequences):
        sampling = sequence.spec.sampling
        if edits_logits(sequence):
            if edited is logits_SV:
                edited = edited.clone()
            logits_V = edited[row]
            if sampling.logit_bias:
                _add_bias(logits_V, sampling)
            if masks_stops(sequence):
                _mask_stops(logits_V, sampling)
    rows = [row for row, sequence in enumerate(sequences) if sequence.spec.sampling.grammar]
    if len(rows) == len(sequences):
        edited = of_grammars(edited, sequences, masks)
    elif rows:
        edited[rows] = of_grammars(edited[rows], [sequences[row] for row in rows], masks)
    penalize_rows(edited, sequences)
    return edited


def _add_bias(logits_V: Tensor, sampling: Sampling) -> None:
    """Change one row in place; a token that is named twice gets both."""
    ids, values = zip(*sampling.logit_bias, strict=True)
    device = logits_V.device
    logits_V.index_add_(0, torch.tensor(ids, device=device), torch.tensor(values, dtype=torch.float32, device=device))


def _mask_stops(logits_V: Tensor, sampling: Sampling) -> None:
    """Change one row in place."""
    logits_V[[token for token in sampling.stop_token_ids if 0 <= token < len(logits_V)]] = float("-inf")


def of_grammars(logits_RV: Tensor, sequences: Seq[SampledRow], masks: TokenMasks | None) -> Tensor:
    """A copy with -inf, in their own dtype, for the tokens that the grammars of `sequences` do not allow. A forbidden
    +inf becomes NaN, which like +inf is found where a token is chosen.

    On CPUs torch's `masked_fill` takes seven times as long as what is done here: each byte of the packed masks stands
    for what is added to eight logits.
    """
    if masks is None:
        return torch.full_like(logits_RV, float("-inf"))
    if logits_RV.device.type != "cpu":
        allowed_RV = torch.from_numpy(masks.allowed(sequences)[:, : logits_RV.shape[1]])
        return logits_RV.masked_fill(~allowed_RV.to(logits_RV.device), float("-inf"))
    packed_RB = masks.packed(sequences)
    added_RBE = np.take(_what_bytes_add(logits_RV.dtype), packed_RB, axis=0)
    added_RV = torch.from_numpy(added_RBE.reshape(len(packed_RB), -1).view(np.uint8)).view(logits_RV.dtype)
    return added_RV[:, : logits_RV.shape[1]].add_(logits_RV)


@functools.cache
def _what_bytes_add(dtype: torch.dtype) -> NDArray[np.complex128]:
    """For each byte of a packed mask 0 for its ones and -inf for its zeros, the lowest bit first: eight numbers of
    `dtype`, as [256, E] elements of 16 bytes, which numpy takes fastest."""
    ones_256x8 = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    added_256x8 = torch.zeros(256, 8, dtype=dtype)
    added_256x8[torch.from_numpy(ones_256x8 == 0)] = float("-inf")
    return added_256x8.view(torch.uint8).numpy().view(np.complex128)


# ---------------------------------------------------------------- penalties


def counts_of(sequence: SampledRow) -> TextCounts:
    """The counts of its ids, brought up to date."""
    if sequence.text_counts is None:
        sequence.text_counts = TextCounts(sequence.token_ids, sequence.num_prompt_tokens)
    sequence.text_counts.extend(sequence.token_ids)
    return sequence.text_counts


def penalize_rows(logits_RV: Tensor, sequences: Seq[SampledRow]) -> None:
    """Change the fp32 rows of those with penalties, in place. Row i belongs to `sequences[i]`."""
    rows = [row for row, sequence in enumerate(sequences) if penalizes(sequence.spec.sampling)]
    if not rows:
        return
    # What is not finite is found where a token is chosen.
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        if logits_RV.device.type == "cpu":
            _penalize_on_host(logits_RV.numpy(), sequences, rows)
        else:
            _penalize_on_device(logits_RV, sequences, rows)


def _penalize_on_host(logits_RV: NDArray[np.float32], sequences: Seq[SampledRow], rows: Seq[int]) -> None:
    for row in rows:
        ids_U, amounts_U = _what_to_take(sequences[row])
        logits_V = logits_RV[row]
        logits_V[ids_U] = _penalized(logits_V[ids_U], sequences[row], amounts_U)


def _what_to_take(sequence: SampledRow) -> tuple[NDArray[np.int64], NDArray[np.float32] | None]:
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
    values_U: NDArray[np.float32], sequence: SampledRow, amounts_U: NDArray[np.float32] | None
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


def _penalize_on_device(logits_RV: Tensor, sequences: Seq[SampledRow], rows: Seq[int]) -> None:
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


# ---------------------------------------------------------------- log-probabilities


_NONE: Mapping[int, TokenLogprobs] = MappingProxyType({})


def sampled_logprobs(
    logits_SV: Tensor, vocab_size: int, sequences: Seq[SampledRow], token_ids: Seq[int]
) -> Mapping[int, TokenLogprobs]:
    """By row, of the rows that request it (`Sampling.logprobs` is not negative) and have a token: the logarithm of the
    probability of the row's token in `token_ids`, and the likeliest tokens.

    The logits (any float dtype, computed with in fp32) are not changed; columns past the vocabulary (padding) are
    ignored. The likeliest are ranked by logit, the smallest id first among equals; where the vocabulary is smaller than
    what was requested, it is all of them.
    """
    rows = [
        row
        for row, sequence in enumerate(sequences)
        if sequence.spec.sampling.logprobs >= 0 and token_ids[row] != NO_TOKEN
    ]
    if not rows:
        return _NONE
    with torch.inference_mode():
        logits_RV = logits_SV[rows, :vocab_size].float()
        logprobs_RV = torch.log_softmax(logits_RV, dim=-1)
        return {
            row: logprobs_of_row(logits_RV[i], logprobs_RV[i], token_ids[row], sequences[row].spec.sampling.logprobs)
            for i, row in enumerate(rows)
        }


def logprobs_of_row(logits_V: Tensor, logprobs_V: Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    """Log probabilities of a token and of the `num_top` likeliest ones of a row, both in fp32."""
    top_K = _likeliest(logits_V, num_top)
    return TokenLogprobs(
        logprob=float(logprobs_V[token_id]),
        top_ids=tuple(top_K.tolist()),
        top_logprobs=tuple(logprobs_V[top_K].tolist()),
    )


def _likeliest(logits_V: Tensor, num_tokens: int) -> Tensor:
    """The ids [K] of the largest logits. `topk` leaves open which of several equal ones it takes, so that it only
    finds the smallest value that counts."""
    count = min(num_tokens, logits_V.shape[0])
    if count == 0:
        return torch.empty(0, dtype=torch.long, device=logits_V.device)
    smallest = logits_V.topk(count).values[-1]
    ids = (logits_V >= smallest).nonzero()[:, 0]
    order = logits_V[ids].argsort(descending=True, stable=True)
    return ids[order[:count]]
