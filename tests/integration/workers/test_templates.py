"""Templates: what their children are, how children and templates end, and what becomes of a cluster's processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import pytest
import yaml
from rich.console import Console

from disagg.cli.operations.apply import ApplyOptions, run_apply
from disagg.cluster.config.cluster_config import override, parse_config
from disagg.cluster.hosts.processes import ProcessCluster
from disagg.cluster.system.children import end, open_log
from disagg.cluster.system.process_tools import ProcessRef
from disagg.cluster.templates import template as system_templates
from disagg.cluster.templates import templates as cluster_templates
from disagg.cluster.templates.template import IS_SUPPORTED, STATUS_UNKNOWN, ForkedProcess, ForkRequest, Template
from tests.support.processes import children_of
from tests.support.template_program import MODULE, Order, Start
from tests.support.waiting import LONG_WAIT_S, wait_until

pytestmark = [
    pytest.mark.skipif(not IS_SUPPORTED, reason="templates need pidfds"),
    pytest.mark.usefixtures("own_templates"),
]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "child.log"


@contextmanager
def template(start: Start, log: Path) -> Iterator[Template]:
    with open_log(log) as output:
        made = Template(MODULE, start, {}, output)
    try:
        yield made
    finally:
        made.close()


def fork(made: Template, order: Order, log: Path, **environment: str) -> ForkedProcess:
    with open_log(log) as output:
        return made.fork(ForkRequest(name="worker", environment=environment), order, output)


def test_a_child_has_its_own_environment_output_and_session_and_nothing_else_of_the_template(log: Path) -> None:
    with template(Start(), log) as made:
        other = fork(made, Order(sleep=True), log)
        child = fork(made, Order(write="COLOUR"), log, COLOUR="blue")
        try:
            assert child.wait(60) == 0
        finally:
            end([other], 10)
    assert log.read_text() == "worker blue True [0, 1, 2]\n"


def test_the_end_of_a_child_is_reported_as_a_popen_reports_it(log: Path) -> None:
    with template(Start(), log) as made:
        failing, killed = fork(made, Order(status=3), log), fork(made, Order(sleep=True), log)
        assert killed.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            killed.wait(0.01)
        killed.kill()
        assert (failing.wait(60), killed.wait(60)) == (3, -signal.SIGKILL)
        killed.terminate()  # as of a `Popen`, nothing happens


def test_children_outlive_their_template_and_can_still_be_ended(log: Path) -> None:
    with template(Start(), log) as made:
        child = fork(made, Order(sleep=True), log)
        os.kill(made.pid, signal.SIGKILL)
        assert wait_until(lambda: not made.is_running, LONG_WAIT_S)
        assert child.poll() is None
        with pytest.raises(OSError, match=r"did not fork|Broken pipe|reset"):
            fork(made, Order(), log)
    assert end([child], 10) == []
    assert child.returncode == STATUS_UNKNOWN


def test_a_template_with_threads_does_not_fork_and_stays(log: Path) -> None:
    with template(Start(threads=1), log) as made:
        with pytest.raises(OSError, match="did not fork"):
            fork(made, Order(), log)
        assert made.is_running


def stop(pid: int) -> None:
    """SIGSTOP to a child of this process; returns when it has stopped."""
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)


def test_the_end_of_a_child_is_seen_while_its_template_hangs(log: Path) -> None:
    with template(Start(), log) as made:
        polled, waited = fork(made, Order(sleep=True), log), fork(made, Order(sleep=True), log)
        stop(made.pid)
        polled.kill()
        assert wait_until(lambda: polled.poll() is not None, timeout_s=LONG_WAIT_S)
        assert end([waited], 20) == []
        assert (polled.returncode, waited.returncode) == (STATUS_UNKNOWN, STATUS_UNKNOWN)


def test_a_template_that_hangs_is_not_waited_for_as_one_that_loads(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_templates, "ANSWER_TIMEOUT_S", 0.2)
    with template(Start(), log) as made:
        child = fork(made, Order(sleep=True), log)
        try:
            stop(made.pid)
            with pytest.raises(
                OSError, match=rf"process {made.pid}\) did not answer for 0\.2 s; it last did \d+ s ago"
            ):
                fork(made, Order(), log)
        finally:
            end([child], 20)


def test_a_template_that_does_not_load_in_time_does_not_fork(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_templates, "FORK_TIMEOUT_S", 0.2)
    with (
        template(Start(loads_until_owner_is_gone=True), log) as made,
        pytest.raises(OSError, match=r"did not answer for 0\.2 s; it never did"),
    ):
        fork(made, Order(), log)


def test_a_template_that_loads_ends_with_its_owner(log: Path) -> None:
    with template(Start(loads_until_owner_is_gone=True), log) as made:
        made._control.close()
        assert wait_until(lambda: not made.is_running, LONG_WAIT_S)


# ---------------------------------------------------------------- of a cluster


FAKE_VALUES = {
    "model": {"path": "fake"},
    "gateway": {"port": 0, "http_port": 0},
    "transfer": {"transport": "shm"},
    "pools": {"decode": {"size": 2}},
}
FAKE = parse_config(FAKE_VALUES)


def templates_of(cluster: ProcessCluster) -> cluster_templates.Templates:
    assert cluster._templates is not None
    return cluster._templates


def test_the_processes_of_a_cluster_are_forked_and_so_are_those_that_follow_them(tmp_path: Path) -> None:
    with ProcessCluster(FAKE, log_dir=tmp_path) as cluster:
        workers, gateway = templates_of(cluster).pids
        assert children_of(workers) == sorted(worker.pid for worker in cluster.workers)
        assert children_of(gateway) == [cluster.pid("gateway")]
        before = cluster.pid("decode-1")
        os.kill(before, signal.SIGKILL)
        assert wait_until(lambda: cluster.state().is_settled and cluster.pid("decode-1") != before, LONG_WAIT_S)
        assert cluster.pid("decode-1") in children_of(workers)


def test_a_template_that_is_gone_is_started_again_for_the_next_process(tmp_path: Path) -> None:
    with ProcessCluster(FAKE, log_dir=tmp_path) as cluster:
        gone, before = templates_of(cluster).pids[0], cluster.pid("decode-1")
        os.kill(gone, signal.SIGKILL)
        assert cluster.state().is_settled
        os.kill(before, signal.SIGKILL)
        assert wait_until(lambda: cluster.state().is_settled and cluster.pid("decode-1") != before, LONG_WAIT_S)
        assert any(cluster.pid("decode-1") in children_of(pid) for pid in templates_of(cluster).pids if pid != gone)


def test_a_process_whose_template_hangs_is_started_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(system_templates, "ANSWER_TIMEOUT_S", 0.5)
    with ProcessCluster(FAKE, log_dir=tmp_path) as cluster:
        hung, before = templates_of(cluster).pids[0], cluster.pid("decode-1")
        stop(hung)
        assert cluster.state().is_settled
        os.kill(before, signal.SIGKILL)
        assert wait_until(lambda: cluster.state().is_settled and cluster.pid("decode-1") != before, LONG_WAIT_S)
        assert cluster.pid("decode-1") in children_of(os.getpid())
        assert hung not in templates_of(cluster).pids
    (line,) = [record.getMessage() for record in caplog.records if record.name == cluster_templates.__name__]
    assert line.startswith(f"decode-1 is started without its template: the template (process {hung}) did not answer")
    assert line.endswith("it is killed, and the next process gets a new one")


def test_a_template_that_ends_before_it_forks_is_tried_once_also_after_one_that_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ProcessCluster(FAKE, log_dir=tmp_path) as cluster:
        templates = templates_of(cluster)
        os.kill(templates.pids[0], signal.SIGKILL)
        monkeypatch.setattr(cluster_templates, "MODULE", "disagg.no_such_module")
        started: list[object] = []

        def start(module: str, message: object, environment: Mapping[str, str], output: IO[bytes]) -> Template:
            started.append(message)
            return Template(module, message, environment, output)

        monkeypatch.setattr(cluster_templates, "Template", start)
        for _ in range(3):
            before = cluster.pid("decode-1")
            assert cluster.state().is_settled
            os.kill(before, signal.SIGKILL)
            assert wait_until(
                lambda old=before: cluster.state().is_settled and cluster.pid("decode-1") != old,  # type: ignore[misc]
                LONG_WAIT_S,
            )
        assert len(started) == 1


def test_a_restart_for_new_code_forks_nothing_from_templates_that_have_the_old(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(FAKE_VALUES))
    with ProcessCluster(FAKE, log_dir=tmp_path) as cluster:
        old, gateway = templates_of(cluster).pids, cluster.pid("gateway")
        options = ApplyOptions(restart=True, wait_s=240.0)
        run_apply(cluster.address, tmp_path / "cluster.yaml", Console(quiet=True), options)
        os.kill(gateway, signal.SIGKILL)
        assert wait_until(lambda: cluster.state().is_settled and cluster.pid("gateway") != gateway, LONG_WAIT_S)
        new = [pid for pid in templates_of(cluster).pids if pid not in old]
        forked = {child for pid in new for child in children_of(pid)}
        assert forked == {*(worker.pid for worker in cluster.workers), cluster.pid("gateway")}
        assert [child for pid in old for child in children_of(pid)] == []
        assert wait_until(lambda: old[0] not in templates_of(cluster).pids, LONG_WAIT_S), "no worker needs it any more"


def test_without_a_template_that_loads_a_cluster_starts_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_templates, "MODULE", "disagg.no_such_module")
    with ProcessCluster(FAKE, log_dir=tmp_path) as cluster:
        assert templates_of(cluster).pids == []
        assert set(cluster_pids(cluster)) <= set(children_of(os.getpid()))


def test_a_cluster_may_have_no_templates(tmp_path: Path) -> None:
    with ProcessCluster(override(FAKE, {"controller.templates": False}), log_dir=tmp_path) as cluster:
        assert set(cluster_pids(cluster)) <= set(children_of(os.getpid()))


def cluster_pids(cluster: ProcessCluster) -> list[int]:
    return [*(worker.pid for worker in cluster.workers), cluster.pid("gateway")]


def test_two_clusters_have_templates_of_their_own(tmp_path: Path) -> None:
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(ProcessCluster(FAKE, log_dir=tmp_path / name)) for name in ("first", "second")
        )
        assert not set(templates_of(first).pids) & set(templates_of(second).pids)
        first.stop()
        assert second.state().is_settled
        assert all(ProcessRef.of(pid).is_alive() for pid in cluster_pids(second))


def test_no_process_is_left_over_when_the_owner_of_a_cluster_is_killed(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys, time\n"
        "from disagg.cluster.config.cluster_config import parse_config\n"
        "from disagg.cluster.hosts.processes import ProcessCluster\n"
        "values = {'model': {'path': 'fake'}, 'gateway': {'port': 0, 'http_port': 0}}\n"
        "cluster = ProcessCluster(parse_config(values), log_dir=pathlib.Path(sys.argv[1]))\n"
        "cluster.start()\n"
        "print(*cluster._templates.pids, *(w.pid for w in cluster.workers), cluster.pid('gateway'), flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        processes = [ProcessRef.of(int(pid)) for pid in owner.stdout.readline().split()]
        try:
            assert len(processes) == 5
            assert all(process.is_alive() for process in processes)
        finally:
            owner.kill()
    assert wait_until(lambda: not any(process.is_alive() for process in processes), LONG_WAIT_S)
