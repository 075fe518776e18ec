"""Checks a client's input and makes requests for the router. Pure: a function of the arguments.

    check_targets   the call's metadata or headers                  -> Targets
    check_request   everything that can be seen before tokenizing  -> CheckedRequest
    fit_prompt      what needs the prompt's ids: the context        -> Sampling

An error names the field as gRPC writes it, within GenerateRequest: `sampling.top_p`, `prompt.token_ids[3]`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from disagg.gateway.requests.request import ChatPrompt, GenerationInput, IdsPrompt, Prompt, Targets, TextPrompt
from disagg.gateway.requests.sampling import MAX_PROMPT_VALUES, check_sampling, check_stop_strings
from disagg.gateway.requests.values import check_ids, check_int, check_length, check_unicode, shown
from disagg.gateway.requests.verdicts import Decisions
from disagg.gateway.text.chat_template import NO_OPTIONS, ChatTurn, TemplateOptions
from disagg.gateway.text.tokenizer import ModelInfo
from disagg.proto.config import MAX_TARGET_MS, MIN_TPOT_MS
from disagg.proto.errors import ContextLengthError, DeadlineError, InvalidRequestError, ModelNotFoundError
from disagg.proto.messages import Pooling, Sampling

MAX_CHAT_MESSAGES = 4096
MAX_ANSWERS = 128
MAX_CACHE_SALT_BYTES = 256
RESUMED = "resume.token_ids"
_VERSION: Final = re.compile(r"([0-9a-f]{16})?")
ROLES = ("system", "user", "assistant")
SPECULATION = ("auto", "off")
TTFT_METADATA = "x-slo-ttft-ms"
"""A client's target for the time to the first token, in milliseconds."""
TPOT_METADATA = "x-slo-tpot-ms"
"""A client's target for the mean time between output tokens, in milliseconds."""
MAX_SESSION_CHARS = 256
"""Maximum characters of the name of a session."""
MAX_ECHOED_CHARS = 64
"""Maximum characters of a client's wrong value that an error message repeats."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The model and the maximum prompt size that requests are checked against."""

    model: ModelInfo
    max_prompt_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRequest:
    """A request in which nothing is wrong that can be seen before tokenizing."""

    prompt: Prompt
    sampling: Sampling
    """Sampling parameters, complete except for `max_tokens` and `seed`, which `fit_prompt` sets."""
    max_tokens: int | None
    """Maximum output tokens as the client sent them."""
    seed: int | None
    """Random seed as the client sent it."""
    stop: tuple[str, ...]
    """Stop strings; workers never see them."""
    num_answers: int
    structured_field: str
    """The client's field that an error of the grammar names."""
    cache_salt: str
    in_session: bool = False
    """Whether it is a turn of a conversation that has a name."""
    speculation: bool = True
    """Whether drafts may be computed for the answer."""
    splits_reasoning: bool = False
    functions: frozenset[str] = frozenset()
    """Names of the functions whose calls are separated from the answer's text."""
    max_prompt_tokens: int | None = None
    """Number of tokens to which the prompt is cut at its beginning; `None` for one that must fit as it is."""
    resumed: tuple[int, ...] = ()
    """Token ids of the answer that the client already has."""
    model_version: str = ""
    """Version of the model that generated the `resumed` tokens; empty for any."""
    pooling: Pooling | None = None
    """Set for a prompt of which a vector is wanted."""
    decisions: Decisions | None = None
    """Decisions of the guardrails on the prompt; None if they have not been asked yet."""


