"""Tiny random checkpoints of every family that the decoder serves, and what transformers computes with them.

    folder = make_checkpoint("qwen3", tmp_path / "qwen3")
    token_ids, logits = reference_generate(folder, prompt_ids, 20)

The weights are drawn wide (and norms and biases too), so that the outputs vary and a forgotten bias or norm shows. Each
folder also has a byte-level tokenizer with a chat template, so that the gateway can serve it.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

VOCAB_SIZE = 384
END_OF_TEXT_ID = 256
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

BASE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.5,
    "bos_token_id": END_OF_TEXT_ID,
    "eos_token_id": END_OF_TEXT_ID,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class _Kind:
    family: str
    """Prefix of transformers' classes."""
    changes: dict[str, Any] = field(default_factory=dict)
    config: str = ""
    """Prefix of the configuration's class, where it has another one."""


def _rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


KINDS = {
    "llama": _Kind("Llama"),
    "llama_tied": _Kind("Llama", {"tie_word_embeddings": True}),
    "llama_bias": _Kind("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_linear_rope": _Kind("Llama", _rope("linear", factor=4.0)),
    "llama_dynamic_rope": _Kind("Llama", _rope("dynamic", factor=4.0)),
    # Wavelengths of this head size lie on both sides of, and between, the two bounds of 16 and 64 positions.
    "llama3_rope": _Kind(
        "Llama",
        _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    ),
    "llama_yarn_rope": _Kind("Llama", _rope("yarn", factor=4.0, original_max_position_embeddings=512)),
    # No number of ranks divides this vocabulary; the tokenizer has all but its last three words.
    "llama_odd_vocab": _Kind(
        "Llama",
        {"vocab_size": VOCAB_SIZE + 3, "num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True},
    ),
    "mistral": _Kind("Mistral", {"sliding_window": None}),
    "qwen2": _Kind("Qwen2"),
    # The heads are wider than hidden size / heads.
    "qwen3": _Kind("Qwen3", {"head_dim": 32}),
    "qwen3_bias": _Kind("Qwen3", {"head_dim": 32, "attention_bias": True}),
}


_FULL, _SLIDING = "full_attention", "sliding_attention"
_FOUR: dict[str, Any] = {"num_hidden_layers": 4}
_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.05 * pair for pair in range(6)],
    "long_factor": [1.0 + 0.7 * pair for pair in range(6)],
}

_EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 40}

_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 28,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "moe_intermediate_size": 40,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "pad_token_id": None,
}
_GROUPS = {"n_group": 4, "topk_group": 2}

LATENT_KINDS = {
    # The two temperatures of yarn differ, so that cosines are scaled as well as scores.
    "deepseek_v2": _Kind(
        "DeepseekV2",
        {
            **_LATENT,
            **_GROUPS,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 4.0,
            **_rope("yarn", factor=8.0, original_max_position_embeddings=32, mscale=0.7, mscale_all_dim=1.2),
        },
    ),
    "deepseek_v2_lite": _Kind("DeepseekV2", {**_LATENT, "q_lora_rank": None, "n_shared_experts": 1}),
    "deepseek_v3": _Kind(
        "DeepseekV3",
        {
            **_LATENT,
            **_GROUPS,
            **_rope("yarn", factor=8.0, original_max_position_embeddings=32, mscale=1.0, mscale_all_dim=1.0),
        },
    ),
    "deepseek_v3_halves": _Kind(
        "DeepseekV3", {**_LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "rope_interleave": False}
    ),
    "glm4_moe_lite": _Kind("Glm4MoeLite", {**_LATENT, "mlp_layer_types": ["sparse", "dense", "sparse"]}),
}
"""Latent attention, whose sizes all differ."""

EXPERT_KINDS = {
    "mixtral": _Kind("Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 16}),
    # The second layer has a dense MLP.
    "qwen2_moe": _Kind("Qwen2Moe", {**_EXPERTS, "shared_expert_intermediate_size": 48, "mlp_only_layers": [1]}),
    "qwen3_moe": _Kind("Qwen3Moe", {**_EXPERTS, "head_dim": 32, "norm_topk_prob": True}),
    "gpt_oss": _Kind(
        "GptOss",
        {
            "head_dim": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 4,
            "sliding_window": 16,
            "swiglu_limit": 1.5,
            "pad_token_id": None,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 256,
            },
        },
    ),
    "glm4_moe": _Kind(
        "Glm4Moe",
        {
            "moe_intermediate_size": 40,
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
            "attention_bias": True,
            "pad_token_id": None,
        },
    ),
    **LATENT_KINDS,
    "minimax_m2": _Kind(
        "MiniMaxM2",
        {
            "head_dim": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
        },
    ),
}

