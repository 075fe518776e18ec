"""The datagrams for a service manager."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from disagg.cluster.system.service_manager import READY, VARIABLE, notify


@pytest.mark.parametrize("is_abstract", [False, True])
def test_the_manager_gets_the_state(tmp_path: Path, is_abstract: bool) -> None:
    if is_abstract and not sys.platform.startswith("linux"):
        pytest.skip("abstract sockets are Linux's")
    name = f"@disagg-test-{os.getpid()}" if is_abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + name[1:] if is_abstract else name)
        assert notify(READY, {VARIABLE: name})
        assert manager.recv(64) == b"READY=1"


@pytest.mark.parametrize("environ", [{}, {VARIABLE: ""}, {VARIABLE: "relative"}, {VARIABLE: "/nowhere/notify"}])
def test_without_a_manager_nothing_is_sent(environ: dict[str, str]) -> None:
    assert not notify(READY, environ)
