"""Configurations of models with latent attention: those of published models are read, and what contradicts itself or is
not computed is refused by field and value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from disagg.engine.cache_groups import model_layout
from disagg.engine.checkpoint.checkpoint import read_model_config
from disagg.engine.checkpoint.model_config import AttentionConfig, DenseConfig, ExpertsConfig, LatentConfig, ModelConfig
from disagg.engine.runner.weights import check_weights, load_parameters
from disagg.proto.errors import ConfigError
from disagg.simulator.durations.model_shapes import shape_of
from tests.support.tiny_models import make_checkpoint

FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
DEEPSEEK: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "kv_lora_rank": 512,
    "moe_layer_freq": 1,
    "pretraining_tp": 1,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "seq_aux": True,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
}


def yarn(**fields: float) -> dict[str, Any]:
    return {"original_max_position_embeddings": 4096, "type": "yarn", "beta_fast": 32, "beta_slow": 1, **fields}


V2_LITE = {
    **DEEPSEEK,
    "architectures": ["DeepseekV2ForCausalLM"],
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "rope_scaling": yarn(factor=40, mscale=0.707, mscale_all_dim=0.707),
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "vocab_size": 102400,
}
V2 = {
    **V2_LITE,
    "ep_size": 1,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_group": 8,
    "n_routed_experts": 160,
    "num_attention_heads": 128,
    "num_hidden_layers": 60,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 16.0,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
}
V3 = {
    **DEEPSEEK,
    "architectures": ["DeepseekV3ForCausalLM"],
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "quantization_config": FP8,
    "rope_scaling": yarn(factor=40, mscale=1.0, mscale_all_dim=1.0),
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}
KIMI_K2 = {
    **V3,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "model_type": "kimi_k2",
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": yarn(factor=32.0, mscale=1.0, mscale_all_dim=1.0, beta_fast=1.0, beta_slow=1.0),
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}
MOONLIGHT = {
    **{name: value for name, value in V3.items() if name != "quantization_config"},
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "max_position_embeddings": 8192,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": None,
    "rope_scaling": None,
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.446,
    "topk_group": 1,
    "vocab_size": 163840,
}
GLM_FLASH = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "eos_token_id": [154820, 154827, 154829],
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "model_type": "glm4_moe_lite",
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 20,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 47,
    "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 154820,
    "partial_rotary_factor": 1.0,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.8,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "transformers_version": "5.0.0rc0",
    "v_head_dim": 256,
    "vocab_size": 154880,
}


def read(folder: Path, fields: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(fields))
    return read_model_config(folder)


def parts(model: ModelConfig) -> tuple[AttentionConfig, LatentConfig, ExpertsConfig]:
    """Of the last layer."""
    attention, ffn = model.layers[-1].attention, model.layers[-1].ffn
    assert attention.latent is not None
    assert isinstance(ffn, ExpertsConfig)
    return attention, attention.latent, ffn


def test_deepseek_v2_lite(tmp_path: Path) -> None:
    model = read(tmp_path, V2_LITE)
    attention, latent, experts = parts(model)
    assert (latent.query_rank, latent.query_dim, latent.cache_dim, latent.interleaved) == (None, 192, 576, True)
    assert attention.scale == pytest.approx(192**-0.5 * 1.2608**2, rel=1e-4)
    assert attention.rope is not None
    assert (attention.rope.attention_factor, model.max_positions) == (1.0, 163840)
    assert (experts.routing.score, experts.routing.groups, experts.routing.renormalize) == ("softmax", 1, False)
    assert (experts.shared_size, experts.choice_bias) == (2816, False)
    assert isinstance(model.layers[0].ffn, DenseConfig)
    assert shape_of(model, "lite").num_parameters == 15_706_484_224


def test_deepseek_v2(tmp_path: Path) -> None:
    _, latent, experts = parts(read(tmp_path, V2))
    routing = experts.routing
    assert (latent.query_rank, routing.groups, routing.top_groups, routing.group_score) == (1536, 8, 3, "largest")
    assert (routing.scale, routing.num_experts, routing.top_k) == (16.0, 160, 6)


def test_deepseek_v3(tmp_path: Path) -> None:
    model = read(tmp_path, V3)
    attention, _, experts = parts(model)
    routing = experts.routing
    assert (routing.score, routing.renormalize, routing.scale, experts.choice_bias) == ("sigmoid", True, 2.5, True)
    assert (routing.groups, routing.top_groups, routing.group_score) == (8, 4, "two_largest")
    assert attention.scale == pytest.approx(192**-0.5 * 1.3689**2, rel=1e-4)
    assert (model.num_kv_heads, model.head_dim, model.num_extra_layers) == (1, 576, 1)
    assert sum(isinstance(layer.ffn, DenseConfig) for layer in model.layers) == 3
    (group,) = model_layout(model, "bfloat16", 2).groups
    assert (group.num_heads, group.key_dim, group.value_dim, group.value_prefix) == (1, 576, 0, 512)
    assert group.bytes_per_token == 61 * 576 * 2
    assert shape_of(model, "v3").kv_layout().groups == (group,)
    assert shape_of(model, "v3").num_parameters == 671_026_419_200


def test_kimi_k2_is_in_the_form_of_deepseek_v3(tmp_path: Path) -> None:
    model = read(tmp_path, KIMI_K2)
    attention, _, experts = parts(model)
    assert (experts.routing.num_experts, experts.routing.groups, experts.routing.scale) == (384, 1, 2.827)
    assert attention.rope is not None
    assert (attention.rope.beta_fast, attention.rope.theta, model.max_positions) == (1.0, 50000.0, 131072)
    assert sum(isinstance(layer.ffn, DenseConfig) for layer in model.layers) == 1


def test_moonlight(tmp_path: Path) -> None:
    model = read(tmp_path, MOONLIGHT)
    attention, latent, experts = parts(model)
    assert (latent.query_rank, attention.scale, experts.shared_size) == (None, 192**-0.5, 2816)


def test_glm_47_flash(tmp_path: Path) -> None:
    model = read(tmp_path, GLM_FLASH)
    attention, latent, experts = parts(model)
    assert (latent.query_rank, latent.key_dim, latent.value_dim, latent.norm_eps) == (768, 192, 256, 1e-6)
    assert (attention.scale, model.rms_norm_eps, model.num_extra_layers) == (256**-0.5, 1e-5, 1)
    assert (experts.routing.scale, experts.routing.num_experts) == (1.8, 64)


def test_a_config_that_transformers_wrote_says_what_follows_from_others(tmp_path: Path) -> None:
    said = {"head_dim": 64, "qk_head_dim": 192, "rope_interleave": True}
    assert read(tmp_path, V3 | said).layers == read(tmp_path, V3).layers
    kinds = {"mlp_layer_types": ["dense"] + ["sparse"] * 46}
    assert read(tmp_path, GLM_FLASH | kinds).layers == read(tmp_path, GLM_FLASH).layers


@pytest.mark.parametrize(
    ("base", "fields", "message"),
    [
        # what is not computed
        (V3, {"index_topk": 2048}, "`index_topk` = 2048 is not known for DeepseekV3ForCausalLM"),
        (V3, {"architectures": ["DeepseekV32ForCausalLM"]}, "architecture DeepseekV32ForCausalLM is not supported"),
        (V3, {"attention_bias": True}, "`attention_bias` True is not supported; supported is False"),
        (V3, {"hidden_act": "gelu"}, "`hidden_act` 'gelu' is not supported; supported is 'silu'"),
        (V3, {"moe_layer_freq": 2}, "`moe_layer_freq` 2 is not supported; supported is 1"),
        (V3, {"scoring_func": "softmax"}, "`scoring_func` 'softmax' is not supported; supported is 'sigmoid'"),
        (V3, {"topk_method": "greedy"}, "`topk_method` 'greedy' is not supported; supported is 'noaux_tc'"),
        (V2, {"topk_method": "noaux_tc"}, "`topk_method` 'noaux_tc' is not supported; supported are greedy and"),
        (V2, {"norm_topk_prob": True}, "`norm_topk_prob` True is not supported; supported is False"),
        (V2, {"scoring_func": "sigmoid"}, "`scoring_func` 'sigmoid' is not supported; supported is 'softmax'"),
        (V2, {"rope_interleave": False}, "`rope_interleave` False is not supported; supported is True"),
        (GLM_FLASH, {"partial_rotary_factor": 0.5}, "`partial_rotary_factor` other than 1 is not supported"),
        # sizes and numbers that contradict each other
        (V3, {"num_key_value_heads": 8}, "`num_key_value_heads` 8 is not supported; supported is 128"),
        (V3, {"head_dim": 128}, "`head_dim` 128 is not supported; supported is 64"),
        (V3, {"qk_head_dim": 128}, "`qk_head_dim` 128 is not supported; supported is 192"),
        (V3, {"kv_lora_rank": 0}, "`kv_lora_rank` must be a whole number of at least 1, not 0"),
        (V3, {"q_lora_rank": 1.5}, "`q_lora_rank` must be a whole number of at least 1, not 1.5"),
        (V3, {"qk_rope_head_dim": 63}, "`qk_rope_head_dim` must be even, not 63"),
        (V3, {"rope_scaling": yarn(factor=40, mscale_all_dim=-1)}, "`mscale_all_dim` must be a positive number"),
        (V3, {"rope_scaling": yarn(factor=40, mscale_all_dim=1e200)}, "`mscale_all_dim` 1e+200 makes a temperature of"),
        (V3, {"n_group": 7}, "`n_group`: 7 do not divide 256 experts"),
        (V3, {"topk_group": 9}, "`topk_group`: must be 1 to 8, not 9"),
        (V3, {"num_experts_per_tok": 400}, "`num_experts_per_tok`: must be 1 to 64 with 256 experts, not 400"),
        (V3, {"n_routed_experts": None}, "`n_routed_experts` is missing"),
        (V2, {"n_group": None}, "`n_group` is missing"),
        (V3, {"n_group": None}, "`n_group` must not be null; experts without groups have 1"),
        (V3, {"topk_group": None}, "`topk_group` must not be null; experts without groups have 1"),
        (V3, {"rope_interleave": 1}, "`rope_interleave` must be true or false, not 1"),
        (GLM_FLASH, {"mlp_layer_types": ["dense"] * 46}, "`mlp_layer_types` must have ('dense', 'sparse') for each of"),
        (
            GLM_FLASH,
            {"mlp_layer_types": ["moe"] * 47},
            "`mlp_layer_types` must have ('dense', 'sparse') for each of the 47 layers, not ['moe'",
        ),
        # another model than the architecture says
        (V3, {"model_type": "deepseek_v2"}, "`model_type` 'deepseek_v2' is not that of DeepseekV3ForCausalLM"),
        (V2, {"model_type": "kimi_k2"}, "`model_type` 'kimi_k2' is not that of DeepseekV2ForCausalLM, 'deepseek_v2'"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(
    tmp_path: Path, base: dict[str, Any], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, base | fields)
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: {message}")


# ---------------------------------------------------------------- weights


def test_tensors_are_held_against_the_sizes_of_heads(tmp_path: Path) -> None:
    """Those of a layer that predicts further tokens are not read."""
    folder = make_checkpoint("deepseek_v3", tmp_path)
    file, up = folder / "model.safetensors", "model.layers.1.self_attn.kv_b_proj.weight"
    plain = load_file(file)
    save_file(plain | {"model.layers.3.eh_proj.weight": torch.ones(64, 128)}, file)
    check_weights(folder)
    for changes, message in (
        ({up: plain[up][:-32]}, rf"tensor {up} has shape \[96, 40\]; config.json requires \[128, 40\]$"),
        ({"model.layers.1.self_attn.k_proj.weight": torch.ones(64, 64)}, "is not part of DeepseekV3ForCausalLM"),
        ({up: torch.empty(0)}, rf"the weights lack {up}$"),
    ):
        save_file({name: tensor for name, tensor in (plain | changes).items() if tensor.numel()}, file)
        with pytest.raises(ConfigError, match=message):
            load_parameters(folder, read_model_config(folder), torch.float32, torch.device("cpu"))
