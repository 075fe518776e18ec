"""Our node providers, without a machine: what they take, give back, refuse and hand to the head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray.autoscaler.node_launch_exception import NodeLaunchException

from disagg.cluster.on_ray.nodes.local_runner import LocalCommandRunner, LocalNode, exports, node_environment
from disagg.cluster.on_ray.nodes.provider import LoopbackProvider, StaticSshProvider
from disagg.proto.errors import ConfigError

HOSTS = {"head": ["h0"], "prefill": ["p0"], "decode": ["d0", "d1"]}
HEAD_KIND = {"ray-node-type": "head"}
WORKER_KIND = {"ray-node-type": "worker"}


class RecordingRunner:
    """What was run where, instead of ssh."""

    def __init__(self, calls: list[tuple[str, str]], node_id: str, unreachable: str) -> None:
        self._calls = calls
        self._node_id = node_id
        self._unreachable = unreachable

    def run(self, cmd: str, **_: object) -> str:
        if self._unreachable in self._node_id:
            raise OSError("no route to host")
        self._calls.append((self._node_id, cmd))
        return ""


class Static(StaticSshProvider):
    """The provider, with a record instead of ssh."""

    unreachable = "nowhere"

    def __init__(self, provider_config: dict[str, Any], cluster_name: str = "c") -> None:
        super().__init__(provider_config, cluster_name)
        self.calls: list[tuple[str, str]] = []

    def get_command_runner(self, log_prefix: str, node_id: str, *_: object, **__: object) -> RecordingRunner:
        return RecordingRunner(self.calls, node_id, self.unreachable)


def tags(node_type: str) -> dict[str, str]:
    kind = HEAD_KIND if node_type == "head" else WORKER_KIND
    return {**kind, "ray-user-node-type": node_type, "ray-node-status": "uninitialized"}


def cluster_config(folder: Path, **provider: object) -> dict[str, Any]:
    section = {"type": "external", "hosts": HOSTS, "state_dir": str(folder), **provider}
    types = {"head": {}, "prefill": {"max_workers": 1}, "decode": {"max_workers": 2}}
    auth = {"ssh_user": "u", "ssh_private_key": "~/key", "ssh_proxy_command": "jump"}
    return {"cluster_name": "c", "provider": section, "auth": auth, "available_node_types": types} | {
        "head_node_type": "head"
    }


def launching(folder: Path) -> tuple[Static, dict[str, Any]]:
    """The provider of `ray up`, with a head."""
    config = StaticSshProvider.bootstrap_config(cluster_config(folder))
    provider = Static(config["provider"])
    provider.create_node({}, tags("head"), 1)
    return provider, config


def on_head(provider: Static, config: dict[str, Any], folder: Path) -> Static:
    """The provider of the autoscaler, on another machine."""
    remote = {**config, "auth": {"ssh_user": "u", "ssh_private_key": "~/ray_bootstrap_key.pem"}}
    section = provider.prepare_for_head_node(remote)["provider"]
    return Static({**section, "state_dir": str(folder)})


def test_nodes_are_taken_from_the_pool_of_their_type(tmp_path: Path) -> None:
    provider, _ = launching(tmp_path)
    provider.create_node({}, tags("decode"), 2)
    provider.create_node({}, tags("prefill"), 1)
    assert provider.non_terminated_nodes({}) == ["head-1@h0", "decode-2@d0", "decode-3@d1", "prefill-4@p0"]
    assert provider.non_terminated_nodes(HEAD_KIND) == ["head-1@h0"]
    assert provider.is_running("decode-3@d1")
    provider.set_node_tags("decode-3@d1", {"ray-node-status": "up-to-date"})
    assert provider.node_tags("decode-3@d1")["ray-node-status"] == "up-to-date"
    assert provider.node_tags("decode-2@d0")["ray-node-status"] == "uninitialized"


def test_more_nodes_than_hosts_are_refused_as_a_whole(tmp_path: Path) -> None:
    provider, _ = launching(tmp_path)
    with pytest.raises(NodeLaunchException, match="3 nodes of type decode are requested, and 2 hosts are free"):
        provider.create_node({}, tags("decode"), 3)
    assert provider.non_terminated_nodes(WORKER_KIND) == []


def test_a_terminated_node_frees_its_host_and_ends_ray_there(tmp_path: Path) -> None:
    provider, _ = launching(tmp_path)
    provider.create_node({}, tags("decode"), 2)
    provider.terminate_node("decode-2@d0")
    assert provider.calls == [("decode-2@d0", "ray stop")]
    assert provider.is_terminated("decode-2@d0")
    assert provider.node_tags("decode-2@d0") == {}
    provider.create_node({}, tags("decode"), 1)
    assert provider.non_terminated_nodes(WORKER_KIND) == ["decode-3@d1", "decode-4@d0"]


def test_the_head_knows_itself_and_how_to_reach_the_others(tmp_path: Path) -> None:
    provider, config = launching(tmp_path / "laptop")
    head = on_head(provider, config, tmp_path / "head")
    assert head.non_terminated_nodes({}) == ["head-1@h0"]
    assert head.node_tags("head-1@h0") == tags("head")
    assert head.provider_config["auth"] == {"ssh_user": "u", "ssh_private_key": "~/ray_bootstrap_key.pem"}
    assert provider.provider_config["auth"]["ssh_proxy_command"] == "jump"


def test_the_heads_table_survives_a_restart_there_and_not_a_new_cluster(tmp_path: Path) -> None:
    provider, config = launching(tmp_path / "laptop")
    on_head(provider, config, tmp_path / "head").create_node({}, tags("decode"), 1)
    again = on_head(provider, config, tmp_path / "head")
    assert again.non_terminated_nodes(WORKER_KIND) == ["decode-2@d0"]
    provider.terminate_node("head-1@h0")
    provider.create_node({}, tags("head"), 1)
    assert on_head(provider, config, tmp_path / "head").non_terminated_nodes({}) == ["head-1@h0"]


def test_ray_down_ends_ray_on_every_host_though_only_the_head_knew_the_workers(tmp_path: Path) -> None:
    provider, config = launching(tmp_path / "laptop")
    on_head(provider, config, tmp_path / "head").create_node({}, tags("decode"), 1)
    found = provider.nodes_for_teardown(HEAD_KIND) + provider.nodes_for_teardown(WORKER_KIND)
    assert found == ["head-1@h0", "prefill-0@p0", "decode-0@d0", "decode-0@d1"]
    provider.terminate_nodes(found)
    assert sorted(provider.calls) == sorted((node_id, "ray stop") for node_id in found)
    assert provider.nodes_for_teardown(HEAD_KIND) + provider.nodes_for_teardown(WORKER_KIND) == []


def test_a_host_that_cannot_be_reached_does_not_hold_up_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    provider, _ = launching(tmp_path)
    provider.unreachable = "d0"
    provider.terminate_nodes(["decode-0@d0", "decode-0@d1"])
    assert provider.calls == [("decode-0@d1", "ray stop")]
    assert caplog.messages == ["decode-0@d0: Ray could not be ended there: no route to host"]
    assert provider.nodes_for_teardown(WORKER_KIND) == ["prefill-0@p0"]


def test_nothing_is_ended_where_no_cluster_was_started(tmp_path: Path) -> None:
    assert Static(cluster_config(tmp_path)["provider"]).nodes_for_teardown(WORKER_KIND) == []


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        (None, "provider.hosts: expected a mapping of node types to lists of hosts"),
        ({**HOSTS, "decode": "d0"}, "provider.hosts.decode: expected a list of host names or addresses; got 'd0'"),
        ({**HOSTS, "decode": ["d0", ""]}, "provider.hosts.decode: expected a list of host names or addresses; got"),
        ({**HOSTS, "decode": ["d0", "p0"]}, "provider.hosts.decode: p0 is written twice; a host is one node"),
        ({**HOSTS, "decode": ["d0"]}, "provider.hosts.decode: 1 hosts for available_node_types.decode.max_workers: 2"),
        ({"decode": ["d0", "d1"], "prefill": ["p0"]}, "provider.hosts.head: 0 hosts for the head"),
    ],
)
def test_hosts_that_cannot_work_are_refused(tmp_path: Path, hosts: object, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        StaticSshProvider.bootstrap_config(cluster_config(tmp_path, hosts=hosts))


def test_a_cluster_without_a_user_to_log_in_as_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^auth\.ssh_user: missing$"):
        StaticSshProvider.bootstrap_config({**cluster_config(tmp_path), "auth": {}})


# ---------------------------------------------------------------- loopback


def loopback(folder: Path) -> LoopbackProvider:
    return LoopbackProvider({"dir": str(folder), "head_port": 7000}, "c")


def test_each_loopback_node_has_an_address_a_home_and_a_ray_folder_of_its_own(tmp_path: Path) -> None:
    provider = loopback(tmp_path / "c")
    provider.create_node({}, tags("head"), 1)
    provider.create_node({}, tags("decode"), 2)
    head, first, second = provider.non_terminated_nodes({})
    assert [head, first, second] == ["head-1@127.0.0.2", "decode-2@127.0.0.3", "decode-3@127.0.0.4"]
    assert provider.internal_ip(second) == "127.0.0.4"
    assert (tmp_path / "c" / "decode-3").is_dir()
    runner = provider.get_command_runner("", second)
    assert isinstance(runner, LocalCommandRunner)
    environment = node_environment({"HOME": "/home/u", "PATH": "/bin", "RAY_ADDRESS": "other:1"}, runner.node)
    assert environment == {
        "HOME": str(tmp_path / "c" / "decode-3"),
        "XDG_CACHE_HOME": "/home/u/.cache",
        "PATH": environment["PATH"],
        "RAY_AUTH_MODE": "token",
        "RAY_ADDRESS": "127.0.0.2:7000",
        "DISAGG_RAY_DIR": str(tmp_path / "c" / "r3"),
        "DISAGG_NODE_IP": "127.0.0.4",
        "DISAGG_HEAD_PORT": "7000",
        "DISAGG_RAY_NODE": str(tmp_path / "c" / "decode-3"),
    }
    assert environment["PATH"].endswith(":/bin")


def test_the_loopback_folder_is_settled_on_the_launching_machine() -> None:
    config = {"cluster_name": "c", "provider": {"dir": "~/c", "head_port": 7000}}
    settled = LoopbackProvider.bootstrap_config(config)["provider"]["dir"]
    assert settled == str(Path("~/c").expanduser())
    default = LoopbackProvider.bootstrap_config({"cluster_name": "c", "provider": {"head_port": 7000}})
    assert Path(default["provider"]["dir"]).is_absolute()


@pytest.mark.parametrize(
    ("provider", "message"),
    [
        ({}, r"provider\.head_port: expected the port for Ray's head"),
        ({"head_port": "7000"}, r"provider\.head_port: expected the port for Ray's head"),
        (
            {"head_port": 7000, "dir": "/tmp/" + "x" * 40},
            r"provider\.dir: /tmp/x{40} is too long for Ray's sockets; at most 38 characters",
        ),
    ],
)
def test_loopback_settings_that_cannot_work_are_refused(provider: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}$"):
        LoopbackProvider.bootstrap_config({"cluster_name": "c", "provider": provider})


def test_shell_variables_are_quoted_and_structures_become_json() -> None:
    values = {"A": "it's", "B": {"disagg_slot": 1}, "C": 0}
    assert exports(values) == """export A='it'"'"'s';export B='{"disagg_slot":1}';export C=0;"""
    assert exports({}) == ""


def test_ray_stop_is_never_run_on_this_machine(tmp_path: Path) -> None:
    node = LocalNode(
        node_id="head-1@127.0.0.2",
        ip="127.0.0.2",
        home=tmp_path / "missing",
        ray_dir=tmp_path / "r1",
        head_ip="127.0.0.2",
        head_port=7000,
    )
    runner = LocalCommandRunner(node)
    assert runner.run("ray stop") == ""  # it would have failed: there is no such home
    with pytest.raises(Exception, match="`ray stop` ends every Ray of this machine"):
        runner.run("true; ray stop --force")
