"""Where the failpoints of a worker (`engine/failpoints.py`) take effect: wrappers around the parts that it is made of.

    Failpoints.connector, .rendezvous   pairs that do not form, or form over a `FaultyTransport`
    Failpoints.sending, .receiving      control messages of one pair, lost, doubled, late or wrong
    Failpoints.runner                   steps that raise, hang, or end the process
    Failpoints.mailbox                  sessions with gateways that break
    Failpoints.files                    files of the disk tier that cannot be written or read, or take long

`Failpoints.parts` gives a worker all of them, once, at its start. The code of a worker imports nothing of this. Where
no failpoint is set a worker has the parts of any other, and nothing is paid. Every fault that happens is a line in the
log, which begins with `FIRED`.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Never, TypeVar, cast

from typing_extensions import override

from disagg.engine.failpoints import Failpoint, Plan, Tamper, Trigger, parse
from disagg.engine.faults.faulty_transport import FaultyTransport
from disagg.engine.io.mailbox import Mailbox
from disagg.engine.kv_transfer.transport import Connector, PairTransport, Rendezvous, TransportError
from disagg.engine.plan import Buffer, ModelRunner, QueuedStep, StepPlan, StepQueue, StepResult
from disagg.engine.shell.extent_files import ExtentFiles
from disagg.engine.shell.parts import DEFAULT_PARTS, WorkerParts
from disagg.engine.tiers.extents import Extent

logger = logging.getLogger(__name__)

FAILPOINTS_VARIABLE = "DISAGG_FAILPOINTS"
"""Environment variable with the text of a worker's failpoints."""
FIRED = "failpoint:"
"""Begins the log message of every fault that happens."""
PAUSE_VARIABLE = "DISAGG_FAILPOINTS_PAUSED_BY"
"""Environment variable with the path of a file: while it exists, no fault falls."""
EXIT_STATUS = 70

M = TypeVar("M")


