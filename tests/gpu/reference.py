"""What transformers computes on the device of a test, for the tiny checkpoints."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def greedy(folder: Path, prompt_ids: list[int], num_tokens: int, device: torch.device) -> tuple[list[int], Tensor]:
    """Greedy tokens and the fp32 logits [num_tokens, vocab] they came from, end tokens ignored."""
    model = _model(str(folder), "float32", str(device))
    token_ids, rows, cache, step_ids = [], [], None, prompt_ids
    with torch.inference_mode():
        for _ in range(num_tokens):
            output = model(torch.tensor([step_ids], device=device), past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            rows.append(output.logits[0, -1])
            step_ids = [int(rows[-1].argmax())]
            token_ids += step_ids
    return token_ids, torch.stack(rows)


def logits(folder: Path, token_ids: list[int], dtype: str, device: torch.device) -> Tensor:
    """The logits [len(token_ids), vocab] of every position, in one forward pass, as fp32."""
    with torch.inference_mode():
        found: Tensor = _model(str(folder), dtype, str(device))(torch.tensor([token_ids], device=device)).logits[0]
    return found.float()


@functools.lru_cache(maxsize=8)
def _model(folder: str, dtype: str, device: str) -> Any:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="eager", local_files_only=True
    )
    return model.eval().to(device)
