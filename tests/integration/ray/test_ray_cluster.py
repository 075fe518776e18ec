"""A cluster of this process, under a real private Ray, with the deterministic model."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import msgspec
import pytest
import yaml

from disagg.client import Client
from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.core.ranks import rank_name, worker_of
from disagg.cluster.on_ray.cluster import RayCluster
from disagg.cluster.on_ray.private import MAX_TEMP_DIR_CHARS
from disagg.cluster.system.children import LaunchError
from disagg.cluster.system.process_tools import ProcessRef, end_processes
from disagg.engine.fake_runner import fake_generate
from disagg.proto.control import ApplyReply, ApplyRequest, ControlState, ScaleRequest, WorkerRecord
from disagg.proto.errors import DisaggError
from disagg.proto.ids import WorkerId
from tests.support.processes import mentioning
from tests.support.sockets import listening_addresses
from tests.support.tiny_models import make_checkpoint
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

PROMPT = tuple(range(40))
HEAL_TIMEOUT_S = 300.0
UNUSED = ("monitor.py", "log_monitor.py", "dashboard.py")
"""Processes of Ray that a private one does without."""


@pytest.fixture
def temp_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of ours whose path is short enough for Ray; nothing may be left in it."""
    folder = Path("/tmp") / f"dt{os.getpid()}"
    folder.mkdir()
    yield folder
    assert mentioning(str(folder)) == []
    assert list(folder.iterdir()) == []
    folder.rmdir()


def make_config(temp_dir: Path, **sections: object) -> dict[str, object]:
    base = {"model": {"path": "fake"}, "gateway": {"port": 0}, "placement": {"local_prefill": "never"}}
    base |= {"transfer": {"transport": "shm"}}
    return {**base, "ray": {"temp_dir": str(temp_dir)}, **sections}


def serve(cluster: RayCluster) -> tuple[str, str]:
    """One right answer, and which workers computed it."""
    with Client(cluster.address) as client:
        answer = client.generate(PROMPT, max_tokens=20, temperature=0.0, ignore_eos=True)
        assert list(answer.token_ids) == fake_generate(PROMPT, 20)
        route = client.explain(answer.request_id)
        assert route.kv_bytes > 0
        return route.prefill_worker, route.decode_worker


def wait_for(cluster: RayCluster, is_there: Callable[[ControlState], bool]) -> ControlState:
    """The first settled state that is as it should be."""
    deadline = time.monotonic() + HEAL_TIMEOUT_S
    while not ((state := cluster.state()).is_settled and is_there(state)):
        assert time.monotonic() < deadline, state
        time.sleep(0.05)
    return state


def records(state: ControlState) -> dict[str, WorkerRecord]:
    return {record.worker_id: record for record in state.workers}


def pids(cluster: RayCluster) -> dict[str, int]:
    return {info.worker_id: info.pid for info in cluster.workers}


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
        (gateway,) = cluster.state().gateways
        assert os.sched_getaffinity(gateway.pid) == set(cluster.plan.cores.gateway)
        prefill, decode = serve(cluster)
        assert (prefill, decode in {"decode-0", "decode-1"}) == ("prefill-0", True)
        refuse_strangers()
        assert listening_hosts(cluster) == {"127.0.0.1"}
        (folder,) = temp_dir.iterdir()
        assert (folder.stat().st_uid, folder.stat().st_mode & 0o777) == (os.geteuid(), 0o700)
        (raylet,) = folder.glob("**/sockets/raylet")
        assert len(str(raylet).encode()) <= 107
        family = cluster._session.family()  # type: ignore[attr-defined]
        assert len(family) > len(workers)
        rays_own = [process for process in family if process not in workers]
        assert {cores for process in rays_own for cores in affinities(process)} == {cluster.plan.cores.gateway}
        assert [name for name in map(program, rays_own) if name in UNUSED] == []
    assert [process for process in (*workers, *family) if process.is_alive()] == []
    assert [name for name, state in seen if state == "starting"] == ["ray", "controller", *names, "gateway"]
    assert sorted(name for name, state in seen if state == "stopped") == sorted([*names, "gateway"])
    assert not (Path(os.environ["HOME"]) / ".ray").exists()
    assert "RAY_AUTH_TOKEN" not in os.environ
    assert signal.getsignal(signal.SIGTERM) is handler


