from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from disagg import __version__
from disagg.cluster import cli
from disagg.cluster.errors import LaunchError
from disagg.proto.errors import UnavailableError
from tests.support.checkpoints import write_checkpoint

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
    for command in ("up", "demo", "generate", "status", "scale", "drain", "model"):
        assert f" {command} " in result.output


@pytest.mark.parametrize(
    "command",
    [
        ["up"],
        ["demo"],
        ["generate"],
        ["status"],
        ["scale"],
        ["drain"],
        ["model"],
        ["model", "import"],
        ["model", "list"],
    ],
)
def test_every_command_has_help(command: list[str]) -> None:
    result = CliRunner().invoke(cli.app, [*command, "--help"])
    assert result.exit_code == 0
    assert f"disagg {' '.join(command)}" in result.output or f"root {' '.join(command)}" in result.output


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
    ],
)
def test_a_wrong_command_line_exits_with_2(arguments: list[str]) -> None:
    assert CliRunner().invoke(cli.app, arguments).exit_code == 2


@pytest.mark.parametrize("module", ["disagg.cluster.cli", "disagg.cluster.up", "disagg.cluster.processes"])
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
        (UnavailableError("no gateway"), 1, "error: no gateway\n"),
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
