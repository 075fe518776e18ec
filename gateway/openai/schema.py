"""The JSON bodies that clients send, as they are typed on the wire.

A known field of a wrong type is the client's mistake and names the field; unknown fields are ignored, as other servers
of this API do. What would change the answer and is not supported is declared, so that `to_input` can refuse it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, Final, TypeVar

import msgspec

from disagg.gateway.requests.part_counts import SMALL_BYTES, Cooperative
from disagg.proto.errors import InvalidRequestError

T = TypeVar("T")
R = TypeVar("R")

ABSENT: Final = msgspec.Raw(b"null")
"""Value of fields that are only refused; their JSON is checked for its syntax, and no objects are built."""


Integer = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
"""A number of a body. JSON has integers of any size; what computes with one, stores it or sends it on has 64 bits."""


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream carries beside text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ContentPart(msgspec.Struct, frozen=True):
    """One piece of a message. Only `text` is supported."""

    type: str
    text: str | None = None


class Message(msgspec.Struct, frozen=True):
    """One turn of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: Any = None
    tool_call_id: str | None = None
    name: str | None = None
    function_call: Any = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Another name of it."""


class GenerationBody(msgspec.Struct, frozen=True, kw_only=True):
    """What both ways to generate take. `None` is the same as absent."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Integer | None = None
    min_tokens: Integer | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Integer | None = None
    min_p: float | None = None
    seed: int | None = None
    """64 bits, with a sign or without one; bounded by `check_sampling`."""
    n: Integer | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Integer] | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: msgspec.Raw = ABSENT
    """By token id; read by `to_input`, which looks at its size first."""
    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    speculation: str | None = None
    prompt_logprobs: Integer | None = None
    truncate_prompt_tokens: Integer | None = None
    service_tier: str | None = None
    priority: Integer | None = None

    # Read by `structured`, which looks at their sizes first.
    response_format: msgspec.Raw = ABSENT
    structured_outputs: msgspec.Raw = ABSENT
    guided_json: msgspec.Raw = ABSENT
    guided_regex: msgspec.Raw = ABSENT
    guided_choice: msgspec.Raw = ABSENT
    guided_grammar: msgspec.Raw = ABSENT

    # Not supported: these constrain the answer, so that ignoring them would give a wrong one.
    json_schema: msgspec.Raw = ABSENT
    regex: msgspec.Raw = ABSENT
    ebnf: msgspec.Raw = ABSENT
    use_beam_search: msgspec.Raw = ABSENT
    allowed_token_ids: msgspec.Raw = ABSENT
    bad_words: msgspec.Raw = ABSENT
    include_stop_str_in_output: msgspec.Raw = ABSENT
    skip_special_tokens: msgspec.Raw = ABSENT


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[Message]
    max_completion_tokens: Integer | None = None
    logprobs: bool | None = None
    top_logprobs: Integer | None = None

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: msgspec.Raw = ABSENT
    """Read by `template_options`, which looks at its size first."""
    include_reasoning: bool | None = None
    reasoning_effort: str | None = None

    tools: msgspec.Raw = ABSENT
    tool_choice: msgspec.Raw = ABSENT
    parallel_tool_calls: bool | None = None
    functions: msgspec.Raw = ABSENT
    function_call: msgspec.Raw = ABSENT
    modalities: msgspec.Raw = ABSENT
    audio: msgspec.Raw = ABSENT
    echo: msgspec.Raw = ABSENT
    chat_template: msgspec.Raw = ABSENT
    documents: msgspec.Raw = ABSENT


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | Integer | list[Integer]]
    """One text, several, the ids of one, or the ids of several."""
    logprobs: Integer | None = None
    echo: bool | None = None
    best_of: Integer | None = None

    suffix: msgspec.Raw = ABSENT
    add_special_tokens: msgspec.Raw = ABSENT
    prompt_embeds: msgspec.Raw = ABSENT


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /tokenize`: of a text or of a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    """Whether a text gets the tokenizer's special tokens; true by default. A chat template writes its own."""
    tools: msgspec.Raw = ABSENT
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: msgspec.Raw = ABSENT
    return_token_strs: bool | None = None


class EmbeddingBody(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/embeddings`."""

    model: str | None = None
    input: str | list[str | Integer | list[Integer]]
    """One text, several, the ids of one, or the ids of several."""
    encoding_format: str | None = None
    dimensions: Integer | None = None
    truncate_prompt_tokens: Integer | None = None

    # Not supported: these are of vLLM, and change vectors.
    messages: msgspec.Raw = ABSENT
    add_special_tokens: msgspec.Raw = ABSENT
    truncation_side: msgspec.Raw = ABSENT
    normalize: msgspec.Raw = ABSENT
    use_activation: msgspec.Raw = ABSENT
    """A later name of `normalize`."""
    embed_dtype: msgspec.Raw = ABSENT
    endianness: msgspec.Raw = ABSENT


class TextDocument(msgspec.Struct, frozen=True):
    """A document of a rerank."""

    text: str


class RerankBody(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/rerank`."""

    model: str | None = None
    query: str
    documents: list[str | TextDocument]
    top_n: Integer | None = None
    """0 is the same as absent: all documents."""
    return_documents: bool | None = None
    instruction: str | None = None
    """What a document must do to be relevant, for models whose prompt has a place for it."""
    truncate_prompt_tokens: Integer | None = None

    # Not supported: these are of vLLM, Cohere and Jina, and change scores.
    truncation_side: msgspec.Raw = ABSENT
    use_activation: msgspec.Raw = ABSENT
    activation: msgspec.Raw = ABSENT
    max_tokens_per_doc: msgspec.Raw = ABSENT
    max_chunks_per_doc: msgspec.Raw = ABSENT
    rank_fields: msgspec.Raw = ABSENT


