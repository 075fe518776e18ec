"""The bytes behind single tokens. A token may be a part of a character, so only bytes are exact.

Vocabularies write tokens in one of two ways: byte-level ones in an alphabet of 256 printable characters, one for each
byte; the others as text, with U+2581 for a space and `<0x0A>` for a single byte. The tokenizer's decoder shows which.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

import tokenizers

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK: Final = "\u2581"
_NFC_SHRINKS_BY: Final = 4
"""A character and the marks that it is composed with are at most three times as long as the composed one."""


class TokenPieces:
    """Reads the pieces of one vocabulary. Stateless but for what it learned about the vocabulary at the start."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._added = {token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items()}
        self._steps = _decoder_steps(backend)
        self._byte_of = {char: byte for byte, char in enumerate(byte_alphabet())}

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token; none for an id that the tokenizer does not have."""
        if token_id in self._added:
            return str(self._added[token_id]).encode()
        piece = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        if "ByteLevel" in self._steps:
            return b"".join(self._from_alphabet(char) for char in piece)
        if "ByteFallback" in self._steps and (match := _BYTE_TOKEN.fullmatch(piece)):
            return bytes.fromhex(match[1])
        return str(piece).replace(_SPACE_MARK, " ").encode()

    def max_bytes_per_token(self) -> int | None:
        """The most bytes of a text that one token can stand for; `None` where that is not known: the normalizer may
        drop text, an unknown word is one token, or a token takes the white space beside it."""
        shrinks_by = _normalizer_shrinks_by(self._backend)
        is_complete = bool({"ByteLevel", "ByteFallback"} & self._steps)
        takes_space = any(token.lstrip or token.rstrip for token in self._backend.get_added_tokens_decoder().values())
        if shrinks_by is None or not is_complete or takes_space:
            return None
        ids = range(self._backend.get_vocab_size())
        return shrinks_by * max((len(self.bytes_of(token_id)) for token_id in ids), default=1)

    def _from_alphabet(self, char: str) -> bytes:
        byte = self._byte_of.get(char)
        return char.encode() if byte is None else bytes((byte,))


def byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE (GPT-2): printable Latin-1 stands for itself,
    the other bytes are counted up from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _normalizer_shrinks_by(backend: tokenizers.Tokenizer) -> int | None:
    """How many bytes of a text become one of what is tokenized, at the most; `None` where there is no such limit."""
    if backend.normalizer is None:
        return 1
    description: dict[str, Any] = json.loads(backend.normalizer.__getstate__())
    shrinks_by = 1
    for step in description.get("normalizers", [description]):
        if step["type"] == "NFC":
            shrinks_by *= _NFC_SHRINKS_BY
        elif step["type"] != "Prepend" and not _marks_spaces(step):
            return None
    return shrinks_by


def _marks_spaces(step: dict[str, Any]) -> bool:
    return bool(step["type"] == "Replace" and step["pattern"] == {"String": " "} and step["content"] == _SPACE_MARK)


def _decoder_steps(backend: tokenizers.Tokenizer) -> frozenset[str]:
    """The kinds of the decoder's steps."""
    decoder = backend.decoder
    if decoder is None:
        return frozenset()
    description: dict[str, Any] = json.loads(decoder.__getstate__())
    steps = description.get("decoders", [description])
    return frozenset(str(step["type"]) for step in steps)
