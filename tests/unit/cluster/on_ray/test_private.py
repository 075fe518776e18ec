"""The environment and the folder of a private Ray, without Ray."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from disagg.cluster.on_ray.private import (
    MARK,
    SEVERAL_MACHINES,
    PrivateEnvironment,
    auth_warnings,
    environment_mark,
    make_temp_dir,
)
from disagg.cluster.system.children import LaunchError

NAMES = (
    "RAY_AUTH_MODE",
    "RAY_AUTH_TOKEN",
    "RAY_AUTH_TOKEN_PATH",
    "RAY_USAGE_STATS_ENABLED",
    "RAY_enable_metrics_collection",
    SEVERAL_MACHINES,
)


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def settings() -> dict[str, str]:
    return {name: os.environ[name] for name in NAMES if name in os.environ}


def test_a_private_ray_asks_for_a_token_and_the_environment_is_given_back() -> None:
    environment = PrivateEnvironment()
    environment.enter()
    first = settings()
    assert len(first.pop("RAY_AUTH_TOKEN")) == 64
    assert first == {
        "RAY_AUTH_MODE": "token",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_enable_metrics_collection": "0",
        SEVERAL_MACHINES: "0",
    }
    for _ in range(2):
        environment.leave()
        assert settings() == {}


def test_a_second_cluster_of_this_process_has_the_same_token() -> None:
    tokens = []
    for _ in range(2):
        environment = PrivateEnvironment()
        environment.enter()
        tokens.append(os.environ["RAY_AUTH_TOKEN"])
        environment.leave()
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize(
    "given",
    [
        {"RAY_AUTH_MODE": "disabled"},
        {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/x"},
        {"RAY_AUTH_TOKEN": "mine"},
        {"RAY_USAGE_STATS_ENABLED": "1"},
    ],
)
def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch, given: dict[str, str]) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    environment = PrivateEnvironment()
    environment.enter()
    inside = settings()
    assert {name: inside[name] for name in given} == given
    assert ("RAY_AUTH_TOKEN" in inside) == ("RAY_AUTH_MODE" not in given)
    environment.leave()
    assert settings() == given


@pytest.mark.parametrize("environ", [{}, {"RAY_AUTH_MODE": "token"}, {"RAY_AUTH_MODE": "TOKEN"}])
def test_a_token_is_nothing_to_warn_about(environ: dict[str, str]) -> None:
    assert auth_warnings(environ) == ()


def test_authentication_that_is_off_is_warned_about() -> None:
    (warning,) = auth_warnings({"RAY_AUTH_MODE": "disabled"})
    assert warning.startswith("RAY_AUTH_MODE=disabled is set: Ray's servers ask for no token, so whoever reaches them")


def test_the_mark_is_there_only_inside_and_the_operator_s_key_only_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISAGG_API_KEY", "key-of-the-operators")
    with environment_mark("m1"):
        assert (os.environ[MARK], "DISAGG_API_KEY" in os.environ) == ("m1", False)
    assert (MARK in os.environ, os.environ["DISAGG_API_KEY"]) == (False, "key-of-the-operators")


def test_a_folder_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = Path(tempfile.mkdtemp(prefix="dt", dir="/tmp"))
    monkeypatch.chdir(short)
    folder, other = make_temp_dir("r"), make_temp_dir("r")
    assert (folder.path.parent, folder.path.stat().st_mode & 0o777) == (short / "r", 0o700)
    assert other.path != folder.path
    for each in (folder, other):
        each.remove()
    shutil.rmtree(short)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/" + "x" * 40)
    fallback = make_temp_dir(None)
    assert fallback.path.parent == Path("/tmp")
    fallback.remove()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("/" + "x" * 31, r"is too long for Ray's sockets; at most 31 characters$"),
        ("/dev/null/x", r"^ray\.temp_dir: cannot make a folder in /dev/null/x \(Not a directory\)$"),
    ],
)
def test_a_folder_that_cannot_be(asked: str, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        make_temp_dir(asked)
