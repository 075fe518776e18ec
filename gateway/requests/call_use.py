"""What one call used: tokens, and of which answer. Pure."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field


@dataclass(slots=True)
class CallUse:
    """What one call used so far. The generator adds to it, whoever answers the call records it when it ends."""

    model: str = ""
    """That it may use and is served; empty until the request is found valid. Without it nothing is recorded."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    stream: bytes = b""
    """Which answer it is, if it can be continued by another call; see `generation.stream_id`."""
    token_ids: array[int] = field(default_factory=lambda: array("I"))
    """Of that answer, as far as the gateway has them."""
    num_had: int = 0
    """Tokens of it that were not delivered, because the client says that it has them."""
    num_prompts: int = 1
    """Of the call. What several used together is no part of one answer."""
    continues: bool = False
    """Whether it continues an answer, of which an earlier call may have recorded a part."""
    failed: bool = False
    """For a line of a batch, which is recorded later than it ends."""
    is_recorded: bool = False

    def note_had(self, num_tokens: int) -> None:
        """The first tokens of the answer are not delivered."""
        self.num_had = num_tokens

    def add(self, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> None:
        """One more prompt with its answers, which share it."""
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += min(prompt_tokens, cached_tokens)
        self.completion_tokens += completion_tokens