class ScoreBody(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/score`: of each pair of texts; one `text_1` is paired with each `text_2`."""

    model: str | None = None
    text_1: str | list[str]
    text_2: str | list[str]
    instruction: str | None = None
    truncate_prompt_tokens: Integer | None = None

    # Not supported: these are of vLLM, and change scores.
    truncation_side: msgspec.Raw = ABSENT
    use_activation: msgspec.Raw = ABSENT
    activation: msgspec.Raw = ABSENT
    max_tokens_per_doc: msgspec.Raw = ABSENT


class LoadAdapterBody(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/load_lora_adapter`."""

    lora_name: str
    """The name that requests use."""
    lora_path: str
    """Its folder below `adapters.folder` of the configuration."""
    base_model_name: str | None = None
    """Its base model, where several take adapters."""
    load_inplace: bool = False
    """Whether it replaces an adapter of that name."""


class UnloadAdapterBody(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/unload_lora_adapter`."""

    lora_name: str


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[Integer]


_PLACE = re.compile(r"(?P<text>.*) - at `\$\.?(?P<path>[^`]*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>\w+)`")
_BODY = "body"


def decode(raw: bytes | msgspec.Raw, decoder: msgspec.json.Decoder[T]) -> T:
    """The body in `raw`. Raises `InvalidRequestError`, which names the field where there is one."""
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise wrong_value(error) from None
    except msgspec.DecodeError as error:
        raise InvalidRequestError(_BODY, f"is no JSON: {error}") from None
    except UnicodeDecodeError:
        raise InvalidRequestError(_BODY, "is not UTF-8") from None
    except RecursionError:
        raise InvalidRequestError(_BODY, "is nested too deeply") from None


def decoded(raw: bytes, decoder: msgspec.json.Decoder[T], read: Callable[[T], Cooperative[R]]) -> Cooperative[R]:
    """What `read` makes of the body in `raw`. Yields between pieces of work."""
    body = decode(raw, decoder)
    if len(raw) > SMALL_BYTES:
        yield
    return (yield from read(body))


def decode_field(raw: msgspec.Raw, decoder: msgspec.json.Decoder[T], field: str) -> T:
    """The value of a field that was not read with its body. Raises `InvalidRequestError` naming it, or what is wrong in
    it."""
    try:
        return decode(raw, decoder)
    except InvalidRequestError as error:
        raise InvalidRequestError(_joined(field, error.field), error.message.removeprefix(f"{error.field}: ")) from None


def wrong_value(error: msgspec.ValidationError, field: str = _BODY) -> InvalidRequestError:
    """The library's error about the value of `field`, whose message ends in the place, as an error of ours."""
    message = str(error)
    found = _PLACE.fullmatch(message)
    text, path = (found["text"], found["path"]) if found else (message, "")
    missing = _MISSING.fullmatch(text)
    if missing:
        path = f"{path}.{missing['name']}" if path else missing["name"]
        text = "must be set"
    # `[...]` stands for any key of an object: the object is what the client knows.
    return InvalidRequestError(_joined(field, path.split("[...]")[0] or _BODY), text[:1].lower() + text[1:])


def _joined(field: str, inner: str) -> str:
    """The path of `inner`, which is within `field`."""
    if field == _BODY or inner == _BODY:
        return inner if field == _BODY else field
    return field + (inner if inner.startswith("[") else f".{inner}")
