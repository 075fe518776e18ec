"""The key q, in a terminal of the test's own."""

from __future__ import annotations

import io
import os
import pty
import termios
import threading
from collections.abc import Iterator
from typing import TextIO

import pytest

from disagg.cli.keyboard import quits_on_q

WAIT_S = 30.0
"""How long anything may take before a test fails."""


@pytest.fixture
def terminal() -> Iterator[tuple[int, TextIO]]:
    """The end of the keys, and the end of the program."""
    keys, screen = pty.openpty()
    with os.fdopen(screen) as program:
        yield keys, program
    os.close(keys)


@pytest.mark.parametrize("pressed", [b"q", b"Q", b"abq"])
def test_q_is_ctrl_c(terminal: tuple[int, TextIO], pressed: bytes) -> None:
    keys, program = terminal
    before = termios.tcgetattr(program.fileno())
    is_quit = False
    try:
        with quits_on_q(program):
            assert not termios.tcgetattr(program.fileno())[3] & termios.ICANON
            os.write(keys, pressed)
            threading.Event().wait(WAIT_S)
    except KeyboardInterrupt:
        is_quit = True
    assert is_quit
    assert termios.tcgetattr(program.fileno()) == before


def test_other_keys_do_nothing_and_no_thread_is_left(terminal: tuple[int, TextIO]) -> None:
    keys, program = terminal
    threads = threading.active_count()
    with quits_on_q(program):
        os.write(keys, b"xyz")
    assert threading.active_count() == threads


def test_without_a_terminal_there_are_no_keys() -> None:
    threads = threading.active_count()
    with quits_on_q(io.StringIO("q")):
        assert threading.active_count() == threads
