"""Nodes of the loopback provider, without Ray: their commands run in homes of their own and their processes end."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from disagg.cluster.on_ray.nodes.local_runner import NODE_MARK
from disagg.cluster.on_ray.nodes.provider import LoopbackProvider
from disagg.cluster.system.process_tools import ProcessRef
from tests.support.waiting import until


def make_provider(folder: Path, *node_types: str) -> LoopbackProvider:
    provider = LoopbackProvider({"dir": str(folder), "head_port": 7000}, "c")
    for node_type in node_types:
        kind = "head" if node_type == "head" else "worker"
        provider.create_node({}, {"ray-node-type": kind, "ray-user-node-type": node_type}, 1)
    return provider


def test_a_command_runs_in_the_nodes_home_with_its_variables(tmp_path: Path) -> None:
    provider = make_provider(tmp_path / "c", "head")
    runner = provider.get_command_runner("", "head-1@127.0.0.2")
    script = "echo $HOME $PWD $DISAGG_NODE_IP $RAY_ADDRESS $X"
    home = tmp_path / "c" / "head-1"
    output = runner.run(script, with_output=True, environment_variables={"X": {"disagg_slot": 1}})
    assert output == f'{home} {home} 127.0.0.2 127.0.0.2:7000 {{"disagg_slot":1}}\n'
    with pytest.raises(click.ClickException, match=r"head-1@127\.0\.0\.2: exit status 3: exit 3"):
        runner.run("exit 3")


def test_files_are_copied_to_and_from_the_home_with_their_modes(tmp_path: Path) -> None:
    provider = make_provider(tmp_path / "c", "head")
    runner = provider.get_command_runner("", "head-1@127.0.0.2")
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "a.whl").write_text("a")
    (tmp_path / "token").touch(mode=0o600)
    runner.run_rsync_up(f"{tmp_path}/wheels/", "~/dist/")
    runner.run_rsync_up(f"{tmp_path}/wheels/", "~/dist/")
    runner.run_rsync_up(str(tmp_path / "token"), "~/.ray/auth_token")
    home = tmp_path / "c" / "head-1"
    assert (home / "dist" / "a.whl").read_text() == "a"
    assert (home / ".ray" / "auth_token").stat().st_mode & 0o777 == 0o600
    runner.run_rsync_down("~/dist/a.whl", str(tmp_path / "back"))
    assert (tmp_path / "back").read_text() == "a"
    with pytest.raises(ValueError, match="relative: expected a path that starts with ~/ or /"):
        runner.run_rsync_up(str(tmp_path / "token"), "relative")


def test_terminating_a_node_ends_its_processes_and_no_others(tmp_path: Path) -> None:
    provider = make_provider(tmp_path / "c", "head", "decode", "decode")
    head, first, second = provider.non_terminated_nodes({})
    stubborn = "trap '' TERM; echo > ready; while :; do sleep 0.1; done"
    for node_id, script in ((head, "sleep 600"), (first, stubborn), (second, "sleep 600")):
        provider.get_command_runner("", node_id).run(f"({script}) > /dev/null 2>&1 &")
    folder = tmp_path / "c"
    until((folder / "decode-2" / "ready").exists)
    families = {name: ProcessRef.family(f"{NODE_MARK}={folder / name}") for name in ("head-1", "decode-2", "decode-3")}
    assert all(families.values())

    provider.terminate_node(first)
    assert [name for name, family in families.items() if any(process.is_alive() for process in family)] == [
        "head-1",
        "decode-3",
    ]
    assert provider.non_terminated_nodes({}) == [head, second]
    assert not (folder / "decode-2").exists()

    provider.create_node(
        {}, {"ray-node-type": "head", "ray-user-node-type": "head"}, 1
    )  # another head, another cluster
    assert not any(process.is_alive() for family in families.values() for process in family)
    assert provider.non_terminated_nodes({}) == ["head-1@127.0.0.2"]

    provider.terminate_node("head-1@127.0.0.2")
    assert not folder.exists()
    assert provider.non_terminated_nodes({}) == []
