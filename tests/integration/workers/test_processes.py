"""The launcher without Ray, with real child processes and the deterministic model."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from disagg.client import Client
from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.hosts.processes import WORKER_MODULE, Child, ProcessCluster, start_child, stop_children
from disagg.cluster.system.children import LaunchError
from disagg.cluster.system.process_tools import ProcessRef, Stopped
from disagg.cluster.templates.template import IS_SUPPORTED
from disagg.engine.config import WorkerConfig
from disagg.engine.fake_runner import fake_generate
from disagg.proto.errors import ConfigError
from disagg.router.config import RouterConfig
from tests.support.processes import children_mentioning
from tests.support.registry import Registry
from tests.support.secret import SECRET
from tests.support.tiny_models import make_checkpoint
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("own_templates")
PATIENT = {"suspect_after_s": 30.0, "kill_after_s": 60.0}
"""`recovery` where nothing hangs: on a slow machine a process may be silent for longer than the default."""
FAKE = {
    "model": {"path": "fake"},
    "gateway": {"port": 0},
    "placement": {"local_prefill": "never"},
    "transfer": {"transport": "shm"},
    "recovery": PATIENT,
}
"""Without torch, which gloo would bring, a worker starts in a third of the time."""
PROMPT = tuple(range(40))


def worker_config(name: str, **values: object) -> WorkerConfig:
    return WorkerConfig(worker_id=name, roles=("decode",), model_path="fake", **values)  # type: ignore[arg-type]


@pytest.fixture
def children(tmp_path: Path) -> Iterator[list[Child]]:
    started: list[Child] = []
    yield started
    stop_children(started, timeout_s=5)


# ---------------------------------------------------------------- a whole cluster


@pytest.mark.parametrize("mode", ["disaggregated", "colocated"])
def test_a_cluster_serves_and_leaves_nothing(mode: str) -> None:
    seen: list[tuple[str, str]] = []
    cluster = ProcessCluster(
        parse_config({**FAKE, "mode": mode}), progress=lambda name, state: seen.append((name, state))
    )
    with cluster:
        processes = [ProcessRef.of(info.pid) for info in cluster.workers] + [ProcessRef.of(cluster.pid("gateway"))]
        names = [info.worker_id for info in cluster.workers]
        assert names == (["prefill-0", "decode-0"] if mode == "disaggregated" else ["colocated-0"])
        assert len({process.pid for process in processes} | {os.getpid()}) == len(names) + 2
        assert cluster.state().is_settled
        with Client(cluster.address) as client:
            answer = client.generate(PROMPT, max_tokens=20, temperature=0.0, ignore_eos=True)
            assert list(answer.token_ids) == fake_generate(PROMPT, 20)
            route = client.explain(answer.request_id)
            assert (route.prefill_worker, route.decode_worker, route.kv_bytes > 0) == (
                ("prefill-0", "decode-0", True) if mode == "disaggregated" else ("", "colocated-0", False)
            )
    assert cluster.killed == []
    assert [process for process in processes if process.is_alive()] == []
    everything = [*names, "gateway"]
    assert [name for name, state in seen if state == "starting"] == everything
    assert sorted(name for name, state in seen if state == "ready") == sorted(everything)
    assert sorted(name for name, state in seen if state == "stopped") == sorted(everything)


def test_a_start_can_be_ended_and_leaves_nothing() -> None:
    cluster = ProcessCluster(parse_config(FAKE))
    started: list[ProcessRef] = []

    def all_started() -> bool:
        try:
            started[:] = [ProcessRef.of(cluster.pid(name)) for name in ("prefill-0", "decode-0")]
        except KeyError:
            return False
        return True

    def stop() -> None:
        if [record.worker_id for record in cluster.state().workers]:
            assert wait_until(all_started)
            raise Stopped

    with pytest.raises(Stopped):
        cluster.start(stop)
    assert len(started) == 2
    assert [process for process in started if process.is_alive()] == []


def test_a_cluster_that_cannot_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    model = make_checkpoint("llama", tmp_path / "model")
    (model / "model.safetensors").write_bytes(b"no weights")
    cluster = ProcessCluster(parse_config({**FAKE, "model": {"path": str(model)}}), log_dir=tmp_path / "logs")
    with pytest.raises(LaunchError, match=r"^(prefill-0|decode-0): .*model\.safetensors") as caught:
        cluster.start()
    name = str(caught.value).partition(":")[0]
    assert children_mentioning("disagg.cluster.hosts") == []  # templates, too
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [
        "decode-0.log",
        "prefill-0.log",
        *(["template-gateway.log", "template-worker.log"] if IS_SUPPORTED else []),
    ]
    assert "Traceback" in (tmp_path / "logs" / f"{name}.log").read_text()


# ---------------------------------------------------------------- one child


def test_a_child_is_pinned_with_all_its_threads_and_ends_when_told(tmp_path: Path, children: list[Child]) -> None:
    core = max(os.sched_getaffinity(0))
    with Registry() as registry:
        config = worker_config("w", cores=(core,))
        children.append(start_child("w", WORKER_MODULE, config, registry.address, SECRET, tmp_path, {}))
        (info,) = registry.wait(["w"])
        assert info.pid == children[0].process.pid
        threads = [int(task.name) for task in Path(f"/proc/{info.pid}/task").iterdir()]
        assert len(threads) > 2
        assert {frozenset(os.sched_getaffinity(thread)) for thread in threads} == {frozenset({core})}
        assert stop_children(children) == []
        assert children[0].process.returncode == 0


def test_a_child_that_does_not_end_is_killed(tmp_path: Path, children: list[Child]) -> None:
    children.append(start_child("w", WORKER_MODULE, worker_config("w"), "127.0.0.1:1", SECRET, tmp_path, {}))
    os.kill(children[0].process.pid, signal.SIGSTOP)
    stat = Path(f"/proc/{children[0].process.pid}/stat")
    assert wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
    assert stop_children(children, timeout_s=0.2) == ["w"]
    assert children[0].process.returncode == -signal.SIGKILL


def test_a_child_that_nobody_wants_ends(tmp_path: Path, children: list[Child]) -> None:
    with Registry() as registry:
        children.append(start_child("w", WORKER_MODULE, worker_config("w"), registry.address, SECRET, tmp_path, {}))
        registry.wait(["w"])
        registry.dismiss("w")
        assert children[0].process.wait(60) == 0


def test_a_child_registers_again_and_again(tmp_path: Path, children: list[Child]) -> None:
    """With any controller at its configured address; here the second one is another."""
    with Registry() as registry:
        children.append(start_child("w", WORKER_MODULE, worker_config("w"), registry.address, SECRET, tmp_path, {}))
        (info,) = registry.wait(["w"])
        port = int(registry.address.rpartition(":")[2])
    with Registry(port) as later:
        assert later.wait(["w"]) == [info]


def test_a_child_that_dies_shows_its_log(tmp_path: Path, children: list[Child]) -> None:
    children.append(start_child("w", "disagg.no_such_module", worker_config("w"), "127.0.0.1:1", SECRET, tmp_path, {}))
    why = children[0].why_ended()
    assert why.startswith("exit status 1; the end of its log:\n")
    assert "no_such_module" in why


def test_a_start_that_fails_is_told_to_the_controller(tmp_path: Path, children: list[Child]) -> None:
    with Registry() as registry:
        config = worker_config("w", block_size=17)
        children.append(start_child("w", WORKER_MODULE, config, registry.address, SECRET, tmp_path, {}))
        assert "17" in registry.wait_error("w")
        assert children[0].process.wait(60) == 1


def test_a_configuration_that_is_no_worker_s_ends_the_child(tmp_path: Path, children: list[Child]) -> None:
    children.append(start_child("w", WORKER_MODULE, RouterConfig(), "127.0.0.1:1", SECRET, tmp_path, {}))
    assert re.search(r"exit status 1; .*Object contains unknown field", children[0].why_ended(), re.DOTALL)


def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys, time\n"
        "from disagg.cluster.hosts.processes import start_child\n"
        "from disagg.engine.config import WorkerConfig\n"
        "config = WorkerConfig(worker_id='w', roles=('decode',), model_path='fake')\n"
        "from disagg.connections.cluster_secret import ClusterSecret\n"
        "secret = ClusterSecret(bytes.fromhex(sys.argv[3]))\n"
        f"child = start_child('w', {WORKER_MODULE!r}, config, sys.argv[2], secret, pathlib.Path(sys.argv[1]), {{}})\n"
        "time.sleep(600)\n"
    )
    with Registry() as registry:
        arguments = [sys.executable, "-c", code, str(tmp_path), registry.address, SECRET.value.hex()]
        with subprocess.Popen(arguments) as parent:
            worker = ProcessRef.of(registry.wait(["w"])[0].pid)
            assert worker.is_alive()
            parent.kill()
        assert wait_until(lambda: not worker.is_alive())


def test_what_the_gateway_cannot_have_is_told_before_anything_starts(tmp_path: Path) -> None:
    started: list[str] = []
    keys = tmp_path / "keys.yaml"
    keys.write_text("[{tenant: a, key: aaaaaaaaaaaaaaaaaaaa}]")
    keys.chmod(0o644)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for gateway, message in (
            (
                {"port": port, "http_port": None},
                f"gateway: cannot listen on 127.0.0.1:{port} (Address already in use); ",
            ),
            ({"port": 0, "http_port": port}, f"gateway: cannot listen on 127.0.0.1:{port} (Address already in use); "),
            ({"port": 0, "api_keys": str(keys)}, f"gateway.api_keys: others can use {keys} (mode 0644); next: chmod"),
        ):
            cluster = ProcessCluster(
                parse_config({"model": {"path": "fake"}, "gateway": gateway}),
                progress=lambda name, state: started.append(name),
            )
            with pytest.raises((LaunchError, ConfigError), match=f"^{re.escape(message)}"):
                cluster.start()
    assert started == []


# ---------------------------------------------------------------- disagg up


def test_up_serves_until_ctrl_c_and_exits_with_0() -> None:
    command = [
        sys.executable,
        "-m",
        "disagg.cli",
        "up",
        "--launcher",
        "processes",
        "--model",
        "fake",
        "--port",
        "0",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as up:
        timer = threading.Timer(60, up.kill)
        timer.start()
        assert up.stdout is not None
        lines: list[str] = []
        while not lines or "Ctrl-C" not in lines[-1]:
            line = up.stdout.readline()
            assert line, up.stderr.read() if up.stderr else ""
            lines.append(line)
        workers = [
            ProcessRef.of(int(line.split()[2])) for line in lines if line.startswith(("prefill-0 ", "decode-0 "))
        ]
        assert [worker.is_alive() for worker in workers] == [True, True]
        os.killpg(up.pid, signal.SIGINT)  # what a terminal does
        rest, errors = up.communicate()
        timer.cancel()
    assert (up.returncode, rest, errors) == (0, "stopping\n", "")
    assert [worker.is_alive() for worker in workers] == [False, False]
