"""Failpoints where they take effect: bytes, control messages, steps, sessions; and that nothing is in the way without
them."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from disagg.engine.commands import Add, Release
from disagg.engine.failpoints import parse
from disagg.engine.fake_runner import FakeModelRunner
from disagg.engine.faults.faulty import NO_FAILPOINTS, Failpoints
from disagg.engine.io.mailbox import Mailbox
from disagg.engine.kv_transfer.transport import PairTransport, TransportError
from disagg.engine.kv_transfer.transports.local import LocalRendezvous, local_connector
from disagg.engine.plan import StepPlan
from disagg.engine.shell.extent_files import ExtentFiles
from disagg.engine.shell.parts import DEFAULT_PARTS
from disagg.proto.messages import StepUpdate
from tests.support.engine import (
    assert_idle,
    end_of,
    expected_output,
    handle_all,
    key_of,
    make_core,
    make_prompt,
    make_spec,
    run_until_idle,
    token_ids_of,
)
from tests.support.queueing import QueueingRunner
from tests.support.secret import SECRET, checksum
from tests.support.stages import StagedRunner
from tests.unit.engine.tiers.test_extent_file import FIRST, format_of, payload

DATA = np.arange(64, dtype=np.uint8)


def failpoints(text: str) -> Failpoints:
    return Failpoints.of_plan(parse(text), "w")


CONNECT = local_connector(SECRET, "sender")


def joined(p: Failpoints, d: Failpoints) -> tuple[PairTransport, PairTransport]:
    """Both ends of a channel, each with the failpoints of its worker."""
    rendezvous = LocalRendezvous(SECRET)
    ends: dict[str, Any] = {}

    def accept() -> None:
        ends["d"] = d.rendezvous(rendezvous).accept("pair")

    thread = threading.Thread(target=accept)
    thread.start()
    ends["p"] = p.connector(CONNECT)("pair", rendezvous.address)
    thread.join()
    rendezvous.close()
    return ends["p"], ends["d"]


class Exchange:
    """One payload sent over a channel: what both sides were told, in the end."""

    def __init__(self, p: str = "", d: str = "") -> None:
        self.sender, self.receiver = joined(failpoints(p), failpoints(d))
        self.source, self.target = DATA.copy(), np.zeros(64, dtype=np.uint8)
        self.posted = 0
        self.sent: list[bool] = []
        self.is_sent = threading.Event()
        self.received: list[tuple[bool, int]] = []
        self.receiver.recv(self.target, 64, lambda ok, _, digest: self.received.append((ok, digest)), self._note_posted)
        self.sender.send(self.source, 64, self._note_sent)

    def _note_sent(self, ok: bool, _: str) -> None:
        self.sent.append(ok)
        self.is_sent.set()

    def _note_posted(self) -> None:
        self.posted += 1

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


def test_the_environment_alone_turns_nothing_on(caplog: pytest.LogCaptureFixture) -> None:
    environment = {"DISAGG_FAILPOINTS": "engine.step=raise"}
    assert Failpoints.from_environment(environment, "w", allowed=False) is NO_FAILPOINTS
    assert caplog.messages == [
        "w: DISAGG_FAILPOINTS is set and has no effect, because the configuration has no recovery.failpoints: true"
    ]


def test_without_failpoints_nothing_is_wrapped() -> None:
    rendezvous, runner = LocalRendezvous(SECRET), FakeModelRunner(4, 16, 64)
    seen: list[object] = []
    assert NO_FAILPOINTS.parts() is DEFAULT_PARTS
    assert NO_FAILPOINTS.rendezvous(rendezvous) is rendezvous
    assert NO_FAILPOINTS.connector(CONNECT) == CONNECT
    assert NO_FAILPOINTS.runner(runner) is runner
    files = ExtentFiles(Path("/folder"), format_of(), is_shared=False)
    assert NO_FAILPOINTS.files(files) is files
    append = seen.append
    assert NO_FAILPOINTS.sending(append) is append
    assert NO_FAILPOINTS.receiving(append) is append
    assert type(NO_FAILPOINTS.mailbox(1)) is Mailbox
    assert failpoints("tokens.send=drop(worker=other)") is NO_FAILPOINTS
    rendezvous.close()


def test_each_failpoint_is_in_the_parts_of_its_worker() -> None:
    """A worker gets faults by its parts only; the transport's name and address go through."""
    control = ";control.send=drop(times=1);control.receive=duplicate(times=1)"
    parts = failpoints(f"pair.setup=fail;engine.step=raise;tokens.send=drop;tier.write=fail{control}").parts()
    rendezvous = parts.make_rendezvous("local", "127.0.0.1", SECRET)
    with pytest.raises(TransportError, match="failpoint"):
        rendezvous.accept("pair")
    with pytest.raises(TransportError, match="failpoint"):
        parts.make_connector("local", "127.0.0.1", SECRET)("pair", rendezvous.address)
    rendezvous.close()
    with pytest.raises(RuntimeError, match="failpoint"):
        parts.wrap_runner(FakeModelRunner(4, 16, 64)).run(StepPlan())
    with pytest.raises(OSError, match="No space left on device"):
        parts.wrap_files(ExtentFiles(Path("/folder"), format_of(), is_shared=False)).write(FIRST, payload())

    async def messages() -> tuple[list[str], list[str], bool]:
        sent, received = list[str](), list[str]()
        for deliver in (parts.control_out(sent.append), parts.control_in(received.append)):
            deliver("a")
            deliver("b")
        mailbox = parts.new_mailbox(10)
        mailbox.put(StepUpdate())
        return sent, received, mailbox.closed

    assert asyncio.run(messages()) == (["b"], ["a", "a", "b"], True)


