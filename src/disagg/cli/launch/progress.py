"""Display of what takes long: a line when a process is ready, and one that names the present activity wherever
`SILENCE_S` would pass without any."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, Self

from rich.console import Console
from rich.markup import escape
from rich.status import Status

SILENCE_S: Final = 2.5
LOOK_S: Final = 0.25
STATES: Final = ("starting", "ready", "stopped")
"""States of `Progress` in `cluster/control/cluster.py`; any other text is what a process does while it starts."""


class StillBusy:
    """Prints the present activity if nothing else was printed for a while. As a context manager it does so by itself,
    on a thread.

    Args:
        console: console on which the caller prints, too.
        clock: gives seconds.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._text = ""
        self._began_s = self._printed_s = clock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def printed(self) -> None:
        """Note that a line was printed."""
        self._printed_s = self._clock()

    def doing(self, text: str) -> None:
        """Set the present activity; empty for none."""
        self._text = text

    def begin(self, text: str) -> None:
        """Print an activity that begins now, and set it as the present one."""
        self._console.print(f"  {escape(text)}", highlight=False, soft_wrap=True)
        self.printed()
        self.doing(text)

    def look(self) -> None:
        """Print the present activity, if a line is due."""
        now, text = self._clock(), self._text
        if text and now - self._printed_s >= SILENCE_S:
            line = f"  [dim]...[/dim]    {escape(text)} [dim]({now - self._began_s:.1f} s)[/dim]"
            self._console.print(line, highlight=False, soft_wrap=True)
            self._printed_s = now

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run, name="still-busy", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(LOOK_S):
            self.look()


class LaunchDisplay:
    """Shows which processes are starting, and what they do: a spinner on a terminal, lines elsewhere."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._started = clock()
        self._doing: dict[str, str] = {}
        """Activity of each process that is starting, by name."""
        self._status: Status | None = None
        self.busy = StillBusy(console, clock)

    def __call__(self, name: str, state: str) -> None:
        """Implements `Progress` of `cluster/control/cluster.py`."""
        if state not in STATES:
            self._doing[name] = state
        elif state == "starting":
            self._doing[name] = "starts"
        else:
            self._doing.pop(name, None)
        if state == "ready":
            elapsed_s = self._clock() - self._started
            self._console.print(f"  [green]ready[/green]  {name} [dim]({elapsed_s:.1f} s)[/dim]", highlight=False)
            self.busy.printed()
        self._show(self._text())

    def _text(self) -> str:
        """Text such as `prefill-0, decode-0: loads the weights; gateway: starts`."""
        by_doing: dict[str, list[str]] = {}
        for name, doing in self._doing.items():
            by_doing.setdefault(doing, []).append(name)
        return "; ".join(f"{', '.join(names)}: {doing}" for doing, names in by_doing.items())

    def _show(self, text: str) -> None:
        if not self._console.is_terminal:
            self.busy.doing(text)
            return
        if not text:
            self.close()
            return
        if self._status is None:
            self._status = self._console.status(escape(text))
            self._status.start()
        self._status.update(escape(text))

    def close(self) -> None:
        """Take the spinner away."""
        if self._status is not None:
            self._status.stop()
            self._status = None
