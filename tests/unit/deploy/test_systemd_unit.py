"""The unit of systemd: its command is ours, its folders are those that we use, and it gives the drain its time."""

from __future__ import annotations

import configparser
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import typer

from disagg.cli.main import app
from disagg.cluster.config.cluster_config import ClusterConfig
from disagg.cluster.hosts.processes import STOP_TIMEOUT_S
from disagg.cluster.models.catalog import cache_dir

FILE = Path(__file__).resolve().parents[3] / "deploy" / "systemd" / "disagg.service"
ANALYZE = shutil.which("systemd-analyze")


@pytest.fixture
def service() -> dict[str, str]:
    parser = configparser.RawConfigParser(strict=True)  # no key twice
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # keys keep their case
    parser.read_string(FILE.read_text(encoding="utf-8"))
    assert parser.sections() == ["Unit", "Service", "Install"]
    return dict(parser["Service"])


def test_the_command_is_ours_and_reports_when_it_is_ready(service: dict[str, str]) -> None:
    """`cluster/system/service_manager.py` sends what `Type=notify` waits for, from the main process."""
    assert (service["Type"], service["NotifyAccess"]) == ("notify", "main")
    program, command, *options = shlex.split(service["ExecStart"])
    assert program == "/opt/disagg/venv/bin/disagg"
    found = typer.main.get_command(app).commands[command]  # type: ignore[attr-defined]
    known = {option for parameter in found.params for option in parameter.opts}
    assert {option for option in options if option.startswith("--")} <= known
    assert options[options.index("--launcher") + 1] == "processes"


def test_a_stop_is_for_the_main_process_and_longer_than_a_drain(service: dict[str, str]) -> None:
    assert service["KillMode"] == "mixed"
    assert int(service["TimeoutStopSec"]) > ClusterConfig().gateway.drain_timeout_s + 3 * STOP_TIMEOUT_S
    assert service["User"] == "disagg"


def test_what_it_writes_is_in_folders_that_it_has(service: dict[str, str]) -> None:
    environment = dict(pair.split("=", 1) for pair in shlex.split(service["Environment"]))
    assert cache_dir(environment).is_relative_to("/var/lib/disagg")
    assert environment["XDG_CACHE_HOME"] == "/var/cache/disagg"  # compiled kernels
    assert (service["StateDirectory"], service["CacheDirectory"], service["LogsDirectory"]) == ("disagg",) * 3
    assert service["CacheDirectoryMode"] == "0700"  # code is loaded from there
    assert "--log-dir /var/log/disagg" in service["ExecStart"]
    assert service["ProtectSystem"] == "strict"


@pytest.mark.skipif(ANALYZE is None, reason="systemd is not installed")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    assert ANALYZE is not None
    unit = tmp_path / FILE.name
    unit.write_text(FILE.read_text().replace("/opt/disagg/venv/bin/disagg", "/bin/true"))  # it has to be there
    done = subprocess.run([ANALYZE, "verify", str(unit)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
