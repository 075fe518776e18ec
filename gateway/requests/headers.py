"""Ids of a request that travel in headers and metadata: ours, the client's own, and the trace context. Pure.

x-disagg-request-id   ours, minted: what `explain` takes; of several answers, the first one's
x-request-id          the client's label: it is sent back, and not used otherwise
x-session-id          the client's conversation: KV of its turns is kept
traceparent           W3C Trace Context, level 1, section 3.2: `00-<32 hex: trace>-<16 hex: span>-<2 hex: flags>`;
                      the caller's span becomes the parent of the gateway's
"""

from __future__ import annotations

import re
from typing import Final

from disagg.proto.ids import RequestId
from disagg.router.telemetry.exported_spans import span_of

REQUEST_ID: Final = "x-disagg-request-id"
LABEL: Final = "x-request-id"
TIMEOUT: Final = "x-request-timeout-ms"
"""How long the complete answer may take, in milliseconds."""
SESSION: Final = "x-session-id"
"""The conversation that a request is a turn of, by any name; as `prompt_cache_key` of bodies."""
MAX_LABEL_CHARS: Final = 256
_PRINTABLE: Final = re.compile(r"[ -~]+")


def read_label(given: str | None) -> str:
    """A label as it may be sent back: its first characters. Empty for none, and for one with anything but printable
    ASCII, which gRPC would refuse to send."""
    if given is None or not _PRINTABLE.fullmatch(given):
        return ""
    return given[:MAX_LABEL_CHARS]


HEADER = "traceparent"
_FORM = re.compile(
    r"(?:00(?=.{53}$)|(?!00|ff)[0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-([0-9a-f]{2})(?:-.*)?"
)
"""Only a later version may have more behind the flags."""


def parent_span(header: str) -> str:
    """The span of the caller in a `traceparent` as received, 16 hex digits; empty for an invalid one."""
    match = _FORM.fullmatch(header)
    return header.split("-")[2] if match else ""


def sibling_of(trace_parent: str, request_id: RequestId) -> str:
    """The `traceparent` of another span beside ours, under the same parent: that of a further answer of a call. Empty
    where ours is."""
    if not trace_parent:
        return ""
    version, trace, _, flags = trace_parent.split("-")
    return f"{version}-{trace}-{span_of(request_id)}-{flags}"


def child_of(header: str, random_bits: int) -> str:
    """The `traceparent` of a new span under the caller's.

    Args:
        header: as received. An invalid `traceparent` begins a new trace, as the standard requires.
        random_bits: 192 random bits: the span's id, and the trace's where it begins here.
    """
    match = _FORM.fullmatch(header)
    span = f"{random_bits & (1 << 64) - 1 or 1:016x}"
    if match is None:
        return f"00-{random_bits >> 64 or 1:032x}-{span}-01"
    return f"00-{match[1]}-{span}-{match[2]}"
