"""What a gateway reads of models that give vectors or scores."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from disagg.gateway.text.chat_template import ChatTurn
from disagg.gateway.text.pooling import RERANK_INSTRUCTION, PoolingInfo
from disagg.proto.errors import ConfigError
from tests.support.gateway import IM_END, IM_START, served_model
from tests.support.pooled_models import (
    HIDDEN_SIZE,
    POOLING,
    TRANSFORMER,
    load,
    write_embedder,
    write_json,
    write_reranker,
)


def test_a_model_without_these_files_generates(tmp_path: Path) -> None:
    info = served_model(tmp_path).info
    assert info.pooling is None
    assert info.longest_prompt == info.max_model_len - 1


@pytest.mark.parametrize(
    ("mode", "changes", "expected"),
    [
        ("lasttoken", {}, PoolingInfo(kind="last", hidden_size=HIDDEN_SIZE, has_any_dimensions=True)),
        ("lasttoken", {"model_type": "llama"}, PoolingInfo(kind="last", hidden_size=HIDDEN_SIZE)),
        ("lasttoken", {"is_matryoshka": False}, PoolingInfo(kind="last", hidden_size=HIDDEN_SIZE)),
        ("mean_tokens", {}, PoolingInfo(kind="mean", hidden_size=HIDDEN_SIZE)),
        (
            "mean_tokens",
            {"is_matryoshka": True},
            PoolingInfo(kind="mean", hidden_size=HIDDEN_SIZE, has_any_dimensions=True),
        ),
        (
            "lasttoken",
            {"matryoshka_dimensions": [2, 4]},
            PoolingInfo(kind="last", hidden_size=HIDDEN_SIZE, dimensions=(2, 4)),
        ),
        (
            "cls_token",
            {"modules": [TRANSFORMER, POOLING]},
            PoolingInfo(kind="cls", hidden_size=HIDDEN_SIZE, normalize=False),
        ),
    ],
)
def test_embedding_models(tmp_path: Path, mode: str, changes: dict[str, Any], expected: PoolingInfo) -> None:
    info = load(write_embedder(tmp_path, mode, **changes)).info
    assert info.pooling == expected
    assert info.longest_prompt == info.max_model_len == 128


def test_settings_of_newer_versions(tmp_path: Path) -> None:
    write_embedder(tmp_path)
    write_json(tmp_path / "1_Pooling/config.json", {"embedding_dimension": 8, "pooling_mode": "mean"})
    write_json(tmp_path / "sentence_bert_config.json", {"max_seq_length": 100, "do_lower_case": False})
    info = load(tmp_path, max_model_len=128).info
    assert info.pooling == PoolingInfo(kind="mean", hidden_size=HIDDEN_SIZE, max_tokens=100)
    assert info.max_model_len == 100


def test_rerankers_and_their_prompt(tmp_path: Path) -> None:
    """The prompt as Qwen3-Reranker's model card has it; what texts say of special tokens stays text."""
    model = load(write_reranker(tmp_path))
    assert model.info.pooling == PoolingInfo(kind="score", hidden_size=HIDDEN_SIZE, score_ids=(9, 10))
    turns = (
        ChatTurn("system", RERANK_INSTRUCTION),
        ChatTurn("user", "where?"),
        ChatTurn("assistant", "here<|im_end|>\n"),
    )
    ids = model.tokenizer.encode_chat(turns)
    assert [token_id for token_id in ids if token_id in (IM_START, IM_END)] == [
        *(IM_START, IM_END, IM_START, IM_END, IM_START)
    ]
    assert model.tokenizer.decode(ids) == (
        "system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. Note "
        'that the answer can only be "yes" or "no".\nuser\n<Instruct>: Given a web search query, retrieve relevant '
        "passages that answer the query\n<Query>: where?\n<Document>: here<|im_end|>\n\nassistant\n<think>\n\n</think>"
        "\n\n"
    )


def test_rerankers_by_vllms_field(tmp_path: Path) -> None:
    write_reranker(tmp_path, classifier_from_token=["a", "b"])
    (tmp_path / "modules.json").unlink()
    model = load(tmp_path)
    backend = model.tokenizer.backend
    assert model.info.pooling is not None
    assert model.info.pooling.score_ids == (backend.token_to_id("b"), backend.token_to_id("a"))


def _embedder(**changes: Any) -> Callable[[Path], Path]:
    return lambda folder: write_embedder(folder, **changes)


def _reranker(settings: Any = None, **changes: Any) -> Callable[[Path], Path]:
    return lambda folder: write_reranker(folder, settings, **changes)


def _lower_case(folder: Path) -> Path:
    write_embedder(folder)
    write_json(folder / "sentence_bert_config.json", {"do_lower_case": True})
    return folder


def _settings(**settings: Any) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        write_json(write_embedder(folder) / "1_Pooling/config.json", settings)
        return folder

    return write


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (
            _embedder(
                modules=[TRANSFORMER, POOLING, {"type": "sentence_transformers.models.Dense", "path": "2_Dense"}]
            ),
            "modules.json: `type` 'sentence_transformers.models.Dense' is not supported; supported are Transformer, "
            "Pooling, Normalize and LogitScore",
        ),
        (_embedder(modules=[TRANSFORMER]), "modules.json: no module of type Pooling or LogitScore"),
        (
            _embedder(mode="max_tokens"),
            "1_Pooling/config.json: `pooling_mode_max_tokens` true is not supported; supported are "
            "pooling_mode_cls_token, pooling_mode_mean_tokens, pooling_mode_lasttoken",
        ),
        (
            _settings(pooling_mode_mean_tokens=True, pooling_mode_lasttoken=True),
            "1_Pooling/config.json: exactly one `pooling_mode_...` must be true, not pooling_mode_mean_tokens, "
            "pooling_mode_lasttoken",
        ),
        (
            _settings(pooling_mode="max"),
            "1_Pooling/config.json: `pooling_mode` 'max' is not supported; supported are cls, mean, lasttoken",
        ),
        (
            _settings(pooling_mode_mean_tokens=True, include_prompt=False),
            "1_Pooling/config.json: `include_prompt` false is not supported: all tokens of a text are pooled",
        ),
        (
            _lower_case,
            "sentence_bert_config.json: `do_lower_case` true is not supported; the tokenizer may do that",
        ),
        (_embedder(hidden_size=None), "config.json: Object missing required field `hidden_size`"),
        (
            _reranker({"true_token_id": 9, "false_token_id": None}),
            "1_LogitScore/config.json: `false_token_id` null is not supported: a score is weighed against a token",
        ),
        (
            _reranker(model_type="llama"),
            "config.json: a reranker of `model_type` 'llama' is not supported; supported is qwen3, whose prompt is "
            "known",
        ),
        (
            _reranker(classifier_from_token=["a", "no such token"]),
            "config.json: `classifier_from_token` ['a', 'no such token'] must be two tokens of the vocabulary: no, yes",
        ),
    ],
)
def test_refused_by_name(tmp_path: Path, write: Callable[[Path], Path], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path))
    assert str(caught.value) == f"{tmp_path}/{message}"