def affinities(process: ProcessRef) -> set[tuple[int, ...]]:
    """Of all its threads; none where it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        tasks = list(Path(f"/proc/{process.pid}/task").iterdir())
        return {tuple(sorted(os.sched_getaffinity(int(task.name)))) for task in tasks}
    return set()


def program(process: ProcessRef) -> str:
    """The Python file that it runs, if it runs one."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        words = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
        return next((Path(word.decode()).name for word in words if word.endswith(b".py")), "")
    return ""


def listening_hosts(cluster: RayCluster) -> set[str]:
    """The addresses on which the cluster's processes listen, Ray's own ones and this one among them."""
    hosts: set[str] = set()
    for pid in (os.getpid(), *(process.pid for process in cluster._session.family())):  # type: ignore[attr-defined]
        with contextlib.suppress(FileNotFoundError):  # it has just ended
            hosts |= {host for host, _ in listening_addresses(pid)}
    return hosts


def refuse_strangers() -> None:
    """Ray's own server answers to the token in our environment, and to no one without it."""
    import ray

    address = ray.get_runtime_context().gcs_address
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetClusterId", bytes, bytes)
        assert call(b"", metadata=(("authorization", f"Bearer {os.environ['RAY_AUTH_TOKEN']}"),), timeout=60)
        for metadata in ((), (("authorization", f"Bearer {'0' * 64}"),)):
            with pytest.raises(grpc.RpcError) as caught:
                call(b"", metadata=metadata, timeout=60)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_what_is_killed_comes_back_and_pools_grow_and_shrink(temp_dir: Path) -> None:
    with RayCluster(parse_config(make_config(temp_dir))) as cluster:
        address, before = cluster.address, pids(cluster)
        first = records(cluster.state())["decode-0"]

        kill(before["decode-0"])
        healed = wait_for(cluster, lambda state: is_another(records(state)["decode-0"], first))
        assert records(healed)["decode-0"].num_starts == 2
        assert serve(cluster) == ("prefill-0", "decode-0")

        now = pids(cluster)
        kill(controller_pid(cluster))
        assert wait_until_asked(cluster, ScaleRequest(sizes={"decode": 2})).pools[1].desired == 2
        wait_for(cluster, lambda state: "decode-1" in records(state))
        assert {name: pid for name, pid in pids(cluster).items() if name != "decode-1"} == now
        assert (cluster.address, serve(cluster)[0]) == (address, "prefill-0")

        gateway, added = cluster.state().gateways[0], records(cluster.state())["decode-1"]
        kill(gateway.pid)
        give_up("decode-1")
        wait_for(
            cluster,
            lambda state: state.gateways[0].pid != gateway.pid and is_another(records(state)["decode-1"], added),
        )
        assert records(cluster.state())["decode-1"].detail.startswith("its actor ended: The actor is dead because")
        assert cluster.address == address
        serve(cluster)

        leaving = ProcessRef.of(pids(cluster)["decode-1"])
        cluster.control(ScaleRequest(sizes={"decode": 1}))
        wait_for(cluster, lambda state: "decode-1" not in records(state))
        assert wait_until(lambda: not leaving.is_alive(), timeout_s=HEAL_TIMEOUT_S)
        assert pids(cluster) == now
        assert serve(cluster) == ("prefill-0", "decode-0")


