"""The gateway's side of the process that compiles grammars (`compiler.py`): starts it, asks it, starts it again."""

from __future__ import annotations

import logging
import math
import os
import select
import socket
import subprocess
import sys
import threading
import time
from typing import Final

import msgspec

from disagg.gateway.answers.grammars.compiler import BEGUN, ENDED, LATE, MAX_WALL_S, VERDICT_BYTES, CompilerStart
from disagg.gateway.answers.grammars.grammars import LateVerdictError, NoVerdictError

logger = logging.getLogger(__name__)

LOAD_S: Final = 60.0
"""How long it may take to load the vocabulary, beside the time of a grammar."""
_LOG_PAUSE_S: Final = 60.0
_ENVIRONMENT: Final = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""It forks, which it may do with one thread only."""


class CompilerProcess:
    """A `Compiler` for one model in a process of its own. Several verdicts are found at a time.

    Args:
        start: what it loads, on the first use.
    """

    def __init__(self, start: CompilerStart) -> None:
        self._start = start
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._is_closed = False
        self._num_ended = 0
        """Compilers that a grammar ended, since the log had a line of them."""
        self._log_at = -math.inf

    @property
    def pid(self) -> int | None:
        """Of the process; None where there is none."""
        process = self._process
        return None if process is None else process.pid

    def prepare(self) -> None:
        """Have it load, so that the first grammar does not wait for that."""
        try:
            with self._lock:
                self._running()
        except OSError as error:  # a request with a grammar tries again, and is told
            logger.warning("the process that compiles grammars cannot be started: %s", error)

    def verdict(self, grammar: str) -> str:
        """What is wrong with a grammar, empty for a good one. Raises `NoVerdictError` and `LateVerdictError`."""
        reader, writer = os.pipe()
        try:
            try:
                with self._lock:
                    socket.send_fds(self._running(), [grammar.encode()], [writer])
            except OSError as error:
                raise NoVerdictError(f"the process that compiles grammars cannot be asked: {error}", False) from error
            finally:
                os.close(writer)
            found = self._read(reader)
        finally:
            os.close(reader)
        begun, found = found.startswith(BEGUN), found.removeprefix(BEGUN)
        if found == LATE:
            raise LateVerdictError(f"not compiled within {MAX_WALL_S:g} s: the processors are busy")
        if not found:
            raise NoVerdictError("its compiler ended", begun and not self._is_closed)
        text = found[1:].decode(errors="replace")
        if found.startswith(ENDED):
            self._note_ended(text)
        return text

    def _note_ended(self, reason: str) -> None:
        """Tell the operator, at most once in `_LOG_PAUSE_S`."""
        with self._lock:
            self._num_ended += 1
            now = time.monotonic()
            if now < self._log_at:
                return
            self._log_at, number, self._num_ended = now + _LOG_PAUSE_S, self._num_ended, 0
        logger.warning(
            "grammars of clients ended their compilers, %d since the last such line; each is refused, and nothing else "
            "notices. The latest one %s",
            number,
            reason,
        )

    def close(self) -> None:
        """End the process. Idempotent; there is no further verdict."""
        with self._lock:
            self._is_closed = True
            self._end()

    def _running(self) -> socket.socket:
        """Where it is asked; with the lock. Raises `OSError`."""
        if self._is_closed:
            raise OSError("the gateway stops")
        if self._process is not None and self._process.poll() is not None:
            logger.warning(
                "the process that compiles grammars (process %d) ended with status %d; starting another",
                self._process.pid,
                self._process.returncode,
            )
            self._end()
        if self._control is None:
            self._control, self._process = _started(self._start)
        return self._control

    def _read(self, pipe: int) -> bytes:
        """All that comes of a verdict."""
        watch, found = select.poll(), b""
        watch.register(pipe, select.POLLIN)
        while not found.removeprefix(BEGUN):
            if not watch.poll((LOAD_S + MAX_WALL_S) * 1e3):
                self._kill()
                break
            more = os.read(pipe, VERDICT_BYTES)
            if not more:
                break
            found += more
        return found

    def _kill(self) -> None:
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                logger.warning("the process that compiles grammars (process %d) hangs: killing it", self._process.pid)
                self._process.kill()

    def _end(self) -> None:
        control, self._control = self._control, None
        process, self._process = self._process, None
        if control is not None:
            control.close()
        if process is not None:
            process.kill()  # it has nothing to finish, and its children end with it
            process.wait()


def _started(start: CompilerStart) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", CompilerStart.__module__],
                stdin=theirs.fileno(),
                env={**os.environ, **_ENVIRONMENT},
                start_new_session=True,
            )
        control.send(msgspec.json.encode(start))
    except BaseException:
        control.close()
        raise
    return control, process
