"""A client's request, independent of the protocol: the one struct behind gRPC and HTTP.

    protobuf, JSON ──> GenerationInput ──check_request──> CheckedRequest ──fit_prompt──> RoutedRequest
    headers        ──> Call

A `GenerationInput` holds what the client wrote, of the right types and unchecked; unset is `None`, and
`validate` fills in the defaults. Both protocols give the same fields the same meaning, so nothing is checked twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from disagg.gateway.auth.auth import ANONYMOUS, Caller
from disagg.gateway.requests.call_use import CallUse
from disagg.gateway.requests.headers import sibling_of
from disagg.gateway.requests.structured import StructuredOutput
from disagg.gateway.text.chat_template import NO_OPTIONS, ChatTurn, TemplateOptions
from disagg.proto.ids import RequestId
from disagg.proto.messages import Pooling

BYTES_PER_ID = 1
"""Size of a token id when small prompts are distinguished from large ones: no more work than a byte of text."""


class Targets(NamedTuple):
    """Latency targets of one request; `None` for the configured ones."""

    ttft_s: float | None = None
    tpot_s: float | None = None


@dataclass(frozen=True)
class TextPrompt:
    """A text to be tokenized as it is."""

    text: str
    field = "prompt.text"

    @cached_property
    def num_bytes(self) -> int:
        """Size, to distinguish small prompts from large ones. Raises `UnicodeEncodeError` for a lone surrogate."""
        return len(self.text.encode())


@dataclass(frozen=True, slots=True)
class IdsPrompt:
    """Token ids, used as they are."""

    token_ids: tuple[int, ...]
    field = "prompt.token_ids"

    @property
    def num_bytes(self) -> int:
        """Size, to distinguish small prompts from large ones."""
        return BYTES_PER_ID * len(self.token_ids)


@dataclass(frozen=True)
class ChatPrompt:
    """Turns, to be rendered with the chat template."""

    turns: tuple[ChatTurn, ...]
    tools: str = ""
    """JSON of the tools that the model may call, for the chat template; empty without."""
    options: TemplateOptions = NO_OPTIONS
    field = "chat.messages"

    @cached_property
    def num_bytes(self) -> int:
        """Size, to distinguish small prompts from large ones. Raises `UnicodeEncodeError` for a lone surrogate."""
        given = (*chain.from_iterable(self.turns), self.tools, self.options.variables)
        return len("".join(given).encode())


Prompt = TextPrompt | IdsPrompt | ChatPrompt


NO_TARGETS = Targets()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationInput:
    """One prompt and how to answer it. See `proto/disagg/v1/inference.proto` for ranges and defaults."""

    model: str
    prompt: Prompt | None
    """The prompt; `None` if the client sent none."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    """Number of likeliest tokens that come with each output token; 0 for the token itself only, `None` for none."""
    prompt_logprobs: int | None = None
    """Number of likeliest tokens that come with each prompt token, as for `logprobs`."""
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    n: int | None = None
    """Answers to this prompt; each has its own id, seed and end."""
    cache_salt: str = ""
    """Cached prefixes are shared with requests of the same tenant and salt only."""
    session_id: str = ""
    """Name of the conversation that the request is a turn of: its KV is kept in tiers from the first turn on. It
    changes no token. Empty for none."""
    truncate_prompt_tokens: int | None = None
    """Number of tokens of the prompt that are kept, the last ones; -1 for as many as leave room for the answer, `None`
    for all."""
    speculation: str | None = None
    """`auto`, the default, or `off`: whether drafts may be computed for the answer, which has the same tokens."""
    split_reasoning: bool = False
    """Whether the text between think tags of a chat is separated from the answer, if the model has such tags."""
    structured: StructuredOutput | None = None
    """The format that the answer must have; `None` for any text."""
    functions: frozenset[str] = frozenset()
    """Names of the functions whose calls are separated from the answer's text."""
    resumed: tuple[int, ...] | None = None
    """Token ids of the answer that the client has already, from index 0 on: it continues an answer of which the
    connection broke. `None` for a new answer."""
    model_version: str = ""
    """Version of the model that generated these tokens, as the gateway told it; no other version continues the answer.
    Empty for any."""
    pooling: Pooling | None = None
    """Set for a prompt of which a vector is wanted, and no answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The context of a call: id, deadline, targets, caller."""

    request_id: RequestId
    """Minted by the gateway, never used before. Further answers (`n`) get ids of their own."""
    deadline: float | None = None
    """Time on the gateway's monotonic clock at which the request fails, in any phase."""
    targets: Targets = NO_TARGETS
    caller: Caller = ANONYMOUS
    in_session: bool = False
    """Whether the client named a session in a header or in metadata, see `GenerationInput.session_id`."""
    priority: int = 0
    """Priority in the router's queue, within the limit of the tenant; lines of batches are below 0."""
    trace_parent: str = ""
    """The W3C `traceparent` of the gateway's own span; empty without one."""
    parent_span: str = ""
    """Id of the caller's span; empty where there is none."""
    response_id: str = ""
    """Id of the response to the call, as its client knows it; empty where that is `request_id`."""
    use: CallUse = field(default_factory=CallUse, compare=False)
    """Usage of all prompts of the call, which grows while it is answered."""

    def for_another(self, request_id: RequestId) -> Call:
        """The context of a further prompt of the same call."""
        return replace(self, request_id=request_id, trace_parent=sibling_of(self.trace_parent, request_id))
