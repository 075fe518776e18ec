from __future__ import annotations

import gc
import os
import resource
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from disagg.cluster.system import children, cores, process_tools
from disagg.cluster.system.process_tools import ProcessRef, StopFlag, Stopped
from disagg.proto.errors import ConfigError


@pytest.fixture
def flag() -> Iterator[StopFlag]:
    before = signal.getsignal(signal.SIGUSR1)
    flag = StopFlag(signal.SIGUSR1)
    yield flag
    flag.close()
    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_signal_sets_the_flag(flag: StopFlag) -> None:
    assert flag.wait(0) is False
    signal.raise_signal(signal.SIGUSR1)
    assert flag.wait(0) is True
    assert flag.wait(600) is True


def test_a_signal_ends_a_wait(flag: StopFlag) -> None:
    sender = threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGUSR1))
    sender.start()
    assert flag.wait(600) is True
    sender.join()


@pytest.mark.timeout(60)
def test_signals_at_any_moment_of_a_wait_do_not_lock_up(flag: StopFlag) -> None:
    main, done = threading.get_ident(), threading.Event()

    def send() -> None:
        while not done.is_set():
            signal.pthread_kill(main, signal.SIGUSR1)

    sender = threading.Thread(target=send)
    sender.start()
    for _ in range(20_000):
        flag.is_set = False
        flag.wait(0)
    done.set()
    sender.join()
    signal.raise_signal(signal.SIGUSR1)
    assert flag.wait(600) is True


def test_only_the_first_signal_interrupts(flag: StopFlag) -> None:
    interrupted = 0
    with flag.interruptible():
        for _ in range(3):
            try:
                signal.raise_signal(signal.SIGUSR1)
            except Stopped:
                interrupted += 1
    assert interrupted == 1


def test_a_signal_interrupts_only_where_it_may(flag: StopFlag) -> None:
    with flag.interruptible():
        pass
    signal.raise_signal(signal.SIGUSR1)
    with pytest.raises(Stopped), flag.interruptible():
        pytest.fail("the signal came before")


def test_a_check_raises_after_a_signal_and_not_in_it(flag: StopFlag) -> None:
    flag.check()
    signal.raise_signal(signal.SIGUSR1)
    for _ in range(2):
        with pytest.raises(Stopped):
            flag.check()


@pytest.mark.parametrize(
    ("status", "text"),
    [(0, "exit status 0"), (3, "exit status 3"), (-9, "killed by SIGKILL"), (-40, "killed by signal 40")],
)
def test_how_a_process_ended(status: int, text: str) -> None:
    assert children.describe_exit(status) == text


def test_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert children.last_lines(log, 2) == ""
    log.write_bytes(b"a\nb\xff\nc\n")
    assert children.last_lines(log, 2) == "b\ufffd\nc"


def test_who_insists_gets_the_default_effect() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    flag = StopFlag(signal.SIGUSR1, max_signals=2)
    signal.raise_signal(signal.SIGUSR1)
    assert signal.getsignal(signal.SIGUSR1) == flag._on_signal
    signal.raise_signal(signal.SIGUSR1)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    flag.close()
    assert signal.getsignal(signal.SIGUSR1) is before