def check_request(given: GenerationInput, limits: Limits, time_left_s: float | None = None) -> CheckedRequest:
    """Check every field of `given`.

    Args:
        given: as it came in.
        limits: of the model and the gateway.
        time_left_s: until the deadline, `None` without one.

    Raises:
        DeadlineError: if no time is left.
        ModelNotFoundError: if the model is another one.
        ContextLengthError: if the prompt's ids alone are too many.
        InvalidRequestError: for any wrong field.
    """
    check_deadline(time_left_s)
    check_model(given.model, limits)
    sampling = check_sampling(given, limits.model)
    max_prompt_tokens = _check_truncation(given, limits.model)
    return CheckedRequest(
        prompt=check_prompt(given.prompt, limits, max_prompt_tokens),
        sampling=sampling,
        max_tokens=given.max_tokens,
        seed=given.seed,
        stop=check_stop_strings(given.stop),
        num_answers=1 if given.n is None else check_int(given.n, "n", 1, MAX_ANSWERS),
        structured_field="" if given.structured is None else given.structured.field,
        cache_salt=_check_cache_salt(given.cache_salt),
        in_session=check_session(given.session_id, "session_id"),
        speculation=_check_speculation(given.speculation),
        splits_reasoning=given.split_reasoning,
        functions=given.functions,
        max_prompt_tokens=max_prompt_tokens,
        pooling=given.pooling,
        model_version=_check_version(given.model_version),
        resumed=() if given.resumed is None else _check_resumed(given.resumed, given, sampling, limits.model),
    )


def check_other_prompt(checked: CheckedRequest, given: GenerationInput, limits: Limits) -> CheckedRequest:
    """Check `given`, which differs only in its prompt from the input of `checked`. Raises as `check_request`."""
    return replace(checked, prompt=check_prompt(given.prompt, limits, checked.max_prompt_tokens))


def fit_prompt(checked: CheckedRequest, prompt_token_ids: Sequence[int], limits: Limits, minted_seed: int) -> Sampling:
    """Check the tokenized prompt against the context, and complete the sampling parameters.

    Args:
        checked: what `check_request` gave.
        prompt_token_ids: the prompt, tokenized.
        limits: as for `check_request`.
        minted_seed: 64 random bits, used where the client gave no seed.

    Raises:
        ContextLengthError: if prompt and answer cannot fit the context.
        InvalidRequestError: if there is no token, or one that is not in the vocabulary.
    """
    field = checked.prompt.field
    if not prompt_token_ids:
        raise InvalidRequestError(field, "has no tokens")
    if max(prompt_token_ids) >= limits.model.vocab_size:
        raise InvalidRequestError(field, "has a token of the tokenizer that is not in the model's vocabulary")
    room = limits.model.max_model_len - len(prompt_token_ids)
    check_num_ids(len(prompt_token_ids), field, limits.model)
    for name, wanted in (("max_tokens", checked.max_tokens or 0), ("min_tokens", checked.sampling.min_tokens)):
        if wanted > room:
            raise ContextLengthError.too_long(
                f"stopping.{name}",
                limits.model.max_model_len,
                f"you requested {shown(len(prompt_token_ids) + wanted)} tokens ({len(prompt_token_ids)} in the prompt, "
                f"{shown(wanted)} in the completion). Shorten the prompt, or ask for at most {room}",
            )
    num_values = (1 + checked.sampling.prompt_logprobs) * len(prompt_token_ids)
    if num_values > MAX_PROMPT_VALUES:
        raise InvalidRequestError(
            "sampling.prompt_logprobs",
            f"{1 + checked.sampling.prompt_logprobs} for each of {len(prompt_token_ids)} tokens are more than "
            f"{MAX_PROMPT_VALUES}",
        )
    max_tokens = room if checked.max_tokens is None else checked.max_tokens
    if checked.pooling is not None:
        max_tokens = 1
    if len(checked.resumed) > max_tokens:
        raise InvalidRequestError(RESUMED, f"at most {max_tokens}, as many as the answer, not {len(checked.resumed)}")
    seed = minted_seed if checked.seed is None else checked.seed
    return msgspec.structs.replace(checked.sampling, max_tokens=max_tokens, seed=seed)


def check_targets(metadata: Iterable[tuple[str, str | bytes]]) -> Targets:
    """The targets in a call's metadata; where a key comes twice the first one counts. Raises `InvalidRequestError` for
    a value that is no positive number of milliseconds, or a TPOT below `MIN_TPOT_MS`."""
    found: dict[str, float] = {}
    for key, value in metadata:
        if key in (TTFT_METADATA, TPOT_METADATA) and key not in found:
            found[key] = check_millis(key, value, MIN_TPOT_MS if key == TPOT_METADATA else None) / 1000
    return Targets(found.get(TTFT_METADATA), found.get(TPOT_METADATA))


