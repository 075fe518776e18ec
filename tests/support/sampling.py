"""A fake runner whose logits are made of its KV and go through the real sampler: sampling settings are honoured,
and KV that is lost or mixed up still gives other tokens.

The logits of a row are one of a few random rows, chosen and turned by what is read back from the pages. So a row
depends on its own context only, and an innocent request must have the same tokens whatever else is in its batch.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import msgspec
import numpy as np
import torch
from torch import Tensor

from disagg.engine.fake_runner import FakeModelRunner
from disagg.engine.plan import StepPlan, StepResult
from disagg.engine.runner.logits import sampled_logprobs
from disagg.engine.runner.sampler import Sampler, row_faults
from disagg.engine.sharding.shards import WHOLE, Shard
from tests.support.engine import BLOCK, VOCAB_SIZE
from tests.support.queueing import QueueingRunner

_NUM_ROWS = 16


class SampledRunner(FakeModelRunner):
    """A fake runner that samples with the real sampler. The model's logits of the requests in `broken` are NaN."""

    def __init__(
        self,
        num_blocks: int = 10,
        block_size: int = BLOCK,
        max_model_len: int = 4096,
        vocab_size: int = VOCAB_SIZE,
        *,
        num_kv_heads: int = 1,
        shard: Shard = WHOLE,
        windows: Seq[tuple[int, int]] = (),
    ) -> None:
        super().__init__(
            num_blocks, block_size, max_model_len, vocab_size, num_kv_heads=num_kv_heads, shard=shard, windows=windows
        )
        self.broken: set[str] = set()
        self._sampler = Sampler(vocab_size)
        generator = torch.Generator().manual_seed(19)
        rows = torch.randn(_NUM_ROWS, vocab_size, generator=generator) * torch.linspace(0.5, 12, _NUM_ROWS)[:, None]
        self._rows = rows.bfloat16()

    def run(self, plan: StepPlan) -> StepResult:
        written = StepPlan(prefills=tuple(msgspec.structs.replace(entry, samples=False) for entry in plan.entries))
        assert not super().run(written).token_ids
        entries = [entry for entry in plan.entries if entry.samples]
        if not entries:
            return StepResult([])
        sequences = [entry.sequence for entry in entries]
        logits = self._logits([self._next_greedy(entry) for entry in entries])
        for row, sequence in enumerate(sequences):
            if sequence.key.request_id in self.broken:
                logits[row, 3] = np.nan
        tokens = self._sampler.sample(logits, sequences)
        logprobs = sampled_logprobs(logits, self.vocab_size, sequences, tokens)
        return StepResult(tokens, logprobs, row_faults(logits, self.vocab_size, tokens))

    def _logits(self, context_words: Seq[int]) -> Tensor:
        return torch.stack([self._rows[word % _NUM_ROWS].roll(word) for word in context_words])


class QueueingSampledRunner(QueueingRunner, SampledRunner):
    """Its steps are queued, as a GPU's captured ones; one behind a row without a token is computed from token 0."""
