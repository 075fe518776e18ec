"""The model of a checkpoint folder, read without torch: configuration, weight files, fingerprint.

`read_model_config` turns config.json (in the form of transformers 4 or 5) and generation_config.json into one frozen
`ModelConfig`, and refuses what the decoder would compute differently. `weight_files` and `read_header` find the tensors
in the safetensors files; `model_fingerprint` names the whole. Every mistake in the folder is a `ConfigError` that names
the file.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import xxhash

from disagg.engine.checkpoint.json_fields import JsonFields, read_json_object
from disagg.proto.errors import ConfigError

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
DEFAULT_ROPE_THETA = 10000.0
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format."""
FINGERPRINT_WINDOW_BYTES = 1 << 20
FINGERPRINT_SAMPLE_BYTES = 512 << 20
"""Weights up to this size are hashed whole; of larger ones, windows evenly spread over each file."""


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding. `dynamic` scaling is `default` here: both agree up to the longest context we serve."""

    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    theta: float = DEFAULT_ROPE_THETA
    factor: float = 1.0
    original_max_positions: int = 0
    """Context length of the pretraining, for llama3 and yarn."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float = 1.0
    """cos and sin are multiplied by this (yarn)."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """All that the decoder needs to know of a model of the Llama family."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    """Longest sequence that the position embedding was made for."""
    sliding_window: int | None
    """A token sees this many positions, itself included; None sees all."""
    rms_norm_eps: float
    rope: RopeConfig
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """RMS norm over each head of q and k, before rope."""
    tied_embeddings: bool
    """The LM head is the embedding matrix."""
    eos_token_ids: tuple[int, ...]

    def kv_head_bytes(self, element_bytes: int) -> int:
        """Bytes of one token's K and V in one KV head of all layers."""
        return 2 * self.num_layers * self.head_dim * element_bytes

    @property
    def max_exact_len(self) -> int:
        """Longest sequence that full attention computes as the checkpoint means it."""
        return min(self.max_positions, self.sliding_window or self.max_positions)


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
    architecture = _architecture(fields)
    _refuse_unsupported(fields)
    num_heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    is_llama, is_qwen3 = architecture == "LlamaForCausalLM", architecture == "Qwen3ForCausalLM"
    attention_bias = (is_llama or is_qwen3) and fields.boolean("attention_bias", False)
    rope = _rope(fields)
    config = ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads if is_llama else None),
        head_dim=fields.integer("head_dim", 128 if is_qwen3 else max(1, hidden_size // num_heads)),
        vocab_size=fields.integer("vocab_size"),
        max_positions=_max_positions(fields, rope),
        sliding_window=_sliding_window(fields, architecture),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        o_bias=attention_bias,
        mlp_bias=is_llama and fields.boolean("mlp_bias", False),
        qk_norm=is_qwen3,
        tied_embeddings=fields.boolean("tie_word_embeddings", False),
        eos_token_ids=_eos_token_ids(file.parent, fields),
    )
    if config.num_heads % config.num_kv_heads:
        raise fields.error(
            f"`num_attention_heads` ({config.num_heads}) must be a multiple of `num_key_value_heads` "
            f"({config.num_kv_heads})"
        )
    if config.head_dim % 2:
        raise fields.error(f"the head size must be even for rotary embeddings, not {config.head_dim}")
    return config


def _architecture(fields: JsonFields) -> str:
    architectures = fields.values.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    for name in names:
        if name in SUPPORTED_ARCHITECTURES:
            return str(name)
    found = ", ".join(map(str, names)) or "none"
    raise fields.error(f"architecture {found} is not supported; supported are {', '.join(SUPPORTED_ARCHITECTURES)}")


def _refuse_unsupported(fields: JsonFields) -> None:
    if (activation := fields.values.get("hidden_act", "silu")) != "silu":
        raise fields.error(f"`hidden_act` {activation!r} is not supported; supported is 'silu'")
    if fields.has("quantization_config"):
        raise fields.error("quantized checkpoints (`quantization_config`) are not supported")


def _max_positions(fields: JsonFields, rope: RopeConfig) -> int:
    """Yarn often leaves `max_position_embeddings` at the length before scaling."""
    max_positions = fields.integer("max_position_embeddings")
    scaled = int(rope.original_max_positions * rope.factor) if rope.kind == "yarn" else 0
    return max(max_positions, scaled)


def _sliding_window(fields: JsonFields, architecture: str) -> int | None:
    """The narrowest window of any layer, by the rules and defaults of transformers' configuration classes."""
    if architecture == "LlamaForCausalLM":
        return None
    if architecture == "MistralForCausalLM":
        if "sliding_window" not in fields.values:
            return 4096
        return fields.integer("sliding_window") if fields.has("sliding_window") else None
    if not fields.boolean("use_sliding_window", False):
        return None
    layer_types = fields.values.get("layer_types")
    if layer_types is None:
        slides = fields.integer("num_hidden_layers") > fields.integer("max_window_layers", 28, minimum=0)
    else:
        slides = any(kind != "full_attention" for kind in layer_types)
    return fields.integer("sliding_window", 4096) if slides else None


def _rope(fields: JsonFields) -> RopeConfig:
    """RoPE settings from `rope_parameters` (transformers 5) or `rope_scaling` and `rope_theta` (transformers 4)."""
    parameters = fields.values.get("rope_scaling") or fields.values.get("rope_parameters") or {}
    if not isinstance(parameters, dict):
        raise fields.error(f"the rope parameters must be an object, not {parameters!r}")
    for name in ("rope_theta", "partial_rotary_factor"):
        if fields.has(name):
            parameters = {name: fields.values[name], **parameters}
    if fields.has("original_max_position_embeddings"):
        parameters = {
            **parameters,
            "original_max_position_embeddings": fields.values["original_max_position_embeddings"],
        }
    rope = JsonFields(fields.file, parameters)
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        raise rope.error("`partial_rotary_factor` other than 1 is not supported")
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    theta = rope.number("rope_theta", DEFAULT_ROPE_THETA)
    if kind in ("default", "dynamic"):
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(kind="linear", theta=theta, factor=rope.number("factor"))
    if kind == "llama3":
        return _llama3_rope(rope, theta, fields.integer("max_position_embeddings"))
    if kind == "yarn":
        return _yarn_rope(rope, theta, fields.integer("max_position_embeddings"))
    raise rope.error(f"rope type {kind!r} is not supported; supported are default, linear, dynamic, llama3, yarn")


def _llama3_rope(rope: JsonFields, theta: float, max_positions: int) -> RopeConfig:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        raise rope.error(f"`low_freq_factor` ({low}) must be less than `high_freq_factor` ({high})")
    return RopeConfig(
        kind="llama3",
        theta=theta,
        factor=rope.number("factor"),
        original_max_positions=rope.integer("original_max_position_embeddings", max_positions),
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn_rope(rope: JsonFields, theta: float, max_positions: int) -> RopeConfig:
    original = rope.integer("original_max_position_embeddings", max_positions)
    factor = rope.number("factor", max_positions / original)
    if rope.has("attention_factor"):
        attention_factor = rope.number("attention_factor")
    elif rope.values.get("mscale") and rope.values.get("mscale_all_dim"):
        attention_factor = _yarn_mscale(factor, rope.number("mscale")) / _yarn_mscale(
            factor, rope.number("mscale_all_dim")
        )
    else:
        attention_factor = _yarn_mscale(factor, 1.0)
    return RopeConfig(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_max_positions=original,
        attention_factor=attention_factor,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.boolean("truncate", True),
    )


def _yarn_mscale(factor: float, mscale: float) -> float:
    """The temperature of the YaRN paper (arXiv 2309.00071, equation 22), scaled by `mscale`."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _eos_token_ids(folder: Path, fields: JsonFields) -> tuple[int, ...]:
    """Ids from generation_config.json if it names any, else from config.json."""
    generation_file = folder / "generation_config.json"
    generation = read_json_object(generation_file) if generation_file.exists() else {}
    source = JsonFields(generation_file, generation) if generation.get("eos_token_id") is not None else fields
    value = source.values.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(id_, int) and not isinstance(id_, bool) and id_ >= 0 for id_ in ids):
        raise source.error(f"`eos_token_id` must be a token id or a list of them, not {value!r}")
    return tuple(ids)


# ---------------------------------------------------------------- weight files


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor as a safetensors header names it."""

    dtype: str
    """The format's own name: F32, BF16, F16, ..."""
    shape: tuple[int, ...]


def weight_files(folder: str | Path) -> tuple[Path, ...]:
    """The safetensors files of a checkpoint, sorted: model.safetensors, or the shards of its index.

    Raises:
        ConfigError: there are none, or the index is broken or names a file that is missing.
    """
    folder = Path(folder)
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return (single,)
    if not index.is_file():
        raise ConfigError(f"{folder}: there is no model.safetensors and no {index.name}; weights must be safetensors")
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{index}: `weight_map` is missing or empty")
    names = set(weight_map.values())
    if not all(isinstance(name, str) and name == Path(name).name for name in names):
        raise ConfigError(f"{index}: `weight_map` must name files of this folder")
    files = tuple(folder / name for name in sorted(names))
    for file in files:
        if not file.is_file():
            raise ConfigError(f"{file}: the shard is missing; {index.name} names it")
    return files


def weight_file_times(folder: str | Path) -> tuple[tuple[str, int, int], ...]:
    """(name, size, time of the last change) of each weight file: other contents have others. Raises as `weight_files`
    does."""
    return tuple((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in weight_files(folder))


def read_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file; checks that the file is as long as its header says.

    Raises:
        ConfigError: not a safetensors file, or cut short.
    """
    raw = _header_bytes(file)
    entries: dict[str, TensorEntry] = {}
    name, end = "", 0
    try:
        for name, entry in json.loads(raw).items():
            if name != "__metadata__":
                entries[name] = TensorEntry(str(entry["dtype"]), tuple(map(int, entry["shape"])))
                end = max(end, int(entry["data_offsets"][1]))
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise ConfigError(f"{file}: broken safetensors header, at tensor {name!r}") from error
    expected_bytes = 8 + len(raw) + end
    if (found_bytes := file.stat().st_size) < expected_bytes:
        raise ConfigError(f"{file}: cut short: {found_bytes} bytes of {expected_bytes}")
    return entries


def _header_bytes(file: Path) -> bytes:
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or not 2 <= length <= MAX_HEADER_BYTES:
            raise ConfigError(f"{file}: not a safetensors file")
        header = stream.read(length)
    if len(header) < length:
        raise ConfigError(f"{file}: cut short within its header")
    return header


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
    digest = hashlib.sha256(json.dumps([essentials, dtype, quantization], sort_keys=True).encode())
    files = weight_files(folder)
    share = min(1.0, FINGERPRINT_SAMPLE_BYTES / max(1, sum(file.stat().st_size for file in files)))
    for file in files:
        read_header(file)
        digest.update(f"\0{file.name}\0{file.stat().st_size}\0".encode())
        digest.update(_header_bytes(file))
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
