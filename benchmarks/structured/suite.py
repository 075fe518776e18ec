"""Schemas of a public suite: JSON-Schema-Test-Suite, which the source distribution of `jsonschema` carries.

Nothing of it is kept in this repository: `fetched` gets it with pip once, or a folder with the suite's files is given.
A *feature* is a file of the suite, which is a keyword of JSON schema (`minimum.json`) or a use of some.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCE = "jsonschema==4.26.0"
DRAFT = "json/tests/draft2020-12"


@dataclass(frozen=True, slots=True)
class Case:
    """One schema."""

    feature: str
    name: str
    schema: dict[str, Any]


def fetched(folder: Path) -> Path:
    """The suite's folder, below `folder`; downloaded where it is not there."""
    found = next(iter(sorted(folder.glob(f"*/{DRAFT}"))), None)
    if found is None:
        folder.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q", "--no-deps"]
        subprocess.run([*pip, "--no-binary", ":all:", "-d", str(folder), SOURCE], check=True)
        with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
            archive.extractall(folder, filter="data")
        found = next(folder.glob(f"*/{DRAFT}"))
    return found


def read_cases(suite: Path, per_feature: int) -> list[Case]:
    """Schemas that are objects, of each feature the first ones."""
    cases: list[Case] = []
    for file in sorted(suite.glob("*.json")):
        groups = [g for g in json.loads(file.read_text(encoding="utf-8")) if isinstance(g["schema"], dict)]
        cases += [Case(file.stem, group["description"], group["schema"]) for group in groups[:per_feature]]
    return cases
