"""A GGUF file becomes a checkpoint folder: bf16 safetensors, configs, a fast tokenizer and the chat template.

Run as a program (`python -m disagg.engine.checkpoint.convert SOURCE.gguf TARGET_FOLDER`), so that the command line
never loads torch: it prints a line at each step and exits 0 with the folder complete, or 1 with one line on standard
error. All names and shapes are held against what the engine loads, and the disk's free space against what will be
written, before anything is read; then one tensor after the other is dequantized, a piece at a time, and written.

Config and tokenizer come from `transformers`; the weights are read with the `gguf` package, because the loader of
`transformers` wants `accelerate`. Which architectures there are: gguf_models.py.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch

from disagg.engine.checkpoint.checkpoint import read_model_config
from disagg.engine.checkpoint.convert_limits import limit_this_process, limits_for
from disagg.engine.checkpoint.gguf_metadata import GgufMetadata
from disagg.engine.checkpoint.gguf_models import (
    EXPERT_NAMES,
    GGUF_MODELS,
    ROPE_TENSORS,
    TOP_NAMES,
    GgufModel,
    gguf_model,
    read_config,
)
from disagg.engine.checkpoint.weight_headers import GROUPS_FILE, write_safetensors
from disagg.engine.runner.model.parameters import allocate_parameters
from disagg.engine.runner.weight_targets import checkpoint_tensors
from disagg.proto.errors import ConfigError

Progress = Callable[[str], None]
Array = np.ndarray[Any, Any]

BF16_BYTES = 2
GB = 10**9
_GROUP_BYTES: Mapping[Any, int] = {
    gguf.GGMLQuantizationType.Q4_0: 18,
    gguf.GGMLQuantizationType.Q4_1: 20,
    gguf.GGMLQuantizationType.Q8_0: 34,
}
"""Bytes of 32 numbers, of the types that are computed in as few bits."""
PIECE_ELEMENTS = 16 << 20
"""Elements that are dequantized at a time."""
_LAYER_PATTERN = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class Output(NamedTuple):
    """A tensor of the checkpoint."""

    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[Array]]
    """Reads it in fp32, in pieces along its first dimension."""
    scales: Callable[[], dict[str, Array]] = dict
    """Reads the scales of its groups of inputs and what is added, as `GROUPS_FILE` names them."""


_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPLIT = _QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_WORD = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_END = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT_4O_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_WORD[0]}*{_WORD[1]}+{_END}|[^\r\n\p{{L}}\p{{N}}]?{_WORD[0]}+{_WORD[1]}*{_END}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {
    "qwen2": _QWEN2_SPLIT,
    "llama-bpe": _LLAMA3_SPLIT,
    "dbrx": _LLAMA3_SPLIT,
    "smaug-bpe": _LLAMA3_SPLIT,
    "gpt-4o": _GPT_4O_SPLIT,
}
"""Expressions by `tokenizer.ggml.pre` whose matches are cut out of a text."""
WHOLE_WORDS = ("llama-bpe",)
"""What is cut out is one token where the vocabulary has it, whatever the merges say."""
SINGLE_DIGITS = ("smollm", "refact")
"""Texts are cut at each digit, then as GPT-2 does."""


def convert_gguf(source: Path, target: Path, progress: Progress = lambda text: None) -> None:
    """Write the checkpoint of `source` into the existing folder `target`.

    Raises:
        ConfigError: if the file is no GGUF file, or of an architecture or tokenizer that is not supported, or the disk
            has too little space.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    reader = open_gguf(source)
    model, metadata = model_of(reader, source)
    vocab_size = int(metadata.tensors["token_embd.weight"].shape[-1])
    fields = read_config(model, metadata, vocab_size)
    config = transformers.AutoConfig.for_model(model.model_type, **fields, **token_ids(reader))
    config.dtype = torch.bfloat16
    config.architectures = [model.architecture]
    outputs = checkpoint_outputs(model, metadata.tensors, config.num_attention_heads, config.num_key_value_heads)
    config.save_pretrained(target)
    _check_against_engine({name: output.shape for name, output in outputs.items()}, target)
    _check_space({name: output.shape for name, output in outputs.items()}, source, target, progress)
    save_tokenizer(reader, source, target, config.max_position_embeddings)
    transformers.GenerationConfig.from_model_config(config).save_pretrained(target)
    weights = target / "model.safetensors"
    write_safetensors(weights, {name: output.shape for name, output in outputs.items()}, _bf16(outputs, progress))
    weights.chmod(0o644)
    _write_scales(target / GROUPS_FILE, outputs)


