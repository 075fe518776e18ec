"""Recorded steps as a file: written by `disagg calibrate`, read by `disagg plan` and `disagg simulate`.

JSON, one object: what was measured on what (model, dtype, threads, machine, date) and the steps. The reader checks all
of it, so that a prediction never rests on a mistake of a file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Final, Literal

import msgspec

from disagg.proto.errors import ConfigError
from disagg.proto.messages import StepSample, WindowKv
from disagg.simulator.durations.drafts import Drafts
from disagg.simulator.durations.overheads import NO_OVERHEADS, Overheads, Sharing

FORMAT: Final = "disagg-step-times"
MAX_SAMPLES = 100_000
MAX_BYTES = 32 << 20
_LONGEST_MS = 1e7
_MOST = 1 << 40
_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]


class StepRecording(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of recorded steps of one worker, with the conditions of the measurement."""

    format: Literal["disagg-step-times"] = FORMAT
    version: Literal[1] = 1
    model: str
    """Name of the model."""
    fingerprint: str = ""
    """Fingerprint of the weights; see `engine.checkpoint.model_fingerprint`."""
    dtype: str
    quantization: str = "none"
    device: str = "cpu"
    num_threads: _Count = 1
    tp: _Count = 1
    machine: str
    """Name of the CPU or GPU, as the operating system has it."""
    date: str
    """Date in UTC, as in ISO 8601."""
    kv_bytes_per_token: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Bytes of K and V of one token in all layers; 0 if not recorded."""
    kv_windows: tuple[WindowKv, ...] = ()
    """The part of it that layers with a window have."""
    expert_share: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.0
    """Share of the model's experts that a token chooses; 0 without experts."""
    overheads: Overheads = NO_OVERHEADS
    sharing: Sharing | None = None
    """Slowdown of workers by others on one machine; the samples do not include it. None if not recorded."""
    drafts: Drafts | None = None
    """Means of steps with drafts; None if there were none."""
    samples: tuple[StepSample, ...]
    """The steps, each as `[ms, prefill_tokens, prefill_attended, num_decodes, decode_context]`."""


def encode_recording(recording: StepRecording) -> bytes:
    """The file's bytes; a step takes one line."""
    head = msgspec.to_builtins(recording)
    samples = head.pop("samples")
    lines = [f'  "{key}": {msgspec.json.encode(value).decode()},' for key, value in head.items()]
    steps = ",\n".join(f"    {msgspec.json.encode(sample).decode()}" for sample in samples)
    return "\n".join(["{", *lines, '  "samples": [', steps, "  ]", "}", ""]).encode()


def decode_recording(content: bytes, name: str) -> StepRecording:
    """The recording in a file; `name` stands for the file in errors.

    Raises:
        ConfigError: it is no such file, or something in it cannot be; names the field or the step.
    """
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{name}: has {len(content)} bytes, more than {MAX_BYTES}")
    try:
        recording = msgspec.json.decode(content, type=StepRecording)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name}: not recorded step times: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: not valid JSON: {error}") from None
    check_samples(recording.samples, name)
    return recording


def check_samples(samples: Sequence[StepSample], name: str) -> None:
    """Refuse steps with impossible values.

    Raises:
        ConfigError: names the first of them.
    """
    if not 1 <= len(samples) <= MAX_SAMPLES:
        raise ConfigError(f"{name}: samples: expected 1 to {MAX_SAMPLES} steps, not {len(samples)}")
    for at, sample in enumerate(samples):
        if problem := _problem(sample):
            raise ConfigError(f"{name}: samples[{at}]: {problem}")


def _problem(sample: StepSample) -> str | None:
    ms, tokens, attended, decodes, context = msgspec.structs.astuple(sample)
    if not (math.isfinite(ms) and 0.0 < ms <= _LONGEST_MS):
        return f"expected a time above 0 and up to {_LONGEST_MS:g} ms, not {ms}"
    if min(tokens, attended, decodes, context) < 0 or max(tokens, attended, decodes, context) > _MOST:
        return f"counts must be from 0 to {_MOST}"
    if tokens + decodes == 0:
        return "a step computes at least one token"
    if attended < tokens:
        return f"{tokens} prompt tokens attend to themselves at least, not to {attended}"
    if context < decodes:
        return f"{decodes} decodes attend to themselves at least, not to {context}"
    if (tokens == 0 and attended) or (decodes == 0 and context):
        return "tokens are attended to by nothing"
    return None
