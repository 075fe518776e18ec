from __future__ import annotations

import platform
from importlib.metadata import version

import pytest

from disagg.cluster.system import provenance


def test_a_package_that_is_not_there_is_named() -> None:
    assert provenance.versions("msgspec", "no-such-package") == {
        "msgspec": version("msgspec"),
        "no-such-package": "not installed",
    }


def test_a_machine_has_its_packages_after_its_own_facts() -> None:
    facts = provenance.machine("grpcio")
    assert list(facts) == ["cpu", "system", "python", "grpcio"]
    assert facts["cpu"]
    assert (facts["python"], facts["grpcio"]) == (platform.python_version(), version("grpcio"))


def test_without_git_the_commit_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert provenance.commit() == "unknown"


def test_outside_a_checkout_the_commit_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_DIR", "/dev/null")
    assert provenance.commit() == "unknown"


def test_a_commit_that_is_given_goes_before_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISAGG_COMMIT", "0123456789ab")
    assert provenance.commit() == "0123456789ab"
    monkeypatch.setenv("DISAGG_COMMIT", "")
    assert provenance.commit() != ""