def open_gguf(source: Path) -> Any:
    """A `gguf.GGUFReader` of the file; raises `ConfigError` where it is broken or no GGUF file."""
    try:
        return gguf.GGUFReader(source)
    except (ValueError, IndexError, OSError) as error:
        raise ConfigError(f"{source}: not a readable GGUF file ({error})") from error


def model_of(reader: Any, source: Path) -> tuple[GgufModel, GgufMetadata]:
    """The architecture of a file, and its metadata; raises `ConfigError` for one that is not supported."""
    architecture = _string_field(reader, "general.architecture")
    values = {key: each.contents() for key, each in reader.fields.items() if key.startswith(f"{architecture}.")}
    metadata = GgufMetadata(source, architecture, values, {tensor.name: tensor for tensor in reader.tensors})
    model = gguf_model(architecture, metadata)
    if model is None:
        supported = ", ".join(sorted(GGUF_MODELS))
        raise ConfigError(f"{source.name}: architecture {architecture!r} is not supported; there is {supported}")
    if "token_embd.weight" not in metadata.tensors:
        raise ConfigError(f"{source.name}: tensor token_embd.weight is missing")
    return model, metadata


def token_ids(reader: Any) -> dict[str, int]:
    """The special tokens that config.json names."""
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    fields = {name: reader.get_field(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {name: int(each.contents()) for name, each in fields.items() if each is not None}


# ---------------------------------------------------------------- tensors


def checkpoint_outputs(
    model: GgufModel, tensors: Mapping[str, Any], num_heads: int, num_kv_heads: int
) -> dict[str, Output]:
    """The tensors of the checkpoint that a GGUF file becomes, by name; no weight is read yet.

    Raises:
        ConfigError: for a tensor that the architecture does not have.
    """
    heads = {"attn_q": num_heads, "attn_k": num_kv_heads} if model.has_rotary_pairs else {}
    outputs: dict[str, Output] = {}
    for name, tensor in tensors.items():
        match = _LAYER_PATTERN.fullmatch(name)
        if name in ROPE_TENSORS:
            continue
        if match and match[2] in EXPERT_NAMES and (model.experts or model.has_fused_experts):
            outputs |= _experts(model, tensors, int(match[1]), match[2], match[3])
        elif match and match[2] in heads:
            outputs[hf_name(name, model)] = _rotary(tensor, heads[match[2]])
        elif model.adds_one_to_norms and name.endswith("norm.weight"):
            outputs[hf_name(name, model)] = Output(_shape(tensor), partial(_norm, tensor))
        else:
            outputs[hf_name(name, model)] = _plain(tensor)
    return outputs


def hf_name(gguf_name: str, model: GgufModel) -> str:
    """The checkpoint's name of a GGUF tensor; raises `ConfigError` for one that the architecture does not have."""
    match = _LAYER_PATTERN.fullmatch(gguf_name)
    if match and match[2] in model.layer_names:
        own = f"model.layers.{match[1]}.{model.layer_names[match[2]]}"
        return own if own.endswith(".sinks") else f"{own}.{match[3]}"
    if gguf_name in TOP_NAMES:
        return TOP_NAMES[gguf_name]
    raise ConfigError(
        f"tensor {gguf_name!r} is not part of a decoder that this engine runs; import the safetensors version"
    )


def split_rotary_pairs(weight: Array, num_heads: int) -> Array:
    """Undo llama.cpp's order: rows (pair 0 even, pair 0 odd, pair 1 even, ...) of each head become (all even, all odd).

    `weight` is [num_heads * head_dim, ...]; so is the result.
    """
    rows = weight.shape[0]
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _shape(tensor: Any) -> tuple[int, ...]:
    """The shape in the order of a checkpoint."""
    return tuple(int(size) for size in reversed(tensor.shape.tolist()))


def _values(tensor: Any, rows: slice | int = slice(None)) -> Array:
    return np.asarray(gguf.dequantize(tensor.data[rows], tensor.tensor_type), dtype=np.float32)


def _plain(tensor: Any) -> Output:
    shape = _shape(tensor)

    def pieces() -> Iterator[Array]:
        step = max(1, PIECE_ELEMENTS // max(1, tensor.n_elements // max(1, shape[0])))
        for start in range(0, shape[0], step):
            yield _values(tensor, slice(start, start + step))

    return Output(shape, pieces, partial(_scales, tensor))


def _scales(tensor: Any) -> dict[str, Array]:
    """The scales of a matrix of groups of 32 inputs, [out, in / 32] in fp16; none of another."""
    sizes = _GROUP_BYTES.get(tensor.tensor_type)
    if sizes is None or len(tensor.shape) != 2:
        return {}
    blocks = np.asarray(tensor.data).view(np.uint8).reshape(_shape(tensor)[0], -1, sizes)
    scales = {"scale": blocks[:, :, :2].copy().view(np.float16)[..., 0]}
    if tensor.tensor_type == gguf.GGMLQuantizationType.Q4_1:
        scales["minimum"] = blocks[:, :, 2:4].copy().view(np.float16)[..., 0]
    elif tensor.tensor_type == gguf.GGMLQuantizationType.Q4_0:
        scales["zero"] = np.full_like(scales["scale"], 8)
    return scales


def _write_scales(file: Path, outputs: Mapping[str, Output]) -> None:
    """The file of the scales, if the checkpoint has any."""
    scales = {f"{name}.{kind}": each for name, output in outputs.items() for kind, each in output.scales().items()}
    if scales:
        shapes = {name: each.shape for name, each in scales.items()}
        write_safetensors(file, shapes, (np.ascontiguousarray(each).tobytes() for each in scales.values()), "F16")
        file.chmod(0o644)


def _norm(tensor: Any) -> Iterator[Array]:
    yield _values(tensor) - 1


def _expert(tensor: Any, expert: int) -> Iterator[Array]:
    yield _values(tensor, expert)


def _rotary(tensor: Any, num_heads: int) -> Output:
    shape = _shape(tensor)
    if shape[0] % (2 * num_heads):
        raise ConfigError(f"tensor {tensor.name!r} has {shape[0]} rows, which are no pairs of {num_heads} heads")
    return Output(
        shape,
        lambda: iter([split_rotary_pairs(_values(tensor), num_heads)]),
        lambda: {kind: split_rotary_pairs(each, num_heads) for kind, each in _scales(tensor).items()},
    )


def _experts(model: GgufModel, tensors: Mapping[str, Any], layer: int, name: str, suffix: str) -> dict[str, Output]:
    """The tensors that one tensor of all experts of a layer becomes, alone or with another one."""
    tensor, prefix = tensors[f"blk.{layer}.{name}.{suffix}"], f"model.layers.{layer}."
    num_experts, *shape = _shape(tensor)
    if model.experts is not None:
        own = model.experts[EXPERT_NAMES.index(name)]
        return {
            f"{prefix}{own.format(expert)}.{suffix}": Output(tuple(shape), partial(_expert, tensor, expert))
            for expert in range(num_experts)
        }
    end = "" if suffix == "weight" else "_bias"
    if name == "ffn_down_exps":
        turned = (num_experts, *reversed(shape))
        return {
            f"{prefix}mlp.experts.down_proj{end}": Output(
                turned, lambda: (_values(tensor, expert).T[None] for expert in range(num_experts))
            )
        }
    gate, up = (f"blk.{layer}.{each}.{suffix}" for each in EXPERT_NAMES[:2])
    if name != EXPERT_NAMES[0]:  # it comes with the gate
        if gate not in tensors:
            raise ConfigError(f"tensor {gate!r} is missing beside {tensor.name!r}")
        return {}
    if up not in tensors or _shape(tensors[up]) != _shape(tensor):
        raise ConfigError(f"tensor {up!r} is missing or of another shape than {gate!r}")

    def in_turns() -> Iterator[Array]:
        for expert in range(num_experts):
            both = np.stack([_values(tensor, expert), _values(tensors[up], expert)], axis=1)
            yield both.reshape(2 * shape[0], *shape[1:]).T[None]

    return {f"{prefix}mlp.experts.gate_up_proj{end}": Output((num_experts, *shape[1:], 2 * shape[0]), in_turns)}


def _bf16(outputs: Mapping[str, Output], progress: Progress) -> Iterator[memoryview]:
    """The bytes of all tensors in bf16, in their order. For each gigabyte a line says how far it is.

    Raises:
        ConfigError: a value is not finite, as with a broken scale.
    """
    total = sum(_num_elements(output.shape) for output in outputs.values())
    done, told = 0, 0
    for name, output in outputs.items():
        for piece in output.pieces():
            if not np.isfinite(piece).all():
                raise ConfigError(f"the file's tensor for {name} has a value that is not finite")
            rounded = torch.from_numpy(np.array(piece, dtype=np.float32, order="C")).to(torch.bfloat16)
            yield rounded.view(-1).view(torch.uint8).numpy().data
            done += piece.size
            if done * BF16_BYTES // GB > told:
                told = done * BF16_BYTES // GB
                progress(f"converted {told} of {total * BF16_BYTES / GB:.2f} GB")


def _num_elements(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))


def _check_space(shapes: Mapping[str, tuple[int, ...]], source: Path, target: Path, progress: Progress) -> None:
    needed = BF16_BYTES * sum(map(_num_elements, shapes.values()))
    free = shutil.disk_usage(target).free
    progress(f"{source.name} takes {needed / GB:.2f} GB as bf16; {free / GB:.2f} GB are free")
    if needed > free:
        raise ConfigError(f"{source.name} takes {needed / GB:.2f} GB as bf16; only {free / GB:.2f} GB are free")


def _check_against_engine(found: Mapping[str, tuple[int, ...]], folder: Path) -> None:
    """The tensors are exactly those that the engine loads for this config.json, in names and shapes."""
    model = read_model_config(folder)
    parameters = allocate_parameters(model, torch.bfloat16, torch.device("meta"))
    expected = {name: target.shape for name, target in checkpoint_tensors(model, parameters).items()}
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if wrong:
        name = wrong[0]
        raise ConfigError(
            f"{len(wrong)} tensors do not fit the architecture, such as {name}: the file has {found.get(name)}, "
            f"{model.architecture} needs {expected.get(name)}"
        )


# ---------------------------------------------------------------- tokenizer


def save_tokenizer(reader: Any, source: Path, target: Path, max_model_len: int) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and, where the file has one, `chat_template.jinja` (byte for
    byte its own)."""
    import transformers

    architecture = _string_field(reader, "general.architecture")
    known_to_auto = architecture in ("llama", "qwen2", "qwen3")
    loader = transformers.AutoTokenizer if known_to_auto else transformers.PreTrainedTokenizerFast
    tokenizer = loader.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.model_max_length = max_model_len
    if _string_field(reader, "tokenizer.ggml.model") == "gpt2":
        name = _string_field(reader, "tokenizer.ggml.pre")
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizer(name)
        tokenizer.backend_tokenizer.model.ignore_merges = name in WHOLE_WORDS
    template = reader.get_field("tokenizer.chat_template")
    tokenizer.chat_template = None if template is None else str(template.contents())
    tokenizer.save_pretrained(target)


def pre_tokenizer(name: str) -> Any:
    """How text is cut before byte-pair merges, by the file's `tokenizer.ggml.pre`; `transformers` ignores that field.

    Raises:
        ConfigError: for a name whose rule is not known here; a guess would give other token ids than the model was
        trained on.
    """
    from tokenizers import Regex, pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "gpt-2":
        return byte_level
    if name in SINGLE_DIGITS:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if name in SPLITS:
        split = pre_tokenizers.Split(Regex(SPLITS[name]), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    known = ", ".join(sorted(("gpt-2", *SPLITS, *SINGLE_DIGITS)))
    raise ConfigError(
        f"pre-tokenizer {name!r} of this GGUF file is not known (there is {known}); import the safetensors version"
    )


def _string_field(reader: Any, key: str) -> str:
    field = reader.get_field(key)
    if field is None:
        raise ConfigError(f"the GGUF file lacks {key}")
    return str(field.contents())


def main(arguments: list[str]) -> int:
    """Entry point: SOURCE.gguf TARGET_FOLDER."""
    source, target = (Path(argument) for argument in arguments)
    try:
        limits = limits_for(source.stat().st_size)
        limit_this_process(limits)
        convert_gguf(source, target, lambda text: print(text, flush=True))
    except MemoryError:
        print(f"error: {source.name} needs more than {limits.memory_bytes >> 30} GiB of memory", file=sys.stderr)
        return 1
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
