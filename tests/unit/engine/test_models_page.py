"""docs/models.md says of each family what the code says, and each family has an exactness test."""

from __future__ import annotations

from pathlib import Path

from tests.support.models_page import table

PAGE = Path(__file__).resolve().parents[3] / "docs/models.md"


def test_the_table_of_models_is_that_of_the_code() -> None:
    assert table() in PAGE.read_text(encoding="utf-8"), "run python -m tests.support.models_page"
