"""Models of text and images, of which the text is served: Gemma 3, Mistral 3 with the text of Mistral or Ministral 3.
The text's fields are in `text_config`; the encoder of images and what leads from it to the text are not read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from disagg.engine.checkpoint.families.family import Family, TensorNames, refuse_unread
from disagg.engine.checkpoint.families.gemma import GEMMA_3
from disagg.engine.checkpoint.families.mistral import MINISTRAL_3, MISTRAL
from disagg.engine.checkpoint.json_fields import JsonFields
from disagg.engine.checkpoint.model_config import ModelConfig

OF_IMAGES = (
    "vision_config",
    "mm_tokens_per_image",
    "multimodal_projector_bias",
    "projector_hidden_act",
    "spatial_merge_size",
    "vision_feature_layer",
)
"""Fields about images."""


def _reader(texts: tuple[Family, ...], defaults: Mapping[str, Any]) -> Callable[[JsonFields], ModelConfig]:
    """`defaults` are those of the text's fields, which files leave out."""
    by_type = {name: family for family in texts for name in family.model_types}

    def read(fields: JsonFields) -> ModelConfig:
        for name in OF_IMAGES:
            fields.value(name)
        text = fields.part("text_config", defaults)
        model_type = text.value("model_type") or next(iter(by_type))
        if not isinstance(model_type, str) or model_type not in by_type:
            raise text.error(f"`model_type` {model_type!r} is not supported; supported are {', '.join(by_type)}")
        model = by_type[model_type].read(text)
        refuse_unread(text, model_type)
        if fields.has("tie_word_embeddings"):
            model = dataclasses.replace(model, tied_embeddings=fields.boolean("tie_word_embeddings", False))
        return model

    return read


def _names(text: TensorNames) -> TensorNames:
    images = ("vision_tower.", "multi_modal_projector.")
    return dataclasses.replace(
        text,
        renamed=(
            ("model.language_model.", "model."),
            ("language_model.model.", "model."),
            ("language_model.lm_head.", "lm_head."),
        ),
        unused=(*images, *(f"model.{name}" for name in images)),
    )


GEMMA_3_IMAGES = Family(
    models="Gemma 3 4B, 12B and 27B: their text",
    architectures=("Gemma3ForConditionalGeneration",),
    model_types=("gemma3",),
    read=_reader(
        (GEMMA_3,),
        {
            "vocab_size": 262208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
        },
    ),
    names=_names(GEMMA_3.names),
)
MISTRAL_3_IMAGES = Family(
    models="Mistral Small 3.1 and 3.2, Ministral 3: their text",
    architectures=("Mistral3ForConditionalGeneration",),
    model_types=("mistral3",),
    read=_reader((MISTRAL, MINISTRAL_3), {}),
    names=_names(MISTRAL.names),
)
