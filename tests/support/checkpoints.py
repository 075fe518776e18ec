"""Tiny checkpoints on disk: real files of the real formats, a few kilobytes each."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import save_file

from disagg.engine.checkpoint.gguf_models import LAYER_NAMES, TOP_NAMES

HIDDEN, HEADS, KV_HEADS, LAYERS, FFN = 32, 4, 2, 2, 64
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcdefghij0123456789", "Ġ", "Ċ", "ab", "ĠĠ"]
MERGES = ["a b", "Ġ Ġ"]
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    pre: str = "smollm",
    extra_tensor: str | None = None,
    leave_out: str | None = None,
    template: str | None = CHAT_TEMPLATE,
) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    """A GGUF file with random F32 weights; returns its tensors by GGUF name, as they are stored."""
    writer = gguf.GGUFWriter(path, architecture)
    _write_sizes(writer)
    write_tokenizer(writer, pre, template)
    tensors = gguf_tensors()
    if extra_tensor is not None:
        tensors[extra_tensor] = np.ones(4, dtype=np.float32)
    if leave_out is not None:
        del tensors[leave_out]
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def _write_sizes(writer: gguf.GGUFWriter) -> None:
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))


def write_tokenizer(writer: gguf.GGUFWriter, pre: str, template: str | None) -> None:
    """Metadata of the tiny tokenizer."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if template is not None:
        writer.add_chat_template(template)


def gguf_tensors() -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    """Random tensors of the tiny Llama, by GGUF name."""
    random = np.random.default_rng(7)
    kv_rows = HIDDEN // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (len(TOKENS), HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        prefix = f"blk.{layer}."
        shapes |= {
            f"{prefix}attn_norm.weight": (HIDDEN,),
            f"{prefix}ffn_norm.weight": (HIDDEN,),
            f"{prefix}attn_q.weight": (HIDDEN, HIDDEN),
            f"{prefix}attn_k.weight": (kv_rows, HIDDEN),
            f"{prefix}attn_v.weight": (kv_rows, HIDDEN),
            f"{prefix}attn_output.weight": (HIDDEN, HIDDEN),
            f"{prefix}ffn_gate.weight": (FFN, HIDDEN),
            f"{prefix}ffn_up.weight": (FFN, HIDDEN),
            f"{prefix}ffn_down.weight": (HIDDEN, FFN),
        }
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def llama_tensors() -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    """The tensors of the tiny Llama by the checkpoint's names; the last norm is zero."""
    named = {}
    for name, tensor in gguf_tensors().items():
        block, layer, part = name.split(".")[:3] if name.startswith("blk.") else ("", "", "")
        named[f"model.layers.{layer}.{LAYER_NAMES[part]}.weight" if block else TOP_NAMES[name]] = tensor
    return named | {"model.norm.weight": np.zeros(HIDDEN, dtype=np.float32)}


def write_checkpoint(folder: Path, *, leave_out: str | None = None, template_in_config: bool = True) -> Path:
    """A checkpoint folder as a hub would hold it, with one weight file and a file of code that must not be taken."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": len(TOKENS),
        "eos_token_id": [2, 3],
        "bos_token_id": 1,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": LAYERS,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    tokenizer_config = {"chat_template": CHAT_TEMPLATE} if template_in_config else {}
    for name, content in (
        ("config.json", config),
        ("tokenizer.json", {"version": "1.0"}),
        ("tokenizer_config.json", tokenizer_config),
    ):
        (folder / name).write_text(json.dumps(content))
    save_file(llama_tensors(), folder / "model.safetensors")
    (folder / "modeling_evil.py").write_text("raise SystemExit")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    if leave_out is not None:
        (folder / leave_out).unlink()
    return folder
