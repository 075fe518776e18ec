"""The configuration of a gateway process, and the part of it that the user's YAML has too (`gateway`).
`cluster/control/plan.py` makes a `GatewayConfig` from it."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from disagg.connections.addresses import is_loopback
from disagg.gateway.auth.tls_files import TlsFiles
from disagg.gateway.guardrails.config import GuardrailOptions, check_guardrails
from disagg.proto.config import Bytes, Count, Fraction, Name, NonNegativeInt, Port, Seconds, check_bounds
from disagg.proto.errors import ConfigError
from disagg.router.config import MetricsOptions, TracingOptions

_MESSAGE_OVERHEAD_BYTES = 64 << 10
"""Bytes of a gRPC message for everything but the prompt."""
_MAX_BYTES_PER_ID = 8
"""Maximum bytes of a token id in JSON, with comma and space; in a packed list of protobuf it has five."""
_MAX_OTHER_VALUES = 65_536
"""Values of a body beside the ids of the longest prompt; 64 prompts of 1,024 ids have as many."""


class StoreLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of what clients can store."""

    max_files: Count = 100
    """Maximum number of files of a tenant, files of answers included. At the limit, further files and batches are
    refused."""
    max_total_bytes: Bytes = 4 << 30
    """Maximum bytes of the files of all tenants and of the answers of batches that run. A tenant may store as much as
    it leaves free: half of it if no other tenant has any. An upload that exceeds this is refused when it begins. A
    batch is refused if as many bytes as its input has cannot be reserved for its answers; more are reserved once its
    lines are read. A batch whose answers need still more waits until there is room."""
    file_days: Annotated[int, msgspec.Meta(ge=1, le=3660)] = 30
    """Age in days at which a file is deleted, unless an open batch reads it."""
    max_batches: Count = 100
    """Maximum number of a tenant's batches that have not ended, and number of its ended batches that are remembered."""
    lease_s: Annotated[float, msgspec.Meta(ge=1, le=3600)] = 15.0
    """Seconds for which a batch belongs to its gateway after each renewal of the lease; after that another gateway of
    the folder may take it over."""


class BatchOptions(StoreLimits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`gateway.batches`: `/v1/files` and `/v1/batches`."""

    folder: Name
    """Folder of the database and the files' contents, on a local disk; gateways of one machine share it. A path in the
    YAML is relative to the YAML's folder."""
    max_file_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 34)] = 200 << 20
    """Maximum bytes of one uploaded file."""
    max_running: Annotated[int, msgspec.Meta(ge=1, le=1 << 14)] = 256
    """Maximum number of answers to lines that each gateway runs at a time, at all models together."""
    reserved_share: Fraction = 0.1
    """The share of a model's decode places that lines leave free for interactive requests."""
    max_step_ms: Annotated[float, msgspec.Meta(gt=0, le=1e6)] | None = None
    """Lines start only while a decode step with one more is predicted to take at most this long. `null` is 0.6 of
    `slo.tpot_ms`, and no bound without that target."""


class UsageOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`gateway.usage`: keeps the usage of each key by day and model in SQLite."""

    folder: Name
    """Folder of the file `usage.sqlite`, on a local disk; gateways of one machine share it. A path in the YAML is
    relative to the YAML's folder."""
    retention_days: Annotated[int, msgspec.Meta(ge=1, le=3660)] = 400
    """Number of days that are kept, today included."""
    wait_ms: Annotated[float, msgspec.Meta(ge=0, le=10_000)] = 100.0
    """Maximum time that the end of an answer waits until its usage is in the file, so that a killed gateway has counted
    every answer that a client saw end. With 0 nothing waits, and the latest usage may be lost."""


class GatewayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`gateway`, without its ports and its queue: who may call, and how much clients may use."""

    host: Name = "127.0.0.1"
    """The address to bind. Anything but loopback needs `tls`, and `api_keys` or `tls.client_ca`; or `insecure: true`.
    """
    api_keys: Name | None = None
    """File of the keys that are let in, one list of `{tenant, sha256 or key, admin, limits}`; others must not be able
    to read it. `disagg key new` makes keys. A path in the YAML is relative to its folder. With `null`, no key."""
    tls: TlsFiles | None = None
    """`{cert, key, client_ca}`: PEM files for both protocols; `client_ca` turns on mutual TLS. `null` serves in clear
    text."""
    allowed_hosts: tuple[Name, ...] = ()
    """Names, without a port, under which a gateway without keys may be called over HTTP (`Host`), beside those of
    loopback: a web page's own name could lead here. Off loopback the name is looked at only where some are given here,
    and IP addresses are taken, too."""
    allowed_origins: tuple[Name, ...] = ()
    """Web sites, such as `https://chat.example`, whose pages may call a gateway and read its answers, beside its own.
    Preflight requests of browsers for them are answered without a key."""
    ui: bool | Literal["auto"] = "auto"
    """Whether the HTTP port has a page for operators at `/`. It shows what the key that is entered there may see.
    `auto`: where callers need a key or a certificate, and on loopback without `allowed_hosts`, which a proxy for others
    needs. `true` is refused where every caller would be let in."""
    drain_timeout_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 2.0
    """Seconds that running answers may take to end when the gateway stops; the rest are then cut off. New requests are
    refused meanwhile."""
    max_connections: Count = 4096
    """Maximum number of HTTP connections. A further one replaces the one that has been without a request for
    longest."""
    max_grpc_connections: Count = 16_384
    """gRPC connections at a time; a further one is closed at once. gRPC closes no silent one for it, so they are more
    than those of HTTP. The process needs as many open files beside those of HTTP: `ulimit -n`."""
    max_unfinished_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)] = 64 << 20
    """Maximum bytes of HTTP bodies that have not arrived completely. Above it, the tenant with the most bytes loses the
    body that has made no progress for longest: it is refused as overload. One body of the largest size always fits."""
    tool_parser: Literal["auto", "hermes", "json"] = "auto"
    """How calls of tools are read in answers. `hermes`: between `<tool_call>` tags (Hermes, Qwen). `json`: answers that
    are nothing but calls (Llama 3, Mistral). `auto`: as the chat template tells."""
    reasoning_parser: Literal["auto", "none", "think"] = "auto"
    """`think`: the text of chats that begins with `<think>`, up to `</think>`, is `reasoning_content` and not content.
    `auto`: where the chat template has these tags. `none`: tags are text."""
    tracing: TracingOptions | None = None
    """`{endpoint, sample, max_waiting, timeout_s}`: send the spans of requests to an OpenTelemetry collector. `null`
    sends none."""
    batches: BatchOptions | None = None
    """`{folder, max_file_bytes, ...}`: serve OpenAI's files and batches. `null` serves none."""
    usage: UsageOptions | None = None
    """`{folder, retention_days, wait_ms}`: keep what each key used by day, for `disagg usage`, the page and
    `/v1/usage`. `null` keeps none."""
    guardrails: tuple[GuardrailOptions, ...] = ()
    """Rules on prompts and answers, in their order: see docs/guardrails.md. Each is `{name, rules}`, `{name, service}`
    or `{name, python}`."""
    max_keyless_watches: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] = 64
    """Streams of `Health/Watch` at a time whose caller brought no valid key; a quarter of them, at least one, from one
    address. `Health/Check` has no such limit."""


def serves_page(options: GatewayOptions) -> bool:
    """Whether the page is served. Raises `ConfigError` where it is configured and would be open to everybody."""
    has_certificates = options.tls is not None and options.tls.client_ca is not None
    is_private = options.api_keys is not None or has_certificates
    if options.ui is True and not is_private and not is_loopback(options.host):
        raise ConfigError(
            f"gateway.ui: the page would be open to everybody who reaches {options.host}; set gateway.api_keys or "
            "gateway.tls.client_ca, or bind to 127.0.0.1"
        )
    if options.ui == "auto":
        return is_private or (is_loopback(options.host) and not options.allowed_hosts)
    return options.ui


class ModelSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model that a gateway serves, with what the gateway needs to know of it."""

    key: str = ""
    """Prefix of the names of its workers; empty if there is only one model."""
    name: Annotated[str, msgspec.Meta(min_length=1)]
    """The name that requests use."""
    path: str
    """Folder with tokenizer.json and config.json, as `disagg model import` wrote it; `fake` for the model
    without weights."""
    prefix_root: str
    """Start value of the prefix hashes. Equal for all gateways of a cluster, whenever they started and whichever
    version of the model the workers have: a worker has KV of its own version only."""
    max_model_len: Count | None = None
    """Longest prompt plus answer in tokens; the checkpoint's own limit when unset."""

    def __post_init__(self) -> None:
        check_bounds(self, "gateway.models")


