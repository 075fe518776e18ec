"""What `disagg doctor` asks of NIXL: whether bytes come through between two processes of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from disagg.engine.kv_transfer.transports import nixl_agent, nixl_check
from tests.support.transports import needs_nixl


def checked(**environment: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "disagg.engine.kv_transfer.transports.nixl_check"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
        env=os.environ | environment,
        timeout=120,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@needs_nixl
def test_bytes_come_through() -> None:
    found = checked()
    assert (found["version"], found["error"]) == (nixl_check.installed_version(), "")
    assert "UCX" in found["plugins"]


@needs_nixl
def test_memory_that_no_other_process_reads() -> None:
    found = checked(UCX_TLS="self")
    assert found["version"]
    assert found["error"].startswith("UCX has no way to other workers for one that binds to 127.0.0.1")


def test_a_machine_without_nixl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for module in (nixl_agent, nixl_check):
        monkeypatch.setattr(module, "MODULES", ("no_such_package",))
    nixl_agent.load.cache_clear()
    try:
        nixl_check.main()
    finally:
        nixl_agent.load.cache_clear()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["version"] == ""
    assert found["error"].startswith("transport nixl needs the extra `nixl`")