@pytest.mark.slow
def test_an_apply_goes_on_under_the_next_controller(temp_dir: Path) -> None:
    config = make_config(temp_dir, pools={"decode": {"size": 2}})
    wanted = parse_config({**config, "pools": {"decode": {"size": 2, "num_blocks": 300}}})
    with RayCluster(parse_config(config)) as cluster:
        before = pids(cluster)
        reply = cluster.control(ApplyRequest(config=msgspec.json.encode(wanted)))
        assert isinstance(reply, ApplyReply)
        assert (reply.generation, reply.pools) == (2, ("decode",))
        kill(controller_pid(cluster))
        state = wait_for(cluster, lambda state: state.generation == 2)
        assert {name: record.info and record.info.num_blocks for name, record in records(state).items()} == {
            "prefill-0": records(state)["prefill-0"].info.num_blocks,  # type: ignore[union-attr]
            "decode-0": 300,
            "decode-1": 300,
        }
        assert (pids(cluster)["prefill-0"], state.rolled_back) == (before["prefill-0"], None)
        kill(controller_pid(cluster))
        assert wait_for(cluster, lambda state: state.generation == 2).rollout is None
        serve(cluster)


def kill(pid: int) -> None:
    end_processes([ProcessRef.of(pid)], grace_s=0)


def give_up(name: str) -> None:
    """End an actor in a way after which Ray does not start it again."""
    import ray

    from disagg.cluster.on_ray.store import find_actor

    ray.kill(find_actor(name), no_restart=True)


def is_another(record: WorkerRecord, former: WorkerRecord) -> bool:
    assert former.info is not None
    return record.info is not None and record.info.incarnation != former.info.incarnation


def controller_pid(cluster: RayCluster) -> int:
    from disagg.cluster.on_ray.handles import actor_info

    pid: int = actor_info(cluster._controller)["Pid"]
    return pid


def wait_until_asked(cluster: RayCluster, request: ScaleRequest) -> ControlState:
    """The answer of a controller that is coming back."""
    deadline = time.monotonic() + HEAL_TIMEOUT_S
    while True:
        try:
            reply = cluster.control(request)
        except (LaunchError, DisaggError):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        else:
            assert isinstance(reply, ControlState)
            return reply


@pytest.mark.slow
def test_the_ranks_of_a_worker_end_and_come_back_together(temp_dir: Path) -> None:
    with RayCluster(parse_config(make_config(temp_dir, pools={"decode": {"tp": 2}}))) as cluster:
        assert serve(cluster) == ("prefill-0", "decode-0")
        first = ranks_of("decode-0")
        assert first[0].pid == pids(cluster)["decode-0"]
        with Client(cluster.address) as client, contextlib.suppress(DisaggError):
            tokens: list[int] = []
            for delta in client.stream(PROMPT, max_tokens=3000, temperature=0.0, ignore_eos=True):
                if not tokens:
                    first[1].kill()
                tokens += delta.token_ids
                assert tokens == fake_generate(PROMPT, len(tokens))
        second = wait_for_other_ranks(cluster, "decode-0", first)
        assert serve(cluster) == ("prefill-0", "decode-0")

        os.kill(second[1].pid, signal.SIGSTOP)  # so that it cannot see that rank 0 is gone
        second[0].kill()
        third = wait_for_other_ranks(cluster, "decode-0", second)
        assert records(cluster.state())["decode-0"].num_starts == 3
        assert serve(cluster) == ("prefill-0", "decode-0")

        give_up(rank_name("decode-0", 1))
        wait_for_other_ranks(cluster, "decode-0", third)
        detail = records(cluster.state())["decode-0"].detail
        assert detail.startswith("its actor ended: The actor is dead because"), detail
        assert serve(cluster) == ("prefill-0", "decode-0")
        assert what_ray_has() == {"prefill-0", "decode-0", "decode-0.rank-1", "gateway"}


def ranks_of(name: str) -> list[ProcessRef]:
    """The processes of a worker of two ranks, rank 0 first."""
    from disagg.cluster.on_ray.handles import actor_info
    from disagg.cluster.on_ray.store import find_actor

    return [ProcessRef.of(actor_info(find_actor(rank_name(name, rank)))["Pid"]) for rank in range(2)]


