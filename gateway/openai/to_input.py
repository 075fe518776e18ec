"""From a JSON body to what the generator takes: `GenerationInput`s, and how the answer is to be written.

Values are not checked here but for what only this API has: lists of prompts, `best_of`, `echo`, string keys. Everything
else is checked once, behind both protocols; `FieldNames` turns its names of fields into those of the body.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import msgspec

from disagg.gateway.openai.order import read_priority
from disagg.gateway.openai.schema import (
    ABSENT,
    ChatBody,
    CompletionBody,
    ContentPart,
    GenerationBody,
    Message,
    StreamOptions,
    decode_field,
)
from disagg.gateway.openai.structured import read_structured
from disagg.gateway.openai.template_options import read_template_options
from disagg.gateway.openai.tools import LONG_ARGUMENTS, OfferedTools, has_extra, read_extra, read_tools
from disagg.gateway.requests.part_counts import TURNS_A_PIECE, Cooperative
from disagg.gateway.requests.request import ChatPrompt, GenerationInput, IdsPrompt, Prompt, TextPrompt
from disagg.gateway.requests.sampling import MAX_LOGIT_BIASES
from disagg.gateway.requests.validate import MAX_ANSWERS as MAX_ANSWERS_EACH
from disagg.gateway.requests.values import check_int, check_length, shown
from disagg.gateway.text.chat_template import ChatTurn
from disagg.proto.errors import InvalidRequestError

MAX_PROMPTS: Final = 64
"""Largest number of prompts of one call."""
MAX_ANSWERS: Final = 128
"""Largest number of answers of one call: prompts times `n`."""
DEFAULT_MAX_TOKENS: Final = 16
"""Default of `max_tokens` for a text completion, as this API has always had it; a chat may fill the context."""
_LEAST_SEED: Final = -(1 << 63)
_NUM_SEEDS: Final = 1 << 64
"""Clients of this API send 64 bits with a sign: a negative seed is the one with the same bits."""
_MAX_KEY_CHARS: Final = 20
"""Largest number of characters of a token id that is the key of an object."""

_MAX_BIASES_BYTES: Final = 64 << 10
"""Largest size of the biases as JSON: 64 bytes for each of the largest number of biases."""
_BIASES: Final = msgspec.json.Decoder(dict[str, float] | None)
_MAX_SMALL_BYTES: Final = 64
"""Largest size of the JSON of a field that is accepted only with a value that changes nothing."""
NEVER: Final[tuple[Any, ...]] = (None,)
"""Values of a field that always means something."""
HARMLESS: Final[Mapping[str, tuple[Any, ...]]] = {
    "json_schema": NEVER,
    "regex": NEVER,
    "ebnf": NEVER,
    "use_beam_search": (None, False),
    "allowed_token_ids": NEVER,
    "bad_words": (None, []),
    "include_stop_str_in_output": (None, False),
    "skip_special_tokens": (None, True),
    "add_special_tokens": (None, True),
    "documents": (None, []),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": NEVER,
    "chat_template": NEVER,
    "suffix": (None, ""),
    "prompt_embeds": NEVER,
}
"""Fields that are not supported, with the values that mean nothing."""
HARMLESS_IN_CHAT: Final[Mapping[str, tuple[Any, ...]]] = {"echo": (None, False)}


@dataclass(frozen=True, slots=True)
class FieldNames:
    """How a body calls what the generator's errors name."""

    prompt: str
    """The field of the prompt; of several, with its index."""
    logprobs: str
    max_tokens: str = "max_tokens"
    stop: str = ""
    """`stop` where the body had one string, so that its index is not named."""
    prompt_logprobs: str = "prompt_logprobs"

    def name(self, field: str) -> str:
        """The body's name of `field`, such as `top_p` for `sampling.top_p`."""
        if field.startswith("prompt"):
            return self.prompt + field.removeprefix("prompt").removeprefix(".text").removeprefix(".token_ids")
        if field.startswith("chat"):
            return field.removeprefix("chat").removeprefix(".") or self.prompt
        name = field.removeprefix("sampling.").removeprefix("stopping.")
        if name == "logprobs":
            return self.logprobs
        if name == "max_tokens":
            return self.max_tokens
        if name == "session_id":
            return "prompt_cache_key"
        if name == "prompt_logprobs":
            return self.prompt_logprobs
        return self.stop if self.stop and name.startswith("stop[") else name

    def rename(self, error: InvalidRequestError) -> InvalidRequestError:
        """The same error in the body's words."""
        message = error.message.removeprefix(f"{error.field}: ")
        return type(error)(self.name(error.field), message)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCall:
    """A call as parsed from its body."""

    inputs: tuple[GenerationInput, ...]
    """One for each prompt, alike but for it. Never empty."""
    names: tuple[FieldNames, ...]
    """One for each prompt."""
    answers_each: int
    """`n`, unchecked where it is out of range."""
    stream: bool
    include_usage: bool
    continuous_usage: bool
    tools: OfferedTools | None = None
    echo: bool = False
    """Each answer's text begins with its prompt."""
    num_shown: int = 1
    """Number of answers to each prompt that are shown: the likeliest ones where these are not all."""
    shows_logprobs: bool = False
    shows_prompt_logprobs: bool = False
    """As a field of their own, as vLLM does."""
    priority: int = 0
    """In the router's queue."""
    shows_tier: bool = False
    shows_reasoning: bool = True


