"""The file of API keys.

    - tenant: team-a
      sha256: 5e88...        # of the key; `disagg key new` writes this form
    - tenant: operators
      key: some-long-random-key
      admin: true

A tenant may have several keys, for instance while one is replaced. The file is read when the gateway starts.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Annotated

import msgspec
import yaml

from disagg.proto.errors import ConfigError
from disagg.router.gateway.auth import ApiKey, ApiKeys, Caller, digest_of

MIN_KEY_CHARS = 16
MAX_KEY_CHARS = 512
MAX_KEYS = 10_000
"""Every call is compared with all of them."""
_KEY = re.compile(rf"[!-~]{{{MIN_KEY_CHARS},{MAX_KEY_CHARS}}}")
_TENANT = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]
_SHA256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-fA-F]{64}\Z")]


class KeyEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One entry of the file; `key` or `sha256`, not both."""

    tenant: _TENANT
    key: str | None = None
    """Printable ASCII without spaces."""
    sha256: _SHA256 | None = None
    """Its SHA-256 in hex."""
    admin: bool = False

    def __repr__(self) -> str:
        return f"KeyEntry(tenant={self.tenant!r}, admin={self.admin})"


def load_keys(path: str) -> ApiKeys:
    """What the file says.

    Raises:
        ConfigError: if it cannot be read, others can read it, or an entry is wrong. No message repeats a key.
    """
    try:
        text = read_private_file(path, "gateway.api_keys").decode()
    except UnicodeDecodeError:
        raise ConfigError(f"gateway.api_keys: {path} is not UTF-8") from None
    entries = parse_entries(text, path)
    if len(entries) > MAX_KEYS:
        raise ConfigError(f"gateway.api_keys: {path} has {len(entries)} keys; at most {MAX_KEYS}")
    if not entries:
        raise ConfigError(f"gateway.api_keys: {path} has no key; next: disagg key new TENANT --file {path}")
    keys = [
        ApiKey(_digest(entry, f"{path}[{i}]"), Caller(entry.tenant, entry.admin)) for i, entry in enumerate(entries)
    ]
    places: dict[bytes, int] = {}
    for index, key in enumerate(keys):
        if (first := places.setdefault(key.digest, index)) != index:
            raise ConfigError(f"gateway.api_keys: {path}[{index}] is the same key as [{first}]; each needs its own")
    return ApiKeys(keys)


def parse_entries(text: str, path: str) -> list[KeyEntry]:
    """The entries of a file, each by itself of the right form. Raises `ConfigError` as `load_keys` does."""
    try:
        raw = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:  # its own words quote the file
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 0
        raise ConfigError(f"gateway.api_keys: {path} is not valid YAML, line {line}") from None
    except yaml.YAMLError:
        raise ConfigError(f"gateway.api_keys: {path} is not valid YAML") from None
    try:
        return msgspec.convert([] if raw is None else raw, list[KeyEntry])
    except msgspec.ValidationError as error:
        raise ConfigError(f"gateway.api_keys: {path}: {str(error).replace('`', '')}") from None


def read_private_file(path: str, name: str) -> bytes:
    """A file that only its owner and group may touch. `name` is the configuration's key.

    Raises:
        ConfigError: if it cannot be read, or others may read or write it.
    """
    try:
        with Path(path).open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & stat.S_IRWXO:
                raise ConfigError(f"{name}: others can use {path} (mode {mode:04o}); next: chmod 600 {path}")
            return file.read()
    except OSError as error:
        raise ConfigError(f"{name}: cannot read {path} ({error.strerror})") from None


def _digest(entry: KeyEntry, where: str) -> bytes:
    if (entry.key is None) == (entry.sha256 is None):
        raise ConfigError(f"gateway.api_keys: {where} needs one of key and sha256")
    if entry.sha256 is not None:
        return bytes.fromhex(entry.sha256)
    key = entry.key or ""
    if not _KEY.fullmatch(key):
        raise ConfigError(
            f"gateway.api_keys: {where}.key must have {MIN_KEY_CHARS} to {MAX_KEY_CHARS} printable ASCII characters "
            "and no space"
        )
    return digest_of(key)
