"""What a client is given and gives: prompts, options, deltas, answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from disagg.v1 import inference_pb2 as pb

Message = Mapping[str, str]
"""One turn of a chat: `{"role": "user", "content": "..."}`."""
Prompt = str | Sequence[int] | Sequence[Message]
FinishReason = Literal["stop", "length", "content_filter"]

Model = pb.Model
Applied = pb.ApplyConfigResponse
AutoscalerState = pb.AutoscalerState
ClusterState = pb.GetClusterStateResponse
Explanation = pb.ExplainRequestResponse
Probe = pb.ProbePairResponse
RecentLoad = pb.GetLoadResponse
Shape = pb.GetShapeResponse
ShapeComparison = pb.ShapeComparison
ShapeOption = pb.ShapeOption
RatePrediction = pb.RatePrediction
RecentRequest = pb.RecentRequest
UsageByDay = pb.GetUsageResponse
WorkerCapacity = pb.WorkerCapacity
WorkerState = pb.WorkerState
TransferState = pb.TransferState
SloState = pb.SloState
PlacementOption = pb.PlacementOption
GuardrailDecision = pb.GuardrailDecision
StageSpan = pb.StageSpan

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 64 << 20),
    # A connection of its own for each client: several gateways at one address share out connections, not calls.
    ("grpc.use_local_subchannel_pool", 1),
    # A connection that broke is tried again soon: another gateway may listen there, or the same one again.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # In spite of its name: how long one connection attempt may take, with its handshakes. Far or busy machines need it.
    ("grpc.min_reconnect_backoff_ms", 5000),
    ("grpc.max_reconnect_backoff_ms", 2000),
)


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
    logit_bias: Mapping[int, float]
    """Token id to what is added to its logit."""
    logprobs: int
    """How many of the likeliest tokens come with each token; 0: only its own probability."""
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    stop_token_ids: Sequence[int]
    stop: str | Sequence[str]
    n: int
    """Answers to this prompt. A stream brings them mixed, see `Delta.answer_index`; `generate` gives one only."""
    cache_salt: str
    """Cached prefixes are shared with requests of the same salt only."""
    truncate_prompt_tokens: int
    """Keep so many tokens of the prompt, the last ones; -1: as many as leave room for the answer."""
    split_reasoning: bool
    """Of a chat, give the text between think tags as `reasoning`, where the model has such tags."""
    json_object: bool
    """The answer is any JSON object. Of this and the next four at most one, which the answer follows."""
    json_schema: Mapping[str, Any] | str
    """A JSON schema, as an object or its text."""
    regex: str
    choice: Sequence[str]
    grammar: str
    """In llguidance's variant of Lark."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """A request's latency targets, in milliseconds; None takes what the cluster is configured for. One whose first
    token is predicted too late is refused with `OverloadedError`, which has the time after which to retry."""

    ttft_ms: float | None = None
    """Of the time to the first token."""
    tpot_ms: float | None = None
    """Of the mean time from one token to the next."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request."""

    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that no worker had to compute."""
    completion_tokens: int
    reasoning_tokens: int = 0
    """Of these the ones up to the end of the reasoning, where that was separated."""


@dataclass(frozen=True, slots=True)
class Finished:
    """How an answer ended."""

    reason: FinishReason
    usage: Usage
    request_id: str
    """For `explain`."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely a token was: natural logarithms of the model's own probabilities."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens and their logarithms, likeliest first; as many as were requested."""


@dataclass(frozen=True, slots=True)
class Delta:
    """A part of an answer: the text and token ids that are new."""

    text: str
    token_ids: tuple[int, ...] = ()
    finished: Finished | None = None
    """Set on the last delta of an answer, which has neither text nor ids."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each of `token_ids`, where they were requested."""
    answer_index: int = 0
    """Which answer this is a part of."""
    reasoning: str = ""
    """What is new of the text between think tags, where it was asked for; comes before `text`."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    text: str
    token_ids: tuple[int, ...]
    reason: FinishReason
    usage: Usage
    request_id: str
    """For `explain`."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each of `token_ids`, where they were requested."""
    reasoning: str = ""
    """The text between think tags, where it was asked for."""
