"""The launcher with Ray, with a real private Ray and the deterministic model."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import yaml

from disagg.client import Client
from disagg.cluster.config import parse_config
from disagg.cluster.errors import LaunchError
from disagg.cluster.process_tools import ProcessRef, end_processes
from disagg.cluster.ray_actors import RayCluster
from disagg.cluster.ray_private import MARK, MAX_TEMP_DIR_CHARS
from disagg.engine.fake import fake_generate
from tests.support.processes import mentioning

pytestmark = pytest.mark.ray

PROMPT = tuple(range(40))


@pytest.fixture
def temp_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of ours whose path is short enough for Ray; nothing may be left in it."""
    folder = Path("/tmp") / f"dt{os.getpid()}"
    folder.mkdir()
    yield folder
    assert mentioning(str(folder)) == []
    assert list(folder.iterdir()) == []
    folder.rmdir()


def make_config(temp_dir: Path, **sections: object) -> object:
    base = {"model": {"path": "fake"}, "gateway": {"port": 0}, "placement": {"local_prefill": "never"}}
    return {**base, "ray": {"temp_dir": str(temp_dir)}, **sections}


def test_a_cluster_serves_and_leaves_nothing(temp_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(temp_dir.parent / f"{temp_dir.name}-home"))
    mine, seen = os.sched_getaffinity(0), []
    handler = signal.getsignal(signal.SIGTERM)
    config = parse_config(make_config(temp_dir, pools={"prefill": {"size": 1}, "decode": {"size": 2}}))
    with RayCluster(config, progress=lambda name, state: seen.append((name, state))) as cluster:
        assert os.sched_getaffinity(0) == mine
        names = [info.worker_id for info in cluster.workers]
        assert names == ["prefill-0", "decode-0", "decode-1"]
        workers = [ProcessRef.of(info.pid) for info in cluster.workers]
        assert len({worker.pid for worker in workers} | {os.getpid()}) == 4
        for info, worker in zip(cluster.workers, cluster.plan.workers, strict=True):
            assert os.sched_getaffinity(info.pid) == set(worker.cores)
        assert cluster.lost() == []
        with Client(cluster.address) as client:
            answer = client.generate(PROMPT, max_tokens=20, temperature=0.0, ignore_eos=True)
            assert list(answer.token_ids) == fake_generate(PROMPT, 20)
            route = client.explain(answer.request_id)
            assert route.prefill_worker == "prefill-0"
            assert route.decode_worker in {"decode-0", "decode-1"}
            assert route.kv_bytes > 0
        refuse_strangers()
        end_processes([workers[2]], grace_s=0)
        assert cluster.lost() == ["decode-1"]
        assert cluster.why_lost("decode-1") == "its process ended"
        family = ProcessRef.family(f"{MARK}={cluster._mark}")
        assert len(family) > len(workers)
    assert [process for process in (*workers, *family) if process.is_alive()] == []
    assert [name for name, state in seen if state == "starting"] == ["ray", *names, "gateway"]
    assert not (Path(os.environ["HOME"]) / ".ray").exists()
    assert "RAY_AUTH_TOKEN" not in os.environ
    assert signal.getsignal(signal.SIGTERM) is handler


def refuse_strangers() -> None:
    """Ray's own server answers to the token in our environment, and to no one without it."""
    import ray

    address = ray.get_runtime_context().gcs_address
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetClusterId", bytes, bytes)
        assert call(b"", metadata=(("authorization", f"Bearer {os.environ['RAY_AUTH_TOKEN']}"),), timeout=10)
        for metadata in ((), (("authorization", f"Bearer {'0' * 64}"),)):
            with pytest.raises(grpc.RpcError) as caught:
                call(b"", metadata=metadata, timeout=10)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_worker_that_cannot_start_is_a_readable_error(temp_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    cluster = RayCluster(parse_config(make_config(temp_dir, model={"path": str(tmp_path)})))
    with pytest.raises(LaunchError, match=r"^(prefill-0|decode-0): .*config\.json"):
        cluster.start()


@pytest.mark.parametrize("moment", ["", "ready  ray"], ids=["while Ray starts", "while workers start"])
def test_a_signal_to_all_during_a_start_ends_it_cleanly(temp_dir: Path, tmp_path: Path, moment: str) -> None:
    """As `timeout` and service managers send it: to `disagg` and its process group at once."""
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(make_config(temp_dir)))
    command = [sys.executable, "-m", "disagg.cluster", "up", "--config", str(tmp_path / "c.yaml")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as up:
        assert up.stdout is not None
        if moment:
            assert moment in up.stdout.readline()
        else:
            while not mentioning(f"{temp_dir}/"):
                assert up.poll() is None
        os.killpg(up.pid, signal.SIGTERM)
        rest, _ = up.communicate(timeout=60)
    assert (up.returncode, rest) == (130, "")


def test_a_cluster_to_join_that_is_not_there_is_an_error_at_once() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = "{}:{}".format(*probe.getsockname())
        cluster = RayCluster(parse_config({"model": {"path": "fake"}, "ray": {"address": address}}))
        with pytest.raises(LaunchError, match=f"^ray.address: no Ray cluster answers at {address} .*refused"):
            cluster.start()


def test_a_temp_dir_that_is_too_long_for_sockets_is_refused(tmp_path: Path) -> None:
    long = tmp_path / ("x" * MAX_TEMP_DIR_CHARS)
    cluster = RayCluster(parse_config(make_config(long)))
    with pytest.raises(LaunchError, match=r"^ray\.temp_dir: .* is too long for Ray's sockets; at most 40 characters$"):
        cluster.start()
    assert not long.exists()
