"""What `disagg health` takes; what it answers is tested with a real gateway."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from disagg.cli.address import DEFAULT_HTTP_ADDRESS
from disagg.cli.doctor.health import ALIVE, run_health
from disagg.cluster.config.cluster_config import ClusterConfig
from disagg.proto.errors import ConfigError


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8471", "ftp://a", "http://", "file:///etc/passwd", "http://a/x", "http://a?x"]
)
def test_a_url_that_is_none_of_a_gateway(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^--url: expected http"):
        run_health(url, ALIVE, {}, Console(file=io.StringIO()))


def test_a_certificate_that_cannot_be_read() -> None:
    with pytest.raises(ConfigError, match=r"^DISAGG_CLIENT_CERT"):
        run_health("https://127.0.0.1:1", ALIVE, {"DISAGG_CLIENT_CERT": "/nowhere.pem"}, Console(file=io.StringIO()))


def test_the_default_is_the_default_gateway() -> None:
    gateway = ClusterConfig().gateway
    assert f"{gateway.host}:{gateway.chosen_http_port}" == DEFAULT_HTTP_ADDRESS
