"""Folders of a gateway that cannot be used are found before anything is started, and nothing is made for that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.control.plan import check_gateway, plan_cluster
from disagg.cluster.control.plans import Plans
from disagg.gateway.stores import check_stores
from disagg.proto.control import ApplyRequest
from disagg.proto.errors import ConfigError

KINDS = ("usage", "batches", "record_events")


def configured(name: str, folder: Path) -> dict[str, Any]:
    return {"model": {"path": "fake"}, "gateway": {"port": 0, name: {"folder": str(folder)}}}


@pytest.mark.parametrize("name", KINDS)
def test_a_folder_that_cannot_be_made_is_refused_by_start_and_change(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "below"
    raw = configured(name, folder)
    message = f"gateway.{name}.folder: {folder} cannot be used: it is not there, and nothing can be made in "
    with pytest.raises(ConfigError) as started:
        check_gateway(parse_config(raw))
    plans = Plans(plan_cluster(parse_config({"model": {"path": "fake"}}), (0, 1)))
    with pytest.raises(ConfigError) as changed:
        plans.plan(ApplyRequest(config=json.dumps(raw).encode(), dry_run=True), plans.target(1), 1)
    assert str(started.value) == str(changed.value) == f"{message}{tmp_path / 'file'}"


@pytest.mark.parametrize("name", KINDS)
def test_a_folder_that_can_be_used_is_left_as_it_is(tmp_path: Path, name: str) -> None:
    gateway = parse_config(configured(name, tmp_path / "new" / "folder")).gateway
    check_stores(gateway, gateway.record_events)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "file"), [("usage", "usage.sqlite"), ("batches", "batches.sqlite")])
def test_a_file_that_is_no_database_is_refused(tmp_path: Path, name: str, file: str) -> None:
    (tmp_path / file).write_bytes(b"something else")
    with pytest.raises(ConfigError, match=rf"gateway.{name}.folder: .* cannot be used: {file} is no SQLite database"):
        check_gateway(parse_config(configured(name, tmp_path)))
    (tmp_path / file).unlink()
    (tmp_path / file).mkdir()
    with pytest.raises(ConfigError, match=f"{file} is no file"):
        check_gateway(parse_config(configured(name, tmp_path)))
