"""Whether two checkpoints mean the same by each token id. Reads their tokenizer.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from disagg.engine.checkpoint.checkpoint import read_model_config
from disagg.engine.checkpoint.json_fields import read_json_object
from disagg.proto.errors import ConfigError


def check_draft_vocabulary(folder: str | Path, draft: str | Path, field: str) -> None:
    """Compare the vocabularies of a model and of its draft model, token by token. Ids past the tokens of both, which
    pad the embeddings, do not count.

    Raises:
        ConfigError: naming `field`, for a draft model whose vocabulary differs or is larger.
    """
    size, draft_size = read_model_config(folder).vocab_size, read_model_config(draft).vocab_size
    if draft_size > size:
        raise ConfigError(f"{field}: {draft} has a vocabulary of {draft_size} tokens, the model one of {size}")
    tokens, draft_tokens = _tokens(folder), _tokens(draft)
    for token_id in sorted(tokens.keys() | draft_tokens.keys()):
        token, draft_token = tokens.get(token_id), draft_tokens.get(token_id)
        if token != draft_token:
            raise ConfigError(
                f"{field}: {draft} has another vocabulary: token {token_id} is {_named(draft_token)}, in the model "
                f"{_named(token)}"
            )


def _named(token: str | None) -> str:
    return "none" if token is None else repr(token)


def _tokens(folder: str | Path) -> dict[int, str]:
    """Tokens by id, special ones included."""
    tokenizer = read_json_object(Path(folder) / "tokenizer.json")
    found: dict[int, str] = {}
    model = tokenizer.get("model")
    vocabulary: Any = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        found.update({token_id: token for token, token_id in vocabulary.items()})
    elif isinstance(vocabulary, list):  # of a unigram model: pairs of token and score
        found.update({token_id: str(entry[0]) for token_id, entry in enumerate(vocabulary)})
    for added in tokenizer.get("added_tokens") or []:
        found[added["id"]] = added["content"]
    return found
