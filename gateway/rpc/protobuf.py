"""A client's protobuf as the gateway's own types, and answers as the protobuf that clients get. Of a request only
lengths are checked here, before anything is copied.

A long conversation is read in pieces, see `pieces`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from google.protobuf.message import Message

from disagg.gateway.requests.answer_events import Delta, Finish
from disagg.gateway.requests.part_counts import TURNS_A_PIECE, Cooperative
from disagg.gateway.requests.request import ChatPrompt, GenerationInput, IdsPrompt, Prompt, TextPrompt
from disagg.gateway.requests.sampling import MAX_LOGIT_BIASES, MAX_STOP_IDS, MAX_STOP_STRINGS
from disagg.gateway.requests.structured import MAX_CHOICES, StructuredOutput
from disagg.gateway.requests.validate import check_num_ids, check_num_resumed, check_num_turns
from disagg.gateway.requests.values import check_length
from disagg.gateway.text.chat_template import ChatTurn
from disagg.gateway.text.tokenizer import ModelInfo
from disagg.proto.errors import InvalidRequestError
from disagg.proto.messages import TokenLogprobs
from disagg.v1 import inference_pb2 as pb

_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logprobs",
)


def read_request(request: pb.GenerateRequest, model: ModelInfo) -> Cooperative[GenerationInput]:
    """The input in `request`. Yields between pieces of work.

    Raises:
        ContextLengthError: if the prompt's ids alone are too many for `model`.
        InvalidRequestError: if another list is too long, naming it.
    """
    sampling, stopping = request.sampling, request.stopping
    check_length(len(sampling.logit_bias), "sampling.logit_bias", MAX_LOGIT_BIASES, "tokens")
    check_length(len(stopping.stop_token_ids), "stopping.stop_token_ids", MAX_STOP_IDS)
    check_length(len(stopping.stop), "stopping.stop", MAX_STOP_STRINGS)
    check_num_resumed(len(request.resume.token_ids), model)
    prompt = yield from _read_prompt(request, model)
    return GenerationInput(
        model=request.model,
        prompt=prompt,
        **{name: getattr(sampling, name) for name in _SAMPLING if sampling.HasField(name)},
        logit_bias=dict(sampling.logit_bias),
        max_tokens=_optional(stopping, "max_tokens"),
        min_tokens=_optional(stopping, "min_tokens"),
        ignore_eos=stopping.ignore_eos,
        stop_token_ids=tuple(stopping.stop_token_ids),
        stop=tuple(stopping.stop),
        n=_optional(request, "n"),
        cache_salt=request.cache_salt,
        session_id=request.session_id,
        speculation=request.speculation or None,
        structured=_read_structured(request),
        resumed=tuple(request.resume.token_ids) if request.HasField("resume") else None,
        model_version=request.resume.model_version,
        truncate_prompt_tokens=_optional(request, "truncate_prompt_tokens"),
        split_reasoning=request.split_reasoning,
    )


def read_turns(chat: pb.ChatMessages) -> Cooperative[tuple[ChatTurn, ...]]:
    """The turns of a conversation. Yields between pieces of work. Raises `InvalidRequestError` if they are too many."""
    check_num_turns(len(chat.messages))
    turns: list[ChatTurn] = []
    for message in chat.messages:
        turns.append(ChatTurn(message.role, message.content))
        if len(turns) % TURNS_A_PIECE == 0:
            yield
    return tuple(turns)


def _read_prompt(request: pb.GenerateRequest, model: ModelInfo) -> Cooperative[Prompt | None]:
    match request.WhichOneof("prompt"):
        case "text":
            return TextPrompt(request.text)
        case "token_ids":
            check_num_ids(len(request.token_ids.ids), IdsPrompt.field, model)
            return IdsPrompt(tuple(request.token_ids.ids))
        case "chat":
            return ChatPrompt((yield from read_turns(request.chat)))
    return None


def _read_structured(request: pb.GenerateRequest) -> StructuredOutput | None:
    if not request.HasField("structured"):
        return None
    given = request.structured
    match given.WhichOneof("kind"):
        case "json_object" if given.json_object:
            return StructuredOutput("json_object", "", "structured.json_object")
        case "choice":
            check_length(len(given.choice.texts), "structured.choice", MAX_CHOICES, "choices")
            text = msgspec.json.encode(list(given.choice.texts)).decode()
            return StructuredOutput("choice", text, "structured.choice")
        case "json_schema":
            return StructuredOutput("json_schema", given.json_schema, "structured.json_schema")
        case "regex":
            return StructuredOutput("regex", given.regex, "structured.regex")
        case "grammar":
            return StructuredOutput("grammar", given.grammar, "structured.grammar")
    raise InvalidRequestError("structured", "one of json_object, json_schema, regex, choice and grammar must be set")


def _optional(message: Message, name: str) -> Any:
    """`None` where the field is unset."""
    return getattr(message, name) if message.HasField(name) else None


_REASONS = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "content_filter": pb.FINISH_REASON_CONTENT_FILTER,
}


def write_delta(delta: Delta) -> pb.TokenDelta:
    """The message with the new tokens of an answer."""
    return pb.TokenDelta(
        first_index=delta.first_index,
        token_ids=delta.token_ids,
        text=delta.text,
        logprobs=write_logprobs(delta.logprobs),
        answer_index=delta.answer_index,
        model_version=delta.model_version,
        reasoning=delta.reasoning,
    )


def write_logprobs(logprobs: Sequence[TokenLogprobs]) -> list[pb.TokenLogprob]:
    """One message for each token."""
    return [
        pb.TokenLogprob(
            logprob=one.logprob,
            top=[
                pb.TopLogprob(token_id=token_id, logprob=logprob)
                for token_id, logprob in zip(one.top_ids, one.top_logprobs, strict=True)
            ],
        )
        for one in logprobs
    ]


def write_finish(finish: Finish) -> pb.Finished:
    """The end of an answer."""
    usage = pb.Usage(
        prompt_tokens=finish.num_prompt_tokens,
        cached_tokens=finish.num_cached_tokens,
        completion_tokens=finish.num_output_tokens,
        reasoning_tokens=finish.num_reasoning_tokens,
    )
    return pb.Finished(
        reason=_REASONS[finish.reason], usage=usage, request_id=finish.request_id, answer_index=finish.answer_index
    )
