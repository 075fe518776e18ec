"""How long a worker takes for a prompt: the fitted step times, put together.

A step that computes `tokens` prompt tokens (which attend to `pairs` query-key pairs) and one token for each of `n`
sequences takes base + tokens * prefill_token + pairs * attended + n * decode + context * context_ms, see
`cost_model.StepCoefficients`. A worker with both jobs runs its sequences along in every step.
"""

from __future__ import annotations

from disagg.router.workers.worker import Worker


def prefill_ms(worker: Worker, cached_tokens: int, num_tokens: int) -> float:
    """To compute the prompt tokens [cached_tokens, num_tokens), once that begins."""
    num_steps = -(-(num_tokens - cached_tokens) // worker.prompt_room)
    return compute_ms(worker, cached_tokens, num_tokens) + num_steps * worker.around_ms


def compute_ms(worker: Worker, cached_tokens: int, num_tokens: int) -> float:
    """The same without what the steps cost anyway: what these tokens add to the steps of the others."""
    num_new = num_tokens - cached_tokens
    return num_new * worker.prefill_token_ms + num_pairs(cached_tokens, num_tokens) * worker.attended_ms


def num_pairs(cached_tokens: int, num_tokens: int) -> int:
    """Query-key pairs of the tokens [cached_tokens, num_tokens), each attending to itself and all before it."""
    return (num_tokens - cached_tokens) * (num_tokens + cached_tokens + 1) // 2
