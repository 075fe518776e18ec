"""Answers of OpenAI's chats and completions, of models and of tokens."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

FinishReason = Literal["stop", "length", "content_filter"]
ChatFinishReason = Literal["stop", "length", "content_filter", "tool_calls"]


class PromptTokensDetails(Struct, forbid_unknown_fields=True):
    """Number of prompt tokens that no worker had to compute."""

    cached_tokens: int


class CompletionTokensDetails(Struct, forbid_unknown_fields=True):
    """Number of output tokens that are reasoning."""

    reasoning_tokens: int


class CompletionUsage(Struct, forbid_unknown_fields=True):
    """Tokens of a call."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class TokenLogprob(Struct, forbid_unknown_fields=True):
    """The log-probability of a token of a chat."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenTokenLogprob(Struct, forbid_unknown_fields=True):
    """The log-probability of a generated token of a chat, with the likeliest tokens at its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Struct, forbid_unknown_fields=True):
    """Log-probabilities of the tokens of a chat's answer."""

    content: list[ChosenTokenLogprob]


class PromptLogprob(Struct, forbid_unknown_fields=True):
    """The log-probability of a token at a place of the prompt."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None] | None


class CalledFunction(Struct, forbid_unknown_fields=True):
    """The function of a call, with the JSON of its arguments."""

    name: str
    arguments: str


class ToolCall(Struct, forbid_unknown_fields=True):
    """A call of a function."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ToolCallDelta(Struct, forbid_unknown_fields=True):
    """A call of a function in a stream; a call comes whole."""

    index: int
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Struct, forbid_unknown_fields=True):
    """The message of an answer."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct, forbid_unknown_fields=True):
    """One of the answers to a chat."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason


class ChatCompletion(Struct, forbid_unknown_fields=True):
    """The answer to a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: CompletionUsage
    service_tier: str | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatDelta(Struct, forbid_unknown_fields=True):
    """What a chunk adds to the message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct, forbid_unknown_fields=True):
    """What a chunk adds to one of the answers."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None


class ChatCompletionChunk(Struct, forbid_unknown_fields=True):
    """An event of a chat's stream. The last event is `[DONE]`, or an error."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    service_tier: str | UnsetType = UNSET
    usage: CompletionUsage | UnsetType | None = UNSET


class TextLogprobs(Struct, forbid_unknown_fields=True):
    """Log-probabilities of the tokens of a text: four lists of the same length."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(Struct, forbid_unknown_fields=True):
    """One of the answers to a prompt."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class TextCompletion(Struct, forbid_unknown_fields=True):
    """The answer to a completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: CompletionUsage
    service_tier: str | UnsetType = UNSET


class TextChunkChoice(Struct, forbid_unknown_fields=True):
    """What a chunk adds to one of the answers."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None


class TextCompletionChunk(Struct, forbid_unknown_fields=True):
    """An event of a completion's stream. The last event is `[DONE]`, or an error."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChunkChoice]
    service_tier: str | UnsetType = UNSET
    usage: CompletionUsage | UnsetType | None = UNSET


class Model(Struct, forbid_unknown_fields=True):
    """A served model; or an adapter, whose `parent` is its base model and whose `root` is its folder."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(Struct, forbid_unknown_fields=True):
    """The models that the key may use."""

    object: Literal["list"]
    data: list[Model]


class Tokens(Struct, forbid_unknown_fields=True):
    """The token ids of a text or of a conversation."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class TokenizerInfo(Struct, forbid_unknown_fields=True):
    """What a client needs to use the tokenizer from afar."""

    tokenizer_class: str
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    chat_template: str | None
    unk_token: str | UnsetType | None = UNSET


class Text(Struct, forbid_unknown_fields=True):
    """The text of token ids."""

    prompt: str


class VectorUsage(Struct, forbid_unknown_fields=True):
    """Tokens of the texts of a call."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int | UnsetType = UNSET


class Embedding(Struct, forbid_unknown_fields=True):
    """The vector of a text; in base64 the bytes of its numbers in fp32, little-endian."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(Struct, forbid_unknown_fields=True):
    """The vectors of the texts, in their order."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Embedding]
    usage: VectorUsage


class Score(Struct, forbid_unknown_fields=True):
    """The score of a pair."""

    index: int
    object: Literal["score"]
    score: float


class ScoreList(Struct, forbid_unknown_fields=True):
    """The scores of the pairs, in their order."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: VectorUsage


class RerankedDocument(Struct, forbid_unknown_fields=True):
    """The text of a document."""

    text: str


class RerankResult(Struct, forbid_unknown_fields=True):
    """One document with its place in the request."""

    index: int
    relevance_score: float
    document: RerankedDocument | UnsetType = UNSET


class Reranked(Struct, forbid_unknown_fields=True):
    """Documents, the most relevant first."""

    id: str
    model: str
    usage: VectorUsage
    results: list[RerankResult]
