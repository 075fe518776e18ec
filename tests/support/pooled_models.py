"""Checkpoint files of models that give vectors or scores, as far as a gateway reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from disagg.gateway.text.tokenizer import ServedModel, load_model
from tests.support.gateway import CONFIG, MODEL_NAME, write_checkpoint

HIDDEN_SIZE = 8
TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
LOGIT_SCORE = {
    "idx": 1,
    "name": "1",
    "path": "1_LogitScore",
    "type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore",
}

BERT = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
}
"""`config.json` of a small encoder."""


def write_embedder(
    folder: Path, mode: str = "lasttoken", *, model_type: str = "qwen3", modules: Any = None, **config: Any
) -> Path:
    """An embedding model; `mode`: behind `pooling_mode_` in its settings."""
    fields = {**CONFIG, "model_type": model_type, "hidden_size": HIDDEN_SIZE, **config}
    write_checkpoint(folder, config=fields)
    write_json(folder / "modules.json", [TRANSFORMER, POOLING, NORMALIZE] if modules is None else modules)
    write_json(folder / "1_Pooling/config.json", {"word_embedding_dimension": 8, f"pooling_mode_{mode}": True})
    return folder


def write_reranker(folder: Path, settings: Any = None, **config: Any) -> Path:
    """A reranker in the form of Qwen3-Reranker."""
    fields = {**CONFIG, "model_type": "qwen3", "hidden_size": HIDDEN_SIZE, **config}
    write_checkpoint(folder, config=fields)
    write_json(folder / "modules.json", [TRANSFORMER, LOGIT_SCORE])
    given = {"true_token_id": 9, "false_token_id": 10} if settings is None else settings
    write_json(folder / "1_LogitScore/config.json", given)
    return folder


def write_json(file: Path, value: Any) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(value), encoding="utf-8")


def load(folder: Path, max_model_len: int | None = None) -> ServedModel:
    return load_model(str(folder), MODEL_NAME, max_model_len)
