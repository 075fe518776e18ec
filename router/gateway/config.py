"""The configuration of a gateway. `cluster` makes it from the user's YAML."""

from __future__ import annotations

import ipaddress
import math

import msgspec

from disagg.proto.errors import ConfigError

_MESSAGE_OVERHEAD_BYTES = 64 << 10
"""Room in a gRPC message for everything but the prompt."""
_MAX_BYTES_PER_ID = 8
"""In JSON, with comma and space; five in a packed list of protobuf."""
_MAX_OTHER_VALUES = 65_536
"""In a body beside the ids of the longest prompt; 64 prompts of 1,024 ids have as many."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what is bound there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class TlsFiles(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`gateway.tls`: PEM files."""

    cert: str
    """The server's certificate, and those between it and its CA."""
    key: str
    """Its private key, without a passphrase; others must not be able to read it."""
    client_ca: str | None = None
    """Let in only clients with a certificate that this CA signed (mutual TLS)."""


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
    api_keys: str | None = None
    """File of the keys that are let in, see `auth/api_keys.py`; `None` for access without keys."""
    tls: TlsFiles | None = None
    """`None` serves in clear text."""
    max_model_len: int | None = None
    """Longest prompt plus answer in tokens; the checkpoint's own limit when unset."""
    max_prompt_bytes: int = 1 << 20
    """Longest text prompt, or roles and contents of a chat together, in bytes of UTF-8; checked before tokenizing."""
    inline_prompt_bytes: int = 1 << 10
    """Prompts up to this size are tokenized on the event loop, where that is cheaper than a thread's hand-over. A
    kibibyte of text that is worst for the tokenizer takes 3 ms."""
    num_tokenizer_threads: int = 3
    """Threads that tokenize larger prompts. One tenant has all but one of them at a time."""
    max_tokenizing_bytes: int = 64 << 20
    """Of larger prompts that are tokenized or wait for it; further ones are refused."""
    max_tenant_tokenizing_bytes: int = 16 << 20
    """The same of one tenant's prompts."""
    special_tokens_in_chat: bool = False
    """Read special tokens that are spelled out in the contents of a chat, such as `<|im_end|>`, as what they control.
    Without, they are ordinary text there. Prompts that are no chats are always read with them."""
    max_undecoded_bytes: int = 64 << 20
    """Of complete messages that wait to be decoded, one at a time; one tenant may have half of them. More is refused as
    overload."""
    max_unfinished_bytes: int = 64 << 20
    """Of HTTP bodies that have not arrived completely. Over it, the tenant that holds the most loses the body that has
    made no progress for longest: it is refused as overload. One body of the largest size always fits."""
    max_keyless_watches: int = 64
    """Streams of `Health/Watch` at a time whose caller brought no valid key; a quarter of them, at least one, from one
    address. `Health/Check` has no such limit."""
    max_concurrent_streams: int = 1024
    """Calls at a time on one client connection."""
    vllm_aliases: bool = True
    """Whether `/metrics` shows the names of vLLM beside our own."""
    write_timeout_s: float = 60.0
    """How long a client may leave a message unread before its stream is given up."""
    allowed_hosts: tuple[str, ...] = ()
    """Names, without a port, that HTTP requests may give in `Host` beside those of loopback. Looked at without keys,
    where a web page's own name could lead here: on loopback, and elsewhere where there are any; there IP addresses are
    taken, too."""
    allowed_origins: tuple[str, ...] = ()
    """Web sites, such as `https://chat.example`, whose pages may call a gateway without keys beside its own."""
    max_connections: int = 4096
    """HTTP connections at a time. A further one takes the place of the one that has been without a request for
    longest."""
    max_grpc_connections: int = 16_384
    """gRPC connections at a time; a further one is closed at once. gRPC closes no silent one for it, so they are more
    than those of HTTP."""
    idle_timeout_s: float = 75.0
    """How long a connection may stay open without a request. Longer than clients keep theirs, so that none is
    closed under a request that is on its way."""
    read_timeout_s: float = 20.0
    """How long the head of an HTTP request may take to arrive, and how long its body."""
    grpc_handshake_timeout_s: float = 5.0
    """How long a gRPC connection may take for TLS and its first frame."""

    def __post_init__(self) -> None:
        if not self.model_name:
            raise ConfigError("gateway.model_name: must not be empty")
        for name in ("port", "http_port"):
            port = getattr(self, name)
            if port is not None and not 0 <= port <= 65535:
                raise ConfigError(f"gateway.{name}: must be in [0, 65535], not {port}")
        for name in (
            "max_model_len",
            "max_prompt_bytes",
            "num_tokenizer_threads",
            "max_undecoded_bytes",
            "max_unfinished_bytes",
            "max_keyless_watches",
            "max_tokenizing_bytes",
            "max_tenant_tokenizing_bytes",
            "max_concurrent_streams",
            "max_connections",
            "max_grpc_connections",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"gateway.{name}: must be at least 1, not {value}")
        for name in ("write_timeout_s", "idle_timeout_s", "read_timeout_s", "grpc_handshake_timeout_s"):
            timeout_s = getattr(self, name)
            if not 0 < timeout_s < math.inf:
                raise ConfigError(f"gateway.{name}: must be a positive number, not {timeout_s}")
        if self.inline_prompt_bytes < 0:
            raise ConfigError(f"gateway.inline_prompt_bytes: must be at least 0, not {self.inline_prompt_bytes}")

    def max_message_bytes(self, max_model_len: int) -> int:
        """The largest message that a client may send: the longest prompt in either form, and what goes with it."""
        return max(self.max_prompt_bytes, _MAX_BYTES_PER_ID * max_model_len) + _MESSAGE_OVERHEAD_BYTES

    def max_body_values(self, max_model_len: int) -> int:
        """The most values that a JSON body, or one list of a gRPC message, may have: the ids of the longest prompt, and
        what goes with it."""
        return max_model_len + _MAX_OTHER_VALUES
