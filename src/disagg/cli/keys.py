"""`disagg key new`: make an API key. The key is shown once; the gateway's file keeps its SHA-256 only."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from pathlib import Path
from typing import Final

import msgspec
import yaml
from rich.console import Console

from disagg.proto.connections.watched_files import read_private_file
from disagg.proto.errors import ConfigError
from disagg.router.gateway.auth.api_keys import KeyEntry, parse_entries
from disagg.router.gateway.auth.auth import digest_of

PREFIX: Final = "disagg_"
"""By which people and secret scanners recognize a key."""
_KEY_BYTES: Final = 32
_MODE: Final = 0o600


def run_key_new(tenant: str, admin: bool, file: Path | None, console: Console, *, metrics: bool = False) -> int:
    """Make a key for a tenant; returns the exit status. Only the key goes to standard output.

    Args:
        tenant: whose key it is; requests of one tenant share cached prefixes.
        admin: whether it may change the cluster and see all requests.
        file: to add it to, made where it is missing; without, the entry is shown instead.
        console: for people, standard error.
        metrics: whether it may read `/metrics`; an admin may in any case.

    Raises:
        ConfigError: if the tenant's name or the file is not what it must be; nothing was changed.
    """
    key = PREFIX + secrets.token_urlsafe(_KEY_BYTES)
    entry = entry_of(tenant, key, admin, metrics)
    if file is not None:
        add_entry(file, entry)
    print(key)
    rights = "an admin's key" if admin else "a key"
    if file is not None:
        text = f"{rights} of {tenant}, added to {file}; a gateway with gateway.api_keys: {file} takes it within seconds"
    else:
        text = f"{rights} of {tenant}; put this into the file that gateway.api_keys names:\n{entry}"
    console.print(f"{text}\nIt is shown only now. Clients take it from DISAGG_API_KEY.", markup=False, highlight=False)
    return 0


def entry_of(tenant: str, key: str, admin: bool, metrics: bool = False) -> str:
    """The lines of the file for a key. Raises `ConfigError` for a name that is no tenant's."""
    rights = {name: True for name, given in (("admin", admin), ("metrics", metrics)) if given}
    entry = {"tenant": tenant, "sha256": digest_of(key).hex(), **rights}
    try:
        msgspec.convert(entry, KeyEntry)
    except msgspec.ValidationError:
        raise ConfigError(
            f"tenant: expected at most 64 letters, digits, dots, dashes and underscores; got {tenant!r}"
        ) from None
    return yaml.safe_dump([entry], sort_keys=False)


def add_entry(file: Path, entry: str) -> None:
    """Put an entry at the end of the file, in one step. Raises `ConfigError`."""
    text = read_private_file(str(file), "--file").decode() if file.exists() else ""
    longer = f"{text.rstrip()}\n{entry}".lstrip()
    before = parse_entries(text, str(file))
    if len(parse_entries(longer, str(file))) != len(before) + 1:
        raise ConfigError(f"--file: {file} is not a plain list; add this to it:\n{entry}")
    try:
        replace_file(file, longer)
    except OSError as error:
        raise ConfigError(f"--file: cannot write {file} ({error.strerror})") from None


def replace_file(file: Path, text: str) -> None:
    """Write a file that only its owner can read; whoever reads it meanwhile gets the old one or the new one."""
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as output:
            output.write(text)
        Path(name).chmod(_MODE)
        Path(name).replace(file)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            Path(name).unlink()
        raise
