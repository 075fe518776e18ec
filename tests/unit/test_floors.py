"""The oldest versions that pyproject.toml accepts are safe ones, and `constraints.txt` has none that is older."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SAFE = {
    "grpcio": (1, 84),  # before, a gzip message is inflated whole before its size is checked
    "jinja2": (3, 1, 6),  # before, a template can leave its sandbox
    "ray": (2, 52),  # before, there is no token: whoever reaches its ports runs code
}


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.match(r"[0-9.]+", text)[0].rstrip(".").split("."))  # type: ignore[index]


def floors() -> dict[str, tuple[int, ...]]:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return {name: version(floor) for name, _, floor in (entry.partition(">=") for entry in project["dependencies"])}


@pytest.mark.parametrize("name", SAFE)
def test_the_oldest_version_is_safe(name: str) -> None:
    assert floors()[name] >= SAFE[name]


def test_what_is_installed_is_no_older_than_the_floors() -> None:
    pins = (REPOSITORY / "constraints.txt").read_text().splitlines()
    pinned = {name: version(pin) for name, _, pin in (line.partition("==") for line in pins) if pin}
    assert {name: pin for name, pin in pinned.items() if pin < floors().get(name, ())} == {}
