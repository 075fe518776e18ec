"""The JSON bodies that clients send, as they are typed on the wire.

A known field of a wrong type is the client's mistake and names the field; unknown fields are ignored, as other servers
of this API do. What would change the answer and is not supported is declared, so that `to_input` can refuse it.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from disagg.proto.errors import InvalidRequestError

T = TypeVar("T")


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream carries beside text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ContentPart(msgspec.Struct, frozen=True):
    """One piece of a message. Only `text` is supported."""

    type: str
    text: str | None = None


class Message(msgspec.Struct, frozen=True):
    """One turn."""

    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: Any = None
    function_call: Any = None


class GenerationBody(msgspec.Struct, frozen=True, kw_only=True):
    """What both ways to generate take. `None` is the same as absent."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    cache_salt: str | None = None

    # Not supported: these constrain the answer, so that ignoring them would give a wrong one.
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    prompt_logprobs: Any = None
    use_beam_search: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    truncate_prompt_tokens: Any = None
    include_stop_str_in_output: Any = None
    skip_special_tokens: Any = None


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    echo: Any = None
    chat_template: Any = None
    add_generation_prompt: Any = None
    continue_final_message: Any = None
    chat_template_kwargs: Any = None
    documents: Any = None


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | int | list[int]]
    """One text, several, the ids of one, or the ids of several."""
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None

    suffix: Any = None
    add_special_tokens: Any = None
    prompt_embeds: Any = None


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /tokenize`: of a text or of a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    """Of a text, true by default; a conversation's template writes its own."""
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[int]


_PLACE = re.compile(r"(?P<text>.*) - at `\$\.?(?P<path>[^`]*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>\w+)`")
_BODY = "body"


def decode(raw: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """The body in `raw`. Raises `InvalidRequestError`, which names the field where there is one."""
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise _wrong_value(str(error)) from None
    except msgspec.DecodeError as error:
        raise InvalidRequestError(_BODY, f"is no JSON: {error}") from None
    except UnicodeDecodeError:
        raise InvalidRequestError(_BODY, "is not UTF-8") from None
    except RecursionError:
        raise InvalidRequestError(_BODY, "is nested too deeply") from None


def _wrong_value(message: str) -> InvalidRequestError:
    """The library's message, which ends in the place, as an error of ours."""
    found = _PLACE.fullmatch(message)
    text, path = (found["text"], found["path"]) if found else (message, "")
    missing = _MISSING.fullmatch(text)
    if missing:
        path = f"{path}.{missing['name']}" if path else missing["name"]
        text = "must be set"
    # `[...]` stands for any key of an object: the object is what the client knows.
    return InvalidRequestError(path.split("[...]")[0] or _BODY, text[:1].lower() + text[1:])
