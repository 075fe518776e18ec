"""The transfer time of a prompt's KV over a link, and the part of it that delays the request.

KV goes out chunk by chunk while the next chunk is computed (docs/architecture.md), so that only the part that is
left when the prompt ends delays the second token. The first token does not wait for it: the prefill worker sends it.
"""

from __future__ import annotations

from collections.abc import Callable

from disagg.step_times.interface import LinkTimes

PrefillTimes = Callable[[int], float]
"""Seconds to compute a prompt, by its number of tokens."""

KvBytes = Callable[[int], float]
"""Bytes of KV that are sent of a prompt, by its number of tokens."""


def transfer_s(num_bytes: float, link: LinkTimes) -> float:
    """Seconds of the whole transfer, without any overlap."""
    return link.latency_s + num_bytes / link.bandwidth_bytes_per_s


def exposed_s(num_bytes: float, prefill_s: float, num_chunks: int, link: LinkTimes) -> float:
    """Seconds of the transfer after the end of the prompt, with `num_chunks` equal chunks, each sent once computed:
    those of the last chunk, or, if the link is slower than the prefill, those of all that was not sent before."""
    last = transfer_s(num_bytes / num_chunks, link)
    first_ready = prefill_s / num_chunks
    return max(last, first_ready + transfer_s(num_bytes, link) - prefill_s)


def bandwidth_to_hide(num_bytes: float, prefill_s: float) -> float:
    """Bytes per second at which the transfer takes as long as the prefill."""
    return num_bytes / prefill_s


def hidden_from(kv_bytes: KvBytes, prefill_s: PrefillTimes, link: LinkTimes, max_tokens: int) -> int | None:
    """The shortest prompt, in tokens, from which on up to `max_tokens` the transfer takes no longer than the prefill;
    None where the transfer of the longest prompt takes longer."""

    def hidden(tokens: int) -> bool:
        return transfer_s(kv_bytes(tokens), link) <= prefill_s(tokens)

    if not hidden(max_tokens):
        return None
    low, high = 0, max_tokens  # `low` is not hidden, or 0
    tokens = max_tokens
    while tokens > 1:
        tokens //= 2
        if hidden(tokens):
            high = tokens
        else:
            low = tokens
            break
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if hidden(middle) else (middle, high)
    return high