def check_deadline(time_left_s: float | None) -> None:
    """Raises `DeadlineError` if there is a deadline and it passed."""
    if time_left_s is not None and time_left_s <= 0:
        raise DeadlineError("the deadline passed before the request could start")


def check_model(name: str, limits: Limits) -> None:
    """Raises `ModelNotFoundError` if `name` is not the served model."""
    if name != limits.model.name:
        raise ModelNotFoundError(name[:MAX_ECHOED_CHARS], [limits.model.name])


def check_text(text: str, field: str, limits: Limits) -> TextPrompt:
    """A text prompt of a possible size. An empty one may have the tokens that the model begins a text with. Raises
    `InvalidRequestError` naming `field`."""
    if len(text) > limits.max_prompt_bytes:  # without a copy of it: what is too large is refused soonest
        raise InvalidRequestError(field, f"at most {limits.max_prompt_bytes} bytes, not {len(text)} characters")
    prompt = TextPrompt(text)
    try:
        _check_num_bytes(prompt.num_bytes, field, limits)
    except UnicodeEncodeError:
        check_unicode(text, field)
    return prompt


def check_chat(
    turns: Sequence[ChatTurn], limits: Limits, tools: str = "", options: TemplateOptions = NO_OPTIONS
) -> ChatPrompt:
    """Turns with known roles, of a possible size. Raises `InvalidRequestError` naming `chat.messages`."""
    field = ChatPrompt.field
    if not turns:
        raise InvalidRequestError(field, "must not be empty")
    check_num_turns(len(turns))
    prompt = ChatPrompt(tuple(turns), tools, options)
    try:
        num_bytes = prompt.num_bytes
    except UnicodeEncodeError:
        num_bytes = 0
    if not num_bytes or not {turn.role for turn in turns if not turn.extra} <= set(ROLES):
        _refuse_a_turn(turns, field)
    _check_num_bytes(num_bytes, field, limits)
    return prompt


def _refuse_a_turn(turns: Sequence[ChatTurn], field: str) -> None:
    """Raises `InvalidRequestError` naming the first turn with an unknown role, or with a content that is no Unicode."""
    for i, (role, content, extra) in enumerate(turns):
        if role not in ROLES and not extra:  # a tool's result says which call it answers
            raise InvalidRequestError(f"{field}[{i}].role", f"must be one of {', '.join(ROLES)}, not {shown(role)}")
        if not content.isascii():
            check_unicode(content, f"{field}[{i}].content")


def check_num_turns(num_turns: int) -> None:
    """Raises `InvalidRequestError` if a conversation has too many turns."""
    check_length(num_turns, ChatPrompt.field, MAX_CHAT_MESSAGES)


def check_num_ids(num_ids: int, field: str, model: ModelInfo) -> None:
    """Raises `ContextLengthError` naming `field` if `num_ids` tokens are no possible prompt."""
    if num_ids > model.longest_prompt:
        raise ContextLengthError.too_long(
            field, model.max_model_len, f"the prompt is too long: {num_ids} tokens > {model.longest_prompt} maximum"
        )


def check_millis(field: str, value: str | bytes, least: float | None = None) -> float:
    """A time in milliseconds, above 0, or at least `least`, and at most a day. Raises `InvalidRequestError` naming
    `field`."""
    try:
        millis = float(value)
    except ValueError:
        millis = math.nan
    if not (0 < millis <= MAX_TARGET_MS and (least is None or millis >= least)):
        given, bound = str(value)[:MAX_ECHOED_CHARS], "(0" if least is None else f"[{least:g}"
        raise InvalidRequestError(
            field, f"must be a number of milliseconds in {bound}, {MAX_TARGET_MS:g}], not {given!r}"
        )
    return millis


def _check_truncation(given: GenerationInput, model: ModelInfo) -> int | None:
    """Maximum number of tokens that the prompt keeps; None for all."""
    most = given.truncate_prompt_tokens
    if most is None:
        return None
    room = model.longest_prompt - max(0, (given.max_tokens or 1) - 1)
    if most == -1 and room >= 1:
        return room
    return check_int(most, "truncate_prompt_tokens", 1, model.longest_prompt)


