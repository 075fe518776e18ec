"""The table of docs/models.md, from the families and from the configurations that their exactness tests use.

python -m tests.support.models_page      prints the table
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from disagg.engine.checkpoint.checkpoint import read_model_config
from disagg.engine.checkpoint.families.family import Family
from disagg.engine.checkpoint.families.registry import FAMILIES, family_of
from disagg.engine.checkpoint.model_config import (
    DenseConfig,
    ExpertsConfig,
    FfnConfig,
    LatentConfig,
    LayerConfig,
    ModelConfig,
    RopeConfig,
)
from tests.support.tiny_models import FAMILY_KINDS, KINDS, transformers_config

TESTS = (
    ("tests/unit/engine/test_model.py", KINDS),
    ("tests/unit/engine/test_families.py", FAMILY_KINDS),
)
"""Each exactness test, with the checkpoints that it compares with transformers."""
HEAD = ("| models | architecture | parts beside those of every model | exactness test |", "|---|---|---|---|")


def table() -> str:
    """One row for each family, in their order."""
    tested: dict[str, dict[str, ModelConfig]] = {}
    for file, kinds in TESTS:
        for kind in kinds:
            for config in configs_of(kind):
                rows = tested.setdefault(config.architecture, {})
                is_named = any(row.startswith(f"`{file}") for row in rows)
                rows[f"`[{kind}]`" if is_named else f"`{file}[{kind}]`"] = config
    return "\n".join((*HEAD, *(_row(family, tested) for family in FAMILIES)))


def configs_of(kind: str) -> list[ModelConfig]:
    """The configuration of a tiny checkpoint, alone and as the text beside images where there is such a family."""
    with tempfile.TemporaryDirectory() as folder:
        values = transformers_config(kind)
        found = [_read(Path(folder), values)]
        for family in FAMILIES:
            if family.names.unused and found[0].architecture == TEXT_OF[family.architectures[0]]:
                outer = {"architectures": [family.architectures[0]], "text_config": values}
                found.append(_read(Path(folder), outer))
        return found


TEXT_OF = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Mistral3ForConditionalGeneration": "Ministral3ForCausalLM",
}
"""Which text the models with images have here."""


def _read(folder: Path, values: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(values))
    return read_model_config(folder)


def _row(family: Family, tested: dict[str, dict[str, ModelConfig]]) -> str:
    configs = {test: config for name in family.architectures for test, config in tested[name].items()}
    architectures = ", ".join(f"`{name}`" for name in family.architectures)
    return f"| {family.models} | {architectures} | {', '.join(_parts(configs.values()))} | {', '.join(configs)} |"


def _parts(configs: Iterable[ModelConfig]) -> list[str]:
    """What some of the configurations have beside what each decoder has, each once."""
    found: dict[str, None] = {}
    for config in configs:
        names = family_of(config.architecture).names
        fused = [part for part, held in (("q, k, v", names.qkv), ("gate, up", names.gate_up)) if len(held) == 1]
        values = (
            f"{' and '.join(fused)} in one tensor" if fused else "",
            "1 + weight RMS norms" if config.plus_one_norms else "",
            *(part for layer in config.layers for part in _layer_parts(layer)),
            "NoPE layers" if None in {layer.attention.rope for layer in config.layers} else "",
            "local and global rope" if len(config.ropes) > 1 else "",
            *(part for rope in config.ropes for part in _rope_parts(rope)),
            "embedding multiplier" if config.embedding_multiplier != 1.0 else "",
            "residual multiplier" if config.residual_multiplier != 1.0 else "",
            "logits divisor" if config.logits_divisor != 1.0 else "",
            "logit soft cap" if config.logits_soft_cap is not None else "",
        )
        found |= dict.fromkeys(part for part in values if part)
    return list(found) or ["none"]


def _layer_parts(layer: LayerConfig) -> list[str]:
    attention = layer.attention
    norms = {"before": "", "after": "post-norm", "both": "pre- and post-norm"}
    qk_norms = {"none": "", "head": "QK norm by head", "whole": "QK norm over all heads"}
    return [
        norms[layer.norms],
        "attention bias" if attention.qkv_bias or attention.o_bias else "",
        *_ffn_parts(layer.ffn),
        qk_norms[attention.qk_norm],
        *_latent_parts(attention.latent),
        "sliding window" if attention.window is not None else "",
        "attention soft cap" if attention.soft_cap is not None else "",
        "attention sinks" if attention.sinks else "",
        "GeGLU" if isinstance(layer.ffn, DenseConfig) and layer.ffn.activation == "gelu_tanh" else "",
    ]


def _latent_parts(latent: LatentConfig | None) -> list[str]:
    if latent is None:
        return []
    return [
        "latent attention (MLA)",
        "" if latent.query_rank is None else "q_lora",
        "interleaved rope" if latent.interleaved else "",
    ]


def _ffn_parts(ffn: FfnConfig) -> list[str]:
    if not isinstance(ffn, ExpertsConfig):
        return ["MLP bias" if ffn.bias else ""]
    routing = ffn.routing
    scores = {"softmax": "softmax", "softmax_of_top": "softmax of the top k", "sigmoid": "sigmoid"}
    return [
        f"experts with {scores[routing.score]} routing",
        "group-limited routing" if routing.groups > 1 else "",
        "correction bias" if ffn.choice_bias else "",
        "expert bias" if ffn.bias else "",
        "clamped SwiGLU" if ffn.activation.kind == "clamped_swiglu" else "",
        f"{'gated ' if ffn.shared_gate else ''}shared experts" if ffn.shared_size else "",
    ]


def _rope_parts(rope: RopeConfig) -> list[str]:
    return [
        {"default": "", "longrope": "longrope"}.get(rope.kind, f"{rope.kind} rope"),
        "partial rope" if rope.share != 1.0 else "",
        "llama4 query scaling" if rope.query_beta else "",
    ]


def main() -> None:
    """Print the table."""
    print(table())


if __name__ == "__main__":
    main()
