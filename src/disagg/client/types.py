"""What a client is given and gives: prompts, options, deltas, answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

from disagg.v1 import inference_pb2 as pb

Message = Mapping[str, str]
"""One turn of a chat: `{"role": "user", "content": "..."}`."""
Prompt = str | Sequence[int] | Sequence[Message]
FinishReason = Literal["stop", "length"]

Model = pb.Model
ClusterState = pb.GetClusterStateResponse
Explanation = pb.ExplainRequestResponse

CHANNEL_OPTIONS = (("grpc.max_receive_message_length", 64 << 20),)


class Options(TypedDict, total=False):
    """How to generate; what is left out takes the server's default. Ranges: see `proto/disagg/v1/inference.proto`."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    stop_token_ids: Sequence[int]
    stop: str | Sequence[str]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request."""

    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that no worker had to compute."""
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Finished:
    """How an answer ended."""

    reason: FinishReason
    usage: Usage
    request_id: str
    """For `explain`."""


@dataclass(frozen=True, slots=True)
class Delta:
    """A part of an answer: the text and token ids that are new."""

    text: str
    token_ids: tuple[int, ...] = ()
    finished: Finished | None = None
    """Set on the last delta, which has neither text nor ids."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    text: str
    token_ids: tuple[int, ...]
    reason: FinishReason
    usage: Usage
    request_id: str
    """For `explain`."""
