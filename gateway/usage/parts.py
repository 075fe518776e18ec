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
"""Maximum number of continuations of an answer; a further one is counted as a new answer."""
_MARK_BYTES: Final = 2
"""Bytes of a token's mark. A wrong token passes for the right one in one of 65,536 tries, and each try is counted."""
_ID_BYTES: Final = 4


class Known(NamedTuple):
    """The stored counts of an answer that broke off."""

    failed: int
    prompt_tokens: int
    completion_tokens: int
    """Output tokens that were counted."""
    marks: bytes
    """Marks of the tokens, see `marks_of`. There may be fewer than counted tokens: some were generated but did not
    reach the gateway."""
    num_again: int
    """Number of counted tokens that may be delivered once more for free."""
    num_continued: int


NOTHING: Final = Known(0, 0, 0, b"", 0, 0)


class Continued(NamedTuple):
    """The counts of a call, and the counts to store of its answer if it broke off."""

    counts: Counts
    known: Known


def continued(part: Part, before: Known | None) -> Continued:
    """The counts of `part`, without those in `before`. If `before` is None, all of `part` counts.

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
    """A mark for each token, made of it and all tokens before it. Tokens cannot be derived from marks.

    Args:
        token_ids: four bytes each.
    """
    marks, state = bytearray(), b""
    for begin in range(0, len(token_ids), _ID_BYTES):
        state = hashlib.blake2b(state + token_ids[begin : begin + _ID_BYTES], digest_size=16).digest()
        marks += state[:_MARK_BYTES]
    return bytes(marks)


def _is_same(first: bytes, second: bytes) -> bool:
    """Whether two answers agree in all tokens that both have. Tokens that did not reach the gateway are then taken for
    equal."""
    length = min(len(first), len(second))
    return first[:length] == second[:length]