def read_chat(body: ChatBody) -> Cooperative[ParsedCall]:
    """A conversation. Yields between pieces of work. Raises `InvalidRequestError`."""
    refuse_unsupported(body, HARMLESS)
    refuse_unsupported(body, HARMLESS_IN_CHAT)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError("top_logprobs", "needs logprobs to be true")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    completion_tokens = body.max_completion_tokens
    tools = read_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
    turns = yield from read_turns(body.messages)
    options = read_template_options(body, turns, body.reasoning_effort)
    parsed = _wanted(
        body,
        [ChatPrompt(turns, tools.source if tools else "", options)],
        [_names(body, "messages", "top_logprobs", "max_tokens" if completion_tokens is None else _NEW_MAX_TOKENS)],
        logprobs=logprobs,
        max_tokens=body.max_tokens if completion_tokens is None else completion_tokens,
        tools=tools,
        shows_reasoning=body.include_reasoning is not False,
    )
    structured = parsed.inputs[0].structured
    if tools is not None and tools.forced and structured is not None:
        raise InvalidRequestError(
            "tool_choice", f"contradicts {structured.field}: an answer of calls has no other form"
        )
    return parsed


def read_completion(body: CompletionBody) -> Cooperative[ParsedCall]:
    """One prompt or several. Yields between pieces of work. Raises `InvalidRequestError`."""
    refuse_unsupported(body, HARMLESS)
    best_of = _read_best_of(body)
    if body.echo and body.truncate_prompt_tokens is not None:
        raise InvalidRequestError("echo", "with truncate_prompt_tokens is not supported")
    echoed_logprobs = body.logprobs if body.echo else None
    if echoed_logprobs is not None and body.prompt_logprobs is not None:
        raise InvalidRequestError("prompt_logprobs", "contradicts echo with logprobs, which has those of the prompt")
    if echoed_logprobs is not None and body.stream:
        raise InvalidRequestError("echo", "with logprobs cannot be streamed")
    prompts, fields = _read_prompts(body.prompt)
    yield from ()  # what there is takes less than a piece
    return _wanted(
        body,
        prompts,
        [_names(body, field, "logprobs", "max_tokens") for field in fields],
        logprobs=body.logprobs,
        max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        echo=bool(body.echo),
        best_of=best_of,
        echoed_logprobs=echoed_logprobs,
    )


def _read_best_of(body: CompletionBody) -> int | None:
    """How many answers are made for each prompt, where not all of them are shown."""
    num_answers = 1 if body.n is None else body.n
    if body.best_of is None or body.best_of == num_answers:
        return None
    check_int(num_answers, "n", 1, MAX_ANSWERS_EACH)  # of the answers, and not only of those that are made
    if body.best_of < num_answers:
        raise InvalidRequestError("best_of", f"must be at least n {shown(num_answers)}, not {shown(body.best_of)}")
    if body.stream:
        raise InvalidRequestError("best_of", "cannot be streamed: which answers are best is known at their end")
    return check_int(body.best_of, "best_of", 1, MAX_ANSWERS_EACH)


