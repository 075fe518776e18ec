"""Compiles clients' grammars at the gateway, to refuse what workers could not use.

Measured with llguidance 1.9: the compiler releases the interpreter's lock, and its limits count work, so that a hostile
grammar costs a thread tens of milliseconds and the event loop nothing. So a thread is enough, without a helper process.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from disagg.proto.errors import InvalidRequestError
from disagg.proto.grammars import grammar_tokenizer, new_matcher
from disagg.router.gateway.text.tokenizer import ServedModel

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_MAX_KNOWN = 1024
"""Verdicts that are kept, of 32 bytes and a short message each."""


class Grammars:
    """Verdicts on grammars for one model; any thread may ask."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._known: OrderedDict[bytes, str] = OrderedDict()
        """By hash: what is wrong with it, empty for a good one."""

    def is_known(self, grammar: str) -> bool:
        """Whether `check` answers at once."""
        return _key(grammar) in self._known

    def check(self, grammar: str, field: str) -> None:
        """Raises `InvalidRequestError` naming `field` if workers could not use the grammar. Long: not for the event
        loop unless it is known."""
        key = _key(grammar)
        with self._lock:
            wrong = self._known.get(key)
            if wrong is not None:
                self._known.move_to_end(key)
        if wrong is None:
            wrong = self._compile(grammar)
            with self._lock:
                self._known[key] = wrong
                while len(self._known) > _MAX_KNOWN:
                    self._known.popitem(last=False)
        if wrong:
            raise InvalidRequestError(field, wrong)

    def _compile(self, grammar: str) -> str:
        try:
            matcher = new_matcher(self._loaded(), grammar)
            matcher.compute_bitmask()
        except ValueError as error:
            return f"cannot be used: {error}"
        return "" if not matcher.is_error() else f"cannot be used: {matcher.get_error().splitlines()[0][:300]}"

    def _loaded(self) -> LLTokenizer:
        with self._loading:
            if self._tokenizer is None:
                info = self._model.info
                text = self._model.tokenizer.backend.to_str()
                self._tokenizer = grammar_tokenizer(text, info.vocab_size, info.eos_token_ids)
            return self._tokenizer


def _key(grammar: str) -> bytes:
    return hashlib.sha256(grammar.encode()).digest()
