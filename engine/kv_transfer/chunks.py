"""How the KV of a prompt is cut into payloads.

A payload has whole tokens and at most `max_chunk_bytes`. During prefill a payload goes out when it is full, or when a
step left at least half of a full one; what is smaller waits for the next step, because a lone small message costs
milliseconds. When the prompt is computed, the rest goes out whatever its size.
"""

from __future__ import annotations

from typing import NamedTuple


class TokenRange(NamedTuple):
    """Tokens [start, end)."""

    start: int
    end: int


def tokens_per_chunk(max_chunk_bytes: int, bytes_per_token: int) -> int:
    """How many whole tokens a payload holds.

    Raises:
        ValueError: if not even one fits.
    """
    if bytes_per_token < 1:
        raise ValueError(f"bytes_per_token must be positive, not {bytes_per_token}")
    if max_chunk_bytes < bytes_per_token:
        raise ValueError(f"chunk_bytes is {max_chunk_bytes}, but the KV of one token takes {bytes_per_token} bytes")
    return max_chunk_bytes // bytes_per_token


def next_chunk(next_token: int, num_planned: int, max_tokens: int, *, complete: bool) -> TokenRange | None:
    """The next payload to send, if there is one worth sending.

    Args:
        next_token: the first token that was not cut yet.
        num_planned: tokens before this one are computed, or will be in the running step.
        max_tokens: tokens of a full payload.
        complete: whether that is the whole prompt.
    """
    available = num_planned - next_token
    if available <= 0:
        return None
    if available >= max_tokens:
        return TokenRange(next_token, next_token + max_tokens)
    if complete or 2 * available >= max_tokens:
        return TokenRange(next_token, num_planned)
    return None
