"""Configurations of models with experts: those of published models are read, those that contradict themselves are
refused by field and value, and so is a checkpoint that lacks an expert."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from disagg.engine.checkpoint.checkpoint import read_model_config
from disagg.engine.checkpoint.model_config import DenseConfig, ExpertsConfig, ModelConfig
from disagg.engine.runner.weights import load_parameters
from disagg.proto.errors import ConfigError
from tests.support.tiny_models import make_checkpoint

SIZES = {"vocab_size": 320, "rms_norm_eps": 1e-5, "eos_token_id": 2, "hidden_act": "silu"}
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rope_theta": 1e6,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    **SIZES,
}
QWEN3 = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rope_scaling": None,
    "rope_theta": 1e6,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "use_sliding_window": False,
    **SIZES,
}
QWEN2 = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "max_position_embeddings": 8192,
    "max_window_layers": 21,
    "model_type": "qwen2_moe",
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "rope_theta": 1e6,
    "shared_expert_intermediate_size": 5632,
    "sliding_window": 32768,
    "use_sliding_window": False,
    **SIZES,
}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    **SIZES,
}
GLM = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
    "use_qk_norm": False,
    **SIZES,
}
MINIMAX = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "attn_type_list": [1] * 62,
    "head_dim": 128,
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "layernorm_full_attention_beta": 1.0,
    "layernorm_linear_attention_beta": 1.0,
    "layernorm_mlp_beta": 1.0,
    "max_position_embeddings": 196608,
    "mlp_intermediate_size": 8192,
    "model_type": "minimax",
    "mtp_transformer_layers": 1,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "num_mtp_modules": 3,
    "output_router_logits": False,
    "qk_norm_type": "per_layer",
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "router_jitter_noise": 0.0,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "shared_moe_mode": "sigmoid",
    "sliding_window": None,
    "use_mtp": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
    **SIZES,
}


def read(folder: Path, fields: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(fields))
    return read_model_config(folder)


def experts_of(model: ModelConfig) -> ExpertsConfig:
    ffn = model.layers[-1].ffn
    assert isinstance(ffn, ExpertsConfig)
    return ffn


def test_mixtral_8x7b(tmp_path: Path) -> None:
    experts = experts_of(read(tmp_path, MIXTRAL))
    assert (experts.routing.num_experts, experts.routing.top_k, experts.intermediate_size) == (8, 2, 14336)
    assert (experts.routing.score, experts.routing.renormalize, experts.shared_size) == ("softmax", True, 0)


def test_qwen3_30b_a3b(tmp_path: Path) -> None:
    model = read(tmp_path, QWEN3)
    experts = experts_of(model)
    assert (experts.routing.num_experts, experts.routing.top_k, experts.intermediate_size) == (128, 8, 768)
    assert (experts.routing.renormalize, model.windows, model.layers[0].attention.qk_norm) == (True, (), "head")


def test_qwen3_coder_says_what_all_of_its_family_do(tmp_path: Path) -> None:
    said = {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True}
    assert read(tmp_path, QWEN3 | said).layers == read(tmp_path, QWEN3).layers


def test_layers_of_qwen3_may_have_a_dense_mlp(tmp_path: Path) -> None:
    model = read(tmp_path, QWEN3 | {"decoder_sparse_step": 2, "mlp_only_layers": [3], "num_hidden_layers": 6})
    assert [isinstance(layer.ffn, DenseConfig) for layer in model.layers] == [True, False, True, True, True, False]


def test_qwen15_moe(tmp_path: Path) -> None:
    model = read(tmp_path, QWEN2)
    experts = experts_of(model)
    assert (experts.shared_size, experts.shared_gate, experts.routing.renormalize) == (5632, True, False)
    assert (model.layers[0].attention.qkv_bias, model.layers[0].attention.o_bias, model.windows) == (True, False, ())


def test_gpt_oss_20b(tmp_path: Path) -> None:
    model = read(tmp_path, GPT_OSS)
    experts = experts_of(model)
    assert (experts.routing.score, experts.bias, experts.router_bias) == ("softmax_of_top", True, True)
    assert (experts.activation.kind, experts.activation.alpha) == ("clamped_swiglu", 1.702)
    assert [layer.attention.window for layer in model.layers[:3]] == [128, None, 128]
    assert (model.layers[0].attention.sinks, model.max_positions) == (True, 131072)


def test_glm_45_air(tmp_path: Path) -> None:
    model = read(tmp_path, GLM)
    experts, rope = experts_of(model), model.layers[0].attention.rope
    assert (experts.choice_bias, experts.shared_size, experts.shared_gate) == (True, 1408, False)
    assert isinstance(model.layers[0].ffn, DenseConfig)
    assert rope is not None
    assert (rope.share, model.num_extra_layers, model.layers[0].attention.o_bias) == (0.5, 1, False)


def test_minimax_m2(tmp_path: Path) -> None:
    model = read(tmp_path, MINIMAX)
    experts, rope = experts_of(model), model.layers[0].attention.rope
    assert (experts.routing.score, experts.choice_bias, experts.routing.num_experts) == ("sigmoid", True, 256)
    assert rope is not None
    assert (rope.share, model.layers[0].attention.qk_norm) == (0.5, "whole")


@pytest.mark.parametrize(
    ("base", "fields", "message"),
    [
        (MIXTRAL, {"num_local_experts": None}, "`num_local_experts` is missing"),
        (
            MIXTRAL,
            {"num_experts_per_tok": 9},
            "`num_experts_per_tok`: must be 1 to 8 with 8 experts, not 9",
        ),
        (QWEN3, {"num_experts": 2000}, "`num_experts`: must be 1 to 1024, not 2000"),
        (QWEN3, {"mlp_only_layers": [48]}, "`mlp_only_layers` must be a list of layers below 48, not [48]"),
        (QWEN3, {"norm_topk_prob": "yes"}, "`norm_topk_prob` must be true or false, not 'yes'"),
        (QWEN3, {"moe_intermediate_size": 0}, "`moe_intermediate_size` must be a whole number of at least 1, not 0"),
        (QWEN2, {"shared_expert_intermediate_size": None}, "`shared_expert_intermediate_size` is missing"),
        (GLM, {"n_group": 5}, "`n_group`: 5 do not divide 128 experts"),
        (GLM, {"n_group": 4, "topk_group": 5}, "`topk_group`: must be 1 to 4, not 5"),
        (
            GLM,
            {"n_group": 64, "topk_group": 2},
            "`topk_group`: 2 x 2 experts of a group are fewer than the 8 of a row (top_k)",
        ),
        (GLM, {"routed_scaling_factor": 0}, "`routed_scaling_factor` must be a positive number, not 0"),
        (GLM, {"scoring_func": "softmax"}, "`scoring_func` = 'softmax' is not known for Glm4MoeForCausalLM; "),
        (GPT_OSS, {"rope_scaling": None}, "`rope_scaling` is missing"),
        (GPT_OSS, {"experts_per_token": 8}, "`experts_per_token` 8 is not supported; supported is 4"),
        (GPT_OSS, {"swiglu_limit": -7.0}, "`swiglu_limit` must be a positive number, not -7.0"),
        (GPT_OSS, {"hidden_act": "gelu"}, "`hidden_act` 'gelu' is not supported; supported is 'silu'"),
        (MINIMAX, {"scoring_func": "softmax"}, "`scoring_func` 'softmax' is not supported; supported is 'sigmoid'"),
        (MINIMAX, {"attn_type_list": [1] * 61 + [0]}, "`attn_type_list` [1, 1, 1,"),
        (MINIMAX, {"shared_intermediate_size": 512}, "`shared_intermediate_size` 512 is not supported; supported is 0"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(
    tmp_path: Path, base: dict[str, Any], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, base | fields)
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: {message}")


# ---------------------------------------------------------------- weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("glm4_moe", tmp_path_factory.mktemp("checkpoints") / "glm4_moe")


def changed(folder: Path, target: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """The checkpoint with these tensors; an empty one stands for none."""
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    found = load_file(folder / "model.safetensors") | tensors
    save_file({name: tensor for name, tensor in found.items() if tensor.numel()}, target / "model.safetensors")
    return target


def load(folder: Path) -> None:
    load_parameters(folder, read_model_config(folder), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    "name", ["mlp.experts.15.up_proj.weight", "mlp.gate.e_score_correction_bias", "mlp.shared_experts.down_proj.weight"]
)
def test_a_layer_that_lacks_a_tensor_of_its_experts_is_refused(folder: Path, tmp_path: Path, name: str) -> None:
    whole = f"model.layers.2.{name}"
    with pytest.raises(ConfigError, match=rf"the weights lack {whole}$"):
        load(changed(folder, tmp_path, {whole: torch.empty(0)}))


def test_one_expert_too_many_and_one_of_another_size_are_refused(folder: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.16.up_proj.weight"
    with pytest.raises(ConfigError, match=f"tensor {name} is not part of Glm4MoeForCausalLM"):
        load(changed(folder, tmp_path, {name: torch.ones(40, 64)}))
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    with pytest.raises(ConfigError, match=rf"tensor {name} has shape \[39, 64\]; config.json requires \[40, 64\]"):
        load(changed(folder, tmp_path, {name: torch.ones(39, 64)}))


def test_layers_that_predict_further_tokens_are_not_read(folder: Path, tmp_path: Path) -> None:
    load(changed(folder, tmp_path, {"model.layers.3.mlp.experts.0.up_proj.weight": torch.ones(40, 64)}))
    with pytest.raises(ConfigError, match=r"tensor model.layers.4.mlp.gate.weight is not part of"):
        load(changed(folder, tmp_path, {"model.layers.4.mlp.gate.weight": torch.ones(16, 64)}))
