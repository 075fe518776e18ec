from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from disagg.client.credentials import Credentials, is_local
from disagg.proto.errors import ConfigError

KEY = "disagg_0123456789"
TLS = cast(grpc.ChannelCredentials, object())
NAMES = ("DISAGG_API_KEY", "DISAGG_CA_CERT", "DISAGG_CLIENT_CERT", "DISAGG_CLIENT_KEY")


@pytest.fixture(autouse=True)
def empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def pem(folder: Path, name: str) -> str:
    file = folder / name
    file.write_text("-----BEGIN SOMETHING-----\n")
    return str(file)


def refusal(address: str = "127.0.0.1:1", **values: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        Credentials(**values).channel(address)
    return str(caught.value)


def test_nothing_is_sent_without_a_key() -> None:
    credentials = Credentials()
    assert credentials.metadata == ()
    assert credentials.channel("gateway.example:8470") is None


def test_the_environment_gives_what_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, name.lower())
    assert Credentials() == Credentials(
        api_key="disagg_api_key",
        ca_cert="disagg_ca_cert",
        client_cert="disagg_client_cert",
        client_key="disagg_client_key",
    )
    assert Credentials(api_key="other").metadata == (("authorization", "Bearer other"),)
    assert Credentials(api_key="").metadata == ()


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("127.0.0.1:8470", True),
        ("localhost:8470", True),
        ("[::1]:8470", True),
        ("0.0.0.0:8470", True),
        ("unix:/tmp/s", True),
        ("10.0.0.1:8470", False),
        ("gateway.example:8470", False),
        ("127.0.0.1.example:8470", False),
    ],
)
def test_a_key_in_clear_text_stays_on_this_machine(address: str, local: bool) -> None:
    assert is_local(address) is local
    if local:
        assert Credentials(api_key=KEY).channel(address) is None
    else:
        assert refusal(address, api_key=KEY) == (
            f"api_key (DISAGG_API_KEY): {address} is another machine and the connection is in clear text, so that "
            "others could read the key; set ca_cert (DISAGG_CA_CERT), or pass allow_plaintext_key=True"
        )
    assert Credentials(api_key=KEY, allow_plaintext_key=True).channel(address) is None


def test_what_turns_on_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[bytes | None, ...]] = []

    def note(*files: bytes | None) -> Any:
        given.append(files)
        return TLS

    monkeypatch.setattr(grpc, "ssl_channel_credentials", note)
    content = b"-----BEGIN SOMETHING-----\n"
    ca, cert, key = (pem(tmp_path, name) for name in ("ca", "cert", "key"))
    for credentials in (
        Credentials(api_key=KEY, ca_cert=ca),
        Credentials(api_key=KEY, ca_cert="system"),
        Credentials(api_key=KEY, ca_cert=ca, client_cert=cert, client_key=key),
    ):
        assert credentials.channel("10.0.0.1:1") is TLS
    assert given == [(content, None, None), (None, None, None), (content, content, content)]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"api_key": "two words"}, "api_key (DISAGG_API_KEY): expected printable ASCII without spaces"),
        ({"api_key": "ключ"}, "api_key (DISAGG_API_KEY): expected printable ASCII without spaces"),
        ({"api_key": "a\nb"}, "api_key (DISAGG_API_KEY): expected printable ASCII without spaces"),
        (
            {"ca_cert": "system", "client_cert": "/c"},
            "client_cert and client_key (DISAGG_CLIENT_CERT, DISAGG_CLIENT_KEY): one is of no use without the other",
        ),
        (
            {"client_cert": "/c", "client_key": "/k"},
            "ca_cert (DISAGG_CA_CERT): needed with a client certificate; `system` takes the public CAs",
        ),
        ({"ca_cert": "/none/ca"}, "ca_cert (DISAGG_CA_CERT): cannot read /none/ca (No such file or directory)"),
    ],
)
def test_credentials_that_cannot_be(values: dict[str, str], message: str) -> None:
    assert refusal(**values) == message


def test_a_file_that_is_no_pem(tmp_path: Path) -> None:
    file = tmp_path / "ca"
    file.write_text("nothing")
    assert refusal(ca_cert=str(file)) == f"ca_cert (DISAGG_CA_CERT): {file} is not a PEM file"


def test_the_key_is_not_shown() -> None:
    assert repr(Credentials(api_key=KEY)) == "Credentials(api_key=..., ca_cert='')"
