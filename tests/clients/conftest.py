"""A real `disagg up` with the default model, shared by all clients; each client has an environment of its own under
build/clients, which `make test-clients` makes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.serving import Served, serving
from tests.support.architecture import REPOSITORY

CLIENTS = REPOSITORY / "build" / "clients"


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The cluster; at the end nothing is queued, running or held, and it stops with status 0."""
    with serving(tmp_path_factory.mktemp("served")) as running:
        yield running


def folder(client: str) -> Path:
    """The environment of a client. Skips the test where there is none."""
    return _existing(CLIENTS / client)


def program(client: str, name: str) -> Path:
    """A program of a client's environment. Skips the test where there is none."""
    return _existing(CLIENTS / client / "bin" / name)


def _existing(path: Path) -> Path:
    if not path.exists():
        pytest.skip(f"{path.relative_to(REPOSITORY)} is missing; run `make test-clients`")
    return path
