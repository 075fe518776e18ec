"""The cluster files in deploy/ray: Ray takes them, ours fit to them, and their commands exist."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray.autoscaler
import typer
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.scripts.scripts import cli as ray_cli

from disagg.cli.main import app
from disagg.cluster.config.cluster_config import ClusterConfig, active_pools, load_config
from disagg.connections.addresses import is_loopback

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "deploy" / "ray"
GPU_FILES = ("aws-gpu.yaml", "gcp-gpu.yaml")
LOOPBACK_FILES = ("loopback.yaml", "loopback-stages.yaml")
CLUSTER_FILES = ("aws.yaml", "gcp.yaml", "onprem.yaml", *LOOPBACK_FILES, *GPU_FILES)
SLOT = "disagg_slot"
SENSITIVE = re.compile(r"[0-9a-f]{32,}|BEGIN [A-Z ]*PRIVATE KEY|AKIA[0-9A-Z]{16}")


@pytest.fixture(params=CLUSTER_FILES)
def cluster_file(request: pytest.FixtureRequest) -> dict[str, Any]:
    return read(request.param)


def read(name: str) -> dict[str, Any]:
    parsed: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text())
    return parsed


def served_by(cluster_file: dict[str, Any]) -> ClusterConfig:
    """Our configuration that the head is given, found as the start command will find it."""
    (start,) = (command for command in cluster_file["head_start_ray_commands"] if "disagg cluster start" in command)
    remote = shlex.split(start)[-1]
    return load_config(REPOSITORY / cluster_file["file_mounts"][remote])


def commands(cluster_file: dict[str, Any]) -> list[str]:
    return [command for key, value in cluster_file.items() if key.endswith("_commands") for command in value]


def test_every_cluster_file_is_tested() -> None:
    found = {path.name for path in FOLDER.glob("*.yaml")}
    ours = {"disagg.yaml", "disagg-gpu.yaml", "disagg-loopback.yaml", "disagg-loopback-stages.yaml"}
    assert found == {*CLUSTER_FILES, *ours}


def test_ray_accepts_it(cluster_file: dict[str, Any]) -> None:
    prepared = prepare_config(cluster_file)
    validate_config(prepared)
    schema = Path(ray.autoscaler.__file__).with_name("ray-schema.json")
    jsonschema.validate(cluster_file, json.loads(schema.read_text()))
    # what `prepare_config` fills in from Ray's own defaults would run other commands than the file says
    for key in ("initialization_commands", "head_start_ray_commands", "worker_start_ray_commands", "file_mounts"):
        assert prepared[key] == cluster_file[key]
    assert prepared["head_setup_commands"] == cluster_file["setup_commands"] + cluster_file["head_setup_commands"]


def test_ray_refuses_a_key_that_it_does_not_know() -> None:
    with pytest.raises(jsonschema.ValidationError, match="idle_timeout_hours"):
        validate_config(prepare_config({**read("loopback.yaml"), "idle_timeout_hours": 1}))


def test_our_own_providers_accept_their_files() -> None:
    for name in ("onprem.yaml", *LOOPBACK_FILES):
        config = prepare_config(read(name))
        module, _, provider = config["provider"]["module"].rpartition(".")
        settled = getattr(importlib.import_module(module), provider).bootstrap_config(config)
        assert settled["available_node_types"] == config["available_node_types"]


def test_each_pool_has_nodes_with_its_labels_and_room_for_its_workers(cluster_file: dict[str, Any]) -> None:
    config = served_by(cluster_file)
    types = cluster_file["available_node_types"]
    assert cluster_file["head_node_type"] == "head"
    assert types["head"]["resources"] == {"CPU": 0}
    for name, pool in active_pools(config):
        node_type = types[name]
        assert pool.node_labels.items() <= node_type["labels"].items()
        taken = "GPU" if pool.device == "cuda" else SLOT
        assert node_type["resources"][taken] >= pool.tp
        assert node_type["resources"][taken] // pool.tp * node_type["min_workers"] >= pool.size * pool.pp
        others = [other for other in types if other != name]
        assert not [other for other in others if pool.node_labels.items() <= types[other]["labels"].items()]


@pytest.mark.parametrize("name", GPU_FILES)
def test_nodes_with_gpus_have_what_kernels_are_compiled_with_and_show_their_driver(name: str) -> None:
    """Before a worker starts: Python's headers and a compiler, Triton, and a torch that sees the device."""
    cluster_file = read(name)
    setup, of_workers = " ".join(cluster_file["setup_commands"]), " ".join(cluster_file["worker_setup_commands"])
    assert {"python3-dev", "g++"} <= set(setup.split())
    assert 'disagg-*.whl)[gpu]"' in setup
    assert "nvidia-smi" in of_workers
    assert '.zeros(1, device="cuda")' in of_workers
    for node_type in ("prefill", "decode"):
        assert cluster_file["available_node_types"][node_type]["resources"] == {"CPU": 0, "GPU": 1}


