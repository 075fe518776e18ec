"""Drives a `TorchModelRunner`, or the ranks of one, by hand: sequences, plans and blocks without a scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from disagg.engine.config import WorkerConfig
from disagg.engine.plan import ScheduledSequence, StepPlan
from disagg.engine.request import Sequence, SequenceState, WindowTable
from disagg.engine.runner.model_runner import TorchModelRunner
from disagg.proto.ids import GatewayId, RequestId
from disagg.proto.messages import Sampling, SequenceSpec
from disagg.proto.token_ids import pack_token_ids


class Computes(Protocol):
    """What gives logits for a plan."""

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        ...

    def forward(self, plan: StepPlan) -> Tensor:
        """The logits of every entry with `samples`."""
        ...


def make_runner(folder: Path, **changes: Any) -> TorchModelRunner:
    """A runner in fp32 on one CPU thread with 64 blocks of 16 tokens; `changes` are fields of `WorkerConfig`."""
    fields: dict[str, Any] = {"roles": ("prefill", "decode"), "dtype": "float32", "num_blocks": 64}
    return TorchModelRunner(WorkerConfig(worker_id="test-0", model_path=str(folder), **{**fields, **changes}))


def assert_logits_close(actual: Tensor, expected: Tensor) -> None:
    """Equal but for fp32 rounding: transformers itself is off from fp64 by 2e-5 (rms), at most 5e-4."""
    torch.testing.assert_close(actual, expected, atol=1e-3, rtol=0.0)
    assert (actual - expected).square().mean().sqrt() < 1e-4


def make_sequence(token_ids: list[int], block_table: list[int], **sampling: Any) -> Sequence:
    """A running sequence, greedy without `sampling`, nothing computed."""
    spec = SequenceSpec(
        request_id=RequestId("request"),
        attempt=0,
        gateway_id=GatewayId("gateway"),
        prompt_token_ids=pack_token_ids(token_ids),
        sampling=Sampling(**{"temperature": 0.0, "max_tokens": 1000, **sampling}),
    )
    windows = [WindowTable(list(block_table), 0, 0, 0, 0) for _ in range(3)]  # for models that have some
    return Sequence(
        spec, SequenceState.RUNNING, token_ids=list(token_ids), block_table=list(block_table), windows=windows
    )


def chunk(sequence: Sequence, start: int, end: int) -> ScheduledSequence:
    """Tokens [start, end) as a plan's entry; it samples where `end` is the last known token."""
    return ScheduledSequence(sequence, start, end - start, samples=end == sequence.num_tokens)


def last_token(sequence: Sequence) -> ScheduledSequence:
    """The last known token as a decode entry."""
    return chunk(sequence, sequence.num_tokens - 1, sequence.num_tokens)


def decodes_of(sequences: list[Sequence], num_pending: int = 0) -> StepPlan:
    """The next step of all sequences, behind so many tokens of each that are not known yet."""
    assert all(sequence.state is SequenceState.RUNNING for sequence in sequences)
    starts = [sequence.num_tokens - 1 + num_pending for sequence in sequences]
    return StepPlan(tuple(ScheduledSequence(*entry, 1, samples=True) for entry in zip(sequences, starts, strict=True)))


def prefill(runner: Computes, sequence: Sequence, *, start: int = 0, chunk_tokens: int = 1 << 30) -> Tensor:
    """Compute the known tokens from `start`, a chunk a step; the logits [vocab] of the last one."""
    logits = torch.empty(0)
    for chunk_start in range(start, sequence.num_tokens, chunk_tokens):
        end = min(chunk_start + chunk_tokens, sequence.num_tokens)
        logits = runner.forward(StepPlan(prefills=(chunk(sequence, chunk_start, end),)))
        assert logits.shape == (int(end == sequence.num_tokens), runner.vocab_size)
    return logits[0]


def decode(runner: Computes, sequences: list[Sequence], num_steps: int) -> list[Tensor]:
    """Greedy decode steps of all sequences together; they grow. The logits [num_steps, vocab] of each."""
    steps: list[Tensor] = []
    for _ in range(num_steps):
        logits = runner.forward(decodes_of(sequences))
        for sequence, row in zip(sequences, logits, strict=True):
            sequence.token_ids.append(int(row.argmax()))
        steps.append(logits[:, None])
    return list(torch.cat(steps, dim=1)) if steps else list(torch.empty((len(sequences), 0, runner.vocab_size)))


def generate(runner: Computes, sequence: Sequence, num_tokens: int, **prefill_options: int) -> Tensor:
    """Prefill, then greedy decode alone until `num_tokens` tokens are there; their logits [num_tokens, vocab]."""
    first = prefill(runner, sequence, **prefill_options)
    sequence.token_ids.append(int(first.argmax()))
    return torch.cat((first[None], decode(runner, [sequence], num_tokens - 1)[0].to(first.device)))
