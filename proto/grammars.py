"""Grammars that constrain an answer: how gateway and workers compile them, with the same limits.

A grammar is a text in the JSON form of llguidance (`{"grammars": [...]}`), complete and bounded by the gateway. What
compiles at the gateway compiles at a worker: the limits count work, not time. llguidance is imported at the first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_GRAMMAR_BYTES = 32 << 10
"""Largest size of a grammar's text, both as the client wrote it and as workers get it."""
_BEGIN: Final = "\U000f0000"
_END: Final = "\U000f0001"
"""Private-use characters `_BEGIN` and `_END` stand around the names of special tokens."""
_PROVED_STEPS = 4
"""Number of tokens of an answer that `prove` tries."""


def grammar_limits() -> LLParserLimits:
    """Bounds on compiling a grammar and on computing one mask, in the library's own units."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_grammar_size=20_000,
        initial_lexer_fuel=50_000,
        step_lexer_fuel=20_000,
        step_max_items=10_000,
        max_lexer_states=10_000,
        verbose_errors=False,
    )


def grammar_tokenizer(tokenizer_json: str, vocab_size: int, eos_token_ids: tuple[int, ...], nonce: str) -> LLTokenizer:
    """The vocabulary as grammars need it; takes most of a second.

    A text in a grammar that spells a special token (`"<|im_end|>"` as a choice, or in an argument) is that text: no
    special token stands for it. A grammar can name one by its id only (`<[2]>`).

    Args:
        tokenizer_json: the content of tokenizer.json.
        vocab_size: the model's.
        eos_token_ids: what ends an answer.
        nonce: what no client knows.

    Raises:
        ValueError: the tokenizer cannot be used for grammars, or there is no end of sequence.
    """
    from llguidance import LLTokenizer

    if not eos_token_ids:
        raise ValueError("the model has no end-of-sequence token")
    try:
        return LLTokenizer(
            _without_special_texts(tokenizer_json, nonce), n_vocab=vocab_size, eos_token=list(eos_token_ids)
        )
    except Exception as error:  # the library raises several kinds
        raise ValueError(f"the tokenizer cannot be used for grammars: {error}") from error


def _without_special_texts(tokenizer_json: str, nonce: str) -> str:
    """The same tokenizer, but for the texts of its special tokens, which become such that no client writes: the library
    tokenizes what a grammar forces, and would find special tokens there. Ids stay."""
    description: dict[str, Any] = msgspec.json.decode(tokenizer_json)
    special = [token for token in description.get("added_tokens") or () if token["special"]]
    names = {token["content"]: f"{_BEGIN}{nonce}-{token['id']}{_END}" for token in special}
    for token in special:
        token["content"] = names[token["content"]]
    model = description["model"]
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(text, text): token_id for text, token_id in vocabulary.items()}
    elif isinstance(vocabulary, list):
        model["vocab"] = [[names.get(text, text), *rest] for text, *rest in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    description["post_processor"] = None  # names special tokens; adds what no answer has
    return msgspec.json.encode(description).decode()


def new_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Compiles without the interpreter's lock. Raises `ValueError` where the grammar is wrong or beyond the limits."""
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=grammar_limits())
    if matcher.is_error():
        raise ValueError(_first_line(matcher))
    return matcher


def _first_line(matcher: LLMatcher) -> str:
    """First line of the matcher's error, worded for the client."""
    line, *_ = matcher.get_error().split("\n")
    told, is_special, _ = line.partition("; following special tokens are available:")
    return f"{told}; a special token is named by its id, as <[2]>" if is_special else line[:300]


def prove(tokenizer: LLTokenizer, grammar: str) -> None:
    """Compile a grammar, and do with it some of what a worker does: compute masks, take tokens, look for forced ones.

    Raises `ValueError` where it is wrong or beyond the limits. Where the library itself fails, this process ends: so
    only one that may end calls it with a client's grammar.
    """
    matcher = new_matcher(tokenizer, grammar)
    for step in range(_PROVED_STEPS):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if step == 0 and matcher.is_error():
            raise ValueError(_first_line(matcher))
        if matcher.is_error() or matcher.is_stopped() or not mask:
            return
        forced = matcher.compute_ff_tokens()
        lowest = (mask & -mask).bit_length() - 1
        matcher.consume_tokens(forced[:1] or [lowest if step % 2 else mask.bit_length() - 1])
