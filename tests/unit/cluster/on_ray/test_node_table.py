"""Which hosts are nodes: the table and its file."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from disagg.cluster.core.node_table import Node, NodeTable, host_of, make_node_id
from disagg.cluster.on_ray.nodes.provider import TableFile
from disagg.proto.errors import ConfigError

HEAD = {"kind": "head"}
WORKER = {"kind": "worker"}


def test_nodes_have_ids_that_are_never_used_again() -> None:
    table, head = NodeTable().begin("g").add("head", "a", HEAD)
    table, first = table.add("decode", "b", WORKER)
    table, second = table.remove(first).add("decode", "b", WORKER)
    assert (head, first, second) == ("head-1@a", "decode-2@b", "decode-3@b")
    assert list(table.nodes) == ["head-1@a", "decode-3@b"]
    assert host_of(second) == "b"


def test_a_host_is_free_until_it_has_a_node_and_again_afterwards() -> None:
    table, node = NodeTable().add("decode", "b", WORKER)
    assert table.free(["a", "b", "c"]) == ["a", "c"]
    assert table.remove(node).free(["a", "b", "c"]) == ["a", "b", "c"]


def test_tags_are_matched_all_and_updated_one_by_one() -> None:
    table, head = NodeTable().add("head", "a", HEAD)
    table, node = table.add("decode", "b", {**WORKER, "status": "setting-up"})
    table = table.tag(node, {"status": "up-to-date"})
    assert table.matching({}) == [head, node]
    assert table.matching({**WORKER, "status": "up-to-date"}) == [node]
    assert table.matching({**WORKER, "status": "setting-up"}) == []
    assert table.nodes[node] == Node(host="b", tags={"kind": "worker", "status": "up-to-date"})


def test_tagging_a_node_that_is_gone_changes_nothing() -> None:
    table, node = NodeTable().add("decode", "b", WORKER)
    gone = table.remove(node)
    assert gone.tag(node, {"status": "x"}) == gone


def test_ended_hosts_are_remembered_until_they_are_used_or_a_new_head_begins() -> None:
    table, node = NodeTable().begin("g").add("decode", "b", WORKER)
    table = table.remove(node, make_node_id("prefill", 0, "c")).remove(node)
    assert table.ended_hosts == ("b", "c")
    assert table.add("decode", "b", WORKER)[0].ended_hosts == ("c",)
    assert table.begin("h") == NodeTable(generation="h")


def test_a_value_is_never_changed() -> None:
    table, node = NodeTable().add("decode", "b", WORKER)
    table.tag(node, {"x": "y"})
    table.remove(node)
    table.add("decode", "c", WORKER)
    assert table.nodes == {node: Node(host="b", tags=WORKER)}


def test_the_file_starts_empty_and_keeps_what_was_changed(tmp_path: Path) -> None:
    file = TableFile(tmp_path / "state")
    assert file.read() == NodeTable()
    assert not (tmp_path / "state").exists()
    table = file.change(lambda table: table.add("head", "a", HEAD)[0])
    assert TableFile(tmp_path / "state").read() == table
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700


def test_a_change_that_fails_changes_nothing(tmp_path: Path) -> None:
    file = TableFile(tmp_path)
    before = file.change(lambda table: table.begin("g"))

    def fail(table: NodeTable) -> NodeTable:
        raise ValueError("no host")

    with pytest.raises(ValueError, match="no host"):
        file.change(fail)
    assert file.read() == before


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(ConfigError, match=f"^{tmp_path}: belongs to another user; choose another folder$"):
        TableFile(tmp_path).change(lambda table: table.begin("g"))
    assert list(tmp_path.iterdir()) == []


def test_no_change_of_several_threads_is_lost(tmp_path: Path) -> None:
    def add(number: int) -> None:
        TableFile(tmp_path).change(lambda table: table.add("decode", f"h{number}", WORKER)[0])

    with ThreadPoolExecutor(8) as executor:
        list(executor.map(add, range(40)))
    table = TableFile(tmp_path).read()
    assert table.num_created == 40
    assert {node.host for node in table.nodes.values()} == {f"h{number}" for number in range(40)}
