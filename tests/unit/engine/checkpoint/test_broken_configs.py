"""Configurations that are broken, contradict themselves, or ask for what is not computed: each is refused, naming the
file, the field and its value."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from disagg.engine.checkpoint.checkpoint import read_model_config
from disagg.proto.errors import ConfigError

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
FULL, SLIDING = "full_attention", "sliding_attention"
SHORT = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
NAMES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral": "MinistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gemma3_images": "Gemma3ForConditionalGeneration",
    "mistral3_images": "Mistral3ForConditionalGeneration",
}


def refusal(folder: Path, family: str, fields: dict[str, Any]) -> str:
    """The error, which must begin with the file."""
    file = folder / "config.json"
    base = {} if "images" in family else BASE
    file.write_text(json.dumps({**base, "architectures": [NAMES[family]], **fields}))
    with pytest.raises(ConfigError) as caught:
        read_model_config(folder)
    start, message = f"{file}: ", str(caught.value)
    assert message.startswith(start)
    return message.removeprefix(start)


@pytest.mark.parametrize("family", NAMES)
def test_what_is_changed_below_is_right(tmp_path: Path, family: str) -> None:
    beta = {"rope_parameters": {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 64}}
    fields = {**BASE, **(beta if family == "ministral3" else {})}
    fields = {"text_config": fields, "vision_config": {"depth": 3}} if "images" in family else fields
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [NAMES[family]], **fields}))
    assert read_model_config(tmp_path).num_layers == 4


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        # sizes that do not fit each other
        ("llama", {"hidden_size": 66}, "`hidden_size` (66) must be a multiple of `num_attention_heads` (4)"),
        (
            "gemma2",
            {"num_key_value_heads": 3},
            "`num_attention_heads` (4) must be a multiple of `num_key_value_heads` (3)",
        ),
        ("qwen3", {"head_dim": 33}, "the head size must be even for rotary embeddings, not 33"),
        ("qwen3", {"num_hidden_layers": 10**9}, "`num_hidden_layers` must be at most 4096"),
        ("granite", {"hidden_size": 10**18}, "`hidden_size` must be at most 2147483647"),
        ("qwen3", {"rope_theta": 10**400}, "`rope_theta` must be a positive number, not 1000"),
        ("phi3", {"rope_scaling": {"type": ["su"]}}, "rope type ['su'] is not supported"),
        (
            "gemma3",
            {"rope_parameters": {"full_attention": [1]}},
            "`rope_parameters.full_attention` must be an object, not [1]",
        ),
        ("gemma2", {"sliding_window_size": 7}, "`sliding_window_size` 7 is not supported; supported is 4096"),
        ("olmo3", {"num_hidden_layers": 0}, "`num_hidden_layers` must be a whole number of at least 1, not 0"),
        ("phi3", {"intermediate_size": 9.5}, "`intermediate_size` must be a whole number of at least 1, not 9.5"),
        ("granite", {"vocab_size": -1}, "`vocab_size` must be a whole number of at least 1, not -1"),
        # another model than the architecture says
        ("llama", {"model_type": "qwen2"}, "`model_type` 'qwen2' is not that of LlamaForCausalLM, 'llama'"),
        ("gemma3", {"model_type": "gemma3n_text"}, "`model_type` 'gemma3n_text' is not that of Gemma3ForCausalLM"),
        # fields that other models have, or newer ones
        ("llama", {"sliding_window": 100}, "`sliding_window` = 100 is not known for LlamaForCausalLM"),
        ("llama", {"num_local_experts": 8}, "`num_local_experts` = 8 is not known for LlamaForCausalLM"),
        ("llama", {"logit_scale": 0.5}, "`logit_scale` = 0.5 is not known for LlamaForCausalLM"),
        ("mistral", {"layer_types": [FULL] * 4}, "`layer_types` = ['full_attention', "),
        ("qwen2", {"attention_bias": True}, "`attention_bias` = True is not known for Qwen2ForCausalLM"),
        ("qwen3", {"attn_output_gate": True}, "`attn_output_gate` = True is not known for Qwen3ForCausalLM"),
        ("phi3", {"lm_head_bias": True}, "`lm_head_bias` = True is not known for Phi3ForCausalLM"),
        ("phi3", {"full_attn_mod": 2}, "`full_attn_mod` 2 is not supported; supported is 1"),
        ("olmo3", {"clip_qkv": 8.0}, "`clip_qkv` = 8.0 is not known for Olmo3ForCausalLM"),
        ("gemma2", {"use_bidirectional_attention": True}, "`use_bidirectional_attention` = True is not known for"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "`attn_logit_softcapping` = 50.0 is not known for"),
        ("gemma3", {"hidden_size_per_layer_input": 8}, "`hidden_size_per_layer_input` = 8 is not known for"),
        ("granite", {"is_encoder_decoder": True}, "`is_encoder_decoder` = True is not known for GraniteForCausalLM"),
        # activations
        ("granite", {"hidden_act": "gelu"}, "`hidden_act` 'gelu' is not supported; supported is 'silu'"),
        (
            "gemma2",
            {"hidden_activation": "relu2"},
            "`hidden_activation` 'relu2' is not supported; supported is 'gelu_py",
        ),
        # windows
        ("mistral", {"sliding_window": 0}, "`sliding_window` must be a whole number of at least 1, not 0"),
        (
            "gemma3",
            {"sliding_window": None},
            "there are layers with a window (`layer_types`), but it has no width (`sli",
        ),
        ("gemma3", {"layer_types": [FULL] * 3}, "`layer_types` must have one kind for each of the 4 layers, not 3"),
        ("olmo3", {"layer_types": "full"}, "`layer_types` must have one kind for each of the 4 layers, not 'full'"),
        (
            "ministral",
            {"layer_types": [*[FULL] * 3, "chunked_attention"]},
            "`layer_types` has 'chunked_attention'; suppor",
        ),
        (
            "qwen2",
            {"layer_types": [SLIDING] * 4},
            "there are layers with a window (`layer_types`), but it has no width",
        ),
        (
            "exaone4",
            {"sliding_window_pattern": "LLLG"},
            "`sliding_window_pattern` must be a whole number of at least 1, not",
        ),
        (
            "exaone4",
            {"sliding_window": None, "layer_types": [SLIDING] * 4},
            "there are layers with a window (`layer_types",
        ),
        ("qwen3", {"max_window_layers": -1}, "`max_window_layers` must be a whole number of at least 0, not -1"),
        (
            "gemma3",
            {"sliding_window_pattern": 0},
            "`sliding_window_pattern` must be a whole number of at least 1, not 0",
        ),
        (
            "smollm3",
            {"no_rope_layers": [1, 0]},
            "`no_rope_layers` must have a 0 or a 1 for each of the 4 layers, not [1",
        ),
        # multipliers and caps
        ("granite", {"logits_scaling": 0}, "`logits_scaling` must be a positive number, not 0"),
        ("granite", {"residual_multiplier": "0.2"}, "`residual_multiplier` must be a positive number, not '0.2'"),
        ("gemma2", {"query_pre_attn_scalar": -1}, "`query_pre_attn_scalar` must be a positive number, not -1"),
        ("gemma2", {"final_logit_softcapping": 0.0}, "`final_logit_softcapping` must be a positive number, not 0.0"),
        # rope
        ("llama", {"partial_rotary_factor": 0.5}, "`partial_rotary_factor` other than 1 is not supported, here 0.5"),
        (
            "phi3",
            {"partial_rotary_factor": 1.5},
            "`partial_rotary_factor` 1.5 of a head of 16 leaves 24 dims to rotate",
        ),
        ("phi3", {"partial_rotary_factor": 0.2}, "`partial_rotary_factor` 0.2 of a head of 16 leaves 3 dims to rotate"),
        ("phi3", {"rope_scaling": {"type": "llama3"}}, "`low_freq_factor` is missing"),
        (
            "phi3",
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope type 'linear' is not that of a Phi-3 model",
        ),
        (
            "phi3",
            {"rope_scaling": {**SHORT, "type": "su", "long_factor": [1.0]}},
            "`long_factor` must have one number for",
        ),
        (
            "phi3",
            {"rope_scaling": {**SHORT, "type": "longrope", "short_factor": [0] * 8}},
            "`short_factor` must be a posit",
        ),
        (
            "phi3",
            {"rope_scaling": {**SHORT, "type": "longrope", "long_mscale": 1.2}},
            "`long_mscale` = 1.2 is not known for",
        ),
        (
            "qwen2",
            {"rope_scaling": {"type": "default", "mrope_section": [4, 2]}},
            "`mrope_section` = [4, 2] is not known",
        ),
        (
            "qwen3",
            {"rope_scaling": {"type": "dynamic", "alpha": 1000}},
            "`alpha` = 1000 is not known for rope type 'dynam",
        ),
        (
            "gemma3",
            {"rope_parameters": {"global": {}}},
            "`rope_parameters` has 'global'; the kinds of layers are full_att",
        ),
        ("gemma3", {"rope_parameters": "default"}, "`rope_parameters` must be an object, not 'default'"),
        (
            "olmo3",
            {"rope_scaling": {"type": "proportional"}},
            "rope type 'proportional' is not supported; supported are",
        ),
        # text beside images
        ("gemma3_images", {"text_config": None}, "`text_config` is missing"),
        (
            "mistral3_images",
            {"text_config": {"model_type": "qwen2"}},
            "text_config: `model_type` 'qwen2' is not suppor",
        ),
        (
            "gemma3_images",
            {"text_config": {"hidden_size": "a"}},
            "text_config: `hidden_size` must be a whole number of",
        ),
        (
            "gemma3_images",
            {"text_config": {**BASE, "altup_num_inputs": 4}},
            "text_config: `altup_num_inputs` = 4 is not",
        ),
        (
            "gemma3_images",
            {"text_config": BASE, "audio_config": {"a": 1}},
            "`audio_config` = {'a': 1} is not known for",
        ),
        ("ministral3", {}, "`llama_4_scaling_beta` is missing"),
        (
            "ministral3",
            {
                "rope_parameters": {
                    "llama_4_scaling_beta": 0.1,
                    "original_max_position_embeddings": 64,
                    "max_position_embeddings": 4096,
                }
            },
            "`max_position_embeddings` is 2048, and 4096 in the rope parameters",
        ),
    ],
)
def test_is_refused_naming_field_and_value(tmp_path: Path, family: str, fields: dict[str, Any], message: str) -> None:
    assert re.match(re.escape(message), refusal(tmp_path, family, fields))


def test_notes_on_training_and_on_libraries_are_left_aside(tmp_path: Path) -> None:
    notes = {
        "_name_or_path": "somewhere",
        "attention_dropout": 0.1,
        "resid_pdrop": 0.1,
        "auto_map": {"AutoModel": "code.py"},
        "pretraining_tp": 2,
        "transformers.js_config": {"dtype": "q4"},
        "unsloth_fixed": True,
        "use_cache": True,
        "rope_interleaved": False,
    }
    fields = {**BASE, "architectures": ["LlamaForCausalLM"]}
    for content in (fields, {**fields, **notes}):
        (tmp_path / "config.json").write_text(json.dumps(content))
        assert read_model_config(tmp_path).num_layers == 4