@pytest.mark.parametrize("name", GPU_FILES)
def test_every_node_has_room_for_the_weights_twice_and_the_packages(name: str) -> None:
    """`disagg model import` copies what the hub's client downloads; CUDA's libraries come with torch."""
    weights_gb, packages_gb, system_gb = 16.4, 9, 20
    disks: dict[str, int] = {}
    for node_type, settings in read(name)["available_node_types"].items():
        node = settings["node_config"]
        if "disks" in node:
            (disk,) = node["disks"]
            disks[node_type] = disk["initializeParams"]["diskSizeGb"]
            # Google Cloud's default is pd-standard, which its nodes with an H100 do not take.
            assert "GPU" not in settings["resources"] or "/pd-balanced" in disk["initializeParams"]["diskType"]
        else:
            (mapping,) = node["BlockDeviceMappings"]
            disks[node_type] = mapping["Ebs"]["VolumeSize"]
    assert set(disks) == {"head", "prefill", "decode"}
    assert min(disks.values()) >= 2 * weights_gb + packages_gb + system_gb


def test_gpu_pools_hand_over_in_pieces_of_several_hundred_tokens() -> None:
    """A token of a model of 8B has 144 KiB of KV: the CPU's chunks of 4 MiB would be 28 tokens."""
    config = load_config(FOLDER / "disagg-gpu.yaml")
    assert [pool.device for _, pool in active_pools(config)] == ["cuda", "cuda"]
    limits = config.transfer.limits("cuda")
    assert limits.chunk_bytes // (144 << 10) == 455  # a power of two, as torch pins them
    assert limits.num_slots == 8


def test_our_configuration_is_for_several_nodes(cluster_file: dict[str, Any]) -> None:
    config = served_by(cluster_file)
    assert config.network.bind == "node"
    assert config.ray.address == "auto"
    assert config.model.served_name in " ".join(cluster_file["setup_commands"])
    for _, pool in active_pools(config):
        assert pool.cores == "none"  # the launching machine knows nothing of the nodes' cores


def test_the_gateway_is_reached_from_its_own_machine_only_without_keys_and_tls(cluster_file: dict[str, Any]) -> None:
    gateway = served_by(cluster_file).gateway
    assert (is_loopback(gateway.host), gateway.insecure) == (True, False)


def test_every_ray_that_is_started_asks_for_the_token_that_was_shipped(cluster_file: dict[str, Any]) -> None:
    assert cluster_file["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    starts = [command for command in commands(cluster_file) if "ray start" in command or "disagg cluster" in command]
    assert len(starts) == 3
    assert all(command.startswith(("export RAY_AUTH_MODE=token", "RAY_AUTH_MODE=token ")) for command in starts)


def test_what_is_mounted_exists_or_is_built(cluster_file: dict[str, Any]) -> None:
    built = {"dist", "~/.ray/auth_token"}  # by `make wheel` and `ray get-auth-token --generate`
    for local in cluster_file["file_mounts"].values():
        assert local in built or (REPOSITORY / local).is_file()


@pytest.mark.parametrize("name", LOOPBACK_FILES)
def test_a_loopback_cluster_never_ends_another_ray(name: str) -> None:
    assert not [command for command in commands(read(name)) if "ray stop" in command]


def test_stages_are_on_nodes_of_their_own() -> None:
    """As in the loopback cluster without stages, but for the prefill nodes."""
    plain, stages = map(read, LOOPBACK_FILES)
    pool = dict(active_pools(served_by(stages)))["prefill"]
    assert (pool.pp, stages["available_node_types"]["prefill"]["resources"][SLOT]) == (2, 1)
    for key in ("auth", "setup_commands", "head_start_ray_commands", "worker_start_ray_commands"):
        assert stages[key] == plain[key]


@pytest.mark.parametrize("name", [path.name for path in sorted(FOLDER.glob("*.yaml"))])
def test_no_secret_is_in_the_repository(name: str) -> None:
    assert not SENSITIVE.search((FOLDER / name).read_text())


def test_every_option_exists(cluster_file: dict[str, Any]) -> None:
    ours = typer.main.get_command(app)
    checked = [
        check_command(words, root)
        for command in commands(cluster_file)
        for program, root in (("ray", ray_cli), ("disagg", ours))
        for words in calls(command, program)
    ]
    assert "ray start" in checked
    assert "disagg cluster start" in checked
    assert "disagg model import" in checked


def calls(command: str, program: str) -> list[list[str]]:
    """The arguments of each call of a program in a shell command."""
    lists = [shlex.split(part) for part in re.split(r";|&&|\|\|", command)]
    found = []
    for words in lists:
        for at, word in enumerate(words):
            if Path(word).name == program and not word.startswith(("export", "-")):
                found.append(words[at:])
                break
    return found


def check_command(words: list[str], root: Any) -> str:
    """The name of the command that the words call; fails for a sub-command or an option that does not exist."""
    name, rest, command = [Path(words[0]).name], words[1:], root
    while hasattr(command, "commands"):  # a group, of click or of the click that typer brings
        assert rest[0] in command.commands, f"{' '.join(name)} has no command {rest[0]}"
        command = command.commands[rest[0]]
        name.append(rest.pop(0))
    options = {option for parameter in command.params for option in parameter.opts}
    for word in rest:
        if word.startswith("--"):
            assert word.partition("=")[0] in options, f"{' '.join(name)} has no {word}"
    return " ".join(name)