def test_failpoints_come_from_the_environment_and_are_loud(caplog: pytest.LogCaptureFixture) -> None:
    assert Failpoints.from_environment({}, "w", allowed=True) is NO_FAILPOINTS
    with pytest.raises(ValueError, match=r"DISAGG_FAILPOINTS: there is no failpoint 'x\.y'"):
        Failpoints.from_environment({"DISAGG_FAILPOINTS": "x.y=drop"}, "w", allowed=True)
    Failpoints.from_environment({"DISAGG_FAILPOINTS": "tokens.send=drop;pair.setup=fail"}, "w", allowed=True)
    (record,) = caplog.records
    assert (record.levelno, record.getMessage()) == (
        logging.WARNING,
        "FAILPOINTS ARE ON in w, faults will be injected: tokens.send=drop; pair.setup=fail",
    )


# ---------------------------------------------------------------- bytes


def test_a_channel_without_a_fault_at_hand_carries_bytes() -> None:
    exchange = Exchange(p="transport.send=fail(after=1)", d="transport.receive=fail(after=1)")
    assert (exchange.sent, exchange.received, exchange.posted) == ([True], [(True, checksum(DATA))], 1)
    assert bytes(exchange.target) == bytes(DATA)
    exchange.close()


@pytest.mark.parametrize("side", ["p", "d"])
def test_corruption_changes_one_bit_and_shows_in_the_checksum(side: str) -> None:
    text = "transport.send=corrupt" if side == "p" else "transport.receive=corrupt"
    exchange = Exchange(**{side: text})
    assert exchange.sent == [True]
    ((ok, digest),) = exchange.received
    assert ok
    assert digest != checksum(DATA)
    assert np.unpackbits(exchange.target ^ DATA).sum() == 1
    exchange.close()


def test_a_send_that_fails_moves_nothing() -> None:
    exchange = Exchange(p="transport.send=fail")
    assert (exchange.sent, exchange.received) == ([False], [])
    assert bytes(exchange.target) == bytes(64)
    exchange.close()
    assert exchange.received == [(False, 0)]


def test_nothing_moves_after_a_failure() -> None:
    """The next bytes would end in the receive of those that did not come."""
    exchange = Exchange(p="transport.send=fail(times=1)", d="transport.receive=fail(times=1,after=1)")
    answers: list[bool] = []
    exchange.sender.send(DATA, 64, lambda ok, _: answers.append(ok))
    assert answers == [False]
    for _ in range(2):
        exchange.receiver.recv(np.zeros(64, np.uint8), 64, lambda ok, _, __: answers.append(ok))
    assert answers == [False] * 3
    assert exchange.received == []  # it was posted before
    exchange.close()


def test_a_receive_that_fails_is_never_posted() -> None:
    exchange = Exchange(d="transport.receive=fail")
    assert (exchange.posted, exchange.received, exchange.sent) == (0, [(False, 0)], [])
    exchange.close()


def test_a_late_answer_comes_when_its_time_is_over_or_the_channel_closes() -> None:
    exchange = Exchange(p="transport.send=delay(ms=3600000)", d="transport.receive=delay(ms=3600000)")
    assert (exchange.sent, exchange.received, exchange.posted) == ([], [], 1)
    exchange.close()
    assert (exchange.sent, exchange.received) == ([True], [(True, checksum(DATA))])
    soon = Exchange(p="transport.send=delay(ms=0)")
    assert soon.is_sent.wait(10)
    assert soon.sent == [True]
    soon.close()


def test_a_pair_that_fails_to_form() -> None:
    faulty = failpoints("pair.setup=fail(times=1)")
    rendezvous = LocalRendezvous(SECRET)
    with pytest.raises(TransportError, match=r"failpoint: pair\.setup=fail"):
        faulty.connector(CONNECT)("pair", rendezvous.address)
    with pytest.raises(TransportError, match="failpoint"):
        failpoints("pair.setup=fail").rendezvous(rendezvous).accept("pair")
    assert faulty.rendezvous(rendezvous).address == rendezvous.address
    faulty.rendezvous(rendezvous).close()


# ---------------------------------------------------------------- the rest


async def test_control_messages_that_are_held_up_stay_in_order() -> None:
    said: list[str] = []
    all_said = asyncio.Event()

    def note(word: str) -> None:
        said.append(word)
        if word == "d":
            all_said.set()

    say = failpoints("control.send=delay(ms=5,times=1,after=1)").sending(note)
    for word in "abcd":
        say(word)
    assert said == ["a"]
    await all_said.wait()
    say("e")
    assert said == list("abcde")


