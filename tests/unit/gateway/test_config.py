from __future__ import annotations

from typing import Any

import msgspec
import pytest

from disagg.gateway.auth.tls_files import TlsFiles
from disagg.gateway.config import GatewayConfig, ModelSource, serves_page
from disagg.proto.errors import ConfigError


def config(**changes: Any) -> GatewayConfig:
    """`changes` are of the gateway, or of its model."""
    of_model: dict[str, Any] = {name: changes.pop(name) for name in ("name", "max_model_len") if name in changes}
    source = ModelSource(**({"name": "m", "path": "p", "prefix_root": "f"} | of_model))
    return GatewayConfig(models=(source,), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": ""}, r"^gateway\.models\.name: must not be empty"),
        ({"port": -1}, r"port: must be in \[0, 65535\], not -1"),
        ({"port": 65536}, "port"),
        ({"max_model_len": 0}, "max_model_len: must be at least 1, not 0"),
        ({"max_prompt_bytes": 0}, "max_prompt_bytes"),
        ({"num_tokenizer_threads": 0}, "num_tokenizer_threads"),
        ({"max_concurrent_streams": 0}, "max_concurrent_streams"),
        ({"inline_prompt_bytes": -1}, "inline_prompt_bytes"),
        ({"write_timeout_s": 0.0}, r"^gateway\.write_timeout_s: must be in \(0, 86400\], not 0\.0$"),
        ({"write_timeout_s": float("inf")}, "write_timeout_s"),
        ({"write_timeout_s": float("nan")}, "write_timeout_s"),
        ({"idle_timeout_s": 0.0}, "idle_timeout_s"),
        ({"read_timeout_s": float("inf")}, "read_timeout_s"),
        ({"max_connections": 0}, "max_connections"),
        ({"max_unfinished_bytes": 0}, r"^gateway\.max_unfinished_bytes: must be in \[1, 1099511627776\], not 0$"),
        ({"max_keyless_watches": 65_537}, r"^gateway\.max_keyless_watches: must be in \[1, 65536\], not 65537$"),
        (
            {"host": "0.0.0.0", "ui": True},
            r"^gateway\.ui: the page would be open to everybody who reaches 0\.0\.0\.0",
        ),
        ({"host": ""}, r"^gateway\.host: must not be empty$"),
        ({"max_grpc_connections": 0}, "max_grpc_connections"),
        ({"grpc_handshake_timeout_s": 0.0}, "grpc_handshake_timeout_s"),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**changes)


def test_it_travels_as_json() -> None:
    given = config(port=8470, max_model_len=100)
    assert msgspec.json.decode(msgspec.json.encode(given), type=GatewayConfig) == given


def test_a_message_holds_the_longest_prompt_in_either_form() -> None:
    assert config(max_prompt_bytes=5 << 20).max_message_bytes(100) == (5 << 20) + (64 << 10)
    assert config(max_prompt_bytes=1000).max_message_bytes(1_000_000) == 8_000_000 + (64 << 10)
    assert config(max_prompt_bytes=1000).max_message_bytes(100) == 1000 + (64 << 10)


@pytest.mark.parametrize(
    ("changes", "is_served"),
    [
        ({}, True),
        ({"ui": False}, False),
        ({"allowed_hosts": ("llm.local",)}, False),
        ({"allowed_hosts": ("llm.local",), "ui": True}, True),
        ({"host": "0.0.0.0"}, False),
        ({"host": "0.0.0.0", "api_keys": "/keys"}, True),
        ({"host": "0.0.0.0", "tls": TlsFiles(cert="/c", key="/k")}, False),
        ({"host": "0.0.0.0", "tls": TlsFiles(cert="/c", key="/k", client_ca="/ca")}, True),
        ({"host": "0.0.0.0", "ui": True, "api_keys": "/keys"}, True),
    ],
)
def test_the_page_is_served_where_not_everybody_can_open_it(changes: dict[str, Any], is_served: bool) -> None:
    assert serves_page(config(**changes)) is is_served
