"""The process that compiles clients' grammars: it loads the vocabulary, and forks children that compile.

    gateway   CompilerProcess.verdict ── grammar, a pipe ──> this process ── both ──> a child that is idle
                        └── reads the pipe <────────────────────────────────────────── compiles, writes the verdict
                                   └── what became of a child that wrote none <── this process, which forks another

A child may crash, run without end or ask for all memory: it has limits of its own, and whatever ends it, no other
grammar notices. This process itself calls the library with nothing that a client wrote. It ends when its control socket
does, which is its standard input. Children are forked before they are needed: the first use of the vocabulary takes a
forked process some 5 ms, and a grammar 1.
"""

from __future__ import annotations

import gc
import os
import resource
import secrets
import select
import signal
import socket
import sys
from collections.abc import Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

import msgspec

from disagg.gateway.requests.alternatives import check_alternatives
from disagg.proto.grammars import grammar_tokenizer, prove

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_CPU_S: Final = 0.1
"""Seconds of processor time for one grammar. A worker compiles it again, and the other rows of its batch wait for
that."""
MAX_WALL_S: Final = 10.0
"""Seconds by the clock, for a compiler that does not get the processor."""
MAX_MORE_BYTES: Final = 64 << 20
"""Bytes of memory for one grammar, beside what the vocabulary takes."""
STACK_BYTES: Final = 1 << 20
"""Less than what threads of workers have, which are to survive what survives here."""
MESSAGE_BYTES: Final = 128 << 10
"""Size of a message on the control socket; a grammar is shorter."""
VERDICT_BYTES: Final = 4096
"""Largest size of a verdict; a pipe takes as much at once."""
BEGUN: Final = b"."
"""Comes first: from here on the grammar may be the reason for what happens."""
DONE: Final = b"="
"""Begins a verdict. The rest is what is wrong, empty for a good grammar."""
ENDED: Final = b"!"
"""The same where the grammar ended a child."""
LATE: Final = b"?"
"""In its place where none was found in `MAX_WALL_S`."""
_YIELDS_AFTER_S: Final = 0.02
"""Then it gives way to other processes; nearly all grammars are compiled by then."""
_NICENESS: Final = 10
NUM_PLACES: Final = 2
"""Grammars that are compiled at a time."""
_MAX_DONE: Final = 256
"""Grammars of a child, after which another takes its place with the memory that it had at first."""
_TRIAL: Final = '{"grammars": [{"json_schema": {"type": "object"}}]}'
"""Compiled ahead, since first times take longer."""


class CompilerStart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first message on the control socket: what the process has to load."""

    tokenizer_file: str
    vocab_size: int
    """Number of tokens of the model's vocabulary."""
    eos_token_ids: tuple[int, ...]


@dataclass(slots=True, eq=False)
class _Child:
    """As this process knows it."""

    pid: int
    pidfd: int
    jobs: socket.socket
    verdict: int | None = None
    """The pipe of the grammar that it has; None while it is idle."""
    num_done: int = 0
    is_slow: bool = False
    """It was made to give way, which cannot be taken back."""


def verdict_of(tokenizer: LLTokenizer | str, grammar: str) -> str:
    """What is wrong with a grammar, empty for a good one. This process may end by it.

    Args:
        tokenizer: or why there is none.
        grammar: the text.
    """
    try:
        if isinstance(tokenizer, str):
            raise ValueError(tokenizer)
        for each in msgspec.json.decode(grammar)["grammars"]:
            check_alternatives(each.get("json_schema"))
        prove(tokenizer, grammar)
    except ValueError as error:
        return f"cannot be used: {error}"
    except MemoryError:
        return _ended_by(signal.SIGABRT)
    return ""


def _ended_by(number: int) -> str:
    if number == signal.SIGPROF:
        return f"cannot be used: it takes more than {MAX_CPU_S * 1e3:g} ms of a processor to compile"
    if number == signal.SIGABRT:
        return f"cannot be used: it takes more than {MAX_MORE_BYTES >> 20} MiB of memory to compile"
    return f"cannot be used: the compiler of grammars fails on it ({signal.Signals(number).name})"


def _run_child(tokenizer: LLTokenizer | str, jobs: socket.socket, address_bytes: int) -> NoReturn:
    status = 1
    try:
        with suppress(OSError):  # where memory is short, the system ends this process first
            Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
        _limit(resource.RLIMIT_CORE, 0)
        _limit(resource.RLIMIT_AS, address_bytes)
        _limit(resource.RLIMIT_STACK, STACK_BYTES)
        quiet = os.open(os.devnull, os.O_RDWR)
        os.dup2(quiet, 0)
        os.dup2(quiet, 2)  # what the library says of a failure
        verdict_of(tokenizer, _TRIAL)
        while _do(tokenizer, jobs):
            pass
        status = 0
    finally:
        os._exit(status)


def _do(tokenizer: LLTokenizer | str, jobs: socket.socket) -> bool:
    """The next grammar; False where there is none."""
    grammar, descriptors, _, _ = socket.recv_fds(jobs, MESSAGE_BYTES, 1)
    if not descriptors:
        return False
    pipe = descriptors[0]
    with suppress(OSError):  # nobody waits for it
        os.write(pipe, BEGUN)
    signal.setitimer(signal.ITIMER_REAL, MAX_WALL_S)
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
    found = verdict_of(tokenizer, grammar.decode())
    signal.setitimer(signal.ITIMER_PROF, 0.0)
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    with suppress(OSError):
        os.write(pipe, DONE + found.encode()[: VERDICT_BYTES - 1])
    os.close(pipe)
    return bool(jobs.send(b"."))


