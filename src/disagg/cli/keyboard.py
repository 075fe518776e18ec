"""Keys that are pressed while a command draws on the screen."""

from __future__ import annotations

import os
import select
import signal
import termios
import threading
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

_QUIT = b"qQ"


@contextmanager
def quits_on_q(source: TextIO) -> Iterator[None]:
    """Let the key q do what Ctrl-C does, as in `top` and `less`, if `source` is a terminal. Called on the main thread;
    on leaving, the terminal is as it was."""
    if not source.isatty():
        yield
        return
    keys = source.fileno()
    before = termios.tcgetattr(keys)
    ended, end = os.pipe()
    watching = threading.Thread(target=_watch, args=(keys, ended), daemon=True)
    tty.setcbreak(keys)  # Ctrl-C stays a signal
    watching.start()
    try:
        yield
    finally:
        os.close(end)
        watching.join()
        os.close(ended)
        termios.tcsetattr(keys, termios.TCSADRAIN, before)


def _watch(keys: int, ended: int) -> None:
    """Wait for the key, or for the other end of the pipe to be closed."""
    main = threading.main_thread().ident
    while True:
        ready, _, _ = select.select([keys, ended], [], [])
        if ended in ready:
            return
        pressed = os.read(keys, 1)
        if pressed and pressed in _QUIT and main is not None:
            signal.pthread_kill(main, signal.SIGINT)
        if not pressed or pressed in _QUIT:
            return
