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
"""Room in a gRPC message for everything but the prompt."""
_MAX_BYTES_PER_ID = 8
"""In JSON, with comma and space; five in a packed list of protobuf."""
_MAX_OTHER_VALUES = 65_536
"""In a body beside the ids of the longest prompt; 64 prompts of 1,024 ids have as many."""


class StoreLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of what clients can store."""

    max_files: Count = 100
    """Files of a tenant, those of answers among them; one more is refused, and so is one more batch."""
    max_total_bytes: Bytes = 4 << 30
    """Contents of all files of all tenants, and answers of batches that run. One tenant may have half of it, and as
    much as is left free after it where others have some. An upload that exceeds this is refused when it begins. A batch
    is refused without room for as many bytes as its input has, which are reserved for its answers; more are once its
    lines were read. One whose answers need still more waits until there is room."""
    file_days: Annotated[int, msgspec.Meta(ge=1, le=3660)] = 30
    """How many days after it was made a file is deleted, unless an open batch reads it."""
    max_batches: Count = 100
    """Batches of a tenant that have not ended; and of those that have, the latest that are remembered."""
    lease_s: Annotated[float, msgspec.Meta(ge=1, le=3600)] = 15.0
    """How long a batch stays with its gateway after a sign of life; then another gateway of the folder goes on with
    it."""


class BatchOptions(StoreLimits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`gateway.batches`: `/v1/files` and `/v1/batches`."""

    folder: Name
    """Of the database and of the files' contents, on a local disk; gateways of one machine share it. A path in the YAML
    is relative to its folder."""
    max_file_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 34)] = 200 << 20
    """Of one uploaded file."""
    max_running: Annotated[int, msgspec.Meta(ge=1, le=1 << 14)] = 256
    """Answers to lines that each gateway runs at a time, of all models."""
    reserved_share: Fraction = 0.1
    """The share of a model's decode places that lines leave free for interactive requests."""
    max_step_ms: Annotated[float, msgspec.Meta(gt=0, le=1e6)] | None = None
    """Lines start only while a decode step with one more is predicted to take at most so long. `null` is 0.6 of
    `slo.tpot_ms`, and no bound without that target."""


class UsageOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`gateway.usage`: what each key used by day and model is kept in SQLite."""

    folder: Name
    """Of the file `usage.sqlite`, on a local disk; gateways of one machine share it. A path in the YAML is relative to
    its folder."""
    retention_days: Annotated[int, msgspec.Meta(ge=1, le=3660)] = 400
    """How many days are kept, the present one included."""
    wait_ms: Annotated[float, msgspec.Meta(ge=0, le=10_000)] = 100.0
    """For how long the end of an answer waits at most until its use is in the file, so that a client never has an end
    that a killed gateway has not counted. 0 waits for none: then what ended in the last moment may be lost."""


class GatewayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`gateway`, but for its ports and its queue: who may call, and how much clients may hold."""

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
    """Web sites, such as `https://chat.example`, whose pages may call a gateway without keys beside its own."""
    ui: bool | Literal["auto"] = "auto"
    """Whether the HTTP port has a page for operators at `/`. It shows what the key that is entered there may see.
    `auto`: where callers need a key or a certificate, and on loopback without `allowed_hosts`, which a proxy for others
    needs. `true` is refused where every caller would be let in."""
    drain_timeout_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 2.0
    """Seconds that running answers may take to end when the gateway stops; what still runs then is cut off. New
    requests are refused meanwhile."""
    max_connections: Count = 4096
    """HTTP connections at a time. A further one takes the place of the one that has been without a request for
    longest."""
    max_grpc_connections: Count = 16_384
    """gRPC connections at a time; a further one is closed at once. gRPC closes no silent one for it, so they are more
    than those of HTTP. The process needs as many open files beside those of HTTP: `ulimit -n`."""
    max_unfinished_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)] = 64 << 20
    """Of HTTP bodies that have not arrived whole. Over it, the tenant that holds the most loses the body that has made
    no progress for longest: it is refused as overload. One body of the largest size always fits."""
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
    """A model that a gateway serves, as far as the gateway needs it."""

    key: str = ""
    """What the names of its workers begin with; empty where there is one model."""
    name: Annotated[str, msgspec.Meta(min_length=1)]
    """The name that requests use."""
    path: str
    """Folder with tokenizer.json and config.json, as `disagg model import` wrote it; `fake` for the model
    without weights."""
    prefix_root: str
    """What prefix hashes start from. Equal for all gateways of a cluster, whenever they started and whatever version of
    the model the workers have then: a worker has KV of its own version only."""
    max_model_len: Count | None = None
    """Longest prompt plus answer in tokens; the checkpoint's own limit when unset."""

    def __post_init__(self) -> None:
        check_bounds(self, "gateway.models")


class GatewayConfig(GatewayOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One gateway process. Raises `ConfigError` where a value cannot work."""

    models: Annotated[tuple[ModelSource, ...], msgspec.Meta(min_length=1)]
    """With names and keys that differ. The first one is shown where there is room for one."""
    name: str = "gateway"
    """Of this process, for its metrics."""
    ttft_target_s: float | None = None
    """Of requests that bring none, see `RouterConfig.ttft_slo_s`; None where there is none. The strictest of the
    models: batches leave room for it."""
    tpot_target_s: float | None = None
    """The same, see `RouterConfig.tpot_slo_s`."""
    shares_ports: bool = False
    """Whether other gateways listen at the same ports. Then this one has ports of its own, too."""
    own_http_port: Port = 0
    """Of HTTP, where it shares the others; 0 takes any free one."""
    shows_workers: bool = True
    """Whether `/metrics` has what all gateways know: the workers' own counts, and the autoscaler's. Of several gateways
    one shows it, so that sums over all are right."""
    port: Port = 0
    """Of gRPC; 0 takes any free port."""
    http_port: Port | None = None
    """Of HTTP; 0 takes any free port, `None` serves no HTTP."""
    max_prompt_bytes: Bytes = 1 << 20
    """Longest text prompt, or roles and contents of a chat together, in bytes of UTF-8; checked before tokenizing."""
    inline_prompt_bytes: NonNegativeInt = 1 << 10
    """Prompts up to this size are tokenized on the event loop, where that is cheaper than a thread's hand-over. A
    kibibyte of text that is worst for the tokenizer takes 3 ms."""
    num_tokenizer_threads: Count = 3
    """Threads that tokenize larger prompts. One tenant has all but one of them at a time."""
    max_tokenizing_bytes: Bytes = 64 << 20
    """Of larger prompts that are tokenized or wait for it; further ones are refused."""
    max_tenant_tokenizing_bytes: Bytes = 16 << 20
    """The same of one tenant's prompts."""
    special_tokens_in_chat: bool = False
    """Read special tokens that are spelled out in the contents of a chat, such as `<|im_end|>`, as what they control.
    Without, they are ordinary text there. Prompts that are no chats are always read with them."""
    max_undecoded_bytes: Bytes = 64 << 20
    """Of whole messages that wait to be decoded, one at a time; one tenant may have half of them. More is refused as
    overload."""
    max_concurrent_streams: Count = 1024
    """Calls at a time on one client connection."""
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
