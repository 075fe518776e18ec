"""What a gateway is told at start. Complete and plain: `cluster` makes it from the user's YAML."""

from __future__ import annotations

import msgspec

from disagg.proto.errors import ConfigError

_MESSAGE_OVERHEAD_BYTES = 64 << 10
"""Room in a gRPC message for everything but the prompt."""
_MAX_BYTES_PER_PACKED_ID = 5
_MIN_MESSAGE_BYTES = 4 << 20
"""Larger messages are refused by gRPC, smaller ones by us with the field that is too long. gRPC's own default."""


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One gateway process. Raises `ConfigError` where a value cannot work."""

    model_name: str
    """The name that requests use."""
    model_path: str
    """Folder with tokenizer.json and config.json, as `disagg model import` wrote it; `fake` for the model
    without weights."""
    fingerprint: str
    """Model fingerprint of the workers; the prefix hash starts from it."""
    host: str = "127.0.0.1"
    """Address that the public server binds to."""
    port: int = 0
    """Of gRPC; 0 takes any free port."""
    http_port: int | None = None
    """Of HTTP; 0 takes any free port, `None` serves no HTTP."""
    max_model_len: int | None = None
    """Longest prompt plus answer in tokens; the checkpoint's own limit when unset."""
    max_prompt_bytes: int = 1 << 20
    """Longest text prompt, or roles and contents of a chat together, in bytes of UTF-8; checked before tokenizing."""
    inline_prompt_bytes: int = 4 << 10
    """Prompts up to this size are tokenized on the event loop, where that is cheaper than a thread's hand-over."""
    num_tokenizer_threads: int = 2
    """Threads that tokenize larger prompts."""
    max_concurrent_streams: int = 1024
    """Calls at a time on one client connection."""

    def __post_init__(self) -> None:
        if not self.model_name:
            raise ConfigError("gateway.model_name: must not be empty")
        for name in ("port", "http_port"):
            port = getattr(self, name)
            if port is not None and not 0 <= port <= 65535:
                raise ConfigError(f"gateway.{name}: must be in [0, 65535], not {port}")
        for name in ("max_model_len", "max_prompt_bytes", "num_tokenizer_threads", "max_concurrent_streams"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"gateway.{name}: must be at least 1, not {value}")
        if self.inline_prompt_bytes < 0:
            raise ConfigError(f"gateway.inline_prompt_bytes: must be at least 0, not {self.inline_prompt_bytes}")

    def max_message_bytes(self, max_model_len: int) -> int:
        """The largest message that a client may send: the longest prompt in either form, and what goes with it."""
        prompt_bytes = max(self.max_prompt_bytes, _MAX_BYTES_PER_PACKED_ID * max_model_len)
        return max(prompt_bytes + _MESSAGE_OVERHEAD_BYTES, _MIN_MESSAGE_BYTES)