class Failpoints:
    """The failpoints of one incarnation of a worker. Its methods are called when what they wrap is made."""

    def __init__(self, triggers: Sequence[Trigger] = (), pause_file: Path | None = None) -> None:
        self._triggers = triggers
        self._pause_file = pause_file
        self._lock = threading.Lock()

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], worker_id: str, *, allowed: bool) -> Failpoints:
        """The failpoints of `DISAGG_FAILPOINTS` for this worker; none where it is not set.

        Args:
            environment: of the process.
            worker_id: whose failpoints are wanted.
            allowed: whether the configuration takes them, too; without, they are left out with a line in the log.

        Raises:
            ValueError: if the text cannot be read, or names what does not exist.
        """
        text = environment.get(FAILPOINTS_VARIABLE, "")
        if not text:
            return NO_FAILPOINTS
        if not allowed:
            logger.warning(
                "%s: %s is set and has no effect, because the configuration has no recovery.failpoints: true",
                worker_id,
                FAILPOINTS_VARIABLE,
            )
            return NO_FAILPOINTS
        try:
            plan = parse(text)
        except ValueError as error:
            raise ValueError(f"{FAILPOINTS_VARIABLE}: {error}") from None
        pause = environment.get(PAUSE_VARIABLE, "")
        return cls.of_plan(plan, worker_id, Path(pause) if pause else None)

    @classmethod
    def of_plan(cls, plan: Plan, worker_id: str, pause_file: Path | None = None) -> Failpoints:
        """Those of a plan that are meant for this worker."""
        triggers = plan.of(worker_id)
        if not triggers:
            return NO_FAILPOINTS
        logger.warning(
            "FAILPOINTS ARE ON in %s, faults will be injected: %s",
            worker_id,
            "; ".join(str(trigger.failpoint) for trigger in triggers),
        )
        return cls(triggers, pause_file)

    def parts(self) -> WorkerParts:
        """What a worker with these failpoints is made of; without any, what every worker is made of."""
        if not self._triggers:
            return DEFAULT_PARTS
        real = DEFAULT_PARTS
        return WorkerParts(
            make_rendezvous=lambda *args: self.rendezvous(real.make_rendezvous(*args)),
            make_connector=lambda *args: self.connector(real.make_connector(*args)),
            control_out=self.sending,
            control_in=self.receiving,
            wrap_runner=self.runner,
            new_mailbox=self.mailbox,
            wrap_files=self.files,
        )

    def connector(self, connect: Connector) -> Connector:
        """P's way to D: pairs form with faults, and over channels with faults."""
        if not self._at("pair.setup", "transport.send"):
            return connect
        return lambda pair_name, address: self._formed(lambda: connect(pair_name, address))

    def rendezvous(self, rendezvous: Rendezvous) -> Rendezvous:
        """D's rendezvous, which forms pairs with faults, over channels with faults."""
        if not self._at("pair.setup", "transport.receive"):
            return rendezvous
        return _FaultyRendezvous(rendezvous, self._formed)

    def sending(self, send: Callable[[M], None]) -> Callable[[M], None]:
        """What a pair's shell sends its control messages with. To be called on the event loop's thread."""
        return self._tampered("control.send", send)

    def receiving(self, receive: Callable[[M], None]) -> Callable[[M], None]:
        """What a pair's shell takes the peer's control messages with. To be called on the event loop's thread."""
        return self._tampered("control.receive", receive)

    def runner(self, runner: ModelRunner) -> ModelRunner:
        """The model runner of the engine."""
        if not self._at("engine.step"):
            return runner
        return cast(ModelRunner, _FaultyRunner(runner, self._before_step))

    def mailbox(self, max_items: int) -> Mailbox[M]:
        """The way out to one gateway."""
        if not self._at("tokens.send"):
            return Mailbox(max_items)
        return _BreakingMailbox(max_items, lambda: self.fired("tokens.send") is not None)

    def files(self, files: ExtentFiles) -> ExtentFiles:
        """The files of the disk tier."""
        if not self._at("tier.write", "tier.read"):
            return files
        return cast(ExtentFiles, _FaultyFiles(files, self._before_file))

    # ------------------------------------------------------------ inside

    def fired(self, point: str) -> Failpoint | None:
        """The fault that falls on this opportunity, if one does. Any thread."""
        if self._is_paused():
            return None
        with self._lock:
            fault = next((t.failpoint for t in self._at(point) if t.fires()), None)
        if fault is not None:
            _log(fault)
        return fault

    def _is_paused(self) -> bool:
        return self._pause_file is not None and self._pause_file.exists()

    def _at(self, *points: str) -> list[Trigger]:
        return [trigger for trigger in self._triggers if trigger.failpoint.point in points]

    def _tampered(self, point: str, pass_on: Callable[[M], None]) -> Callable[[M], None]:
        triggers = self._at(point)
        return _Tampered(Tamper(triggers), self._is_paused, pass_on) if triggers else pass_on

    def _formed(self, form: Callable[[], PairTransport]) -> PairTransport:
        """A pair's channel, formed on this thread."""
        if (fault := self.fired("pair.setup")) is not None:
            if fault.action == "fail":
                raise TransportError(f"{FIRED} {fault}")
            _hang_or_end(fault)
        return FaultyTransport(form(), lambda point: self.fired(point))

    def _before_step(self) -> None:
        if (fault := self.fired("engine.step")) is not None:
            if fault.action == "raise":
                raise RuntimeError(f"{FIRED} {fault}")
            _hang_or_end(fault)

    def _before_file(self, point: str) -> None:
        if (fault := self.fired(point)) is not None:
            if fault.action == "fail":
                code = errno.ENOSPC if point == "tier.write" else errno.EIO
                raise OSError(code, os.strerror(code))
            time.sleep(fault.ms / 1000)


NO_FAILPOINTS = Failpoints()


def _log(fault: Failpoint) -> None:
    logger.warning("%s %s", FIRED, fault)