def read_turns(messages: Sequence[Message]) -> Cooperative[tuple[ChatTurn, ...]]:
    """The turns of a conversation; text parts are joined by line ends. Yields between pieces of work. Raises
    `InvalidRequestError`."""
    turns: list[ChatTurn] = []
    for message in messages:
        if len(turns) % TURNS_A_PIECE == TURNS_A_PIECE - 1:
            yield
        role, content = _read_role(message, len(turns)), message.content
        extra = read_extra(message, len(turns)) if has_extra(message) else ""
        if len(extra) > LONG_ARGUMENTS:
            yield
        if content is None and extra and role == "assistant":
            content = ""
        if not isinstance(content, str):
            content = yield from read_text(content, ("text",), f"messages[{len(turns)}].content")
        turns.append(ChatTurn(role, content, extra))
    return tuple(turns)


_NEW_MAX_TOKENS: Final = "max_completion_tokens"
_ROLES: Final = {"developer": "system"}


def _read_role(message: Message, index: int) -> str:
    if message.role == "function":
        raise InvalidRequestError(f"messages[{index}].role", "function is not supported; use tool")
    if message.function_call not in (None, []):
        raise InvalidRequestError(f"messages[{index}].function_call", "is not supported; use tool_calls")
    return _ROLES.get(message.role, message.role)


def read_text(parts: str | Sequence[ContentPart] | None, kinds: Sequence[str], place: str) -> Cooperative[str]:
    """The text of a content: parts are joined by line ends. Yields between pieces of work. Raises
    `InvalidRequestError` for a part that is none of `kinds`."""
    if isinstance(parts, str):
        return parts
    if parts is None:
        raise InvalidRequestError(place, "must be set")
    texts: list[str] = []
    for part in parts:
        where = f"{place}[{len(texts)}]"
        if part.type not in kinds:
            raise InvalidRequestError(f"{where}.type", f"must be {' or '.join(kinds)}, not {shown(part.type)}")
        if part.text is None:
            raise InvalidRequestError(f"{where}.text", "must be set")
        texts.append(part.text)
        if len(texts) % TURNS_A_PIECE == 0:
            yield
    return "\n".join(texts)


def _read_prompts(given: str | list[str | int | list[int]]) -> tuple[list[Prompt], list[str]]:
    """The prompts, and what each is called."""
    if isinstance(given, str):
        return [TextPrompt(given)], ["prompt"]
    if not given:
        raise InvalidRequestError("prompt", "must not be empty")
    kind = type(given[0])
    if kind is not int and len(given) > MAX_PROMPTS:
        raise InvalidRequestError("prompt", f"at most {MAX_PROMPTS} prompts in one call, not {len(given)}")
    if set(map(type, given)) != {kind}:
        odd = next(i for i, item in enumerate(given) if type(item) is not kind)
        raise InvalidRequestError(f"prompt[{odd}]", "all of a list must be texts, token ids, or lists of token ids")
    if kind is int:
        return [IdsPrompt(tuple(given))], ["prompt"]  # type: ignore[arg-type]  # all are ints
    prompts = [TextPrompt(item) if isinstance(item, str) else IdsPrompt(tuple(item)) for item in given]  # type: ignore[arg-type]
    return list(prompts), [f"prompt[{i}]" for i in range(len(prompts))]


