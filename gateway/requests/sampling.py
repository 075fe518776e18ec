"""How to sample, from a client's options to what workers need. Pure.

GenerationInput ──check_sampling──> Sampling, but for `max_tokens` and `seed`, which depend on the tokenized prompt
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping

import msgspec

from disagg.gateway.requests.request import GenerationInput
from disagg.gateway.requests.structured import check_structured
from disagg.gateway.requests.values import (
    FloatRange,
    as_float32,
    as_floats32,
    check_float,
    check_ids,
    check_int,
    check_length,
    check_unicode,
    shown,
)
from disagg.gateway.text.tokenizer import ModelInfo
from disagg.proto.errors import ContextLengthError, InvalidRequestError
from disagg.proto.messages import Sampling

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_IDS = 64
MAX_LOGIT_BIASES = 1024
MAX_LOGPROBS = 20
MAX_PROMPT_VALUES = 16_384
"""Maximum number of log-probabilities of one prompt: of its tokens and of the likeliest ones beside each."""
MAX_SEED = (1 << 64) - 1
MIN_REPETITION_PENALTY = as_float32(0.01)
"""Smallest penalty. A logit is divided by it, and a smaller one could make the logit infinite."""

FLOAT_RANGES = {
    "temperature": FloatRange(0, 100),
    "top_p": FloatRange(0, 1),
    "min_p": FloatRange(0, 1),
    "presence_penalty": FloatRange(-2, 2),
    "frequency_penalty": FloatRange(-2, 2),
    "repetition_penalty": FloatRange(MIN_REPETITION_PENALTY, 100),
}
_LEAST_TOP_P = as_float32(1e-6)
"""Stands for 0: the likeliest token alone is kept."""
_LOGIT_BIAS = FloatRange(-100, 100)


def check_sampling(given: GenerationInput, model: ModelInfo) -> Sampling:
    """The sampling parameters, without `max_tokens` and `seed`. Raises `InvalidRequestError` for any wrong field, and
    `ContextLengthError` for an answer that no context holds."""
    if given.seed is not None:
        check_int(given.seed, "sampling.seed", 0, MAX_SEED)
    floats = {
        name: check_float(value, f"sampling.{name}", allowed)
        for name, allowed in FLOAT_RANGES.items()
        if (value := getattr(given, name)) is not None
    }
    if "top_p" in floats:
        floats["top_p"] = max(floats["top_p"], _LEAST_TOP_P)
    min_tokens, stop_token_ids = _check_min_tokens(given, model), _check_stop_ids(given, model)
    if min_tokens and len(stop_token_ids) >= model.vocab_size:
        raise InvalidRequestError("stopping.min_tokens", "every token is a stop id, so none may come before them")
    others = Sampling(
        top_k=_check_top_k(given.top_k or 0, model.vocab_size),
        min_tokens=min_tokens,
        stop_token_ids=stop_token_ids,
        logit_bias=_check_logit_bias(given.logit_bias, model.vocab_size),
        logprobs=_check_logprobs(given, model.vocab_size),
        prompt_logprobs=_check_top(given.prompt_logprobs, "sampling.prompt_logprobs", model.vocab_size),
        grammar=check_structured(given),
    )
    return msgspec.structs.replace(others, **floats)


def check_stop_strings(stop: tuple[str, ...]) -> tuple[str, ...]:
    """Stop strings, each once. Raises `InvalidRequestError` for too many, or for one that cannot be matched."""
    check_length(len(stop), "stopping.stop", MAX_STOP_STRINGS)
    for i, text in enumerate(stop):
        field = f"stopping.stop[{i}]"
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            raise InvalidRequestError(field, f"must have 1 to {MAX_STOP_CHARS} characters, not {len(text)}")
        check_unicode(text, field)
    return tuple(dict.fromkeys(stop))


def answer_seed(seed: int, answer_index: int) -> int:
    """The seed of one of several answers to a request with `seed` (64 bits). The first answer's is `seed` itself, so
    that it is the answer to the same request with n = 1."""
    if answer_index == 0:
        return seed
    digest = hashlib.sha256(b"disagg/answer\0" + struct.pack("<QI", seed, answer_index)).digest()
    return int.from_bytes(digest[:8], "little")


def _check_top_k(top_k: int, vocab_size: int) -> int:
    """The valid `top_k`; 0 if it is off or keeps every token."""
    if top_k < -1:
        raise InvalidRequestError("sampling.top_k", f"must be at least 1, or 0 or -1 for off, not {shown(top_k)}")
    return top_k if 0 < top_k < vocab_size else 0


def _check_min_tokens(given: GenerationInput, model: ModelInfo) -> int:
    max_tokens, min_tokens = given.max_tokens, given.min_tokens or 0
    if max_tokens is not None and max_tokens < 1:
        raise InvalidRequestError("stopping.max_tokens", f"must be at least 1, not {shown(max_tokens)}")
    if max_tokens is not None and max_tokens >= model.max_model_len:  # A call is charged before it is tokenized.
        raise ContextLengthError.too_long(
            "stopping.max_tokens",
            model.max_model_len,
            f"you requested {shown(max_tokens)} tokens in the completion. Ask for at most {model.max_model_len - 1}",
        )
    if min_tokens < 0:
        raise InvalidRequestError("stopping.min_tokens", f"must be at least 0, not {shown(min_tokens)}")
    if max_tokens is not None and min_tokens > max_tokens:
        raise InvalidRequestError(
            "stopping.min_tokens", f"must be at most max_tokens {shown(max_tokens)}, not {shown(min_tokens)}"
        )
    return min_tokens


def _check_stop_ids(given: GenerationInput, model: ModelInfo) -> tuple[int, ...]:
    """The client's stop ids and, unless they are ignored, the model's end-of-sequence ids."""
    field = "stopping.stop_token_ids"
    check_length(len(given.stop_token_ids), field, MAX_STOP_IDS)
    own = () if given.ignore_eos else model.eos_token_ids
    return tuple(dict.fromkeys((*check_ids(given.stop_token_ids, field, model.vocab_size), *own)))


def _check_logit_bias(logit_bias: Mapping[int, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    """Pairs of token id and bias, ordered by token id."""
    field = "sampling.logit_bias"
    check_length(len(logit_bias), field, MAX_LOGIT_BIASES, "tokens")
    for token_id in logit_bias:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(field, f"there is no token {shown(token_id)} in a vocabulary of {vocab_size}")
    token_ids = sorted(logit_bias)
    biases = as_floats32([logit_bias[i] for i in token_ids], _LOGIT_BIAS)
    if biases is None:
        return tuple((i, check_float(logit_bias[i], f"{field}[{i}]", _LOGIT_BIAS)) for i in token_ids)
    return tuple(zip(token_ids, biases, strict=True))


def _check_logprobs(given: GenerationInput, vocab_size: int) -> int:
    """The number of log-probabilities, -1 for none. At least 0 with those of the prompt, which come with the first
    token's."""
    least = -1 if given.prompt_logprobs is None else 0
    return max(least, _check_top(given.logprobs, "sampling.logprobs", vocab_size))


def _check_top(num_top: int | None, field: str, vocab_size: int) -> int:
    """The number of likeliest tokens, -1 for none, at most the size of the vocabulary."""
    return -1 if num_top is None else min(check_int(num_top, field, 0, MAX_LOGPROBS), vocab_size)