def wait_for_other_ranks(cluster: RayCluster, name: str, before: list[ProcessRef]) -> list[ProcessRef]:
    """The ranks of the next incarnation of a worker; nothing is left of the earlier ones."""
    pids_before = {rank.pid for rank in before}
    wait_for(cluster, lambda state: (info := records(state)[name].info) is not None and info.pid not in pids_before)
    now = ranks_of(name)
    assert wait_until(lambda: not any(rank.is_alive() for rank in before), timeout_s=HEAL_TIMEOUT_S)
    assert all(rank.is_alive() for rank in now)
    return now


def what_ray_has() -> set[str]:
    """The processes that have an actor; each but the followers has a placement group."""
    from disagg.cluster.on_ray.handles import present_actors, present_groups

    actors = present_actors()
    assert present_groups() == {name for name in actors if worker_of(name) == name}
    return actors


@pytest.mark.slow
def test_a_worker_that_cannot_start_is_a_readable_error(temp_dir: Path, tmp_path: Path) -> None:
    model = make_checkpoint("llama", tmp_path / "model")
    (model / "model.safetensors").write_bytes(b"no weights")
    cluster = RayCluster(parse_config(make_config(temp_dir, model={"path": str(model)})))
    with pytest.raises(LaunchError, match=r"^(prefill-0|decode-0): .*model\.safetensors"):
        cluster.start()


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["", "ready  ray"], ids=["while Ray starts", "while workers start"])
def test_a_signal_to_all_during_a_start_ends_it_cleanly(temp_dir: Path, tmp_path: Path, moment: str) -> None:
    """As `timeout` and service managers send it: to `disagg` and its process group at once."""
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(make_config(temp_dir)))
    command = [sys.executable, "-m", "disagg.cli", "up", "--config", str(tmp_path / "c.yaml")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as up:
        assert up.stdout is not None
        if moment:
            assert moment in next(line for line in up.stdout if not is_progress(line))
        else:
            while not mentioning(f"{temp_dir}/"):
                assert up.poll() is None
        os.killpg(up.pid, signal.SIGTERM)
        rest, _ = up.communicate(timeout=60)
    assert (up.returncode, [line for line in rest.splitlines() if not is_progress(line)]) == (130, [])


def is_progress(line: str) -> bool:
    """Of a start that takes long."""
    return line.strip().startswith("...")


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
    with pytest.raises(LaunchError, match=r"^ray\.temp_dir: .* is too long for Ray's sockets; at most 31 characters$"):
        cluster.start()
    assert not long.exists()


@pytest.mark.slow
def test_two_models_each_with_its_workers(temp_dir: Path) -> None:
    """A killed worker of one comes back under its name; the other's serve on."""
    models = {key: {"model": {"path": "fake"}, "pools": {"decode": {"size": 1}}} for key in ("a", "b")}
    config = {name: section for name, section in make_config(temp_dir).items() if name != "model"}
    with RayCluster(parse_config({**config, "models": models})) as cluster, Client(cluster.address) as client:

        def route(model: str) -> tuple[str, str]:
            answer = client.generate(PROMPT, model=model, max_tokens=20, temperature=0.0, ignore_eos=True)
            assert list(answer.token_ids) == fake_generate(PROMPT, 20)
            found = client.explain(answer.request_id)
            return found.prefill_worker, found.decode_worker

        assert [route(model) for model in models] == [("a/prefill-0", "a/decode-0"), ("b/prefill-0", "b/decode-0")]
        before = {info.worker_id: info.pid for info in cluster.workers}
        os.kill(before[WorkerId("a/decode-0")], signal.SIGKILL)
        assert route("b") == ("b/prefill-0", "b/decode-0")
        wait_for(cluster, lambda state: pid_of(state, "a/decode-0") not in (0, before[WorkerId("a/decode-0")]))
        assert route("a") == ("a/prefill-0", "a/decode-0")
        after = {info.worker_id: info.pid for info in cluster.workers}
        assert {name for name in before if before[name] != after[name]} == {"a/decode-0"}


def pid_of(state: ControlState, worker: str) -> int:
    """0 while it has none."""
    return next((record.info.pid for record in state.workers if record.worker_id == worker and record.info), 0)
