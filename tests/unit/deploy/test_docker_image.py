"""The definitions of the images, which are not built here: their user, the versions of their packages, their commands,
and what is in them for the build and for kernels."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from disagg.cli.main import app
from disagg.kernels.cpu import build

REPOSITORY = Path(__file__).resolve().parents[3]
FOLDER = REPOSITORY / "deploy" / "docker"
IMAGES = ("Dockerfile", "Dockerfile.cpu")
UID = "10001:10001"
"""A number: with a name, Kubernetes cannot see that it is not root (`runAsNonRoot`)."""

Instructions = list[tuple[str, str]]


def instructions(name: str) -> Instructions:
    """(word, rest) of each instruction, its lines joined."""
    text = (FOLDER / name).read_text()
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(line.partition(" ")[0], line.partition(" ")[2].strip()) for line in joined.splitlines()]


def of(word: str, found: Instructions) -> list[str]:
    return [rest for each, rest in found if each == word]


def last_stage(found: Instructions) -> Instructions:
    """What makes the image."""
    begin = max(index for index, (word, _) in enumerate(found) if word == "FROM")
    return found[begin:]


def installed(found: Instructions) -> set[str]:
    """Packages of the base's distribution."""
    runs = " ".join(of("RUN", found))
    lists = re.findall(r"apt-get install -y --no-install-recommends ([^&]*)&&", runs)
    return {name for names in lists for name in names.split()}


@pytest.mark.parametrize("name", IMAGES)
def test_it_runs_as_another_user_than_root(name: str) -> None:
    assert of("USER", last_stage(instructions(name))) == [UID]


@pytest.mark.parametrize("name", IMAGES)
def test_python_packages_have_the_pinned_versions(name: str) -> None:
    pips = [rest for rest in of("RUN", instructions(name)) if re.search(r"\binstall --no-cache-dir", rest)]
    assert len(pips) == 2
    assert all("-c /opt/disagg/constraints.txt" in rest for rest in pips)
    pinned = (REPOSITORY / "constraints.txt").read_text()
    assert all(re.search(rf"^{package}==", pinned, re.MULTILINE) for package in ("torch", "triton"))


@pytest.mark.parametrize("name", IMAGES)
def test_its_commands_and_its_probe_are_ours(name: str) -> None:
    final = last_stage(instructions(name))
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert json.loads(of("ENTRYPOINT", final)[0]) == ["disagg"]
    assert json.loads(of("CMD", final)[0])[0] in commands
    program, command, *rest = json.loads(of("HEALTHCHECK", final)[0].partition(" CMD ")[2])
    assert (program, command, rest) == ("disagg", "health", ["--live"])
    assert "--live" in [option for parameter in commands["health"].params for option in parameter.opts]


# ---------------------------------------------------------------- for GPUs


def test_the_image_for_gpus_has_what_triton_compiles_with() -> None:
    """`disagg doctor` looks for the same: `kernels.describe.triton_lacks`."""
    assert {"gcc", "g++", "python3-dev", "python3-venv", "libc-bin"} <= installed(instructions("Dockerfile"))
    assert "[gpu]" in of("RUN", instructions("Dockerfile"))[-1]


# ---------------------------------------------------------------- for CPUs


def test_the_image_for_cpus_has_nothing_of_the_build() -> None:
    assert installed(last_stage(instructions("Dockerfile.cpu"))) == {"ca-certificates", "python3"}


def test_the_kernels_of_the_image_for_cpus_are_made_in_the_build_and_found_at_run_time() -> None:
    found = instructions("Dockerfile.cpu")
    runs = " ".join(of("RUN", found))
    (module, folder) = re.findall(r"python -m (disagg\.kernels\S+) (\S+)", runs)[0]
    assert importlib.util.find_spec(module) is not None
    variables = dict(pair.split("=", 1) for rest in of("ENV", last_stage(found)) for pair in rest.split())
    assert variables[build.PREBUILT] == folder
    assert folder.startswith("/opt/disagg/")
    assert variables["PATH"].startswith("/opt/disagg/venv/bin:")


@pytest.mark.parametrize(("cuda", "status"), [(None, 0), ("13.0", 1)])
def test_the_image_for_cpus_refuses_a_torch_with_cuda(cuda: str | None, status: int, tmp_path: Path) -> None:
    """The default index has no other one for Linux."""
    program = re.findall(r'python -c "([^"]*)"', " ".join(of("RUN", instructions("Dockerfile.cpu"))))[0]
    (tmp_path / "torch.py").write_text(f"class version:\n    cuda = {cuda!r}\n")
    environment = {"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    assert ("give TORCH_INDEX" in done.stderr) == bool(status)