def test_thread_environment() -> None:
    environment = process_tools.thread_environment(3)
    assert {environment[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")} == {"3"}
    assert environment["MALLOC_ARENA_MAX"] == "2"
    assert environment["GOMP_SPINCOUNT"] == "4000"


def test_a_process_that_runs_takes_an_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "9")
    process_tools.take_environment({"OMP_NUM_THREADS": "3"})
    assert os.environ["OMP_NUM_THREADS"] == "3"


def test_a_process_is_pinned_by_another_one_only_where_it_runs_anywhere() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        anywhere = os.sched_getaffinity(process.pid)
        cores.pin_unpinned(process.pid, set(), anywhere)
        assert os.sched_getaffinity(process.pid) == anywhere
        cores.pin_unpinned(process.pid, anywhere, [min(anywhere)])
        assert os.sched_getaffinity(process.pid) == {min(anywhere)}
        cores.pin_unpinned(process.pid, anywhere, [max(anywhere)])
        assert os.sched_getaffinity(process.pid) == {min(anywhere)}
    finally:
        process.communicate()
    cores.pin_unpinned(process.pid, anywhere, anywhere)  # it is gone


def test_pinning_to_nothing_or_to_no_core_of_this_machine_changes_nothing() -> None:
    before = os.sched_getaffinity(0)
    assert cores.pin_process(()) is False
    assert cores.pin_process((100_000,)) is False
    assert os.sched_getaffinity(0) == before
    assert cores.pin_process(before) is True
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ConfigError("a.b: no\n  way"), "a.b: no way"),
        (KeyError("x"), "KeyError: 'x'"),
        (ValueError(""), "ValueError: "),
    ],
)
def test_errors_in_one_line(error: Exception, text: str) -> None:
    assert process_tools.describe(error) == text


def test_a_process_is_known_by_its_start_and_not_by_its_id_alone() -> None:
    me = ProcessRef.of(os.getpid())
    assert me.is_alive()
    assert not ProcessRef(me.pid, me.start_ticks + 1).is_alive()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        found = ProcessRef.of(child.pid)
        assert found.is_alive()
        found.kill()
        child.wait()
    assert child.returncode == -signal.SIGKILL
    assert not found.is_alive()
    assert not ProcessRef.of(child.pid).is_alive()
    found.kill()


def test_a_family_is_found_by_its_environment_and_its_descent() -> None:
    mark = uuid.uuid4().hex
    grandchild = "import subprocess, sys; print(subprocess.Popen(['sleep', '600'], env={}).pid, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", grandchild],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "MARK": mark},
    ) as child:
        assert child.stdout is not None
        sleeper = ProcessRef.of(int(child.stdout.readline()))
        family = ProcessRef.family(f"MARK={mark}")
        assert family == sorted([ProcessRef.of(child.pid), sleeper], key=lambda process: process.pid)
        assert ProcessRef.family(f"MARK={mark[:-1]}") == []
        for process in family:
            process.kill()


@pytest.mark.parametrize(
    ("soft", "hard", "limit"),
    [
        (256, 4096, 1000),
        (256, 512, 512),
        (256, resource.RLIM_INFINITY, 1000),
        (5000, 9000, 5000),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, resource.RLIM_INFINITY),
    ],
)
def test_the_limit_of_open_files_only_rises(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, limit: int) -> None:
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, wanted: limits.append(wanted))
    assert process_tools.allow_open_files(1000) == limit
    assert limits[-1] == (limit, hard)


def test_what_the_start_left_is_not_collected_again() -> None:
    kept: list[object] = []
    kept.append(kept)
    try:
        process_tools.freeze_start()
        assert gc.get_freeze_count() > 0
        assert not any(known is kept for known in gc.get_objects())
    finally:
        gc.unfreeze()
    assert any(known is kept for known in gc.get_objects())


def test_batch_scheduling_is_inherited_by_the_threads_of_a_thread() -> None:
    policies: list[int] = []

    def look() -> None:
        policies.append(os.sched_getscheduler(0))

    def start_another() -> None:
        process_tools.use_batch_scheduling()
        child = threading.Thread(target=look)
        child.start()
        child.join()

    thread = threading.Thread(target=start_another)
    thread.start()
    thread.join()
    look()
    assert policies == [os.SCHED_BATCH, os.SCHED_OTHER]


def test_a_thread_gives_way_with_those_that_it_starts() -> None:
    found: list[int] = []

    def look() -> None:
        found.append(os.getpriority(os.PRIO_PROCESS, 0))

    def start_another() -> None:
        for _ in range(2):
            process_tools.give_way()
        child = threading.Thread(target=look)
        child.start()
        child.join()

    before = os.getpriority(os.PRIO_PROCESS, 0)
    thread = threading.Thread(target=start_another)
    thread.start()
    thread.join()
    look()
    assert found == [max(before, process_tools.NICENESS), before]
