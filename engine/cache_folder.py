"""Where what can be made again is kept on this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def cache_folder(name: str, environ: Mapping[str, str] = os.environ) -> Path:
    """`$DISAGG_HOME/NAME`, or `disagg/NAME` in the user's cache folder (`$XDG_CACHE_HOME`, `~/.cache`)."""
    if home := environ.get("DISAGG_HOME"):
        return Path(home).expanduser() / name
    if cache := environ.get("XDG_CACHE_HOME"):
        return Path(cache) / "disagg" / name
    return Path("~/.cache/disagg").expanduser() / name
