"""Which token a process sends that joins a Ray cluster, without Ray."""

from __future__ import annotations

import os
from pathlib import Path

import grpc
import pytest

from disagg.cluster.on_ray import joined as ray_auth
from disagg.cluster.system.children import LaunchError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without a token, an environment that says nothing."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_without_a_token_ray_is_left_alone() -> None:
    ray_auth.prepare_token()
    assert "RAY_AUTH_MODE" not in os.environ


@pytest.mark.parametrize("name", ["RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"])
def test_a_token_in_the_environment_is_used(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "x")  # to be put back at the end
    monkeypatch.delenv("RAY_AUTH_MODE")
    monkeypatch.setenv(name, "anything")
    ray_auth.prepare_token()
    assert os.environ["RAY_AUTH_MODE"] == "token"


def test_a_token_in_rays_own_file_is_used(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "x")
    monkeypatch.delenv("RAY_AUTH_MODE")
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text("anything")
    ray_auth.prepare_token()
    assert os.environ["RAY_AUTH_MODE"] == "token"


def test_what_the_user_said_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "anything")
    ray_auth.prepare_token()
    assert os.environ["RAY_AUTH_MODE"] == "disabled"


class Refusal(grpc.RpcError, grpc.Call):  # type: ignore[misc]  # as gRPC makes them
    """What a call that failed raises."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details


class Channel:
    """A cluster that answers every call in one way. Owner of what it was asked."""

    def __init__(self, refusal: Refusal | None) -> None:
        self._refusal = refusal
        self.metadata: list[tuple[tuple[str, str], ...]] = []

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def unary_unary(self, path: str, *_: object) -> Channel:
        assert path == "/ray.rpc.NodeInfoGcsService/GetClusterId"
        return self

    def __call__(self, request: bytes, metadata: tuple[tuple[str, str], ...], timeout: float) -> bytes:
        self.metadata.append(metadata)
        if self._refusal is not None:
            raise self._refusal
        return b""


def cluster(monkeypatch: pytest.MonkeyPatch, token: str, refusal: Refusal | None) -> Channel:
    channel = Channel(refusal)
    monkeypatch.setattr(grpc, "insecure_channel", lambda address, options: channel)
    monkeypatch.setattr(ray_auth, "_raw_token", lambda: token)
    return channel


UNAUTHENTICATED = Refusal(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")


def test_the_token_is_sent_as_ray_sends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    channel = cluster(monkeypatch, "abc", None)
    ray_auth.check_accepted("h:1")
    assert channel.metadata == [(("authorization", "Bearer abc"),)]


@pytest.mark.parametrize(
    ("token", "refusal", "message"),
    [
        ("", UNAUTHENTICATED, r"^ray\.address: the Ray cluster at h:1 requires a token\. Put the cluster's own into "),
        ("abc", UNAUTHENTICATED, r"^ray\.address: the Ray cluster at h:1 refused our token; "),
        ("", Refusal(grpc.StatusCode.UNAVAILABLE, "no"), r"^ray\.address: no Ray cluster answers at h:1 \(no\)$"),
    ],
)
def test_a_refusal_says_what_to_do(monkeypatch: pytest.MonkeyPatch, token: str, refusal: Refusal, message: str) -> None:
    cluster(monkeypatch, token, refusal)
    with pytest.raises(LaunchError, match=message):
        ray_auth.check_accepted("h:1")


def test_a_mode_that_is_off_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    cluster(monkeypatch, "", UNAUTHENTICATED)
    with pytest.raises(LaunchError, match=r"RAY_AUTH_MODE=disabled is set, so none was sent"):
        ray_auth.check_accepted("h:1")