def check_prompt(prompt: Prompt | None, limits: Limits, max_tokens: int | None) -> Prompt:
    """A prompt of a possible size. Raises as `check_request`."""
    match prompt:
        case TextPrompt(text):
            return check_text(text, TextPrompt.field, limits)
        case IdsPrompt(token_ids):
            return _check_prompt_ids(token_ids, limits.model, max_tokens)
        case ChatPrompt(turns, tools, options):
            return check_chat(turns, limits, tools, options)
    raise InvalidRequestError("prompt", "one of text, token_ids and chat must be set")


def _check_prompt_ids(token_ids: Sequence[int], model: ModelInfo, max_tokens: int | None) -> IdsPrompt:
    field = IdsPrompt.field
    if not token_ids:
        raise InvalidRequestError(field, "must not be empty")
    if max_tokens is None:
        check_num_ids(len(token_ids), field, model)
    ids = check_ids(token_ids, field, model.vocab_size)
    return IdsPrompt(ids if max_tokens is None else ids[-max_tokens:])


def _check_num_bytes(num_bytes: int, field: str, limits: Limits) -> None:
    if num_bytes > limits.max_prompt_bytes:
        raise InvalidRequestError(field, f"at most {limits.max_prompt_bytes} bytes, not {num_bytes}")


def _check_resumed(
    token_ids: Sequence[int], given: GenerationInput, sampling: Sampling, model: ModelInfo
) -> tuple[int, ...]:
    """The resumed token ids, if they can begin an answer. `fit_prompt` checks their number against the prompt's."""
    if given.prompt_logprobs is not None:
        raise InvalidRequestError("resume", "with prompt_logprobs is not supported: they came with the first token")
    if given.n is not None and given.n > 1:
        raise InvalidRequestError("resume", f"continues one answer, so n must be 1, not {shown(given.n)}")
    if given.seed is None and sampling.temperature > 0:
        raise InvalidRequestError(
            "sampling.seed", "must be that of the answer that is resumed, unless temperature is 0"
        )
    check_num_resumed(len(token_ids), model)
    ids = check_ids(token_ids, RESUMED, model.vocab_size)
    stop_ids = set(sampling.stop_token_ids)
    if not stop_ids.isdisjoint(ids[:-1]):
        i = next(i for i, token_id in enumerate(ids) if token_id in stop_ids)
        raise InvalidRequestError(f"{RESUMED}[{i}]", f"{ids[i]} ends the answer, so no token comes after it")
    return ids


def _check_version(version: str) -> str:
    """The version if it has the form of `router.placement.placement.Version`; empty for any."""
    if _VERSION.fullmatch(version) is None:
        raise InvalidRequestError("resume.model_version", "is none that a gateway told: 16 hexadecimal digits")
    return version


def check_num_resumed(num_ids: int, model: ModelInfo) -> None:
    """Raises `InvalidRequestError` if no answer can have `num_ids` tokens."""
    check_length(num_ids, RESUMED, model.max_model_len, "tokens")


def _check_cache_salt(cache_salt: str) -> str:
    num_bytes = check_unicode(cache_salt, "cache_salt")
    if num_bytes > MAX_CACHE_SALT_BYTES:
        raise InvalidRequestError("cache_salt", f"at most {MAX_CACHE_SALT_BYTES} bytes, not {num_bytes}")
    return cache_salt


def check_session(session_id: str, field: str) -> bool:
    """Whether a session is named. Raises `InvalidRequestError` naming `field` for a name that is too long."""
    if len(session_id) > MAX_SESSION_CHARS:
        raise InvalidRequestError(field, f"at most {MAX_SESSION_CHARS} characters, not {len(session_id)}")
    return bool(session_id)


def _check_speculation(speculation: str | None) -> bool:
    if speculation is not None and speculation not in SPECULATION:
        raise InvalidRequestError("speculation", f"must be {' or '.join(SPECULATION)}, not {shown(speculation)}")
    return speculation != "off"