class GatewayConfig(GatewayOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One gateway process. Raises `ConfigError` where a value cannot work."""

    models: Annotated[tuple[ModelSource, ...], msgspec.Meta(min_length=1)]
    """The models, with distinct names and keys. The first one is shown where there is space for only one."""
    name: str = "gateway"
    """Name of this process in its metrics."""
    ttft_target_s: float | None = None
    """TTFT target in seconds of requests without one, see `RouterConfig.ttft_slo_s`; None for no target. The strictest
    of all models', since batches leave room for it."""
    tpot_target_s: float | None = None
    """TPOT target in seconds of requests without one, see `RouterConfig.tpot_slo_s`; as `ttft_target_s` otherwise."""
    shares_ports: bool = False
    """Whether other gateways listen at the same ports. Then this one has ports of its own, too."""
    own_http_port: Port = 0
    """HTTP port of this gateway alone, if it shares the other ports; 0 takes any free one."""
    shows_workers: bool = True
    """Whether `/metrics` has the metrics that all gateways know: those of workers and of the autoscaler. Only one of
    several gateways shows them, so that sums over all gateways are right."""
    port: Port = 0
    """gRPC port; 0 takes any free one."""
    http_port: Port | None = None
    """HTTP port; 0 takes any free one, `None` serves no HTTP."""
    max_prompt_bytes: Bytes = 1 << 20
    """Longest text prompt, or roles and contents of a chat together, in bytes of UTF-8; checked before tokenizing."""
    inline_prompt_bytes: NonNegativeInt = 1 << 10
    """Prompts up to this size are tokenized on the event loop, where that is cheaper than a thread's hand-over. A
    kibibyte of text that is worst for the tokenizer takes 3 ms."""
    num_tokenizer_threads: Count = 3
    """Threads that tokenize larger prompts. One tenant has all but one of them at a time."""
    max_tokenizing_bytes: Bytes = 64 << 20
    """Maximum bytes of larger prompts that are tokenized or wait for it; further ones are refused."""
    max_tenant_tokenizing_bytes: Bytes = 16 << 20
    """Maximum bytes of one tenant's larger prompts that are tokenized or wait for it."""
    special_tokens_in_chat: bool = False
    """Whether special tokens that are spelled out in the contents of a chat, such as `<|im_end|>`, act as special
    tokens. If not, they are ordinary text there. Prompts that are no chats are always read with them."""
    max_undecoded_bytes: Bytes = 64 << 20
    """Maximum bytes of whole messages that wait to be decoded, one at a time; one tenant may have half of them. Further
    ones are refused as overload."""
    max_concurrent_streams: Count = 1024
    """Maximum number of concurrent calls on one client connection."""
    vllm_aliases: bool = MetricsOptions().vllm_aliases
    """Whether `/metrics` shows the names of vLLM beside our own."""
    write_timeout_s: Seconds = 60.0
    """How long a client may leave a message unread before its stream is given up."""
    idle_timeout_s: Seconds = 75.0
    """How long a connection may stay open without a request. Longer than clients keep theirs, so that none is
    closed under a request that is on its way."""
    read_timeout_s: Seconds = 20.0
    """How long the head of an HTTP request may take to arrive, and how long its body."""
    grpc_handshake_timeout_s: Seconds = 5.0
    """How long a gRPC connection may take for TLS and its first frame."""

    def __post_init__(self) -> None:
        check_bounds(self, "gateway")
        check_guardrails(self.guardrails, "gateway.guardrails")
        serves_page(self)

    def max_message_bytes(self, max_model_len: int) -> int:
        """The largest message that a client may send: the longest prompt in either form, and what goes with it."""
        return max(self.max_prompt_bytes, _MAX_BYTES_PER_ID * max_model_len) + _MESSAGE_OVERHEAD_BYTES

    def max_body_values(self, max_model_len: int) -> int:
        """The most values that a JSON body, or one list of a gRPC message, may have: the ids of the longest prompt, and
        what goes with it."""
        return max_model_len + _MAX_OTHER_VALUES
