"""Requests as clients may write them, for property tests: each field is well meant, or anything that its type can hold,
such as NaN, an integer of thousands of bits, half of a surrogate pair.

`generation_inputs` gives about as many requests that are taken as requests that are refused.
"""

from __future__ import annotations

import math
from typing import Any

from hypothesis import strategies as st

from disagg.gateway.requests.request import ChatPrompt, GenerationInput, IdsPrompt, TextPrompt
from disagg.gateway.requests.validate import Limits
from disagg.gateway.text.chat_template import ChatTurn

ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=12)
"""With lone surrogates and control characters."""
ANY_INT = st.one_of(
    st.integers(-3, 25),
    st.integers(),
    st.sampled_from([2**31, 2**32, 2**63, 2**64 - 1, 2**64, -(2**63), 10**400, -(10**400), 10**4000, -(10**4000)]),
)
"""None has more than the 4300 digits that Python prints: a report of a failure must be able to show it."""
ANY_FLOAT = st.one_of(st.floats(), st.sampled_from([math.nan, math.inf, -math.inf, 1e-60, 1e300, -0.0]), ANY_INT)
"""An integer is a number too, in JSON."""


def generation_inputs(limits: Limits) -> st.SearchStrategy[GenerationInput]:
    """Any input of the right types, of which up to three fields may be anything."""
    good, wild = _good_fields(limits), _wild_fields(limits)

    @st.composite
    def build(draw: st.DrawFn) -> GenerationInput:
        required = {"model": good["model"], "prompt": good["prompt"]}
        fields: dict[str, Any] = draw(
            st.fixed_dictionaries(required, optional={name: one for name, one in good.items() if name not in required})
        )
        for name in draw(st.lists(st.sampled_from(sorted(wild)), max_size=3, unique=True)):
            fields[name] = draw(wild[name])
        return GenerationInput(**fields)

    return build()


def _good_fields(limits: Limits) -> dict[str, st.SearchStrategy[Any]]:
    model = limits.model
    token_ids = st.integers(0, model.vocab_size - 1)
    text = st.text(min_size=1, max_size=8)
    turns = st.builds(ChatTurn, st.sampled_from(["user", "assistant"]), st.text(max_size=6), st.just(""))
    return {
        "model": st.just(model.name),
        "prompt": st.one_of(
            st.builds(TextPrompt, text),
            st.builds(IdsPrompt, st.lists(token_ids, min_size=1, max_size=20).map(tuple)),
            st.builds(ChatPrompt, st.lists(turns, min_size=1, max_size=2).map(tuple)),
        ),
        "temperature": st.floats(0, 100),
        "top_p": st.floats(0.01, 1),
        "top_k": st.integers(-1, 2**31),
        "min_p": st.floats(0, 1),
        "seed": st.integers(0, 2**64 - 1),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.01, 100),
        "logit_bias": st.dictionaries(token_ids, st.floats(-100, 100), max_size=4),
        "logprobs": st.integers(0, 20),
        "max_tokens": st.integers(8, 16),
        "min_tokens": st.integers(0, 8),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.lists(token_ids, max_size=3).map(tuple),
        "stop": st.lists(text, max_size=3).map(tuple),
        "n": st.integers(1, 128),
        "cache_salt": st.text(max_size=6),
        "speculation": st.sampled_from([None, "auto", "off"]),
    }


def _wild_fields(limits: Limits) -> dict[str, st.SearchStrategy[Any]]:
    model = limits.model
    token_ids = st.one_of(st.integers(-1, model.vocab_size), ANY_INT)
    long_text = st.integers(1, limits.max_prompt_bytes + 2).map("x".__mul__)
    roles = st.one_of(st.sampled_from(["system", "user", "tool"]), ANY_TEXT)
    turns = st.builds(ChatTurn, roles, ANY_TEXT, st.just(""))
    numbers = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    counts = ("top_k", "seed", "logprobs", "max_tokens", "min_tokens", "n")
    return {
        **dict.fromkeys(numbers, ANY_FLOAT),
        **dict.fromkeys(counts, ANY_INT),
        "model": ANY_TEXT,
        "prompt": st.one_of(
            st.none(),
            st.builds(TextPrompt, st.one_of(ANY_TEXT, long_text)),
            st.builds(IdsPrompt, st.lists(token_ids, max_size=model.max_model_len + 2).map(tuple)),
            st.builds(ChatPrompt, st.lists(turns, max_size=3).map(tuple)),
        ),
        "logit_bias": st.one_of(
            st.dictionaries(token_ids, ANY_FLOAT, max_size=3),
            st.integers(1020, 1030).map(lambda size: dict.fromkeys(range(size), 1.0)),
        ),
        "stop_token_ids": st.lists(token_ids, max_size=66).map(tuple),
        "stop": st.lists(st.one_of(ANY_TEXT, st.just("x" * 257)), max_size=18).map(tuple),
        "cache_salt": st.one_of(ANY_TEXT, st.integers(0, 300).map("s".__mul__)),
        "speculation": ANY_TEXT,
    }
