"""When places to decode open: a request waits for one before its prompt is computed.

    free now: 0      else: the expected ends of the sequences there, until a place and enough KV blocks are free

An end is expected after the rest of the answer at the worker's step time. Answers are expected to be as long as recent
ones, at most `max_tokens`; one that outgrew that, by a quarter more. Another router's sequences are known by number
only: their ends are spread over an answer's time.

Pure; counts change with every token, so that an answer is good for a few milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from disagg.router.workers.assignments import Assignment
from disagg.router.workers.worker import Worker

_OUTGROWN = 4
"""An answer of n tokens that outgrew what was expected has n / 4 more."""


def openings(worker: Worker, num_blocks: int, room: int, output_tokens: float) -> Iterator[float]:
    """In how many milliseconds the worker can begin with one more sequence of `num_blocks` blocks, and with the next
    ones, in order: as many as its present sequences make way for."""
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
    step_ms = worker.around_ms
    for left_tokens, blocks in sorted(_ends(worker, output_tokens)):
        num_places, num_free = num_places + 1, num_free + blocks
        while num_places > 0 and num_free >= num_blocks:
            num_places, num_free = num_places - 1, num_free - num_blocks
            yield left_tokens * step_ms


def wait_ms(opening_ms: Sequence[float], position: int, generation_ms: float) -> float:
    """For the request at a position of the queue; `opening_ms` is sorted. What is behind the last opening waits for
    those that are placed meanwhile, which keep their places for `generation_ms`."""
    if not opening_ms:
        return 0.0
    round_, index = divmod(position, len(opening_ms))
    return opening_ms[index] + round_ * generation_ms


def _ends(worker: Worker, output_tokens: float) -> Iterator[tuple[float, int]]:
    """(Tokens that a sequence still makes, KV blocks that it gives back)."""
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
