"""When work on one worker is done: the time of a prompt, and when its sequences make way for others. Pure.

A step that computes `tokens` prompt tokens (which attend to `pairs` query-key pairs) and one token for each of `n`
sequences takes base + tokens * prefill_token + pairs * attended + n * decode + context * context_ms, see
`step_model.StepCoefficients`. A worker with both roles decodes its sequences in every step, also in those of prompts.

A decode place opens now, or when sequences there are expected to end, until a place and enough KV blocks are free. An
end is expected after the rest of the answer at the worker's step time. Answers are expected to be as long as recent
ones, at most `max_tokens`; one that outgrew that, by a quarter more. Of another router's sequences only the number is
known: their ends are spread over an answer's time. The counts change with every token, so a result is good for a few
milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from disagg.router.workers.assignments import Assignment
from disagg.router.workers.worker import Worker


def prefill_ms(worker: Worker, cached_tokens: int, num_tokens: int) -> float:
    """Milliseconds to compute the prompt tokens [cached_tokens, num_tokens), from the first of their steps on."""
    num_new = num_tokens - cached_tokens
    pairs = num_new * (num_tokens + cached_tokens + 1) // 2
    compute = num_new * worker.prefill_token_ms + pairs * worker.attended_ms
    return compute - (-num_new // worker.prompt_room) * worker.around_ms


def compute_ms(worker: Worker, cached_tokens: int, num_tokens: int) -> float:
    """Milliseconds that these tokens add to steps that run anyway: `prefill_ms` without the steps' fixed cost."""
    num_new = num_tokens - cached_tokens
    pairs = num_new * (num_tokens + cached_tokens + 1) // 2
    return num_new * worker.prefill_token_ms + pairs * worker.attended_ms


def num_pairs(cached_tokens: int, num_tokens: int) -> int:
    """Number of query-key pairs of the tokens [cached_tokens, num_tokens), each attending to itself and all before
    it."""
    return (num_tokens - cached_tokens) * (num_tokens + cached_tokens + 1) // 2


_OUTGROWN = 4
"""An answer that is longer than expected, at n tokens, is expected to get n / 4 more."""


def openings(worker: Worker, num_blocks: int, room: int, output_tokens: float) -> Iterator[float]:
    """In how many milliseconds the worker can begin with one more sequence of `num_blocks` blocks, and with the next
    ones, in order, until all its present sequences have ended.

    Args:
        worker: with its assignments.
        num_blocks: KV blocks of each new sequence.
        room: KV blocks that may be in use there.
        output_tokens: expected length of an answer.
    """
    if worker.is_empty:
        yield 0.0
    num_places = worker.info.max_num_seqs - worker.num_sequences - worker.num_others
    num_free = room - worker.used_blocks
    if worker.is_empty:
        num_places, num_free = num_places - 1, num_free - num_blocks
    is_open = not worker.is_full
    while is_open and num_places > 0 and num_free >= num_blocks:
        num_places, num_free = num_places - 1, num_free - num_blocks
        yield 0.0
    num_places = max(0, num_places)
    step_ms = worker.token_ms
    for left_tokens, blocks in sorted(_ends(worker, output_tokens)):
        num_places, num_free = num_places + 1, num_free + blocks
        while num_places > 0 and num_free >= num_blocks:
            num_places, num_free = num_places - 1, num_free - num_blocks
            yield left_tokens * step_ms


def wait_ms(opening_ms: Sequence[float], position: int, generation_ms: float) -> float:
    """Milliseconds for which the request at a position of the queue waits for a decode place; `opening_ms` is sorted.
    Requests behind the last opening wait for those placed meanwhile, which keep their places for `generation_ms`."""
    if not opening_ms:
        return 0.0
    round_, index = divmod(position, len(opening_ms))
    return opening_ms[index] + round_ * generation_ms


def _ends(worker: Worker, output_tokens: float) -> Iterator[tuple[float, int]]:
    """For each sequence on the worker: the output tokens that are left, and the KV blocks that it frees."""
    for assignment in worker.assigned.assignments.values():
        yield _left(assignment, output_tokens), assignment.blocks
    num_others = worker.num_others
    for number in range(num_others):
        yield output_tokens * (number + 1) / (num_others + 1), worker.blocks_beyond // num_others


def _left(assignment: Assignment, output_tokens: float) -> float:
    num_made = assignment.context - assignment.known_tokens
    most = assignment.most_output_tokens - num_made
    left = min(output_tokens, assignment.most_output_tokens) - num_made
    return max(1.0, left if left > 0 else min(most, num_made / _OUTGROWN))
