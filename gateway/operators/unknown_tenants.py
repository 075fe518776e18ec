"""What an operator is told who names a tenant that no caller of this gateway can be. Pure."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from itertools import islice

MAX_COMPARED, MAX_SIMILAR, MAX_CHARS = 1000, 3, 64
"""Most names that are compared, most that are shown, and characters of the name that are compared and shown."""


def unknown_tenant(tenant: str, known: Collection[str] | None) -> str | None:
    """What is wrong with the name of a tenant, for an admin, who may see those of all; None for a known one.

    Args:
        tenant: the name, of any length.
        known: the names of all tenants; None where every name may be one.
    """
    if known is None or tenant in known:
        return None
    if not any(known):
        return "callers have no keys here; all that they have is under the empty name"
    shown = tenant[:MAX_CHARS]
    similar = get_close_matches(shown, islice(sorted(known), MAX_COMPARED), MAX_SIMILAR)
    return f"no key has the tenant {shown!r}" + (f"; similar: {', '.join(similar)}" if similar else "")
