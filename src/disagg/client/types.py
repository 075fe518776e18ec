"""Types of the client's arguments and results: prompts, options, deltas, answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from disagg.v1 import inference_pb2 as pb

Message = Mapping[str, str]
"""One turn of a chat: `{"role": "user", "content": "..."}`."""
Prompt = str | Sequence[int] | Sequence[Message]
FinishReason = Literal["stop", "length", "content_filter"]

Adapter = pb.Adapter
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
    """Options of generation; those that are left out take the server's default. Ranges: see
    `proto/disagg/v1/inference.proto`."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    """Number that is added to the logit, by token id."""
    logprobs: int
    """Number of most probable tokens that are reported with each token; 0: only its own probability."""
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    stop_token_ids: Sequence[int]
    stop: str | Sequence[str]
    n: int
    """Number of answers to this prompt. Their deltas are mixed in a stream, see `Delta.answer_index`; `generate` gives
    one only."""
    cache_salt: str
    """Salt of the prefix cache: cached prefixes are shared with requests of the same salt only."""
    session_id: str
    """Name of the conversation that the request is a turn of, at most 256 characters. Its KV is kept in the tiers of
    workers from the first turn on."""
    speculation: Literal["auto", "off"]
    """Whether workers may compute drafts of the tokens to come, which changes none of them."""
    truncate_prompt_tokens: int
    """Number of prompt tokens to keep, the last ones; -1: as many as leave room for the answer."""
    split_reasoning: bool
    """Whether the text between think tags of a chat's answer becomes `reasoning`, if the model has such tags."""
    json_object: bool
    """Whether the answer must be a JSON object, of any content. At most one of this and the next four options may be
    given; the answer follows it."""
    json_schema: Mapping[str, Any] | str
    """JSON schema that the answer follows, as an object or its text."""
    regex: str
    choice: Sequence[str]
    grammar: str
    """Grammar that the answer follows, in llguidance's variant of Lark."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """A request's latency targets, in milliseconds; None takes the configured ones. A request whose first token is
    predicted too late is refused with `OverloadedError`, which has the time after which to retry."""

    ttft_ms: float | None = None
    """Target of the time to the first token."""
    tpot_ms: float | None = None
    """Target of the mean time from one token to the next."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request."""

    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that no worker had to compute."""
    completion_tokens: int
    reasoning_tokens: int = 0
    """Completion tokens up to the end of the reasoning, where that was separated."""


@dataclass(frozen=True, slots=True)
class Finished:
    """End of an answer."""

    reason: FinishReason
    usage: Usage
    request_id: str
    """Id of the request, for `explain`."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of a token: the natural logarithm of the model's own probability."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The most probable tokens with their log-probabilities, most probable first; as many as were requested."""


@dataclass(frozen=True, slots=True)
class Delta:
    """A part of an answer: the new text and token ids."""

    text: str
    token_ids: tuple[int, ...] = ()
    finished: Finished | None = None
    """End of the answer, on its last delta only, which has neither text nor ids."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """Log-probabilities, one for each of `token_ids`, if they were requested."""
    answer_index: int = 0
    """Index of the answer that this is a part of."""
    reasoning: str = ""
    """New part of the text between think tags, if it was requested; comes before `text`."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer, with the counts of its tokens."""

    text: str
    token_ids: tuple[int, ...]
    reason: FinishReason
    usage: Usage
    request_id: str
    """Id of the request, for `explain`."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """Log-probabilities, one for each of `token_ids`, if they were requested."""
    reasoning: str = ""
    """Text between think tags, if it was requested."""
