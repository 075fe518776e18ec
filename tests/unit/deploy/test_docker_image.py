"""The definitions of the images, which are not built here: what they copy exists or is built, they install what is
needed and pinned, they run as another user than root without what only the build needs, and their commands are ours."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from disagg.cli.doctor.health import run_health
from disagg.cli.main import app
from disagg.kernels.cpu import build

REPOSITORY = Path(__file__).resolve().parents[3]
FOLDER = REPOSITORY / "deploy" / "docker"
BUILT = "dist/disagg-*.whl"
"""By `make wheel`."""
IMAGES = ("Dockerfile", "Dockerfile.cpu")
UID = "10001:10001"
"""A number: with a name, Kubernetes cannot see that it is not root (`runAsNonRoot`)."""
BASE = "ubuntu:24.04"
WORDS = {"FROM", "RUN", "ENV", "USER", "COPY", "WORKDIR", "VOLUME", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"}
HADOLINT = shutil.which("hadolint")

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
def test_it_has_known_instructions_a_pinned_base_and_ends_as_another_user_than_root(name: str) -> None:
    found = instructions(name)
    assert {word for word, _ in found} - {"ARG"} == WORDS
    assert {base.partition(" AS ")[0] for base in of("FROM", found)} == {BASE}
    final = last_stage(found)
    assert of("USER", final) == [UID]
    runs_as_user = final[final.index(("USER", UID)) :]
    assert not [rest for word, rest in runs_as_user if word == "RUN" and "apt-get" in rest]
    create = "groupadd --gid 10001 disagg && useradd --uid 10001 --gid disagg --create-home disagg"
    assert create in re.sub(r"\s+", " ", " ".join(of("RUN", final)))


@pytest.mark.parametrize("name", IMAGES)
def test_what_it_copies_exists_or_is_built_and_reaches_the_builder(name: str) -> None:
    copies = [shlex.split(rest) for rest in of("COPY", instructions(name))]
    sources = [source for words in copies if not words[0].startswith("--from=") for source in words[:-1]]
    assert sources == ["constraints.txt", BUILT]
    assert (REPOSITORY / "constraints.txt").is_file()
    ignored = (FOLDER / f"{name}.dockerignore").read_text().splitlines()
    assert [line for line in ignored if not line.startswith("#")] == ["*", *(f"!{source}" for source in sources)]
    makefile = (REPOSITORY / "Makefile").read_text()
    assert "wheel -q --no-deps -w dist ." in makefile


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
    options, _, probe = of("HEALTHCHECK", final)[0].partition(" CMD ")
    assert {option.partition("=")[0] for option in options.split()} == {"--interval", "--timeout", "--start-period"}
    program, command, *rest = json.loads(probe)
    assert (program, command, rest) == ("disagg", "health", ["--live"])
    assert callable(run_health)
    assert "--live" in [option for parameter in commands["health"].params for option in parameter.opts]


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed")
@pytest.mark.parametrize("name", IMAGES)
def test_hadolint_finds_nothing(name: str) -> None:
    assert HADOLINT is not None
    done = subprocess.run([HADOLINT, str(FOLDER / name)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


# ---------------------------------------------------------------- for GPUs


def test_the_image_for_gpus_has_what_triton_compiles_with() -> None:
    """`disagg doctor` looks for the same: `kernels.describe.triton_lacks`."""
    assert {"gcc", "g++", "python3-dev", "python3-venv", "libc-bin"} <= installed(instructions("Dockerfile"))
    assert "[gpu]" in of("RUN", instructions("Dockerfile"))[-1]


def test_the_image_for_gpus_is_given_the_driver() -> None:
    variables = dict(pair.split("=", 1) for rest in of("ENV", instructions("Dockerfile")) for pair in rest.split())
    assert variables["NVIDIA_DRIVER_CAPABILITIES"].split(",") == ["compute", "utility"]
    assert variables["PATH"].startswith("/opt/disagg/venv/bin:")


# ---------------------------------------------------------------- for CPUs


def test_the_image_for_cpus_has_nothing_of_the_build() -> None:
    found = instructions("Dockerfile.cpu")
    assert of("FROM", found) == [f"{BASE} AS build", BASE]
    final = last_stage(found)
    assert installed(final) == {"ca-certificates", "python3"}
    assert of("COPY", final) == ["--from=build /opt/disagg /opt/disagg"]  # as root: nobody else may change it
    assert "--without-pip /opt/disagg/venv" in " ".join(of("RUN", found))


def test_the_kernels_of_the_image_for_cpus_are_made_in_the_build_and_found_at_run_time() -> None:
    found = instructions("Dockerfile.cpu")
    runs = " ".join(of("RUN", found))
    (module, folder) = re.findall(r"python -m (disagg\.kernels\S+) (\S+)", runs)[0]
    assert importlib.util.find_spec(module) is not None
    variables = dict(pair.split("=", 1) for rest in of("ENV", last_stage(found)) for pair in rest.split())
    assert variables[build.PREBUILT] == folder
    assert folder.startswith("/opt/disagg/")
    assert variables["PATH"].startswith("/opt/disagg/venv/bin:")


def test_the_build_of_the_image_for_cpus_compiles_what_is_imported() -> None:
    """The root file system may be read-only then. The same modules as in the Makefile, and the command line's."""
    programs = re.findall(r'python -c "([^"]*)"', " ".join(of("RUN", instructions("Dockerfile.cpu"))))
    imported = {
        alias.name for node in ast.walk(ast.parse(programs[-1])) if isinstance(node, ast.Import) for alias in node.names
    }
    used = re.search(r"^USED := (.*)$", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    assert used is not None
    assert imported == {*used[1].split(", "), "disagg.cli.main"}
    assert all(importlib.util.find_spec(name) for name in imported)


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
