"""The weights of a model once for all workers of a host: a file of the packed parameters that each worker maps.

    map it, if it is there -> else, under a lock: map what another wrote meanwhile, or load, pack, write, map

The first worker that needs the file writes it, under another name, and renames it; the others wait for the lock. Its
name and key have all that its content depends on. It is mapped read-only, never changed, and only ever replaced or
removed, so that who has it mapped keeps it; of each model the newest packing is kept. A worker that can neither find
nor write it keeps weights of its own and logs a warning.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from disagg.engine.cache_folder import cache_folder
from disagg.engine.checkpoint.model_config import ModelConfig
from disagg.engine.checkpoint.weight_file import UnusableFileError, map_tensors, write_tensors
from disagg.engine.checkpoint.weight_headers import weight_file_times
from disagg.engine.config import WeightsSource
from disagg.engine.runner.model.parameters import (
    FfnParameters,
    LatentParameters,
    LayerParameters,
    ModelParameters,
    allocate_parameters,
)
from disagg.kernels.dispatch import drop_packing_memory, packed_parts, packing_name, restored_experts, restored_weight

logger = logging.getLogger(__name__)


def shared_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Folder of packed weights, beside the models."""
    return cache_folder("packed", environ)


def shared_parameters(
    source: WeightsSource, model: ModelConfig, fingerprint: str, make: Callable[[], ModelParameters]
) -> ModelParameters:
    """The packed parameters of a whole model on the CPU, mapped where that is possible; read-only.

    Args:
        fingerprint: of the model, with `dtype` and `quantization`.
        make: reads the checkpoint and packs it; not called when the file is there. What it raises goes through.
    """
    dtype: torch.dtype = getattr(torch, source.dtype)
    packing = packing_name(dtype)
    if packing is None:
        logger.warning(
            "share_weights: there are no C++ kernels, so %s weights cannot be shared; this worker keeps its own",
            source.dtype,
        )
        return make()
    times = weight_file_times(source.model_path)
    key = hashlib.sha256(json.dumps([fingerprint, packing, times, source.quantization]).encode()).hexdigest()[:32]
    shared = _SharedFile(shared_folder(), fingerprint, key, model, dtype)
    if (found := shared.mapped()) is not None:
        return found
    with shared.locked() as is_locked:
        if is_locked and (found := shared.mapped(log_reason=True)) is not None:
            return found
        parameters = make()
        written = shared.write(parameters) if is_locked else None
    if written is None:
        return parameters
    del parameters
    drop_packing_memory()
    return written


@dataclass(frozen=True, slots=True)
class _SharedFile:
    folder: Path
    fingerprint: str
    key: str
    model: ModelConfig
    dtype: torch.dtype

    @property
    def path(self) -> Path:
        return self.folder / f"{self.fingerprint}-{self.key}.weights"

    def mapped(self, log_reason: bool = False) -> ModelParameters | None:
        """Mapped weights; None if there is no such file, or it cannot be used."""
        try:
            parameters = _filled(self.model, self.dtype, map_tensors(self.path, self.key))
        except FileNotFoundError:
            return None
        except (UnusableFileError, OSError, ValueError) as error:
            if log_reason:
                logger.warning("share_weights: ignoring %s, packing the weights again: %s", self.path, error)
            return None
        logger.info("weights are mapped from %s", self.path)
        return parameters

    @contextmanager
    def locked(self) -> Iterator[bool]:
        """Holds the folder's lock; yields false, after a warning, where it cannot be taken."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
        except OSError as error:
            self._warn(error)
            yield False
            return
        try:
            yield self._is_alone(descriptor)
        finally:
            os.close(descriptor)

    def _is_alone(self, descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:  # a file system without locks
            self._warn(error)
            return False
        return True

    def write(self, parameters: ModelParameters) -> ModelParameters | None:
        """The parameters, written and mapped, under the lock; None, and a warning, where that cannot be. Older packings
        of the model are removed."""
        staged = self.path.with_suffix(".tmp")  # whatever a killed worker left there is overwritten
        try:
            try:
                with staged.open("wb") as stream:
                    write_tensors(stream, self.key, _flat(parameters))
                staged.replace(self.path)
            finally:
                staged.unlink(missing_ok=True)
            for other in self.folder.glob(f"{self.fingerprint}-*"):
                if other != self.path:
                    other.unlink(missing_ok=True)
        except OSError as error:
            self._warn(error)
            return None
        return self.mapped(log_reason=True)

    def _warn(self, error: OSError) -> None:
        logger.warning(
            "share_weights: cannot write to %s, this worker keeps weights of its own: %s", self.folder, error
        )


# ---------------------------------------------------------------- parameters


_Holder = LayerParameters | LatentParameters | FfnParameters | ModelParameters


def _slots(parameters: ModelParameters) -> Iterator[tuple[str, _Holder, str]]:
    """(name in the file, holder, its attribute) of every parameter."""
    for index, layer in enumerate(parameters.layers):
        yield from _fields_of(layer, f"{index}.")
        yield from _fields_of(layer.ffn, f"{index}.ffn.")
        if layer.latent is not None:
            yield from _fields_of(layer.latent, f"{index}.latent.")
    for name in ("embedding_VH", "final_norm_H", "lm_head_VH"):
        yield name, parameters, name


def _fields_of(
    holder: LayerParameters | LatentParameters | FfnParameters, prefix: str
) -> Iterator[tuple[str, _Holder, str]]:
    for field in fields(holder):
        if field.name not in ("ffn", "latent"):
            yield f"{prefix}{field.name}", holder, field.name


def _flat(parameters: ModelParameters) -> dict[str, Tensor]:
    tensors = {}
    for name, holder, attribute in _slots(parameters):
        value = getattr(holder, attribute)
        if isinstance(value, Tensor):
            tensors[name] = value
        elif value is not None:
            tensors[f"{name}.packed"], scale_O = packed_parts(value)
            if scale_O is not None:
                tensors[f"{name}.scale"] = scale_O
    return tensors


def _filled(model: ModelConfig, dtype: torch.dtype, tensors: Mapping[str, Tensor]) -> ModelParameters:
    """The reverse of `_flat`; ValueError where the tensors are not those of the model."""
    parameters = allocate_parameters(model, dtype, torch.device("meta"))
    for name, holder, attribute in _slots(parameters):
        wanted: Tensor | None = getattr(holder, attribute)
        if wanted is None:
            continue
        if (packed := tensors.get(f"{name}.packed")) is not None:
            restored = restored_weight if wanted.dim() == 2 else restored_experts
            setattr(holder, attribute, restored(packed, tensors.get(f"{name}.scale"), *wanted.shape))
            continue
        tensor = tensors.get(name)
        if tensor is None or tensor.dtype != wanted.dtype or tensor.shape != wanted.shape:
            raise ValueError(f"{name} is not the model's")
        setattr(holder, attribute, tensor)
    return parameters
