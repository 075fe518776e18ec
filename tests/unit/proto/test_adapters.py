"""Names, paths and versions of adapters."""

from __future__ import annotations

import pytest

from disagg.proto.adapters import name_problem, path_problem, version_with
from disagg.proto.block_hash import root_hash
from disagg.proto.messages import Adapter


@pytest.mark.parametrize("name", ["sql", "org/name:v1", "Übung 2", "x" * 256])
def test_names_that_models_may_have(name: str) -> None:
    assert name_problem(name) == ""


@pytest.mark.parametrize("name", ["", " sql", "sql\n", "a\x00b", "x" * 257])
def test_names_that_are_refused(name: str) -> None:
    assert name_problem(name)


@pytest.mark.parametrize("path", ["sql", "team/sql", "./sql", "a..b"])
def test_paths_below_the_folder(path: str) -> None:
    assert path_problem(path) == ""


@pytest.mark.parametrize("path", ["", ".", "..", "/sql", "a/../../b", "a\x00", "x" * 1025])
def test_paths_that_are_refused(path: str) -> None:
    assert path_problem(path)


def test_a_version_is_told_with_the_adapter_and_understood_with_the_same_one_only() -> None:
    first, second = (Adapter(name="sql", path="sql", fingerprint=digit * 64) for digit in "3c")
    version = "00ff00ff00ff00ff"
    told = version_with(version, first)
    assert told == "33cc33cc33cc33cc"
    assert version_with(told, first) == version
    assert version_with(told, second) != version
    assert version_with(version, None) == version
    assert version_with("", first) == ""


def test_two_contents_of_one_name_have_other_hashes_than_each_other_and_the_model() -> None:
    roots = {root_hash("m", salt, adapter) for salt in (b"", b"t") for adapter in ("", "a" * 64, "b" * 64)}
    assert len(roots) == 6
