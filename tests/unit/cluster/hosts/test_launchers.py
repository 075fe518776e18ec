"""What a process that computes on a GPU is started with, and which configurations are refused before any is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from disagg.cluster.config.cluster_config import PoolConfig, parse_config
from disagg.cluster.control.launcher import Launcher
from disagg.cluster.control.plan import GatewaySpec, plan_cluster
from disagg.cluster.hosts import processes
from disagg.cluster.hosts.processes import ProcessCluster, ProcessLauncher
from disagg.cluster.on_ray import store as ray_store
from disagg.cluster.on_ray.launcher import RayLauncher
from disagg.cluster.on_ray.store import ControllerSettings
from disagg.engine.config import TransportName, WorkerConfig
from disagg.engine.device_environment import GPU_ENVIRONMENT, nccl_shares_gpus
from disagg.proto.errors import ConfigError
from tests.support.secret import SECRET


@pytest.mark.parametrize(("device", "expected"), [("cuda:1", dict(GPU_ENVIRONMENT)), ("cpu", {})])
@pytest.mark.parametrize("kind", ["processes", "ray"])
def test_a_worker_s_process_has_its_device_s_variables_from_its_start(
    kind: str, device: str, expected: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Mapping[str, str]] = []
    launcher: Launcher
    if kind == "processes":
        launcher = ProcessLauncher(tmp_path, SECRET)
        monkeypatch.setattr(processes, "start_child", lambda *arguments: given.append(arguments[6]))
    else:
        settings = ControllerSettings(config=parse_config({"model": {"path": "fake"}}), cores=(), is_private=True)
        launcher = RayLauncher(settings)
        monkeypatch.setattr(launcher, "_start", lambda *arguments: given.append(arguments[2]))
    config = WorkerConfig(worker_id="decode-0", roles=("decode",), model_path="fake", device=device)
    launcher.start_worker(config, "", PoolConfig(device=device))
    (environment,) = given
    assert {name: value for name, value in environment.items() if name in GPU_ENVIRONMENT} == expected


@pytest.mark.parametrize(("asked", "transport"), [("1", "nccl"), ("0", "nccl"), ("", "nccl"), ("1", "shm")])
def test_workers_of_one_gpu_are_hosts_of_their_own_to_nccl_where_that_is_asked_for(
    asked: str, transport: TransportName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Mapping[str, str]] = []
    monkeypatch.setattr(processes, "start_child", lambda *arguments: given.append(arguments[6]))
    monkeypatch.setenv("DISAGG_NCCL_ONE_GPU", asked)
    launcher = ProcessLauncher(tmp_path, SECRET)
    for name in ("prefill-0", "decode-0"):
        config = WorkerConfig(
            worker_id=name, roles=("decode",), model_path="fake", device="cuda:0", transport=transport
        )
        launcher.start_worker(config, "", PoolConfig(device="cuda:0"))
    found = [{name: value for name, value in each.items() if name.startswith("NCCL")} for each in given]
    if (asked, transport) == ("1", "nccl"):
        common = {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}
        assert found == [{"NCCL_HOSTID": name, **common} for name in ("prefill-0", "decode-0")]
    else:
        assert found == [{}, {}]


def test_a_switch_that_is_neither_on_nor_off_is_refused() -> None:
    with pytest.raises(ConfigError) as raised:
        nccl_shares_gpus({"DISAGG_NCCL_ONE_GPU": "yes"})
    assert str(raised.value) == "DISAGG_NCCL_ONE_GPU: expected 0 or 1; got 'yes'"


def test_a_gateway_whose_process_waits_gets_its_specification_and_no_other_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = parse_config({"model": {"path": "fake"}})
    launcher = RayLauncher(ControllerSettings(config=config, cores=(), is_private=True))
    started: list[tuple[str, GatewaySpec | None]] = []
    saved: dict[str, object] = {}
    monkeypatch.setattr(launcher, "_start_gateway", lambda name, spec: started.append((name, spec)))
    monkeypatch.setattr(ray_store, "save", saved.__setitem__)
    launcher.prepare_gateways(["gateway"])
    spec = plan_cluster(config).gateway(())
    launcher.start_gateway(spec, "")
    assert started == [("gateway", None)]
    assert saved == {"gateway-spec/gateway": spec}
    launcher.start_gateway(spec, "")
    assert started == [("gateway", None), ("gateway", spec)]


def test_workers_that_need_more_devices_than_there_are_are_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(processes, "start_child", lambda *arguments: started.append(arguments))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    gpu = {"device": "cuda", "num_blocks": 9}
    cluster = ProcessCluster(parse_config({"model": {"path": "fake"}, "pools": {"prefill": gpu, "decode": gpu}}))
    with pytest.raises(ConfigError, match="decode-0 needs CUDA device 1; this machine has 1"):
        cluster._open(lambda: None)
    assert started == []
