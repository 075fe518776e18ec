"""Users' text that spells special tokens out stays text: `<|im_end|>` in a message ends no turn.

    contents ──protect──> marks where special tokens are spelled out ──template──> rendered text
        rendered text ──encode──> the template's own special tokens are ids; each mark is read as ordinary text

A second tokenizer reads special tokens as ordinary text, and has a stand-in for each of them, which replaces those that
the template wrote. So the text between them is split as it always is, and only in place of the marks the ids differ.
Text without special tokens takes another way and is not touched.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import tokenizers

from disagg.gateway.text.chat_template import ChatTurn

_BEGIN, _END = "\U000f0000", "\U000f0001"
"""Private-use characters around marks and stand-ins."""


class LiteralText:
    """Protects the special tokens of one tokenizer in messages. Stateless, so several threads may use it.

    Args:
        backend: the model's tokenizer; must have special tokens.
        nonce: unguessable part of all marks, so that no message has one.
    """

    def __init__(self, backend: tokenizers.Tokenizer, nonce: str) -> None:
        special = {i: token for i, token in backend.get_added_tokens_decoder().items() if token.special}
        self._contents = sorted((token.content for token in special.values()), key=len, reverse=True)
        self._index = {content: i for i, content in enumerate(self._contents)}
        self._pattern = re.compile(_any_of(self._contents))
        self._nonce = nonce
        self._mark = re.compile(f"{_BEGIN}{nonce}m(\\d+){_END}")
        self._backend = tokenizers.Tokenizer.from_str(backend.to_str())
        self._backend.encode_special_tokens = True
        self._id_of: dict[int, int] = {}
        for token_id, token in special.items():
            name = self._stand_in(token.content)
            self._backend.add_tokens(
                [
                    tokenizers.AddedToken(
                        name,
                        single_word=token.single_word,
                        lstrip=token.lstrip,
                        rstrip=token.rstrip,
                        normalized=token.normalized,
                        special=False,
                    )
                ]
            )
            self._id_of[self._backend.token_to_id(name)] = token_id

    def protect(self, turns: Sequence[ChatTurn]) -> list[ChatTurn] | None:
        """`turns` with a mark for each special token that is spelled out in a content; `None` if there is none."""
        if not any(self._pattern.search(text) for turn in turns for text in turn[1:]):
            return None
        return [ChatTurn(turn.role, *(self._pattern.sub(self._marked, text) for text in turn[1:])) for turn in turns]

    def restore(self, text: str) -> str:
        """Rendered text with its marks read."""
        return self._mark.sub(lambda found: self._contents[int(found[1])], text)

    def encode(self, text: str) -> list[int]:
        """Ids of rendered text with marks."""
        with_stand_ins = self._pattern.sub(lambda found: self._stand_in(found[0]), text)
        (encoding,) = self._backend.encode_batch_fast([self.restore(with_stand_ins)], add_special_tokens=False)
        return [self._id_of.get(token_id, token_id) for token_id in encoding.ids]

    def _marked(self, found: re.Match[str]) -> str:
        return f"{_BEGIN}{self._nonce}m{self._index[found[0]]}{_END}"

    def _stand_in(self, content: str) -> str:
        return f"{_BEGIN}{self._nonce}s{self._index[content]}{_END}"


def _any_of(words: Sequence[str]) -> str:
    """A pattern for the longest of some words. A tree of their beginnings: hundreds of words that begin alike, tried
    one after the other at each place, would take a second for a megabyte."""
    root: dict[str, Any] = {}
    for word in words:
        node = root
        for char in word:
            node = node.setdefault(char, {})
        node[""] = {}
    return _pattern_of(root)


def _pattern_of(node: dict[str, Any]) -> str:
    branches = [re.escape(char) + _pattern_of(rest) for char, rest in node.items() if char]
    if not branches:
        return ""
    joined = branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
    return f"(?:{joined})?" if "" in node else joined
