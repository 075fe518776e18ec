"""A GGUF file becomes a checkpoint folder: bf16 safetensors, configs, a fast tokenizer and the chat template.

Run as a program (`python -m disagg.engine.checkpoint.convert SOURCE.gguf TARGET_FOLDER`), so that the command line
never loads torch: it exits 0 with the folder complete, or 1 with one line on standard error. It reads one tensor at a
time and checks the result against the parameter names and shapes of the architecture before it writes anything.

Config and tokenizer come from `transformers`; the weights are read with the `gguf` package, because the loader of
`transformers` wants `accelerate`. Source of the format: the GGUF specification and llama.cpp's converter, whose two
changes to a Llama checkpoint are undone here: its tensor names, and the order of the rotary dimensions of Q and K.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from disagg.engine.checkpoint.convert_limits import limit_this_process, limits_for
from disagg.proto.errors import ConfigError

INTERLEAVED_ROPE_ARCHITECTURES = frozenset({"llama"})
"""Architectures whose Q and K rows llama.cpp stores with rotary pairs side by side (Mistral is stored as `llama`)."""
HALVED_ROPE_ARCHITECTURES = frozenset({"qwen2", "qwen3"})
"""Architectures that it stores as the checkpoint has them: first half, second half."""

_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_PATTERN = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")

_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def convert_gguf(source: Path, target: Path) -> None:
    """Write the checkpoint of `source` into the existing folder `target`.

    Raises:
        ConfigError: if the file is no GGUF file, or of an architecture or tokenizer that is not supported.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    reader = open_gguf(source)
    architecture = _string_field(reader, "general.architecture")
    supported = INTERLEAVED_ROPE_ARCHITECTURES | HALVED_ROPE_ARCHITECTURES
    if architecture not in supported:
        raise ConfigError(
            f"{source.name}: architecture {architecture!r} is not supported; there is {', '.join(sorted(supported))}"
        )
    config = transformers.AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    config.dtype = torch.bfloat16
    tensors = dict(_hf_tensors(reader, architecture, config.num_attention_heads, config.num_key_value_heads))
    _check_against_architecture(tensors, config)
    save_tokenizer(reader, source, target, config.max_position_embeddings)
    config.save_pretrained(target)
    transformers.GenerationConfig.from_model_config(config).save_pretrained(target)
    weights = target / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)


def open_gguf(source: Path) -> Any:
    """A `gguf.GGUFReader` of the file; raises `ConfigError` where it is broken or no GGUF file."""
    try:
        return gguf.GGUFReader(source)
    except (ValueError, IndexError, OSError) as error:
        raise ConfigError(f"{source}: not a readable GGUF file ({error})") from error


def hf_name(gguf_name: str) -> str:
    """The checkpoint's name of a GGUF tensor; raises `ConfigError` for one that a dense decoder does not have."""
    match = _LAYER_PATTERN.fullmatch(gguf_name)
    if match and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
    stem, _, suffix = gguf_name.rpartition(".")
    if stem in _TOP_NAMES and suffix == "weight":
        return f"{_TOP_NAMES[stem]}.weight"
    raise ConfigError(
        f"tensor {gguf_name!r} is not part of a decoder that this engine runs; import the safetensors version"
    )


def split_rotary_pairs(weight: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Undo llama.cpp's order: rows (pair 0 even, pair 0 odd, pair 1 even, ...) of each head become (all even, all odd).

    `weight` is [num_heads * head_dim, ...]; so is the result.
    """
    rows = weight.shape[0]
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _hf_tensors(
    reader: Any, architecture: str, num_heads: int, num_kv_heads: int
) -> Iterator[tuple[str, torch.Tensor]]:
    interleaved = architecture in INTERLEAVED_ROPE_ARCHITECTURES
    for tensor in reader.tensors:
        name = hf_name(tensor.name)
        weight = gguf.dequantize(tensor.data, tensor.tensor_type)
        if interleaved and ".attn_q." in tensor.name:
            weight = split_rotary_pairs(weight, num_heads)
        elif interleaved and ".attn_k." in tensor.name:
            weight = split_rotary_pairs(weight, num_kv_heads)
        yield name, torch.from_numpy(np.array(weight, dtype=np.float32, order="C")).to(torch.bfloat16)


def _check_against_architecture(tensors: dict[str, torch.Tensor], config: Any) -> None:
    """The tensors are exactly the parameters of the architecture (but for a tied `lm_head`), in names and shapes."""
    import transformers

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    expected = {name: tuple(parameter.shape) for name, parameter in model.state_dict().items()}
    if config.tie_word_embeddings:
        expected.pop("lm_head.weight", None)
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if wrong:
        name = wrong[0]
        raise ConfigError(
            f"{len(wrong)} tensors do not fit the architecture, such as {name}: the file has {found.get(name)}, "
            f"{config.architectures[0]} needs {expected.get(name)}"
        )


def save_tokenizer(reader: Any, source: Path, target: Path, max_model_len: int) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and, where the file has one, `chat_template.jinja` (byte for
    byte its own)."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.model_max_length = max_model_len
    if _string_field(reader, "tokenizer.ggml.model") == "gpt2":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizer(_string_field(reader, "tokenizer.ggml.pre"))
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
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if name == "qwen2":
        split = pre_tokenizers.Split(Regex(_QWEN2_SPLIT), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    raise ConfigError(
        f"pre-tokenizer {name!r} of this GGUF file is not known (there is gpt-2, qwen2, smollm); "
        "import the safetensors version"
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
        convert_gguf(source, target)
    except MemoryError:
        print(f"error: {source.name} needs more than {limits.memory_bytes >> 30} GiB of memory", file=sys.stderr)
        return 1
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
