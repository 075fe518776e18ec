"""What `transformers` generates, in fp32, computed once a run for each prompt."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def generate(folder: Path, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Greedy output of `generate`, end-of-sequence tokens taken like any other."""
    return list(_generate(str(folder), tuple(prompt), num_tokens))


def logprobs(folder: Path, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
    """The logarithms of the probabilities [len(output), vocab] of what may come at each place of `output`."""
    with torch.inference_mode():
        logits = _model(str(folder))(torch.tensor([[*prompt, *output[:-1]]])).logits[0, len(prompt) - 1 :]
    return torch.log_softmax(logits.float(), dim=-1)


@functools.cache
def _generate(folder: str, prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    with torch.inference_mode():
        output = _model(folder).generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=num_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
    return tuple(output[0, len(prompt) :].tolist())


@functools.lru_cache(maxsize=1)
def _model(folder: str) -> Any:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    model.generation_config.repetition_penalty = 1.0
    return model
