"""The cluster's configuration: a YAML file, or none, becomes frozen structs.

    load_config(file) -> override (command line) -> `control/plan.py` makes the configurations of the processes

The structs are in `schema.py`; every key has a default, so that an empty file is a working cluster: one prefill and one
decode worker on this machine's CPU. Any mistake is a `ConfigError` that names the key's path and what is allowed there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from disagg.cluster.config.checks import LEAST_TRACES, check, check_keys
from disagg.cluster.config.model_pools import active_pools, models_of, pool_path, unused_pools
from disagg.cluster.config.schema import (
    MAX_MODELS,
    AdaptersSection,
    ClusterConfig,
    GatewaySection,
    Mode,
    ModelSection,
    NetworkConfig,
    PoolConfig,
    PoolsConfig,
    RecoveryConfig,
    ServedModelSection,
    TransferSection,
    WorkersConfig,
)
from disagg.cluster.core.config_reader import parse_yaml, read_struct
from disagg.cluster.models.catalog import looks_like_path
from disagg.proto.errors import ConfigError

__all__ = [
    "LEAST_TRACES",
    "MAX_MODELS",
    "ClusterConfig",
    "GatewaySection",
    "Mode",
    "ModelSection",
    "NetworkConfig",
    "PoolConfig",
    "PoolsConfig",
    "RecoveryConfig",
    "ServedModelSection",
    "TransferSection",
    "WorkersConfig",
    "active_pools",
    "load_config",
    "models_of",
    "override",
    "parse_config",
    "pool_path",
    "unused_pools",
]


def load_config(file: Path | None) -> ClusterConfig:
    """Read and check a configuration file; None gives the defaults.

    Raises:
        ConfigError: if the file cannot be read, is no YAML, or has a value that cannot work.
    """
    if file is None:
        return ClusterConfig()
    try:
        raw = parse_yaml(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read ({error})") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: not valid YAML ({' '.join(str(error).split())})") from None
    return _in_folder(parse_config(raw), file.absolute().parent)


def _in_folder(config: ClusterConfig, folder: Path) -> ClusterConfig:
    """Make the files of gateway and network absolute paths, because processes on other hosts have another working
    directory. The same for the folder of a model, if it exists for this process."""

    def absolute(path: str | None) -> str | None:
        return None if path is None else str(folder / Path(path).expanduser())

    gateway = config.gateway
    tls = gateway.tls
    if tls is not None:
        paths = {name: absolute(getattr(tls, name)) for name in ("cert", "key", "client_ca")}
        tls = msgspec.structs.replace(tls, **paths)
    recording = gateway.record_events
    if recording is not None:
        recording = msgspec.structs.replace(recording, folder=absolute(recording.folder))
    batches = gateway.batches
    if batches is not None:
        batches = msgspec.structs.replace(batches, folder=absolute(batches.folder))
    usage = gateway.usage
    if usage is not None:
        usage = msgspec.structs.replace(usage, folder=absolute(usage.folder))
    gateway = msgspec.structs.replace(
        gateway, tls=tls, api_keys=absolute(gateway.api_keys), record_events=recording, batches=batches, usage=usage
    )
    network = config.network
    if network.certificates is not None:
        given = {name: absolute(getattr(network.certificates, name)) for name in ("ca", "cert", "key")}
        network = msgspec.structs.replace(network, certificates=msgspec.structs.replace(network.certificates, **given))
    tiers = config.kv_cache.tiers
    if tiers is not None and tiers.disk is not None:
        disk = msgspec.structs.replace(tiers.disk, path=absolute(tiers.disk.path))
        config = msgspec.structs.replace(
            config, kv_cache=msgspec.structs.replace(config.kv_cache, tiers=msgspec.structs.replace(tiers, disk=disk))
        )
    models = {
        key: msgspec.structs.replace(
            section,
            model=_with_absolute_path(section.model),
            adapters=_with_absolute_folder(section.adapters, folder),
        )
        for key, section in config.models.items()
    }
    return msgspec.structs.replace(
        config,
        gateway=gateway,
        network=network,
        model=_with_absolute_path(config.model),
        adapters=_with_absolute_folder(config.adapters, folder),
        models=models,
    )


def _with_absolute_folder(adapters: AdaptersSection | None, folder: Path) -> AdaptersSection | None:
    if adapters is None:
        return None
    return msgspec.structs.replace(adapters, folder=str(folder / Path(adapters.folder).expanduser()))


def _with_absolute_path(model: ModelSection) -> ModelSection:
    if model.path is None or not looks_like_path(model.path) or not Path(model.path).expanduser().is_dir():
        return model
    return msgspec.structs.replace(model, path=str(Path(model.path).expanduser().absolute()))


def parse_config(raw: object) -> ClusterConfig:
    """Make a checked configuration from parsed YAML; raises `ConfigError`."""
    if isinstance(raw, dict) and isinstance(raw.get("models"), dict):
        check_keys(raw["models"])
    config = read_struct(ClusterConfig, raw)
    check(config)
    return config


def override(config: ClusterConfig, values: Mapping[str, object]) -> ClusterConfig:
    """Replace some values of a configuration, named by path: `{"gateway.port": 0}`.

    Raises:
        ConfigError: for a value that is not allowed, as in the file.
    """
    raw: dict[str, Any] = msgspec.to_builtins(config)
    for path, value in values.items():
        *sections, key = path.split(".")
        target = raw
        for section in sections:
            target = target[section]
        target[key] = value
    return parse_config(raw)
