"""Probabilities of output tokens, as the two ways to generate write them.

A completion's tokens have places in its text. A token may be a part of a character, and some have no text: so a place
is the number of characters that were complete before the token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from disagg.gateway.text.detokenizer import IncrementalDecoder
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
        self._decoder = IncrementalDecoder(tokenizer)
        self._offset = 0

    def prompt(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], text: str) -> dict[str, list[Any]]:
        """A prompt that the text repeats, before the other pieces: its first token has no logprob. `text`: its own, in
        which special tokens may be spelled out."""
        decoder, offset = IncrementalDecoder(self._tokenizer), 0
        offsets: list[int] = []
        for token_id in token_ids:
            offsets.append(min(offset, len(text)))
            spelled = self._special_text(token_id)
            offset += len(spelled) if spelled and text.startswith(spelled, offset) else len(decoder.step(token_id))
        self._offset = len(text)
        return {
            "tokens": [self._name(token_id) for token_id in token_ids],
            "token_logprobs": [None, *(_finite(one.logprob) for one in logprobs)],
            "top_logprobs": [None, *map(self._top, token_ids[1:], logprobs)],
            "text_offset": offsets,
        }

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
            self._offset += skipped.get(i, 0)
            tokens.append(self._name(token_id))
            own.append(_finite(one.logprob))
            tops.append(self._top(token_id, one))
            offsets.append(self._offset)
            self._offset += len(self._decoder.step(token_id))
        return {"tokens": tokens, "token_logprobs": own, "top_logprobs": tops, "text_offset": offsets}

    def _top(self, token_id: int, one: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens and the token itself, by their names. Of tokens with one name, the likeliest one."""
        top: dict[str, float] = {}
        for top_id, logprob in zip(one.top_ids, one.top_logprobs, strict=True):
            top.setdefault(self._name(top_id), _finite(logprob))
        top.setdefault(self._name(token_id), _finite(one.logprob))
        return top

    def _name(self, token_id: int) -> str:
        """A token's text. One that is no text has its bytes in it, as OpenAI's API has them, since all parts of
        characters would read alike."""
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _special_text(self, token_id: int) -> str:
        """How a special token is spelled; empty for any other token."""
        is_special = token_id in self._tokenizer.special_token_ids
        return token_text(self._tokenizer.token_bytes(token_id)) if is_special else ""


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
