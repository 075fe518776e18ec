"""Vectors of pooled requests, from the rows behind the final norm of the steps that compute their prompts.

    last     row of the last token
    mean     sum of the rows of all chunks, which is kept with the sequence, over their number
    cls      row of the first token, which is kept likewise
    score    probability of one token against another, by the logits of the last token

All of it is computed in fp32. Dimensions are cut off before a vector is divided by its length, as for models whose
leading dimensions are vectors of their own (Matryoshka representations, arXiv 2205.13147).

Shapes: R rows that a step keeps, H hidden, V vocabulary.
"""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from disagg.engine.plan import RowFault, StepPlan, StepResult
from disagg.engine.request import Sequence
from disagg.proto.ids import AttemptKey
from disagg.proto.messages import Pooling

LEAST_LENGTH = 1e-12
"""Length by which a shorter vector is divided, as torch does."""


@torch.inference_mode()
def with_vectors(plan: StepPlan, result: StepResult, hidden_RH: Tensor, logits_RV: Tensor) -> StepResult:
    """`result` with the vectors of the prompts that the step completed. One that is not finite is a fault of the
    model."""
    vectors: dict[AttemptKey, bytes] = {}
    faults: dict[int, RowFault] = {}
    row, place = 0, -1
    for number, entry in enumerate(plan.entries):
        sequence, pooling = entry.sequence, entry.sequence.spec.pooling
        is_decode = number < len(plan.decodes)
        keeps_all = is_decode or sequence.keeps_rows
        num_rows = entry.num_tokens if keeps_all else int(entry.samples)
        rows_RH = hidden_RH[row : row + num_rows]
        last = row + num_rows - 1
        row += num_rows
        place += entry.samples
        if pooling is None:
            if entry.samples and place in result.faults:
                faults[place] = result.faults[place]
            continue
        if pooling.is_whole:
            _keep(sequence, pooling, entry.start, rows_RH)
        if not entry.samples:
            continue
        vector = _score(pooling, logits_RV[last]) if pooling.kind == "score" else _vector(sequence, pooling, rows_RH)
        if bool(vector.isfinite().all()):
            vectors[sequence.key] = vector.cpu().numpy().astype("<f4").tobytes()
        else:
            faults[place] = "model"
    return msgspec.structs.replace(result, vectors=vectors, faults=faults)


def _keep(sequence: Sequence, pooling: Pooling, start: int, rows_RH: Tensor) -> None:
    """Add a chunk to the sum of its sequence, or keep its first row; the first chunk begins anew, also where it is
    computed again."""
    if start == 0:
        sequence.pooled_sum = None
    if pooling.kind == "cls":
        sequence.pooled_sum = rows_RH[0].float() if sequence.pooled_sum is None else sequence.pooled_sum
        return
    sum_H = rows_RH.float().sum(dim=0)
    sequence.pooled_sum = sum_H if sequence.pooled_sum is None else sequence.pooled_sum + sum_H


def _vector(sequence: Sequence, pooling: Pooling, rows_RH: Tensor) -> Tensor:
    if pooling.kind == "last":
        vector_H = rows_RH[-1].float()
    elif pooling.kind == "mean":
        vector_H = sequence.pooled_sum / sequence.num_tokens
    else:
        vector_H = sequence.pooled_sum
    if pooling.dimensions:
        vector_H = vector_H[: pooling.dimensions]
    if pooling.normalize:
        vector_H = vector_H / vector_H.norm().clamp_min(LEAST_LENGTH)
    return vector_H


def _score(pooling: Pooling, logits_V: Tensor) -> Tensor:
    """Probability of the first token of `score_ids`, of the two."""
    return torch.softmax(logits_V[list(pooling.score_ids)].float(), dim=-1)[:1]
