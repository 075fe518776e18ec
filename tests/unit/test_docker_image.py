"""The definition of the CUDA image, which is not built here: what it copies exists or is built, it installs what torch
and Triton need, and its command is ours."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import typer

from disagg.cli.main import app

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "deploy" / "docker"
BUILT = "dist/disagg-*.whl"
"""By `make wheel`."""
WORDS = {"FROM", "RUN", "ENV", "USER", "COPY", "WORKDIR", "VOLUME", "EXPOSE", "ENTRYPOINT", "CMD"}


def instructions() -> list[tuple[str, str]]:
    """(word, rest) of each instruction, its lines joined."""
    text = (FOLDER / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(line.partition(" ")[0], line.partition(" ")[2].strip()) for line in joined.splitlines()]


def of(word: str) -> list[str]:
    return [rest for found, rest in instructions() if found == word]


def test_it_has_known_instructions_one_base_and_ends_as_another_user_than_root() -> None:
    found = [word for word, _ in instructions()]
    assert set(found) == WORDS
    assert found[0] == "FROM"
    assert of("FROM") == ["ubuntu:24.04"]
    assert of("USER") == ["disagg"]
    assert found.index("USER") < found.index("COPY")


def test_what_it_copies_exists_or_is_built_and_reaches_the_builder() -> None:
    sources = [source for rest in of("COPY") for source in shlex.split(rest)[:-1]]
    assert sources == ["constraints.txt", BUILT]
    assert (REPOSITORY / "constraints.txt").is_file()
    ignored = (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
    assert [line for line in ignored if not line.startswith("#")] == ["*", *(f"!{source}" for source in sources)]
    makefile = (REPOSITORY / "Makefile").read_text()
    assert "wheel -q --no-deps -w dist ." in makefile


def test_it_has_what_triton_compiles_with() -> None:
    """`disagg doctor` looks for the same: `kernels.describe.triton_lacks`."""
    installed = re.search(r"apt-get install -y --no-install-recommends ([^&]*)&&", of("RUN")[0])
    assert installed is not None
    assert {"gcc", "g++", "python3-dev", "python3-venv", "libc-bin"} <= set(installed[1].split())


def test_python_packages_have_the_pinned_versions_and_the_extra_for_gpus() -> None:
    pips = [rest for rest in of("RUN") if "pip install" in rest]
    assert len(pips) == 2
    assert all("-c /opt/disagg/constraints.txt" in rest for rest in pips)
    assert "[gpu]" in pips[1]
    pinned = (REPOSITORY / "constraints.txt").read_text()
    assert all(re.search(rf"^{name}==", pinned, re.MULTILINE) for name in ("torch", "triton"))


def test_it_is_given_the_driver() -> None:
    variables = dict(pair.split("=", 1) for rest in of("ENV") for pair in rest.split())
    assert variables["NVIDIA_DRIVER_CAPABILITIES"].split(",") == ["compute", "utility"]
    assert variables["PATH"].startswith("/opt/disagg/venv/bin:")


def test_its_command_is_ours() -> None:
    (entry,), (command,) = (json.loads(of(word)[0]) for word in ("ENTRYPOINT", "CMD"))
    assert entry == "disagg"
    assert command in typer.main.get_command(app).commands  # type: ignore[attr-defined]