def _limit(which: int, value: int) -> None:
    _, most = resource.getrlimit(which)
    resource.setrlimit(which, (value if most == resource.RLIM_INFINITY else min(value, most), most))


class _Compiler:
    """The loop of this process, which has one thread."""

    def __init__(self, control: socket.socket, tokenizer: LLTokenizer | str) -> None:
        self._control = control
        self._tokenizer = tokenizer
        self._children: dict[int, _Child] = {}
        """By both descriptors of each."""
        self._idle: list[_Child] = []
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        self._address_bytes = pages * resource.getpagesize() + MAX_MORE_BYTES

    def serve(self) -> None:
        """Until the gateway is gone."""
        for _ in range(NUM_PLACES):
            self._fork()
        while True:
            watch = select.poll()
            for descriptor in (self._control.fileno(), *self._children):
                watch.register(descriptor, select.POLLIN)
            new = [child for child in self._children.values() if child.verdict is not None and not child.is_slow]
            ready = {descriptor for descriptor, _ in watch.poll(_YIELDS_AFTER_S * 1e3 if new else None)}
            if not ready:
                _give_way(new)
            self._hear(ready)
            if self._control.fileno() in ready and not self._receive():
                return

    def _receive(self) -> bool:
        grammar, descriptors, _, _ = socket.recv_fds(self._control, MESSAGE_BYTES, 1)
        if not descriptors:
            return False
        if not self._idle:
            self._fork()
        if not self._idle:  # the gateway sees the end of the pipe
            os.close(descriptors[0])
            return True
        child = self._idle.pop()
        child.verdict = descriptors[0]
        with suppress(OSError):  # it has just ended, which is heard next
            socket.send_fds(child.jobs, [grammar], descriptors)
        return True

    def _hear(self, ready: Set[int]) -> None:
        """Handle what the children of these descriptors say. When a child has ended, its descriptors may already be
        those of the one that took its place, which says nothing yet."""
        saying = [(descriptor, self._children[descriptor]) for descriptor in ready & self._children.keys()]
        for descriptor, child in saying:
            if self._children.get(descriptor) is child:
                self._heard(descriptor, child)

    def _heard(self, descriptor: int, child: _Child) -> None:
        """A child is done with a grammar, or ended."""
        if descriptor == child.pidfd:
            self._ended(child)
            return
        try:
            if not child.jobs.recv(16):
                return  # its end is heard, too
        except ConnectionResetError:
            return  # it ended before it read its grammar
        self._close_verdict(child)
        child.num_done += 1
        if child.is_slow or child.num_done >= _MAX_DONE:
            child.jobs.shutdown(socket.SHUT_RDWR)
        else:
            self._idle.append(child)

    def _ended(self, child: _Child) -> None:
        del self._children[child.pidfd], self._children[child.jobs.fileno()]
        if child in self._idle:
            self._idle.remove(child)
        _, status = os.waitpid(child.pid, 0)
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if child.verdict is not None:
            with suppress(OSError):  # nobody waits for it
                if number == signal.SIGALRM:
                    os.write(child.verdict, LATE)
                elif number not in (0, signal.SIGKILL, signal.SIGTERM):  # these come from outside
                    os.write(child.verdict, ENDED + _ended_by(number).encode())
        self._close_verdict(child)
        os.close(child.pidfd)
        child.jobs.close()
        if child.num_done and len(self._children) < 2 * NUM_PLACES:  # two descriptors each
            self._fork()

    def _close_verdict(self, child: _Child) -> None:
        if child.verdict is not None:
            os.close(child.verdict)
        child.verdict = None

    def _fork(self) -> None:
        """One more idle child, unless there is no memory or no process for it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                pid = os.fork()
            except OSError:
                ours.close()
                return
            if pid == 0:
                self._close_all(ours)
                _run_child(self._tokenizer, theirs, self._address_bytes)
        child = _Child(pid, os.pidfd_open(pid), ours)
        self._children[child.pidfd] = self._children[ours.fileno()] = child
        self._idle.append(child)

    def _close_all(self, ours: socket.socket) -> None:
        """In a child: nothing of the others stays open, or who waits for a verdict would not see its end."""
        ours.close()
        for child in set(self._children.values()):
            os.close(child.pidfd)
            child.jobs.close()
            if child.verdict is not None:
                os.close(child.verdict)


def _give_way(children: list[_Child]) -> None:
    for child in children:
        child.is_slow = True
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, child.pid, _NICENESS)


def _load(start: CompilerStart) -> LLTokenizer | str:
    """The vocabulary, or why it cannot be used."""
    try:
        text = Path(start.tokenizer_file).read_text(encoding="utf-8")
        tokenizer = grammar_tokenizer(text, start.vocab_size, start.eos_token_ids, secrets.token_hex(8))
    except (OSError, ValueError) as error:
        return str(error)
    prove(tokenizer, _TRIAL)  # children share what this makes
    return tokenizer


def main() -> int:
    """The process; returns its exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=0) as control:
        first = control.recv(MESSAGE_BYTES)
        if not first:
            return 0
        tokenizer = _load(msgspec.json.decode(first, type=CompilerStart))
        gc.freeze()
        _Compiler(control, tokenizer).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
