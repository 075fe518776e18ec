"""The manifest for KubeRay: its structure, as the operator's schema has it, and that it fits to our configuration, our
image, our commands and our probes. It is not applied to a cluster here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from disagg.cli.main import app
from disagg.cluster.config.cluster_config import ClusterConfig, active_pools, load_config

REPOSITORY = Path(__file__).resolve().parents[3]
FILE = REPOSITORY / "deploy" / "kuberay" / "disagg.yaml"
UID = 10001
"""As in the images."""

# What KubeRay 1.5 and newer know, of what a RayCluster may have (ray.io/v1).
CLUSTER_KEYS = {"rayVersion", "enableInTreeAutoscaling", "headGroupSpec", "workerGroupSpecs"}
HEAD_KEYS = {"labels", "resources", "rayStartParams", "template"}
GROUP_KEYS = HEAD_KEYS | {"groupName", "replicas", "minReplicas", "maxReplicas"}


def documents() -> dict[str, dict[str, Any]]:
    """Kind -> document."""
    found = list(yaml.safe_load_all(FILE.read_text(encoding="utf-8")))
    by_kind = {document["kind"]: document for document in found}
    assert len(by_kind) == len(found)
    return by_kind


CLUSTER = documents()["RayCluster"]["spec"]
HEAD = CLUSTER["headGroupSpec"]
GROUPS = {group["groupName"]: group for group in CLUSTER["workerGroupSpecs"]}
PODS = {"head": HEAD["template"]["spec"]} | {name: group["template"]["spec"] for name, group in GROUPS.items()}


@pytest.fixture
def config(tmp_path: Path) -> ClusterConfig:
    (tmp_path / "disagg.yaml").write_text(documents()["ConfigMap"]["data"]["disagg.yaml"])
    return load_config(tmp_path / "disagg.yaml")


def container(pod: dict[str, Any]) -> dict[str, Any]:
    (only,) = pod["containers"]
    return dict(only)


def shell_lines(pod: dict[str, Any]) -> Iterator[str]:
    for hook in container(pod)["lifecycle"].values():
        *shell, script = hook["exec"]["command"]
        assert shell == ["bash", "-c"]
        yield script


def test_the_structure_is_that_of_a_ray_cluster() -> None:
    cluster = documents()["RayCluster"]
    assert cluster["apiVersion"] == "ray.io/v1"
    assert set(CLUSTER) == CLUSTER_KEYS
    assert set(HEAD) == HEAD_KEYS
    assert list(GROUPS) == ["prefill", "decode"]
    for group in GROUPS.values():
        assert set(group) == GROUP_KEYS
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    for each in (HEAD, *GROUPS.values()):
        assert all(isinstance(value, str) for value in {**each["rayStartParams"], **each["resources"]}.values())


def test_the_version_of_ray_is_the_one_that_the_image_installs() -> None:
    pinned = re.search(r"^ray==(.*)$", (REPOSITORY / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert CLUSTER["rayVersion"] == pinned[1]


def test_pools_land_on_the_groups_of_their_labels(config: ClusterConfig) -> None:
    pools = dict(active_pools(config))
    assert set(pools) == set(GROUPS)
    for name, pool in pools.items():
        group = GROUPS[name]
        assert pool.node_labels == group["labels"]
        assert group["resources"] == {"CPU": "0", "disagg_slot": str(pool.tp)}
        assert pool.size == group["replicas"]
        assert container(PODS[name])["resources"]["requests"]["cpu"] == str(pool.num_threads)
    assert "disagg_slot" not in HEAD["resources"]
    assert HEAD["labels"] not in [group["labels"] for group in GROUPS.values()]
    assert config.network.bind == "node"
    assert config.ray.address == "auto"


def test_every_file_of_the_configuration_is_mounted_and_private(config: ClusterConfig) -> None:
    pod = PODS["head"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container(pod)["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    tls = config.gateway.tls
    assert tls is not None
    for path, names in ((config.gateway.api_keys, {"keys.yaml"}), (tls.cert, {"tls.crt"}), (tls.key, {"tls.key"})):
        assert path is not None
        secret = volumes[mounts[str(Path(path).parent)]]["secret"]
        assert Path(path).name in names
        assert secret["defaultMode"] == 0o440  # of root, for the group: others must not read it
    for name, each in PODS.items():
        mounted = {mount["name"] for mount in container(each)["volumeMounts"]}
        assert mounted == {volume["name"] for volume in each["volumes"]}, name
        tokens = {entry["name"]: entry["value"] for entry in container(each)["env"]}
        assert tokens["RAY_AUTH_MODE"] == "token"
        where = {mount["mountPath"]: mount for mount in container(each)["volumeMounts"]}
        assert where[str(Path(tokens["RAY_AUTH_TOKEN_PATH"]).parent)]["name"] == "ray-token"
        assert not any("valueFrom" in entry for entry in container(each)["env"])
    kinds = [yaml.safe_dump(document) for document in documents().values() if document["kind"] == "Secret"]
    assert kinds == []


@pytest.mark.parametrize("name", PODS)
def test_a_pod_runs_as_the_user_of_the_image_and_may_little(name: str) -> None:
    pod = PODS[name]
    security = pod["securityContext"]
    assert (security["runAsNonRoot"], security["runAsUser"], security["fsGroup"]) == (True, UID, UID)
    assert f"USER {UID}:{UID}" in (REPOSITORY / "deploy" / "docker" / "Dockerfile.cpu").read_text()
    assert pod["automountServiceAccountToken"] is False
    for each in (*pod["containers"], *pod["initContainers"]):
        assert each["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert each["image"] == "registry.example/disagg:cpu"
        assert {"cpu", "memory"} == set(each["resources"]["requests"])
        assert each["resources"]["limits"]["memory"] == each["resources"]["requests"]["memory"]
        written = {mount["mountPath"] for mount in each["volumeMounts"] if not mount.get("readOnly")}
        assert written == {"/tmp", "/home/disagg/.cache/disagg"}


def test_probes_and_service_reach_the_gateway(config: ClusterConfig) -> None:
    head = container(PODS["head"])
    ports = {port["name"]: port["containerPort"] for port in head["ports"]}
    assert (ports["grpc"], ports["https"]) == (config.gateway.port, config.gateway.chosen_http_port)
    assert head["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "https", "scheme": "HTTPS"}
    assert config.gateway.tls is not None
    assert config.gateway.tls.client_ca is None  # the kubelet has no certificate
    service = documents()["Service"]["spec"]
    assert {port["name"]: port["port"] for port in service["ports"]} == {"grpc": ports["grpc"], "https": ports["https"]}
    assert all(port["targetPort"] == port["name"] for port in service["ports"])
    name = documents()["RayCluster"]["metadata"]["name"]
    assert service["selector"] == {"ray.io/cluster": name, "ray.io/node-type": "head"}
    assert f"127.0.0.1:{ports['gcs']}" in head["livenessProbe"]["exec"]["command"]
    for group in GROUPS.values():
        worker = container(group["template"]["spec"])
        raylet = {port["name"]: port["containerPort"] for port in worker["ports"]}["raylet"]
        assert group["rayStartParams"]["node-manager-port"] == str(raylet)
        for probe in ("livenessProbe", "readinessProbe"):
            assert worker[probe]["tcpSocket"] == {"port": "raylet"}


def test_a_pod_has_time_for_its_drain(config: ClusterConfig) -> None:
    head, grace_s = PODS["head"], PODS["head"]["terminationGracePeriodSeconds"]
    stop = list(shell_lines(head))[-1]
    slept = re.search(r"sleep (\d+); disagg cluster stop", stop)
    assert slept is not None
    assert grace_s >= int(slept[1]) + config.gateway.drain_timeout_s + 30
    for name in GROUPS:
        (leave,) = shell_lines(PODS[name])
        deadline = re.search(r"disagg cluster leave --deadline (\d+)s", leave)
        remaining = re.search(r"--deadline-remaining-seconds (\d+)", leave)
        assert deadline is not None
        assert remaining is not None
        assert int(deadline[1]) + 15 < int(remaining[1]) < PODS[name]["terminationGracePeriodSeconds"]


def test_the_commands_exist_with_their_options() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    lines = [line for pod in PODS.values() for line in shell_lines(pod)]
    ours = [words.split() for line in lines for words in re.findall(r"disagg (cluster [^>;&]*)", line)]
    assert {words[1] for words in ours} == {"start", "stop", "leave"}
    for words in ours:
        command = commands[words[0]].commands[words[1]]
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        assert {word for word in words if word.startswith("--")} <= known
    for pod in PODS.values():
        (model,) = pod["initContainers"]
        assert model["args"][0] in commands
        assert model["args"][1] in commands["model"].commands


def test_what_is_served_is_imported_into_each_pod(config: ClusterConfig) -> None:
    assert [pod["initContainers"][0]["args"][-1] for pod in PODS.values()] == [config.model.served_name] * 3
