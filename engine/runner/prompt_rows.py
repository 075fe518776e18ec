"""Which rows of a step's logits give a token, and which are those of prompts whose own tokens' log-probabilities are
wanted.

Shapes: R rows of logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from disagg.engine.plan import ScheduledSequence, StepPlan
from disagg.engine.runner.logits import logprobs_of_row
from disagg.proto.ids import AttemptKey
from disagg.proto.messages import TokenLogprobs

_ROWS_AT_A_TIME = 16
"""Rows of logits that are converted to fp32 at a time."""


class _PromptRows(NamedTuple):
    entry: ScheduledSequence
    first_row: int


class Rows(NamedTuple):
    """The rows of a plan's logits."""

    sampled: list[int] | None
    """Those that give a token, in the order of the entries; `None` stands for all rows."""
    prompts: list[_PromptRows]


def rows_of(plan: StepPlan) -> Rows:
    """As `BatchBuilder` orders them."""
    if all(entry.samples for entry in plan.decodes) and not any(e.sequence.keeps_rows for e in plan.prefills):
        return Rows(None, [])
    sampled: list[int] = []
    prompts: list[_PromptRows] = []
    for row, entry in enumerate(plan.decodes):
        if entry.samples:
            sampled.append(row)
    row = len(plan.decodes)
    for entry in plan.prefills:
        if entry.sequence.gathers_prompt:
            prompts.append(_PromptRows(entry, row))
        row += entry.num_tokens if entry.sequence.keeps_rows else entry.samples
        if entry.samples:
            sampled.append(row - 1)
    return Rows(sampled, prompts)


@torch.inference_mode()
def prompt_logprobs(
    logits_RV: Tensor, vocab_size: int, prompts: list[_PromptRows]
) -> Mapping[AttemptKey, list[TokenLogprobs]]:
    """By sequence, of each token behind one of the chunk that belongs to the prompt: how likely it was there."""
    found: dict[AttemptKey, list[TokenLogprobs]] = {}
    for entry, first_row in prompts:
        sequence = entry.sequence
        num_top = sequence.spec.sampling.prompt_logprobs
        next_ids = sequence.token_ids[entry.start + 1 : min(entry.end + 1, sequence.num_prompt_tokens)]
        made = found[sequence.key] = []
        for begin in range(0, len(next_ids), _ROWS_AT_A_TIME):
            ids = next_ids[begin : begin + _ROWS_AT_A_TIME]
            first = first_row + begin
            rows_RV = logits_RV[first : first + len(ids), :vocab_size].float()
            logprobs_RV = torch.log_softmax(rows_RV, dim=-1)
            made += [logprobs_of_row(rows_RV[i], logprobs_RV[i], token, num_top) for i, token in enumerate(ids)]
    return found
