"""All families, by the name of the architecture in config.json."""

from __future__ import annotations

import dataclasses

from disagg.engine.checkpoint.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from disagg.engine.checkpoint.families.exaone import EXAONE_4
from disagg.engine.checkpoint.families.family import Family, refuse_unread
from disagg.engine.checkpoint.families.gemma import GEMMA_2, GEMMA_3
from disagg.engine.checkpoint.families.glm_moe import GLM_4_MOE, GLM_4_MOE_LITE
from disagg.engine.checkpoint.families.gpt_oss import GPT_OSS
from disagg.engine.checkpoint.families.granite import GRANITE
from disagg.engine.checkpoint.families.llama import LLAMA
from disagg.engine.checkpoint.families.minimax import MINIMAX_M2
from disagg.engine.checkpoint.families.mistral import MINISTRAL, MINISTRAL_3, MISTRAL
from disagg.engine.checkpoint.families.mixtral import MIXTRAL
from disagg.engine.checkpoint.families.multimodal import GEMMA_3_IMAGES, MISTRAL_3_IMAGES
from disagg.engine.checkpoint.families.olmo import OLMO_3
from disagg.engine.checkpoint.families.phi import PHI_3
from disagg.engine.checkpoint.families.qwen import QWEN2, QWEN3
from disagg.engine.checkpoint.families.qwen_moe import QWEN2_MOE, QWEN3_MOE
from disagg.engine.checkpoint.families.smollm import SMOLLM_3
from disagg.engine.checkpoint.formats.quantization import read_weight_format
from disagg.engine.checkpoint.json_fields import JsonFields
from disagg.engine.checkpoint.model_config import ModelConfig

FAMILIES: tuple[Family, ...] = (
    LLAMA,
    SMOLLM_3,
    MISTRAL,
    MINISTRAL,
    MINISTRAL_3,
    MISTRAL_3_IMAGES,
    QWEN2,
    QWEN3,
    GEMMA_2,
    GEMMA_3,
    GEMMA_3_IMAGES,
    PHI_3,
    GRANITE,
    OLMO_3,
    EXAONE_4,
    MIXTRAL,
    QWEN2_MOE,
    QWEN3_MOE,
    GPT_OSS,
    GLM_4_MOE,
    GLM_4_MOE_LITE,
    MINIMAX_M2,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
)

_BY_ARCHITECTURE = {name: family for family in FAMILIES for name in family.architectures}
SUPPORTED_ARCHITECTURES = tuple(_BY_ARCHITECTURE)


def family_of(architecture: str) -> Family:
    """The family of a supported architecture."""
    return _BY_ARCHITECTURE[architecture]


def read_family(fields: JsonFields) -> ModelConfig:
    """The model of a config.json, but for its end tokens.

    Raises:
        ConfigError: naming the file, the field and its value, for what is not supported or contradicts itself.
    """
    architecture = _architecture(fields)
    family = _BY_ARCHITECTURE[architecture]
    model_type = fields.value("model_type")
    if model_type is not None and model_type not in family.model_types:
        raise fields.error(f"`model_type` {model_type!r} is not that of {architecture}, {family.model_types[0]!r}")
    model = dataclasses.replace(
        family.read(fields), architecture=architecture, weight_format=read_weight_format(fields)
    )
    refuse_unread(fields, architecture)
    return model


def _architecture(fields: JsonFields) -> str:
    architectures = fields.value("architectures")
    names = architectures if isinstance(architectures, list) else []
    for name in names:
        if isinstance(name, str) and name in _BY_ARCHITECTURE:
            return name
    found = ", ".join(map(str, names)) or "none"
    raise fields.error(f"architecture {found} is not supported; supported are {', '.join(SUPPORTED_ARCHITECTURES)}")
