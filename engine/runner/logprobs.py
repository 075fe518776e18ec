"""How likely the model found what was sampled: log-softmax of its logits as they were before the sampler edited them.

Only rows whose sequences ask are computed. A row's numbers do not depend on the other rows.

Shapes: S sequences, V vocabulary, R rows that ask, K likeliest tokens of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from types import MappingProxyType

import torch
from torch import Tensor

from disagg.engine.plan import NO_TOKEN
from disagg.engine.request import Sequence
from disagg.proto.messages import TokenLogprobs

_NONE: Mapping[int, TokenLogprobs] = MappingProxyType({})


def sampled_logprobs(
    logits_SV: Tensor, vocab_size: int, sequences: Seq[Sequence], token_ids: Seq[int]
) -> Mapping[int, TokenLogprobs]:
    """By row, of the rows that ask (`Sampling.logprobs` is not negative) and have a token: the logarithm of the
    probability of the row's token in `token_ids`, and the likeliest tokens.

    The logits (any float dtype, computed with in fp32) are not changed; columns past the vocabulary (padding) are
    ignored. The likeliest are ranked by logit, the smallest id first among equals; where the vocabulary is smaller than
    what was asked for, it is all of them.
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
            row: _of_row(logits_RV[i], logprobs_RV[i], token_ids[row], sequences[row].spec.sampling.logprobs)
            for i, row in enumerate(rows)
        }


def _of_row(logits_V: Tensor, logprobs_V: Tensor, token_id: int, num_top: int) -> TokenLogprobs:
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