async def test_each_direction_has_its_own_failpoints(caplog: pytest.LogCaptureFixture) -> None:
    faulty = failpoints("control.receive=drop(times=1)")
    said: list[str] = []
    heard: list[str] = []
    assert faulty.sending(said.append) == said.append
    hear = faulty.receiving(heard.append)
    hear("a")
    hear("b")
    assert heard == ["b"]
    assert [r.getMessage() for r in caplog.records if "FAILPOINTS" not in r.getMessage()] == [
        "failpoint: control.receive=drop"
    ]


def test_no_fault_falls_while_the_pause_file_exists(tmp_path: Path) -> None:
    pause = tmp_path / "pause"
    environment = {
        "DISAGG_FAILPOINTS": "control.send=reorder(times=1);engine.step=raise",
        "DISAGG_FAILPOINTS_PAUSED_BY": str(pause),
    }
    faulty = Failpoints.from_environment(environment, "w", allowed=True)
    runner, said = faulty.runner(FakeModelRunner(4, 16, 64)), list[str]()

    async def say_while_paused() -> None:
        say = faulty.sending(said.append)
        say("held")
        pause.touch()
        say("next")

    asyncio.run(say_while_paused())
    assert said == ["next", "held"]
    assert runner.run(StepPlan()).token_ids == []
    pause.unlink()
    with pytest.raises(RuntimeError, match="failpoint"):
        runner.run(StepPlan())


def test_a_step_that_raises_or_hangs() -> None:
    runner = failpoints("engine.step=raise(times=1);engine.step=hang(ms=0)").runner(FakeModelRunner(4, 16, 64))
    assert (runner.num_blocks, runner.fingerprint) == (4, "fake")
    with pytest.raises(RuntimeError, match=r"failpoint: engine\.step=raise"):
        runner.run(StepPlan())
    assert runner.run(StepPlan()).token_ids == []


def test_a_step_that_raises_when_it_is_launched() -> None:
    """The steps of an answer: its prompt, two that are launched, and one that is not."""
    runner = QueueingRunner()
    core = make_core(runner=failpoints("engine.step=raise(after=3,times=1)").runner(runner))
    prompt = make_prompt(40)
    events = handle_all(core, Add(make_spec("a", prompt, max_tokens=20))) + run_until_idle(core)
    assert token_ids_of(events, "a") == expected_output(prompt, 3)
    assert end_of(events, "a").detail.startswith("step: RuntimeError: failpoint: engine.step=raise")
    assert runner.num_queued == 2
    assert_idle(core)


def test_steps_of_stages_are_queued_with_faults_as_without() -> None:
    runner = StagedRunner(2, 40)
    faulty = failpoints("engine.step=raise(after=3,times=1)").runner(runner)
    assert faulty.step_queue is not None
    assert (faulty.step_queue.kind, faulty.step_queue.max_ahead) == ("prompts", 2)
    assert faulty.step_queue.watch(lambda: None)
    core = make_core(runner=faulty, roles=("prefill",), token_budget=32)
    prompts = {name: make_prompt(90, seed=seed) for seed, name in enumerate("ab")}
    specs = [make_spec(name, prompt) for name, prompt in prompts.items()]
    events = handle_all(core, *(Add(spec, hold_after_prefill=True) for spec in specs)) + run_until_idle(core)
    assert runner.most_under_way == 2
    assert token_ids_of(events, "a") == expected_output(prompts["a"], 1)
    assert end_of(events, "b").detail.startswith("step: RuntimeError: failpoint: engine.step=raise")
    handle_all(core, Release(key_of("a")))
    assert_idle(core)


def test_a_runner_without_a_launcher_has_none_with_faults_either() -> None:
    assert failpoints("engine.step=raise").runner(FakeModelRunner(4, 16, 64)).step_queue is None


def test_a_disk_that_is_full_or_broken_and_then_is_not(tmp_path: Path) -> None:
    plan = "tier.write=fail(times=1);tier.read=fail(times=1);tier.write=delay(ms=0);tier.read=delay(ms=0)"
    files = failpoints(plan).files(ExtentFiles(tmp_path / "own", format_of(), is_shared=False))
    files.open()
    for error, order in (("No space left on device", files.write), ("Input/output error", files.read)):
        with pytest.raises(OSError, match=error):
            order(FIRST, payload())
    files.write(FIRST, payload())
    assert files.read(FIRST, payload(0)) == ""
    assert files.scan(8).extents == [FIRST]
    files.close()


async def test_a_session_breaks_instead_of_taking_an_update() -> None:
    mailbox: Mailbox[int] = failpoints("tokens.send=drop(after=1,times=1)").mailbox(10)
    closed = []
    for item in (1, 2):
        mailbox.put(item)
        closed.append(mailbox.closed)
    assert closed == [False, True]
    assert [item async for item in mailbox] == []
