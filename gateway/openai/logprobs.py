"""Probabilities of output tokens, as the two ways to generate write them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from disagg.gateway.text.tokenizer import Tokenizer
from disagg.proto.messages import TokenLogprobs

LEAST_LOGPROB: Final = -9999.0
"""JSON has no infinity; clients of this API get this value instead."""


def chat_logprobs(token_ids: Sequence[int], logprobs: Iterable[TokenLogprobs], tokenizer: Tokenizer) -> dict[str, Any]:
    """`logprobs` of a chat choice: each token with its bytes and the likeliest ones."""
    content = [
        {
            **_chat_token(token_id, one.logprob, tokenizer),
            "top_logprobs": [
                _chat_token(top_id, top, tokenizer) for top_id, top in zip(one.top_ids, one.top_logprobs, strict=True)
            ],
        }
        for token_id, one in zip(token_ids, logprobs, strict=True)
    ]
    return {"content": content}


def prompt_logprobs(token_ids: Sequence[int], logprobs: Iterable[TokenLogprobs], tokenizer: Tokenizer) -> list[Any]:
    """vLLM's `prompt_logprobs`: of each token but the first its own and the likeliest ones, by id. The rank of one that
    is not among these is not known."""
    found: list[Any] = [None]
    for token_id, one in zip(token_ids[1:], logprobs, strict=True):
        ranked = zip(one.top_ids, one.top_logprobs, strict=True)
        top = {str(i): _ranked(i, logprob, rank, tokenizer) for rank, (i, logprob) in enumerate(ranked, start=1)}
        own = str(token_id)
        found.append({own: top.pop(own, None) or _ranked(token_id, one.logprob, None, tokenizer), **top})
    return found


def _ranked(token_id: int, logprob: float, rank: int | None, tokenizer: Tokenizer) -> dict[str, Any]:
    return {"logprob": _finite(logprob), "rank": rank, "decoded_token": token_text(tokenizer.token_bytes(token_id))}


class CompletionLogprobs:
    """`logprobs` of one text choice, which come in pieces: offsets go on from piece to piece."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def prompt(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
        """A prompt that the text repeats, before the other pieces: its first token has no logprob."""
        text = token_text(self._tokenizer.token_bytes(token_ids[0]))
        self._offset += len(text)
        first: dict[str, list[Any]] = {
            "tokens": [text],
            "token_logprobs": [None],
            "top_logprobs": [None],
            "text_offset": [0],
        }
        return joined(first, self.piece(token_ids[1:], logprobs))

    def piece(
        self,
        token_ids: Sequence[int],
        logprobs: Iterable[TokenLogprobs],
        skipped: Mapping[int, int] = MappingProxyType({}),
    ) -> dict[str, list[Any]]:
        """The next tokens: four lists of the same length. `skipped`: index of a token here -> characters before it that
        have no token, see `Delta`."""
        tokens: list[str] = []
        own: list[float] = []
        tops: list[dict[str, float]] = []
        offsets: list[int] = []
        for i, (token_id, one) in enumerate(zip(token_ids, logprobs, strict=True)):
            text = token_text(self._tokenizer.token_bytes(token_id))
            self._offset += skipped.get(i, 0)
            tokens.append(text)
            own.append(_finite(one.logprob))
            tops.append(self._top(text, one))
            offsets.append(self._offset)
            self._offset += len(text)
        return {"tokens": tokens, "token_logprobs": own, "top_logprobs": tops, "text_offset": offsets}

    def _top(self, text: str, one: TokenLogprobs) -> dict[str, float]:
        """The likeliest texts and the token's own. Of tokens that read alike, the likeliest one."""
        top: dict[str, float] = {}
        for top_id, logprob in zip(one.top_ids, one.top_logprobs, strict=True):
            top.setdefault(token_text(self._tokenizer.token_bytes(top_id)), _finite(logprob))
        top.setdefault(text, _finite(one.logprob))
        return top


def joined(before: dict[str, list[Any]], after: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Two pieces as one."""
    return {name: values + after[name] for name, values in before.items()}


def token_text(data: bytes) -> str:
    """A token's bytes as text; incomplete characters read as U+FFFD."""
    return data.decode("utf-8", "replace")


def _chat_token(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    data = tokenizer.token_bytes(token_id)
    return {"token": token_text(data), "logprob": _finite(logprob), "bytes": list(data)}


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
