"""Probabilities of output tokens, as the two ways to generate write them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from disagg.proto.messages import TokenLogprobs
from disagg.router.gateway.text.tokenizer import Tokenizer

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


class CompletionLogprobs:
    """`logprobs` of one text choice, which come in pieces: offsets go on from piece to piece."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def piece(self, token_ids: Sequence[int], logprobs: Iterable[TokenLogprobs]) -> dict[str, list[Any]]:
        """The next tokens: four lists of the same length."""
        tokens: list[str] = []
        own: list[float] = []
        tops: list[dict[str, float]] = []
        offsets: list[int] = []
        for token_id, one in zip(token_ids, logprobs, strict=True):
            text = token_text(self._tokenizer.token_bytes(token_id))
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


def token_text(data: bytes) -> str:
    """A token's bytes as text; incomplete characters read as U+FFFD."""
    return data.decode("utf-8", "replace")


def _chat_token(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    data = tokenizer.token_bytes(token_id)
    return {"token": token_text(data), "logprob": _finite(logprob), "bytes": list(data)}


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
