"""`disagg key new`: make an API key. The key is shown once; the gateway's file keeps its SHA-256 only."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import yaml
from rich.console import Console

from disagg.connections.watched_files import read_private_file
from disagg.gateway.auth.auth import TENANT, digest_of
from disagg.gateway.auth.shell.api_keys import KeyEntry, parse_entries
from disagg.proto.errors import ConfigError
from disagg.router.api import NO_LIMITS

PREFIX: Final = "disagg_"
"""Prefix by which people and secret scanners recognize a key."""
_KEY_BYTES: Final = 32
_MODE: Final = 0o600


@dataclass(frozen=True, kw_only=True)
class KeyRights:
    """Rights of a key, and their duration; see `KeyEntry`."""

    admin: bool = False
    metrics: bool = False
    scopes: Sequence[str] = ()
    models: Sequence[str] = ()
    expires: str | None = None

    def fields(self) -> dict[str, object]:
        """Fields of the key's entry in the file: those that are set."""
        every = {
            "admin": self.admin,
            "metrics": self.metrics,
            "scopes": [*self.scopes],
            "models": [*self.models],
            "expires": self.expires,
        }
        return {name: value for name, value in every.items() if value}


def run_key_new(tenant: str, rights: KeyRights, file: Path | None, console: Console) -> int:
    """Make a key for a tenant; returns the exit status. Only the key goes to standard output.

    Args:
        tenant: whose key it is; requests of one tenant share cached prefixes.
        rights: rights of the key.
        file: file to add it to, which is made if it is missing; without one, the entry is shown instead.
        console: for people, standard error.

    Raises:
        ConfigError: if the tenant's name, the rights or the file are invalid; nothing was changed.
    """
    key = PREFIX + secrets.token_urlsafe(_KEY_BYTES)
    entry = entry_of(tenant, key, rights)
    if file is not None:
        add_entry(file, entry)
    print(key)
    kind = "an admin's key" if rights.admin or "admin" in rights.scopes else "a key"
    if file is not None:
        text = f"{kind} of {tenant}, added to {file}; a gateway with gateway.api_keys: {file} takes it within seconds"
    else:
        text = f"{kind} of {tenant}; put this into the file that gateway.api_keys names:\n{entry}"
    console.print(f"{text}\nIt is shown only now. Clients take it from DISAGG_API_KEY.", markup=False, highlight=False)
    return 0


def entry_of(tenant: str, key: str, rights: KeyRights) -> str:
    """The lines of the file for a key. Raises `ConfigError` for an invalid tenant name or invalid rights."""
    entry = {"tenant": tenant, "sha256": digest_of(key).hex(), **rights.fields()}
    if not re.match(TENANT, tenant):
        raise ConfigError(f"tenant: expected at most 64 letters, digits, dots, dashes and underscores; got {tenant!r}")
    try:
        msgspec.convert(entry, KeyEntry).caller(NO_LIMITS)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error).replace("`", "").replace("$.", "")) from None
    return yaml.safe_dump([entry], sort_keys=False)


def add_entry(file: Path, entry: str) -> None:
    """Append an entry to the file, in one step. Raises `ConfigError`."""
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
    """Write a file that only its owner can read, in one step: a reader gets either the old or the new content."""
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
