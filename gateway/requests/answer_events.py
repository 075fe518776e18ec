"""What an answer gives out, for all APIs: deltas, then its finish. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from disagg.gateway.text.segments import ToolCall
from disagg.proto.ids import RequestId
from disagg.proto.messages import TokenLogprobs
from disagg.proto.token_ids import PackedTokenIds


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of an answer. `text` may lag behind the ids; the last delta may have text only."""

    first_index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of `token_ids`, or none where the request has none."""
    answer_index: int = 0
    num_prompt_tokens: int = field(default=0, compare=False)
    """Number of tokens of the prompt that is answered."""
    model_version: str = field(default="", compare=False)
    """Version of the model that makes the answer; set in the first delta only."""
    reasoning: str = ""
    """What became final of the text between think tags, where it is asked for; comes before `text`."""
    calls: tuple[tuple[int, ToolCall], ...] = ()
    """Calls of functions that the request offers, each with the number of characters of `text` before it."""
    num_reasoning_tokens: int = field(default=0, compare=False)
    """Number of tokens between think tags in the answer so far."""
    prompt_token_ids: PackedTokenIds = field(default=PackedTokenIds(b""), compare=False)
    """With the first tokens of a prompt's first answer, where its log-probabilities are requested: they are in
    `logprobs[0].prompt`."""
    skipped: tuple[tuple[int, int], ...] = ()
    """Index within `token_ids` -> characters of text before that token that have none: a guardrail put them in the
    place of other tokens, which are missing."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of an answer; comes once, last of this answer."""

    request_id: RequestId
    reason: Literal["stop", "length", "content_filter"]
    """`content_filter`: a guardrail ended it."""
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    answer_index: int = 0
    num_reasoning_tokens: int = 0
    """Number of output tokens up to the close tag."""
    stop_string: str = field(default="", compare=False)
    """What ended the answer, where that was one of the stop strings; else empty."""
