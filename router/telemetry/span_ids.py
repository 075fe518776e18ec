"""Ids of traces and spans (W3C Trace Context) where none came with the request: hashes of what they name, so that all
processes find the same without telling each other. Pure."""

from __future__ import annotations

from hashlib import blake2b

_TRACE_BYTES = 16
_SPAN_BYTES = 8


def trace_of(name: str) -> str:
    """The id of a trace: 32 hex digits."""
    return blake2b(name.encode(), digest_size=_TRACE_BYTES, person=b"trace").hexdigest()


def span_of(name: str) -> str:
    """The id of a span: 16 hex digits."""
    return blake2b(name.encode(), digest_size=_SPAN_BYTES, person=b"span").hexdigest()
