"""W3C Trace Context: a caller's `traceparent` becomes the parent of the gateway's span.

The header is `00-<32 hex: trace>-<16 hex: span>-<2 hex: flags>` (Trace Context, level 1, section 3.2).
"""

from __future__ import annotations

import re

HEADER = "traceparent"
_FORM = re.compile(
    r"(?:00(?=.{53}$)|(?!00|ff)[0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-([0-9a-f]{2})(?:-.*)?"
)
"""Only a later version may have more behind the flags."""


def child_of(header: str, random_bits: int) -> str:
    """The `traceparent` of a new span under the caller's.

    Args:
        header: as it came in. What is no `traceparent` begins a new trace, as the standard says.
        random_bits: 192 random bits: the span's id, and the trace's where it begins here.
    """
    match = _FORM.fullmatch(header)
    span = f"{random_bits & (1 << 64) - 1 or 1:016x}"
    if match is None:
        return f"00-{random_bits >> 64 or 1:032x}-{span}-01"
    return f"00-{match[1]}-{span}-{match[2]}"
