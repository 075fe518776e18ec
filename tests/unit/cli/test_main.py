from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from disagg import __version__
from disagg.cli import main as cli
from disagg.cluster.system.children import LaunchError
from disagg.gateway.auth.auth import Caller
from disagg.gateway.auth.shell.api_keys import load_keys
from disagg.proto.errors import (
    AuthenticationError,
    DeadlineError,
    OverloadedError,
    PermissionDeniedError,
    RequestNotFoundError,
    UnavailableError,
)
from disagg.router.api import NO_LIMITS
from tests.support.checkpoints import write_checkpoint

COMMANDS = ("up", "demo", "generate", "chat", "status", "scale", "drain", "top", "explain", "doctor")
HEAVY = ("torch", "transformers", "ray", "grpc", "gguf", "tokenizers", "numpy")


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DISAGG_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("DISAGG_DEBUG", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "dumb")


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["disagg", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    code = caught.value.code
    assert isinstance(code, int)
    return code


def test_help_names_every_command() -> None:
    result = CliRunner().invoke(cli.app, ["--help"])
    assert result.exit_code == 0
    for command in (*COMMANDS, "model", "trace", "key", "cluster", "load"):
        assert f" {command} " in result.output
    for panel in ("Serve", "Operate", "Measure", "Models"):
        assert f" {panel} " in result.output


@pytest.mark.parametrize(
    "command",
    [
        *([command] for command in COMMANDS),
        ["model"],
        ["model", "import"],
        ["model", "list"],
        ["key"],
        ["key", "new"],
        ["trace"],
        ["trace", "export"],
    ],
)
def test_every_command_has_help(command: list[str]) -> None:
    result = CliRunner().invoke(cli.app, [*command, "--help"])
    assert result.exit_code == 0
    assert f"disagg {' '.join(command)}" in result.output or f"root {' '.join(command)}" in result.output


def leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every command that does something, by what is typed for it."""
    if not hasattr(command, "commands"):
        yield " ".join(path), command
        return
    for name, inner in command.commands.items():
        yield from leaves(inner, (*path, name))


@pytest.mark.parametrize(("name", "command"), list(leaves(typer.main.get_command(cli.app))))
def test_every_command_ends_its_help_with_examples_that_it_takes(name: str, command: Any) -> None:
    title, *lines = command.epilog.split("\n\n")
    assert title == "Examples:"
    assert lines
    for line in lines:
        typed = shlex.split(line.rpartition("| ")[2])
        words = ["disagg", *name.split()]
        assert typed[: len(words)] == words
        command.make_context(name, typed[len(words) :])  # raises for what the command does not take


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str) -> None:
    script = CliRunner().invoke(cli.app, [], prog_name="disagg", env={"_DISAGG_COMPLETE": f"source_{shell}"})
    assert script.exit_code == 0
    assert "_DISAGG_COMPLETE" in script.output
    words = {"COMP_WORDS": "disagg do", "COMP_CWORD": "1", "_TYPER_COMPLETE_ARGS": "disagg do"}
    names = (
        CliRunner()
        .invoke(cli.app, [], prog_name="disagg", env={"_DISAGG_COMPLETE": "complete_bash", **words})
        .output.split()
    )
    assert names == ["doctor"]


def test_version() -> None:
    result = CliRunner().invoke(cli.app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"disagg {__version__}\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ["upp"],
        ["up", "--launcher", "docker"],
        ["up", "--port", "70000"],
        ["up", "--prefill", "0"],
        ["generate"],
        ["scale"],
        ["top", "--interval", "0"],
        ["explain", "--list", "--limit", "0"],
        ["trace", "export"],
    ],
)
def test_a_wrong_command_line_exits_with_2(arguments: list[str]) -> None:
    assert CliRunner().invoke(cli.app, arguments).exit_code == 2


@pytest.mark.parametrize("module", ["disagg.cli.main", "disagg.cli.up", "disagg.cluster.hosts.processes"])
def test_the_launching_process_stays_light(module: str) -> None:
    code = f"import sys, {module}; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_config_error_is_one_line_and_exits_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "c.yaml").write_text("pools: {decode: {sise: 2}}")
    assert run_main(monkeypatch, "up", "--config", str(tmp_path / "c.yaml")) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: pools.decode.sise: unknown key, did you mean 'size'?; allowed here: size, ")
    assert captured.err.count("\n") == 1


def test_a_missing_model_says_what_to_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run_main(monkeypatch, "up", "--launcher", "processes", "--model", "other") == 2
    assert capsys.readouterr().err == (
        f"error: model: 'other' is not in {tmp_path}/home/models (there is: none yet); run: disagg model import other\n"
    )


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (LaunchError("decode-0: no room"), 1, "error: decode-0: no room\n"),
        (UnavailableError("no room"), 1, "error: no room; next: disagg status\n"),
        (UnavailableError("no one", "unreachable"), 1, "error: no one; next: disagg doctor\n"),
        (
            OverloadedError("full", 1.5),
            1,
            "error: full; next: try again in 1.5 s, or add workers: disagg scale decode=2\n",
        ),
        (RequestNotFoundError("no such request"), 1, "error: no such request; next: disagg explain --list\n"),
        (AuthenticationError("no key"), 1, "error: no key; next: set DISAGG_API_KEY to a key of this cluster\n"),
        (PermissionDeniedError("no"), 1, "error: no; next: set DISAGG_API_KEY to the key of an administrator\n"),
        (DeadlineError("late"), 1, "error: late\n"),
        (ZeroDivisionError("x"), 1, "error: ZeroDivisionError: x\n(DISAGG_DEBUG=1 shows where)\n"),
    ],
)
def test_other_errors_exit_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, status: int, text: str
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(cli, "app", fail)
    assert run_main(monkeypatch) == status
    assert capsys.readouterr().err == text


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise LaunchError("x")

    monkeypatch.setattr(cli, "app", fail)
    monkeypatch.setenv("DISAGG_DEBUG", "1")
    with pytest.raises(LaunchError):
        cli.main()


def test_a_key_goes_to_the_file_and_to_standard_output(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    made = CliRunner().invoke(cli.app, ["key", "new", "team-a", "--admin", "--file", str(file)])
    assert made.exit_code == 0
    key = made.stdout.strip()
    assert load_keys(str(file)).authenticate(f"Bearer {key}")._replace(limits=NO_LIMITS, credential="") == Caller(
        "team-a", True
    )
    assert key not in file.read_text()
    assert key not in made.stderr


def test_import_and_list(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "Tiny")
    runner = CliRunner()
    empty = runner.invoke(cli.app, ["model", "list"])
    assert empty.output == f"no models in {tmp_path}/home/models; next: disagg model import smollm2-135m\n"
    done = runner.invoke(cli.app, ["model", "import", str(source), "--name", "small"])
    assert done.exit_code == 0
    assert done.output.endswith(f"small is in {tmp_path}/home/models/small\nnext: disagg up --model small\n")
    listed = runner.invoke(cli.app, ["model", "list"])
    assert listed.output == f"small  LlamaForCausalLM  0 MB  from {source}\n"
