"""What the shell completes."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import typer
from typer.testing import CliRunner

import disagg.client
from disagg.cli import completion
from disagg.cli.main import app
from disagg.proto.errors import AuthenticationError, UnavailableError


class Cluster:
    """A client of a cluster with two workers, or of none."""

    addresses: ClassVar[list[str]] = []
    error: Exception | None = None
    answered = threading.Event()

    def __init__(self, address: str) -> None:
        self.addresses.append(address)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def cluster_state(self) -> Any:
        if self.error is not None:
            raise self.error
        self.answered.wait(30)
        return SimpleNamespace(workers=[SimpleNamespace(worker_id=name) for name in ("prefill-0", "decode-0")])

    def models(self) -> Any:
        return [SimpleNamespace(name="llama"), SimpleNamespace(name="qwen")]

    def requests(self, limit: int) -> Any:
        return [SimpleNamespace(request_id="ab12"), SimpleNamespace(request_id="cd34")][:limit]


@pytest.fixture(autouse=True)
def _cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disagg.client, "Client", Cluster)
    monkeypatch.setattr(Cluster, "addresses", [])
    monkeypatch.setattr(Cluster, "error", None)
    answered = threading.Event()
    answered.set()
    monkeypatch.setattr(Cluster, "answered", answered)
    monkeypatch.delenv("DISAGG_ADDRESS", raising=False)
    monkeypatch.setenv("GRPC_VERBOSITY", "NONE")


def completed(line: str) -> list[str]:
    """What bash gets for a line whose last word is not complete."""
    words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1), "_TYPER_COMPLETE_ARGS": line}
    env = {"_DISAGG_COMPLETE": "complete_bash", **words}
    done = CliRunner().invoke(app, [], prog_name="disagg", env=env)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("disagg drain ", ["prefill-0", "decode-0"]),
        ("disagg drain de", ["decode-0"]),
        ("disagg generate --model q", ["qwen"]),
        ("disagg chat --model ", ["llama", "qwen"]),
        ("disagg explain ab", ["ab12"]),
        ("disagg plan --device h", ["h100", "h200"]),
        ("disagg plan --model qwen3-8", ["qwen3-8b"]),
        ("disagg plan --scenario inter", ["interactive"]),
        ("disagg simulate mo", ["mooncake"]),
        ("disagg load run --scenario shared", ["shared-prefix"]),
        ("disagg up --model fa", ["fake"]),
    ],
)
def test_names_that_begin_with_what_was_typed(line: str, names: list[str]) -> None:
    assert completed(line) == names


def test_the_cluster_is_that_of_the_line_else_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    completed("disagg drain ")
    monkeypatch.setenv("DISAGG_ADDRESS", "b:2")
    completed("disagg drain ")
    completed("disagg drain --address a:1 ")
    assert Cluster.addresses == ["127.0.0.1:8470", "b:2", "a:1"]


@pytest.mark.parametrize("error", [UnavailableError("x", "unreachable"), AuthenticationError("x"), OSError("x")])
def test_without_a_cluster_there_is_nothing_and_no_message(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(Cluster, "error", error)
    assert completed("disagg drain ") == []


def test_a_cluster_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    Cluster.answered.clear()
    monkeypatch.setattr(completion, "TIMEOUT_S", 0.0)
    context = cast(typer.Context, SimpleNamespace(params={}))
    assert completion.workers(context, "") == []
    Cluster.answered.set()


def test_a_model_cache_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> list[str]:
        raise OSError("no")

    monkeypatch.setattr("disagg.cluster.models.catalog.list_models", fail)
    assert completed("disagg model verify ") == []
