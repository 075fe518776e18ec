"""The folders of a gateway, and whether they can be used: found out before anything is started."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from disagg.gateway.batches import store as batches
from disagg.gateway.config import GatewayOptions
from disagg.gateway.private_files import check_folder
from disagg.gateway.sqlite import check_database
from disagg.gateway.usage import store as usage
from disagg.proto.errors import ConfigError
from disagg.router.config import RecordingOptions


def check_stores(options: GatewayOptions, recording: RecordingOptions | None) -> None:
    """Find out that a folder cannot be used, without making anything.

    Args:
        options: of the gateways.
        recording: of the routers' events.

    Raises:
        ConfigError: naming the key and the folder.
    """
    given = (("usage", options.usage, usage.FILE), ("batches", options.batches, batches.FILE))
    for name, section, file in given:
        if section is None:
            continue
        try:
            check_database(Path(section.folder) / file)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"gateway.{name}.folder: {section.folder} cannot be used: {error}") from None
    if recording is not None:
        try:
            check_folder(Path(recording.folder))
        except OSError as error:
            raise ConfigError(f"gateway.record_events.folder: {recording.folder} cannot be used: {error}") from None
