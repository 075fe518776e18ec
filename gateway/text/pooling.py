"""What a checkpoint says of vectors: which models give some, and how. Read from the files of sentence-transformers
(`modules.json` with the settings of its modules) and, for rerankers, from vLLM's `classifier_from_token`.

    modules.json: Pooling      an embedding model; `1_Pooling/config.json` says which hidden states become the vector
    modules.json: LogitScore   a reranker: the probability of one token against another behind query and document
    classifier_from_token      the same by texts of tokens, [no, yes], in config.json

A model is either of these or it generates; what its files ask for and is not done is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import tokenizers

from disagg.gateway.text.checkpoint import read_optional, read_required
from disagg.proto.errors import ConfigError
from disagg.proto.messages import PoolingKind

_MODES: Final[dict[str, PoolingKind]] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_MODE_NAMES: Final[dict[str, PoolingKind]] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
_DECODERS: Final = ("qwen3",)
"""Values of `model_type` of embedding models whose leading dimensions are vectors of their own."""
_RERANKERS: Final = ("qwen3",)
"""Values of `model_type` of rerankers whose prompt is `RERANK_TEMPLATE`."""

RERANK_INSTRUCTION: Final = "Given a web search query, retrieve relevant passages that answer the query"
RERANK_TEMPLATE: Final = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct"
    ' provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {{ messages[0].content }}\n<Query>: {{ messages[1].content }}\n<Document>: {{ messages[2].content }}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n{{ '\\n' }}"
)
"""Prompt of Qwen3-Reranker (its model card): system, user and assistant of the turns are instruction, query and
document. Jinja drops a line end at the end of a template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingInfo:
    """How a model makes vectors."""

    kind: PoolingKind
    hidden_size: int
    """Dimensions of a vector."""
    normalize: bool = True
    has_any_dimensions: bool = False
    """Whether any number of leading dimensions is a vector, too."""
    dimensions: tuple[int, ...] = ()
    """Numbers of leading dimensions that are vectors, too; empty where all or none are."""
    score_ids: tuple[int, ...] = ()
    """Token whose probability is the score of a reranker, and the one that it is weighed against."""
    max_tokens: int | None = None
    """Longest text in tokens by the files of sentence-transformers; None where they name none."""


class _Module(msgspec.Struct, frozen=True):
    type: str
    path: str = ""


class _Config(msgspec.Struct, frozen=True):
    model_type: str = ""
    hidden_size: int | None = None
    is_matryoshka: bool | None = None
    matryoshka_dimensions: list[int] | None = None
    classifier_from_token: list[str] | None = None


class _SentenceConfig(msgspec.Struct, frozen=True):
    max_seq_length: int | None = None
    do_lower_case: bool = False


class _LogitScore(msgspec.Struct, frozen=True):
    true_token_id: int
    false_token_id: int | None = None


def read_pooling(folder: Path, backend: tokenizers.Tokenizer) -> PoolingInfo | None:
    """How the model of a checkpoint folder makes vectors or scores; None for one that generates.

    Raises:
        ConfigError: naming file and field, for what is not supported.
    """
    config_file, modules_file = folder / "config.json", folder / "modules.json"
    config = read_required(config_file, _Config)
    modules = read_optional(modules_file, list[_Module])
    if config.classifier_from_token is not None:
        ids = _ids_of(config_file, config.classifier_from_token, backend)
        return _reranker(config_file, config, score_ids=ids)
    if modules is None:
        return None
    kinds = [module.type.rpartition(".")[2] for module in modules]
    for module, kind in zip(modules, kinds, strict=True):
        if kind not in ("Transformer", "Pooling", "Normalize", "LogitScore"):
            raise ConfigError(
                f"{modules_file}: `type` {module.type!r} is not supported; supported are Transformer, Pooling, "
                "Normalize and LogitScore"
            )
    if "LogitScore" in kinds:
        file = folder / modules[kinds.index("LogitScore")].path / "config.json"
        scored = read_required(file, _LogitScore)
        if scored.false_token_id is None:
            raise ConfigError(f"{file}: `false_token_id` null is not supported: a score is weighed against a token")
        return _reranker(config_file, config, score_ids=(scored.true_token_id, scored.false_token_id))
    if "Pooling" not in kinds:
        raise ConfigError(f"{modules_file}: no module of type Pooling or LogitScore")
    sentence_file = folder / "sentence_bert_config.json"
    sentence = read_optional(sentence_file, _SentenceConfig) or _SentenceConfig()
    if sentence.do_lower_case:
        raise ConfigError(f"{sentence_file}: `do_lower_case` true is not supported; the tokenizer may do that")
    kind = _kind_of(folder / modules[kinds.index("Pooling")].path / "config.json")
    dimensions = tuple(config.matryoshka_dimensions or ())
    is_nested = config.is_matryoshka
    if is_nested is None:
        is_nested = config.model_type in _DECODERS and kind == "last"
    return PoolingInfo(
        kind=kind,
        hidden_size=_hidden_size(config_file, config),
        normalize="Normalize" in kinds,
        has_any_dimensions=is_nested and not dimensions,
        dimensions=dimensions,
        max_tokens=sentence.max_seq_length,
    )


def _kind_of(file: Path) -> PoolingKind:
    """The one way of pooling that a module has."""
    settings = read_required(file, dict[str, Any])
    if settings.get("include_prompt") is False:
        raise ConfigError(f"{file}: `include_prompt` false is not supported: all tokens of a text are pooled")
    mode = settings.get("pooling_mode")
    if mode is not None:
        if mode not in _MODE_NAMES:
            raise ConfigError(f"{file}: `pooling_mode` {mode!r} is not supported; supported are {_listed(_MODE_NAMES)}")
        return _MODE_NAMES[mode]
    wanted = [name for name, value in settings.items() if name.startswith("pooling_mode_") and value]
    if len(wanted) != 1:
        raise ConfigError(f"{file}: exactly one `pooling_mode_...` must be true, not {', '.join(wanted) or 'none'}")
    if wanted[0] not in _MODES:
        raise ConfigError(f"{file}: `{wanted[0]}` true is not supported; supported are {_listed(_MODES)}")
    return _MODES[wanted[0]]


def _reranker(file: Path, config: _Config, score_ids: tuple[int, int]) -> PoolingInfo:
    if config.model_type not in _RERANKERS:
        raise ConfigError(
            f"{file}: a reranker of `model_type` {config.model_type!r} is not supported; supported is "
            f"{_listed(_RERANKERS)}, whose prompt is known"
        )
    return PoolingInfo(kind="score", hidden_size=_hidden_size(file, config), score_ids=score_ids)


def _ids_of(file: Path, texts: list[str], backend: tokenizers.Tokenizer) -> tuple[int, int]:
    ids = [backend.token_to_id(text) for text in texts]
    if len(ids) != 2 or None in ids:
        raise ConfigError(f"{file}: `classifier_from_token` {texts!r} must be two tokens of the vocabulary: no, yes")
    return ids[1], ids[0]


def _hidden_size(file: Path, config: _Config) -> int:
    if config.hidden_size is None:
        raise ConfigError(f"{file}: Object missing required field `hidden_size`")
    return config.hidden_size


def _listed(names: Any) -> str:
    return ", ".join(names)