def _hang_or_end(fault: Failpoint) -> None:
    match fault.action:
        case "hang":
            time.sleep(fault.ms / 1000)
        case "exit":
            os._exit(EXIT_STATUS)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case _:
            _unknown(fault)


def _unknown(fault: Failpoint) -> Never:
    raise AssertionError(f"{fault} passed the checks and means nothing here")


class _FaultyRendezvous(Rendezvous):
    """A `Rendezvous` whose `accept` may fail, hang or end the process, and whose channels are faulty."""

    def __init__(self, inner: Rendezvous, formed: Callable[[Callable[[], PairTransport]], PairTransport]) -> None:
        self._inner = inner
        self._formed = formed

    @property
    @override
    def address(self) -> str:
        return self._inner.address

    @override
    def accept(self, pair_name: str) -> PairTransport:
        return self._formed(lambda: self._inner.accept(pair_name))

    @override
    def close(self) -> None:
        self._inner.close()


class _Tampered(Generic[M]):
    """One direction of a pair's control messages. What is held up stays in order."""

    def __init__(self, tamper: Tamper, is_paused: Callable[[], bool], pass_on: Callable[[M], None]) -> None:
        self._tamper = tamper
        self._is_paused = is_paused
        self._pass_on = pass_on
        self._late: deque[tuple[float, M]] = deque()
        """(when it may be passed on, message)"""

    def __call__(self, message: M) -> None:
        altered = self._tamper.spare(message) if self._is_paused() else self._tamper(message)
        if altered.fault is not None:
            _log(altered.fault)
        loop = asyncio.get_running_loop()
        ready_at = max(loop.time() + altered.delay_s, self._late[-1][0] if self._late else 0.0)
        for each in altered.messages:
            if altered.delay_s or self._late:
                self._late.append((ready_at, each))
                loop.call_at(ready_at, self._pass_on_next)
            else:
                self._pass_on(each)

    def _pass_on_next(self) -> None:
        self._pass_on(self._late.popleft()[1])


class _FaultyFiles:
    """`ExtentFiles` that do something before each file."""

    def __init__(self, inner: ExtentFiles, before: Callable[[str], None]) -> None:
        self._inner = inner
        self._before = before

    def write(self, extent: Extent, payload: Buffer) -> None:
        self._before("tier.write")
        self._inner.write(extent, payload)

    def read(self, extent: Extent, payload: Buffer) -> str:
        self._before("tier.read")
        return self._inner.read(extent, payload)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _FaultyRunner:
    """A `ModelRunner` that does something before each step."""

    def __init__(self, inner: ModelRunner, before_step: Callable[[], None]) -> None:
        self._inner = inner
        self._before_step = before_step

    @property
    def step_queue(self) -> StepQueue | None:
        step_queue = self._inner.step_queue
        return None if step_queue is None else _FaultyLauncher(step_queue, self._before_step)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def run(self, plan: StepPlan) -> StepResult:
        self._before_step()
        return self._inner.run(plan)


class _FaultyLauncher(StepQueue):
    """A `StepQueue` that does something before each step."""

    def __init__(self, inner: StepQueue, before_step: Callable[[], None]) -> None:
        self._inner = inner
        self._before_step = before_step
        self.kind, self.max_ahead = inner.kind, inner.max_ahead

    @property
    @override
    def max_decodes(self) -> int:
        return self._inner.max_decodes

    @override
    def enqueue(self, plan: StepPlan, after: QueuedStep | None) -> QueuedStep:
        self._before_step()
        return self._inner.enqueue(plan, after)

    @override
    def watch(self, wake: Callable[[], None]) -> bool:
        return self._inner.watch(wake)


class _BreakingMailbox(Mailbox[M]):
    """Closes instead of taking an item, where `breaks` returns true."""

    def __init__(self, max_items: int, breaks: Callable[[], bool]) -> None:
        super().__init__(max_items)
        self._breaks = breaks

    @override
    def put(self, item: M) -> None:
        if not self.closed and self._breaks():
            self.close()
        super().put(item)
