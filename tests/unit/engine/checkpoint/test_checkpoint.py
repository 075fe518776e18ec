"""Reading a checkpoint folder without torch: every form of config.json, every mistake by name; and the fingerprint."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from disagg.engine.checkpoint import checkpoint
from disagg.engine.checkpoint.checkpoint import model_fingerprint, read_model_config
from disagg.engine.checkpoint.model_config import AttentionConfig, DenseConfig, LayerConfig, ModelConfig, RopeConfig
from disagg.proto.errors import ConfigError

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "eos_token_id": 2,
}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"]}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"]}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"]}
LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
FULL, SLIDING = "full_attention", "sliding_attention"
LLAMA3_ROPE = RopeConfig(kind="llama3", theta=500000.0, factor=8.0, original_max_positions=512)


def read(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_model_config(folder)


def test_a_llama_config_in_full(tmp_path: Path) -> None:
    assert read(tmp_path, LLAMA) == ModelConfig(
        architecture="LlamaForCausalLM",
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=320,
        max_positions=2048,
        layers=(
            LayerConfig(
                attention=AttentionConfig(scale=0.25, rope=RopeConfig(theta=500000.0)),
                ffn=DenseConfig(intermediate_size=96),
            ),
        )
        * 3,
        rms_norm_eps=1e-5,
        tied_embeddings=False,
        eos_token_ids=(2,),
    )


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA, (False, False, False, False)),
        ({**LLAMA, "attention_bias": True, "mlp_bias": True}, (True, True, True, False)),
        (MISTRAL, (False, False, False, False)),
        (QWEN2, (True, False, False, False)),
        (QWEN3, (False, False, False, True)),
        ({**QWEN3, "attention_bias": True}, (True, True, False, True)),
    ],
)
def test_what_the_families_have(tmp_path: Path, config: dict[str, Any], expected: tuple[bool, ...]) -> None:
    for layer in read(tmp_path, config).layers:
        attention = layer.attention
        assert (attention.qkv_bias, attention.o_bias, layer.ffn.bias, attention.qk_norm == "head") == expected


def test_defaults_of_the_families(tmp_path: Path) -> None:
    without_kv_heads = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
    assert read(tmp_path, without_kv_heads).num_kv_heads == 4
    assert read(tmp_path, QWEN3).head_dim == 128
    assert read(tmp_path, {**MISTRAL, "head_dim": None}).head_dim == 16
    assert read(tmp_path, {**MISTRAL, "head_dim": 32}).head_dim == 32
    assert read(tmp_path, {**LLAMA, "tie_word_embeddings": True}).tied_embeddings


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_theta": None}, RopeConfig(theta=10000.0)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, RopeConfig(theta=7.0)),
        ({"rope_parameters": {"rope_type": "default"}}, RopeConfig(theta=500000.0)),
        ({"rope_scaling": None}, RopeConfig(theta=500000.0)),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, RopeConfig(kind="linear", theta=500000.0, factor=2.0)),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, RopeConfig(theta=500000.0)),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3_SCALING}}, LLAMA3_ROPE),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3_SCALING}}, LLAMA3_ROPE),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}},
            RopeConfig(
                kind="yarn",
                theta=500000.0,
                factor=4.0,
                original_max_positions=1024,
                attention_factor=0.1 * math.log(4.0) + 1.0,
            ),
        ),
        (
            {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4.0,
                    "attention_factor": 1.5,
                    "beta_fast": 16,
                    "truncate": False,
                }
            },
            RopeConfig(
                kind="yarn",
                theta=500000.0,
                factor=4.0,
                original_max_positions=2048,
                attention_factor=1.5,
                beta_fast=16.0,
                truncate=False,
            ),
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}},
            RopeConfig(kind="yarn", theta=500000.0, factor=4.0, original_max_positions=2048),
        ),
    ],
)
def test_rope_in_both_forms(tmp_path: Path, changes: dict[str, Any], expected: RopeConfig) -> None:
    assert {layer.attention.rope for layer in read(tmp_path, {**LLAMA, **changes}).layers} == {expected}


def test_yarn_reaches_beyond_the_original_context(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    assert read(tmp_path, {**QWEN2, "rope_scaling": scaling}).max_positions == 8192
    assert read(tmp_path, {**QWEN2, "rope_scaling": scaling, "max_position_embeddings": 9000}).max_positions == 9000


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (LLAMA, [None] * 3),
        ({**MISTRAL, "sliding_window": 100}, [100] * 3),
        ({**MISTRAL, "sliding_window": None}, [None] * 3),
        (MISTRAL, [4096] * 3),
        ({**QWEN2, "sliding_window": 100, "use_sliding_window": False}, [None] * 3),
        ({**QWEN2, "sliding_window": 100, "use_sliding_window": True}, [None] * 3),
        ({**QWEN2, "sliding_window": 100, "use_sliding_window": True, "max_window_layers": 2}, [None, None, 100]),
        ({**QWEN3, "sliding_window": 100, "use_sliding_window": True, "max_window_layers": 0}, [100] * 3),
        ({**QWEN3, "sliding_window": 100, "use_sliding_window": True, "layer_types": [FULL] * 3}, [None] * 3),
        (
            {**QWEN3, "sliding_window": 100, "use_sliding_window": True, "layer_types": [SLIDING, FULL, SLIDING]},
            [100, None, 100],
        ),
    ],
)
def test_sliding_windows(tmp_path: Path, config: dict[str, Any], windows: list[int | None]) -> None:
    model = read(tmp_path, config)
    assert [layer.attention.window for layer in model.layers] == windows
    assert model.windows == tuple({window for window in windows if window is not None})


@pytest.mark.parametrize(
    ("in_config", "generation", "expected"),
    [
        (2, None, (2,)),
        ([2, 5], None, (2, 5)),
        (None, None, ()),
        (2, {"eos_token_id": [7, 8]}, (7, 8)),
        (2, {"eos_token_id": 0}, (0,)),
        (2, {"temperature": 0.6}, (2,)),
    ],
)
def test_end_tokens(
    tmp_path: Path, in_config: object, generation: dict[str, Any] | None, expected: tuple[int, ...]
) -> None:
    assert read(tmp_path, {**LLAMA, "eos_token_id": in_config}, generation).eos_token_ids == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "architecture GPT2LMHeadModel is not supported; supported are LlamaFor",
        ),
        ({"architectures": None}, "architecture none is not supported"),
        ({"hidden_act": "gelu"}, "`hidden_act` 'gelu' is not supported"),
        ({"quantization_config": {"quant_method": "hqq"}}, "`quant_method` 'hqq' is not supported"),
        ({"hidden_size": None}, "`hidden_size` is missing"),
        ({"hidden_size": "64"}, "`hidden_size` must be a whole number of at least 1, not '64'"),
        ({"num_hidden_layers": 0}, "`num_hidden_layers` must be a whole number"),
        ({"vocab_size": True}, "`vocab_size` must be a whole number"),
        ({"num_key_value_heads": 3}, r"`num_attention_heads` \(4\) must be a multiple of `num_key_value_heads` \(3\)"),
        ({"head_dim": 15}, "head size must be even for rotary embeddings, not 15"),
        ({"rms_norm_eps": -1.0}, "`rms_norm_eps` must be a positive number"),
        ({"tie_word_embeddings": "yes"}, "`tie_word_embeddings` must be true or false, not 'yes'"),
        ({"eos_token_id": "</s>"}, "`eos_token_id` must be a token id or a list of them, not '</s>'"),
        ({"rope_scaling": "linear"}, "rope parameters must be an object"),
        ({"rope_scaling": {"type": "axial"}}, "rope type 'axial' is not supported; supported are default"),
        ({"rope_scaling": {"type": "linear"}}, "`factor` is missing"),
        ({"rope_scaling": {**LLAMA3_SCALING, "type": "llama3", "low_freq_factor": 4.0}}, "`low_freq_factor` .* less"),
        ({"partial_rotary_factor": 0.5}, "`partial_rotary_factor` other than 1"),
    ],
)
def test_a_model_that_cannot_be_computed_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read(tmp_path, {**LLAMA, **changes})
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: ")


def test_only_llama_has_a_default_for_kv_heads(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`num_key_value_heads` is missing"):
        read(tmp_path, {**QWEN2, "num_key_value_heads": None})


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere: no such checkpoint folder"):
        read_model_config(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"config\.json: the file is missing"):
        read_model_config(tmp_path)
    for content, message in ((b"{", "not valid JSON"), (b"\xff", "not valid JSON"), (b"[]", "must hold a JSON object")):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(ConfigError, match=rf"config\.json: {message}"):
            read_model_config(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read"):
        read_model_config(tmp_path)


def test_a_broken_generation_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("no")
    with pytest.raises(ConfigError, match=r"generation_config\.json: not valid JSON"):
        read(tmp_path, LLAMA)
    with pytest.raises(ConfigError, match=r"generation_config\.json: `eos_token_id` must be a token id"):
        read(tmp_path, LLAMA, {"eos_token_id": [1, -1]})


# ---------------------------------------------------------------- fingerprint


def write_weights(file: Path, **tensors: np.ndarray[Any, Any]) -> Path:
    save_file(tensors, file)
    return file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    read(folder, LLAMA)
    write_weights(folder / "model.safetensors", a=np.arange(1000, dtype=np.float32))
    return folder


def test_the_fingerprint_is_the_same_wherever_the_folder_lies(folder: Path) -> None:
    fingerprint = model_fingerprint(folder, "float32")
    shutil.copytree(folder, folder.parent / "copy")
    assert len(fingerprint) == 32
    assert int(fingerprint, 16) >= 0
    assert model_fingerprint(folder.parent / "copy", "float32") == fingerprint


def test_the_fingerprint_ignores_what_does_not_change_kv(folder: Path) -> None:
    fingerprint = model_fingerprint(folder, "float32")
    read(folder, {**LLAMA, "eos_token_id": 9, "transformers_version": "5"}, {"temperature": 0.1})
    assert model_fingerprint(folder, "float32") == fingerprint


def test_the_fingerprint_differs_with_all_that_counts(folder: Path) -> None:
    weights = folder / "model.safetensors"
    fingerprints = [model_fingerprint(folder, "float32"), model_fingerprint(folder, "bfloat16")]
    fingerprints.append(model_fingerprint(folder, "bfloat16", "int8"))
    for changes in ({"rope_theta": 1e4}, {"rms_norm_eps": 1e-6}, {"num_attention_heads": 8, "head_dim": 16}):
        read(folder, {**LLAMA, **changes})
        fingerprints.append(model_fingerprint(folder, "float32"))
    read(folder, LLAMA)
    for position in (0, 500, 999):
        content = np.arange(1000, dtype=np.float32)
        content[position] += 0.5
        write_weights(weights, a=content)
        fingerprints.append(model_fingerprint(folder, "float32"))
    write_weights(weights, b=np.arange(1000, dtype=np.float32))
    fingerprints.append(model_fingerprint(folder, "float32"))
    assert len(set(fingerprints)) == len(fingerprints)


def test_large_weights_are_sampled_evenly(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With windows of 100 bytes over a quarter of the file, a change within a window shows, one between does not."""
    monkeypatch.setattr(checkpoint, "FINGERPRINT_WINDOW_BYTES", 100)
    weights = folder / "model.safetensors"
    size = weights.stat().st_size
    monkeypatch.setattr(checkpoint, "FINGERPRINT_SAMPLE_BYTES", size // 4)
    content = weights.read_bytes()
    original = model_fingerprint(folder, "float32")

    def changed_at(offset: int) -> str:
        weights.write_bytes(content[:offset] + bytes([content[offset] ^ 1]) + content[offset + 1 :])
        return model_fingerprint(folder, "float32")

    assert changed_at(450) != original
    assert changed_at(size - 1) != original
    assert changed_at(550) == original


def test_checkpoints_are_read_without_torch() -> None:
    loaded = "'torch' in sys.modules or 'transformers' in sys.modules"
    code = f"import sys, disagg.engine.checkpoint.checkpoint; print({loaded})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_models_of_vectors_and_rerankers_are_pooled(folder: Path) -> None:
    assert not checkpoint.is_pooled(folder)
    (folder / checkpoint.MODULES).write_text("[]")
    assert checkpoint.is_pooled(folder)
