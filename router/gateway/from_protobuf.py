"""A client's protobuf as the gateway's own types. Nothing is checked here."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message

from disagg.router.gateway.chat_template import ChatTurn
from disagg.router.gateway.request import ChatPrompt, GenerationInput, IdsPrompt, Prompt, TextPrompt
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


def read_request(request: pb.GenerateRequest) -> GenerationInput:
    """What `request` asks for."""
    sampling, stopping = request.sampling, request.stopping
    return GenerationInput(
        model=request.model,
        prompt=_read_prompt(request),
        **{name: getattr(sampling, name) for name in _SAMPLING if sampling.HasField(name)},
        logit_bias=dict(sampling.logit_bias),
        max_tokens=_optional(stopping, "max_tokens"),
        min_tokens=_optional(stopping, "min_tokens"),
        ignore_eos=stopping.ignore_eos,
        stop_token_ids=tuple(stopping.stop_token_ids),
        stop=tuple(stopping.stop),
        n=_optional(request, "n"),
        cache_salt=request.cache_salt,
    )


def read_turns(chat: pb.ChatMessages) -> tuple[ChatTurn, ...]:
    """The turns of a conversation."""
    return tuple(ChatTurn(message.role, message.content) for message in chat.messages)


def _read_prompt(request: pb.GenerateRequest) -> Prompt | None:
    match request.WhichOneof("prompt"):
        case "text":
            return TextPrompt(request.text)
        case "token_ids":
            return IdsPrompt(tuple(request.token_ids.ids))
        case "chat":
            return ChatPrompt(read_turns(request.chat))
    return None


def _optional(message: Message, name: str) -> Any:
    """`None` where the field is unset."""
    return getattr(message, name) if message.HasField(name) else None
