"""The JSON files of a checkpoint folder, as far as a gateway needs them: limits, special tokens, chat template.

The files are those that `save_pretrained` writes: `config.json`, and where present `generation_config.json`,
`tokenizer_config.json`, `special_tokens_map.json` and `chat_template.jinja`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from disagg.proto.errors import ConfigError

EosIds = int | list[int] | None


class ModelConfig(msgspec.Struct, frozen=True):
    """Fields read from `config.json`, or from its `text_config` where the model has other parts, too."""

    vocab_size: int | None = None
    """Only a `text_config` may leave it out, where its class has a default."""
    max_position_embeddings: int | None = None
    eos_token_id: EosIds = None


class _ConfigFile(ModelConfig, frozen=True):
    text_config: ModelConfig | None = None


class GenerationConfig(msgspec.Struct, frozen=True):
    """Fields read from `generation_config.json`."""

    eos_token_id: EosIds = None


class TokenContent(msgspec.Struct, frozen=True):
    """A token that was written with its options; only its text matters here."""

    content: str


Token = str | TokenContent | None


class NamedTemplate(msgspec.Struct, frozen=True):
    """One of several chat templates."""

    name: str
    template: str


class SpecialTokens(msgspec.Struct, frozen=True):
    """Fields of `special_tokens_map.json`, and the same keys of `tokenizer_config.json`."""

    bos_token: Token = None
    eos_token: Token = None
    unk_token: Token = None
    pad_token: Token = None
    sep_token: Token = None
    cls_token: Token = None
    mask_token: Token = None

    def as_text(self) -> dict[str, str]:
        """The tokens that are set: name -> text."""
        pairs = ((name, getattr(self, name)) for name in SpecialTokens.__struct_fields__)
        return {name: token if isinstance(token, str) else token.content for name, token in pairs if token is not None}


class TokenizerConfig(SpecialTokens, frozen=True):
    """Fields read from `tokenizer_config.json`."""

    chat_template: str | list[NamedTemplate] | None = None


J = TypeVar("J")


def read_required(path: Path, kind: type[J]) -> J:
    """Parse a JSON file. Raises `ConfigError` naming the file where it is missing or does not fit."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); is this a model folder?") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error


def read_optional(path: Path, kind: type[J]) -> J | None:
    """As `read_required`, but `None` where there is no such file."""
    return read_required(path, kind) if path.exists() else None


def model_config(folder: Path) -> ModelConfig:
    """What `config.json` says of the text. Raises `ConfigError` as `read_required` does."""
    file = folder / "config.json"
    config = read_required(file, _ConfigFile)
    text = config.text_config
    if text is not None:
        return text if config.eos_token_id is None else msgspec.structs.replace(text, eos_token_id=config.eos_token_id)
    if config.vocab_size is None:
        raise ConfigError(f"{file}: Object missing required field `vocab_size`")
    return config


def special_tokens(folder: Path) -> dict[str, str]:
    """Special tokens by name (`bos_token`...); `special_tokens_map.json` goes before `tokenizer_config.json`."""
    tokens: dict[str, str] = {}
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        found = read_optional(folder / name, SpecialTokens)
        if found is not None:
            tokens |= found.as_text()
    return tokens


def chat_template_source(folder: Path) -> str | None:
    """The chat template's source; `chat_template.jinja` goes before `tokenizer_config.json`. `None` without one."""
    file = folder / "chat_template.jinja"
    if file.exists():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file}: {error}") from error
    config = read_optional(folder / "tokenizer_config.json", TokenizerConfig)
    templates = None if config is None else config.chat_template
    if isinstance(templates, list):
        return next((entry.template for entry in templates if entry.name == "default"), None)
    return templates


def eos_ids(folder: Path, model: ModelConfig) -> tuple[int, ...]:
    """Ids that end an answer, by `generation_config.json` or else `config.json`; empty where neither names one."""
    generation = read_optional(folder / "generation_config.json", GenerationConfig)
    for ids in (generation.eos_token_id if generation else None, model.eos_token_id):
        if ids is not None:
            found = (ids,) if isinstance(ids, int) else tuple(dict.fromkeys(ids))
            _check_ids(folder, found, model.vocab_size)
            return found
    return ()


def _check_ids(folder: Path, ids: tuple[int, ...], vocab_size: int | None) -> None:
    for token_id in ids:
        if token_id < 0 or (vocab_size is not None and token_id >= vocab_size):
            raise ConfigError(f"{folder}: eos_token_id {token_id} is not in the vocabulary of {vocab_size}")
