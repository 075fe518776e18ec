"""The model of a checkpoint folder, read without torch: configuration, weight files, fingerprint.

`read_model_config` turns config.json (in the form of transformers 4 or 5) and generation_config.json into one frozen
`ModelConfig`, and refuses what the decoder would compute differently; `model_fingerprint` names the whole. Every
mistake in the folder is a `ConfigError` that names the file.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import xxhash

from disagg.engine.checkpoint.families.bert import is_bert, read_bert
from disagg.engine.checkpoint.families.registry import read_family
from disagg.engine.checkpoint.json_fields import JsonFields, read_json_object
from disagg.engine.checkpoint.model_config import ModelConfig
from disagg.engine.checkpoint.weight_headers import header_bytes, read_header, weight_files
from disagg.proto.errors import ConfigError

MODULES = "modules.json"
"""File of sentence-transformers that says what is done with hidden states."""
FINGERPRINT_WINDOW_BYTES = 1 << 20
FINGERPRINT_SAMPLE_BYTES = 512 << 20
"""Weights up to this size are hashed whole; of larger ones, windows evenly spread over each file."""


def read_model_config(folder: str | Path) -> ModelConfig:
    """The model of a checkpoint folder.

    Raises:
        ConfigError: a file is missing or broken, or the model is not one that the decoder computes exactly.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such checkpoint folder")
    return read_config_file(folder / "config.json")


def read_config_file(file: Path) -> ModelConfig:
    """The model that a `config.json`, whatever its name, describes; generation_config.json beside it is read, too.

    Raises:
        ConfigError: as `read_model_config`.
    """
    fields = JsonFields(file, read_json_object(file))
    if is_bert(fields):
        return read_bert(fields)
    model = replace(read_family(fields), eos_token_ids=_eos_token_ids(file.parent, fields))
    return replace(model, gives_vectors=True, tied_embeddings=True) if has_pooling(file.parent) else model


def has_pooling(folder: Path) -> bool:
    """Whether a checkpoint makes vectors of hidden states, by the files of sentence-transformers. What exactly it does
    with them is the gateway's to read."""
    file = folder / MODULES
    if not file.is_file():
        return False
    try:
        modules = json.loads(file.read_bytes())
        return any(str(module["type"]).endswith(".Pooling") for module in modules)
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise ConfigError(f"{file}: not a list of modules, each with a type: {error}") from error


def is_pooled(folder: str | Path) -> bool:
    """Whether a checkpoint gives vectors or scores, and no answers: it has modules of sentence-transformers, or is a
    BERT. Raises as `read_model_config`."""
    return (Path(folder) / MODULES).is_file() or read_model_config(folder).gives_vectors


def _eos_token_ids(folder: Path, fields: JsonFields) -> tuple[int, ...]:
    """Ids from generation_config.json if it names any, else from config.json."""
    generation_file = folder / "generation_config.json"
    generation = read_json_object(generation_file) if generation_file.exists() else {}
    source = JsonFields(generation_file, generation) if generation.get("eos_token_id") is not None else fields
    value = source.value("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(id_, int) and not isinstance(id_, bool) and id_ >= 0 for id_ in ids):
        raise source.error(f"`eos_token_id` must be a token id or a list of them, not {value!r}")
    return tuple(ids)


# ---------------------------------------------------------------- fingerprint


def model_fingerprint(folder: str | Path, dtype: str, quantization: str = "none") -> str:
    """32 hex characters that name what a model computes: workers with equal ones may share KV.

    SHA-256 over the decoder's configuration (end tokens left out), `dtype`, `quantization`, and of every weight file
    its name, size, header and an XXH3-128 of its bytes. The bytes are hashed whole up to 512 MiB for the checkpoint; of
    a larger one, 1 MiB windows evenly spread, so that another fine-tune differs, but a change of a few small tensors
    may go unseen. Equal weights in other shards have another fingerprint. It is no defence against forged weights.

    Raises:
        ConfigError: as `read_model_config`, `weight_files` and `read_header`.
    """
    essentials = asdict(read_model_config(folder))
    del essentials["eos_token_ids"]
    if not essentials["gives_vectors"]:
        del essentials["gives_vectors"]  # as it was before there were such models
    if essentials["encoder"] is None:
        del essentials["encoder"]
    digest = hashlib.sha256(json.dumps([essentials, dtype, quantization], sort_keys=True).encode())
    files = weight_files(folder)
    share = min(1.0, FINGERPRINT_SAMPLE_BYTES / max(1, sum(file.stat().st_size for file in files)))
    for file in files:
        read_header(file)
        digest.update(f"\0{file.name}\0{file.stat().st_size}\0".encode())
        digest.update(header_bytes(file))
        digest.update(_sampled_hash(file, share))
    return digest.hexdigest()[:32]


def _sampled_hash(file: Path, share: float) -> bytes:
    """XXH3-128 of windows that cover `share` of the file, the last one included."""
    size = file.stat().st_size
    stride = math.ceil(FINGERPRINT_WINDOW_BYTES / share)
    content = xxhash.xxh3_128()
    window = bytearray(FINGERPRINT_WINDOW_BYTES)
    with file.open("rb", buffering=0) as stream:
        for start in (*range(0, size, stride), max(0, size - FINGERPRINT_WINDOW_BYTES)):
            stream.seek(start)
            count = stream.readinto(window)
            content.update(memoryview(window)[:count])
    return content.digest()