def _wanted(
    body: GenerationBody,
    prompts: Sequence[Prompt],
    names: Sequence[FieldNames],
    *,
    logprobs: int | None,
    max_tokens: int | None,
    echo: bool = False,
    tools: OfferedTools | None = None,
    best_of: int | None = None,
    echoed_logprobs: int | None = None,
    shows_reasoning: bool = True,
) -> ParsedCall:
    if not body.model:
        raise InvalidRequestError("model", "must be set")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options", "needs stream to be true")
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequestError("prompt_logprobs", "cannot be streamed")
    num_shown = 1 if body.n is None else body.n
    answers_each, count = (num_shown, "n") if best_of is None else (best_of, "best_of")
    if len(prompts) * answers_each > MAX_ANSWERS:
        raise InvalidRequestError(count, f"prompts times {count} must be at most {MAX_ANSWERS}")
    options = body.stream_options or StreamOptions()
    shared: dict[str, Any] = {
        name: getattr(body, name) for name in _AS_THEY_ARE if getattr(body, name) is not None
    } | _translated(body)
    if isinstance(body, ChatBody):
        shared["split_reasoning"] = True
    if best_of is not None:
        shared["n"] = best_of
    given_logprobs, logprobs = logprobs, 0 if logprobs is None and best_of is not None else logprobs
    if echoed_logprobs is not None:
        shared["prompt_logprobs"] = echoed_logprobs
        names = [replace(name, prompt_logprobs="logprobs") for name in names]
    inputs = tuple(
        GenerationInput(prompt=prompt, logprobs=logprobs, max_tokens=max_tokens, **shared) for prompt in prompts
    )
    return ParsedCall(
        inputs=inputs,
        names=tuple(names),
        answers_each=answers_each,
        stream=bool(body.stream),
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.continuous_usage_stats),
        echo=echo,
        num_shown=num_shown,
        shows_logprobs=given_logprobs is not None,
        shows_prompt_logprobs=body.prompt_logprobs is not None,
        priority=read_priority(body.service_tier, body.priority),
        shows_tier=body.service_tier is not None,
        shows_reasoning=shows_reasoning,
        tools=tools,
    )


_AS_THEY_ARE: Final = (
    "model",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "cache_salt",
    "speculation",
    "prompt_logprobs",
    "truncate_prompt_tokens",
)
"""Fields that the generator calls the same."""


def _translated(body: GenerationBody) -> dict[str, Any]:
    seed = body.seed
    if seed is not None and _LEAST_SEED <= seed < 0:
        seed += _NUM_SEEDS
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    return {
        "session_id": body.prompt_cache_key or "",
        "seed": seed,
        "stop": stop,
        "stop_token_ids": tuple(body.stop_token_ids or ()),
        "structured": read_structured(body),
        "logit_bias": _read_biases(body.logit_bias),
    }


def _read_biases(given: msgspec.Raw) -> dict[int, float]:
    num_bytes = memoryview(given).nbytes
    if num_bytes > _MAX_BIASES_BYTES:
        raise InvalidRequestError("logit_bias", f"at most {_MAX_BIASES_BYTES} bytes of JSON, not {num_bytes}")
    biases = decode_field(given, _BIASES, "logit_bias") or {}
    check_length(len(biases), "logit_bias", MAX_LOGIT_BIASES, "tokens")  # before the keys are read
    return {_read_id(key): bias for key, bias in biases.items()}


def _read_id(key: str) -> int:
    if not (key.isascii() and key.isdecimal() and len(key) <= _MAX_KEY_CHARS):
        raise InvalidRequestError("logit_bias", f"its keys must be token ids, not {key[:_MAX_KEY_CHARS]!r}")
    return int(key)


def _names(
    body: GenerationBody, prompt: str, logprobs: str, max_tokens: Literal["max_tokens", "max_completion_tokens"]
) -> FieldNames:
    return FieldNames(prompt, logprobs, max_tokens, "stop" if isinstance(body.stop, str) else "")


def refuse_unsupported(body: msgspec.Struct, harmless: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises `InvalidRequestError` for a field of `harmless` that has another value than those that mean nothing."""
    for name, values in harmless.items():
        if (given := small_value(getattr(body, name, None))) is not None and given not in values:
            raise InvalidRequestError(name, "this is not supported yet")


def small_value(given: object) -> object:
    """What was given, of an unread field only where it is short: all values that mean nothing are."""
    if given is ABSENT:
        return None
    if not isinstance(given, msgspec.Raw) or memoryview(given).nbytes > _MAX_SMALL_BYTES:
        return given
    try:
        return msgspec.json.decode(given)
    except msgspec.DecodeError:  # a number that is out of range, which means something
        return given
