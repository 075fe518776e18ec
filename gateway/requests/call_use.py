"""The usage of one call: its tokens, and the answer that they belong to. Pure."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field


@dataclass(slots=True)
class CallUse:
    """The usage of one call so far. The generator adds to it, and the handler of the call records it at the end."""

    model: str = ""
    """Name of the served model, which the caller may use; empty until the request is found valid. Without it nothing is
    recorded."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    stream: bytes = b""
    """Id of the answer if another call can continue it, see `generation.stream_id`."""
    token_ids: array[int] = field(default_factory=lambda: array("I"))
    """Token ids of that answer, as far as the gateway has them."""
    num_had: int = 0
    """Tokens of that answer that were not delivered, because the client says that it has them."""
    num_prompts: int = 1
    """Number of prompts of the call. The usage of several prompts is no part of one answer."""
    continues: bool = False
    """Whether the call continues an answer, of which an earlier call may have recorded a part."""
    failed: bool = False
    """Whether a line of a batch failed, which is recorded later than it ends."""
    is_recorded: bool = False

    def note_had(self, num_tokens: int) -> None:
        """Note the number of first tokens of the answer that are not delivered."""
        self.num_had = num_tokens

    def add(self, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> None:
        """Add a prompt with all its answers, which share it."""
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += min(prompt_tokens, cached_tokens)
        self.completion_tokens += completion_tokens
