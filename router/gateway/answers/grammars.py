"""Compiles clients' grammars at the gateway, to refuse what workers could not use.

Measured with llguidance 1.9: the compiler releases the interpreter's lock, and its limits count work, so that a hostile
grammar costs a thread tens of milliseconds and the event loop nothing. So a thread is enough, without a helper process.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

import msgspec

from disagg.proto.structured_output.grammars import grammar_tokenizer, new_matcher
from disagg.router.gateway.requests.alternatives import check_alternatives
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

    def prepare(self) -> None:
        """Begin to load the vocabulary, so that the first request does not wait for it."""
        if self._model.info.eos_token_ids:
            # No daemon: native code that returns to an interpreter that is gone would crash.
            threading.Thread(target=self._prepare, name="grammar-tokenizer").start()

    def known(self, grammar: str) -> str | None:
        """What is wrong with a grammar, empty for a good one; None where that is not known yet."""
        key = _key(grammar)
        with self._lock:
            wrong = self._known.get(key)
            if wrong is not None:
                self._known.move_to_end(key)
        return wrong

    def compiled(self, grammar: str) -> str:
        """As `known`, compiled where it has to be. Long: not for the event loop."""
        wrong = self.known(grammar)
        if wrong is None:
            wrong = self._compile(grammar)
            with self._lock:
                self._known[_key(grammar)] = wrong
                while len(self._known) > _MAX_KNOWN:
                    self._known.popitem(last=False)
        return wrong

    def _prepare(self) -> None:
        with contextlib.suppress(ValueError):  # a request with a grammar is told
            self._loaded()

    def _compile(self, grammar: str) -> str:
        try:
            for each in msgspec.json.decode(grammar)["grammars"]:
                check_alternatives(each.get("json_schema"))
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
