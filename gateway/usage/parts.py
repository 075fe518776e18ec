"""What a call that continues an answer is counted for, from what earlier calls of it were. (pure)

What the client says of the past is not believed. Two calls are of one answer if tenant, prompt, seed, all settings and
the model's version are the same, and so is each token that both have; else it is another answer, which counts like any
other. A token that was counted may be delivered once more for nothing, because it may have been lost on the way.
"""

from __future__ import annotations

import hashlib
from typing import Final, NamedTuple

from disagg.gateway.usage.counts import Counts, Part

MAX_CONTINUED: Final = 16
"""How often an answer goes on; who continues it further is counted as for a new one."""
_MARK_BYTES: Final = 2
"""A wrong token passes for the right one once in 65,536 times, and each try costs what it is counted for."""
_ID_BYTES: Final = 4


class Known(NamedTuple):
    """What is kept of an answer that broke off."""

    failed: int
    prompt_tokens: int
    completion_tokens: int
    """That were counted."""
    marks: bytes
    """See `marks_of`. There may be fewer than counted tokens: some had not come to the gateway, and were made."""
    num_again: int
    """How many counted tokens may be delivered once more."""
    num_continued: int


NOTHING: Final = Known(0, 0, 0, b"", 0, 0)


class Continued(NamedTuple):
    """What a call is counted for, and what is kept of its answer if it broke off."""

    counts: Counts
    known: Known


def continued(part: Part, before: Known | None) -> Continued:
    """What `part` is counted for, where `before` is known of its answer; None for nothing, and then all of it counts.

    Args:
        part: a call that has ended.
        before: of earlier calls of the same answer.
    """
    counts, marks = part.counts, marks_of(part.token_ids)
    if before is None or before.num_continued >= MAX_CONTINUED or not _is_same(before.marks, marks):
        num_tokens = counts.completion_tokens
        return Continued(counts, Known(counts.failed, counts.prompt_tokens, num_tokens, marks, num_tokens, 0))
    num_counted = before.completion_tokens
    delivered_again = max(0, min(num_counted, counts.completion_tokens) - part.num_had)
    for_nothing = min(delivered_again, before.num_again)
    num_new = max(0, counts.completion_tokens - num_counted)
    known = Known(
        max(before.failed, counts.failed),
        max(before.prompt_tokens, counts.prompt_tokens),
        max(num_counted, counts.completion_tokens),
        max(marks, before.marks, key=len),
        before.num_again - for_nothing + num_new,
        before.num_continued + 1,
    )
    less = counts._replace(
        requests=0,
        failed=max(0, counts.failed - before.failed),
        prompt_tokens=max(0, counts.prompt_tokens - before.prompt_tokens),
        cached_tokens=0 if before.prompt_tokens else counts.cached_tokens,
        completion_tokens=num_new + delivered_again - for_nothing,
    )
    return Continued(less, known)


def marks_of(token_ids: bytes) -> bytes:
    """For each token a mark of it and of all before it; from a mark nothing can be told about a token.

    Args:
        token_ids: four bytes each.
    """
    marks, state = bytearray(), b""
    for begin in range(0, len(token_ids), _ID_BYTES):
        state = hashlib.blake2b(state + token_ids[begin : begin + _ID_BYTES], digest_size=16).digest()
        marks += state[:_MARK_BYTES]
    return bytes(marks)


def _is_same(first: bytes, second: bytes) -> bool:
    """Whether two answers agree in all tokens that both have: then also in what was made and never came here."""
    length = min(len(first), len(second))
    return first[:length] == second[:length]
