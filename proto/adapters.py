"""Names and paths of adapters, and their limits. Pure."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Final

from disagg.proto.messages import Adapter

MAX_ADAPTERS: Final = 1024
"""Largest number of adapters of one cluster."""
MAX_NAME_CHARS: Final = 256
MAX_PATH_CHARS: Final = 1024
_VERSION_DIGITS: Final = 16


def name_problem(name: str) -> str:
    """What is wrong with the name of an adapter, which requests use like that of a model; empty for nothing."""
    if not 1 <= len(name) <= MAX_NAME_CHARS:
        return f"has 1 to {MAX_NAME_CHARS} characters, not {len(name)}"
    if not name.isprintable() or name != name.strip():
        return "has printable characters only, and no space at its ends"
    if not {".", ".."}.isdisjoint(name.split("/")):
        return "has no part that is . or .., which paths of URLs cannot have"
    return ""


def path_problem(path: str) -> str:
    """What is wrong with the path of an adapter's folder below `adapters.folder`; empty for nothing. Workers check
    links."""
    if not 1 <= len(path) <= MAX_PATH_CHARS:
        return f"has 1 to {MAX_PATH_CHARS} characters, not {len(path)}"
    if not path.isprintable():
        return "has printable characters only"
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts:
        return "is the path of a folder below adapters.folder, without .."
    return ""


def version_with(version: str, adapter: Adapter | None) -> str:
    """What a client is told of the version that makes its answer: that of the model, combined with the adapter. Applied
    to what a client was told it gives the version of the model again, if the adapter is the same one: else a version
    that nothing has. Both have 16 hexadecimal digits; empty stays empty."""
    if adapter is None or not version:
        return version
    mask = int(adapter.fingerprint[:_VERSION_DIGITS].ljust(_VERSION_DIGITS, "0"), 16)
    return f"{int(version, 16) ^ mask:0{_VERSION_DIGITS}x}"