FAMILY_KINDS = {
    **EXPERT_KINDS,
    "phi3": _Kind("Phi3", {"sliding_window": 16, "pad_token_id": None}),
    # 12 of the 16 dims of a head are rotated.
    "phi3_longrope": _Kind(
        "Phi3",
        {
            "rope_parameters": {**_LONG_ROPE, "partial_rotary_factor": 0.75},
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 128,
            "pad_token_id": None,
        },
    ),
    "granite": _Kind(
        "Granite",
        {
            "attention_multiplier": 0.3,
            "embedding_multiplier": 3.3,
            "residual_multiplier": 0.7,
            "logits_scaling": 6.0,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "smollm3": _Kind("SmolLM3", {**_FOUR, "pad_token_id": None}),
    "smollm3_windows": _Kind(
        "SmolLM3",
        {**_FOUR, "use_sliding_window": True, "sliding_window": 16, "no_rope_layer_interval": 2, "pad_token_id": None},
    ),
    "olmo3": _Kind(
        "Olmo3",
        {
            **_FOUR,
            "sliding_window": 16,
            "rope_parameters": {
                _SLIDING: {"rope_type": "default", "rope_theta": 500.0},
                _FULL: {
                    "rope_type": "yarn",
                    "rope_theta": 500.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 512,
                },
            },
        },
    ),
    "exaone4": _Kind("Exaone4", {**_FOUR, "sliding_window": 16, "rope_parameters": {"rope_theta": 500.0}}),
    "mistral_window": _Kind("Mistral", {"sliding_window": 16}),
    "ministral": _Kind("Ministral", {"head_dim": 16, "sliding_window": 16, "layer_types": [_SLIDING, _FULL, _SLIDING]}),
    "ministral3": _Kind(
        "Ministral3",
        {
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 20,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.3,
            },
        },
    ),
    "qwen2_windows": _Kind("Qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    "qwen3_windows": _Kind(
        "Qwen3",
        {
            "head_dim": 32,
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": [_SLIDING, _FULL, _SLIDING],
        },
    ),
    "gemma2": _Kind(
        "Gemma2",
        {
            **_FOUR,
            "head_dim": 32,
            "sliding_window": 16,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 9.0,
        },
    ),
    "gemma3": _Kind(
        "Gemma3",
        {
            **_FOUR,
            "head_dim": 32,
            "sliding_window": 16,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 24,
            "rope_parameters": {
                _SLIDING: {"rope_type": "default", "rope_theta": 100.0},
                _FULL: {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
            },
        },
        config="Gemma3Text",
    ),
}
"""Families whose layers have other parts than Llama's."""

STAGE_KINDS = {
    "llama_four": _Kind("Llama", _FOUR),
    "llama_four_tied": _Kind("Llama", {**_FOUR, "tie_word_embeddings": True}),
    "qwen3_moe_four": _Kind("Qwen3Moe", {**EXPERT_KINDS["qwen3_moe"].changes, **_FOUR}),
    "gpt_oss_four": _Kind("GptOss", {**EXPERT_KINDS["gpt_oss"].changes, **_FOUR}),
    "deepseek_v3_four": _Kind("DeepseekV3", {**LATENT_KINDS["deepseek_v3"].changes, **_FOUR}),
}
"""Layers enough for four stages."""


def make_checkpoint(kind: str, folder: Path, *, dtype: torch.dtype = torch.float32, shard_bytes: int = 1 << 30) -> Path:
    """Write a checkpoint of any of these kinds into `folder`, the same bytes at every call, and return it. Each
    is made once in a process, and copied."""
    shutil.copytree(_made(kind, dtype, shard_bytes), folder, dirs_exist_ok=True)
    return folder


@functools.cache
def _made(kind: str, dtype: torch.dtype, shard_bytes: int) -> Path:
    import transformers

    folder = _folder_of_process() / f"{kind}-{dtype}-{shard_bytes}"
    family, config = _described(kind).family, _config(kind)
    generator_state = torch.random.get_rng_state()
    try:
        torch.manual_seed(20)
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        _vary_norms_and_biases(model)
    finally:
        torch.random.set_rng_state(generator_state)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard_bytes)
    _write_json(folder / "generation_config.json", {"bos_token_id": END_OF_TEXT_ID, "eos_token_id": END_OF_TEXT_ID})
    _write_tokenizer(folder)
    return folder


@functools.cache
def _folder_of_process() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="disagg-checkpoints-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _described(kind: str) -> _Kind:
    return {**KINDS, **FAMILY_KINDS, **STAGE_KINDS}[kind]


def _config(kind: str) -> Any:
    import transformers

    described = _described(kind)
    return getattr(transformers, f"{described.config or described.family}Config")(**{**BASE, **described.changes})


def transformers_config(kind: str) -> dict[str, Any]:
    """The config.json of a checkpoint, whose weights are not made."""
    return {**_config(kind).to_diff_dict(), "architectures": [f"{_described(kind).family}ForCausalLM"]}


def reference_generate(folder: Path, prompt_ids: list[int], num_tokens: int) -> tuple[list[int], Tensor]:
    """Greedy tokens and the fp32 logits [num_tokens, vocab] they came from, by transformers, end tokens ignored."""
    token_ids, logits = _reference(folder).generate(tuple(prompt_ids), num_tokens)
    return token_ids, logits.clone()


def reference_logits(folder: Path, token_ids: list[int]) -> Tensor:
    """The fp32 logits [len(token_ids), vocab] of every position, by transformers, in one forward pass."""
    with torch.inference_mode():
        logits: Tensor = _reference(folder).model(torch.tensor([token_ids])).logits[0]
    return logits


class _Reference:
    """A model of transformers, and what it has generated."""

    def __init__(self, folder: Path) -> None:
        import transformers

        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        ).eval()
        self._generated: dict[tuple[int, ...], tuple[list[int], Tensor]] = {}
        """The longest answer to each prompt so far: shorter ones begin alike."""

    def generate(self, prompt_ids: tuple[int, ...], num_tokens: int) -> tuple[list[int], Tensor]:
        if prompt_ids not in self._generated or len(self._generated[prompt_ids][0]) < num_tokens:
            self._generated[prompt_ids] = self._generate(prompt_ids, num_tokens)
        token_ids, logits = self._generated[prompt_ids]
        return token_ids[:num_tokens], logits[:num_tokens]

    def _generate(self, prompt_ids: tuple[int, ...], num_tokens: int) -> tuple[list[int], Tensor]:
        token_ids, rows, cache, step_ids = [], [], None, list(prompt_ids)
        with torch.inference_mode():
            for _ in range(num_tokens):
                output = self.model(torch.tensor([step_ids]), past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                rows.append(output.logits[0, -1])
                step_ids = [int(rows[-1].argmax())]
                token_ids += step_ids
        return token_ids, torch.stack(rows)


MOST_REFERENCES = 40
_references: dict[bytes, _Reference] = {}
"""References of this process, by what is in their files: the same checkpoint lies in many folders."""


def _reference(folder: Path) -> _Reference:
    digest = hashlib.sha256()
    for file in sorted(file for file in folder.iterdir() if file.is_file()):
        digest.update(file.name.encode() + file.read_bytes())
    key = digest.digest()
    if key not in _references:
        while len(_references) >= MOST_REFERENCES:
            del _references[next(iter(_references))]
        _references[key] = _Reference(folder)
    return _references[key]


def _vary_norms_and_biases(model: Any) -> None:
    """transformers starts norms at one and biases at zero, where a model that forgets them passes."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith((".bias", "_bias")):
                parameter.normal_(0.0, 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(0.0, 0.5)


def _write_tokenizer(folder: Path) -> None:
    """Every byte is a token, then the special ones, then words that only the model can produce."""
    vocabulary = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    first_word = len(vocabulary) + len(SPECIAL_TOKENS)
    words = {f"Ġword{index}": index for index in range(first_word, VOCAB_SIZE)}
    specials = {token: len(vocabulary) + index for index, token in enumerate(SPECIAL_TOKENS)}
    tokenizer = Tokenizer(models.BPE(vocab={**vocabulary, **specials, **words}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    assert tokenizer.token_to_id(SPECIAL_TOKENS[0]) == END_OF_TEXT_ID
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL_TOKENS[0],
            "eos_token": SPECIAL_TOKENS[0],
            "model_max_length": BASE["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n")
