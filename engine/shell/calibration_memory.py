"""Step times that a worker measured at its start, kept for the next one like it on this machine.

    remembered_calibration(...) as memory ── memory.samples: of the last start ── replaced ──> written

A file each in the user's cache folder, that other users cannot write. Only for workers of one rank on CPU: elsewhere
starts take long for other reasons. What is read is data only, is checked against what such a worker measures, and
against two measured steps (`calibrate`); it is measured again after a day.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from disagg.engine.cache_folder import cache_folder
from disagg.engine.config import WorkerConfig
from disagg.engine.core.calibration import is_complete
from disagg.engine.plan import ModelRunner
from disagg.proto.messages import StepSample

logger = logging.getLogger(__name__)

MAX_AGE_S: Final = 86400.0
MAX_FILES: Final = 64
MAX_BYTES: Final = 64 << 10
_VERSION: Final = 2


@dataclass(slots=True)
class CalibrationMemory:
    """What is known of a worker."""

    samples: tuple[StepSample, ...] = ()
    """Measured steps; empty if none are known."""


def calibration_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Folder of step times, beside the models."""
    return cache_folder("calibration", environ)


@contextmanager
def remembered_calibration(runner: ModelRunner, config: WorkerConfig) -> Iterator[CalibrationMemory]:
    """What an earlier worker measured; what the caller puts in its place is kept, if it is complete."""
    if config.is_fake or config.device != "cpu" or config.num_ranks > 1:
        yield CalibrationMemory()
        return
    path = calibration_folder() / f"{_key(runner, config)}.json"
    memory = CalibrationMemory(_read(path))
    before = memory.samples
    yield memory
    if memory.samples != before and is_complete(memory.samples, runner, config):
        _write(path, memory.samples)


def _key(runner: ModelRunner, config: WorkerConfig) -> str:
    """Of all that decides which steps are measured, and, but for the load of the machine, how long they take."""
    parts = (
        _VERSION,
        platform.node(),
        platform.python_version(),
        runner.fingerprint,
        config.roles,
        config.num_threads,
        len(config.cores),
        config.token_budget,
        config.num_places,
        runner.block_size,
        runner.num_blocks,
        runner.max_model_len,
        runner.arithmetic,
        os.environ.get("DISAGG_KERNELS", ""),
        os.environ.get("DISAGG_TRITON_SHAPES", ""),
        os.environ.get("DISAGG_CPU_LEVEL", ""),
        config.share_weights,
    )
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:32]


def _read(path: Path) -> tuple[StepSample, ...]:
    """Samples of the file; empty if there is no usable one."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW)) as file:
            status = os.fstat(file.fileno())
            is_ours = status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if not is_ours or not 0.0 <= time.time() - status.st_mtime <= MAX_AGE_S:
                return ()
            samples = msgspec.json.decode(file.read(MAX_BYTES), type=tuple[StepSample, ...])
    except FileNotFoundError:
        return ()
    except (OSError, msgspec.MsgspecError) as error:
        logger.warning("%s cannot be used, steps are measured again: %s", path, error)
        return ()
    return samples


def _write(path: Path, samples: tuple[StepSample, ...]) -> None:
    """In one piece; the oldest files beyond `MAX_FILES` are removed."""
    staged = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            with open(staged, "wb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o600)) as file:
                file.write(msgspec.json.encode(samples))
            staged.replace(path)
        finally:
            staged.unlink(missing_ok=True)
        files = sorted(path.parent.glob("*.json"), key=lambda each: each.stat().st_mtime)
        for old in files[:-MAX_FILES]:
            old.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s: step times cannot be kept: %s", path.parent, error)
