"""Prompt tokens of attempts that were dispatched to this worker and that its engine does not count yet.

    dispatched ──Add, taken in by the engine──> in the engine's load        or over before that: refused, cancelled

A prompt waits for room on its decode worker, and then for the end of the engine's step: together longer than the time
between two reports. A report without it would look to a router as if the prompt had been computed.

Owner: the worker. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from disagg.proto.ids import AttemptKey


class PendingPrompts:
    """See the module docstring."""

    def __init__(self) -> None:
        self._tokens: dict[AttemptKey, int] = {}

    def dispatched(self, key: AttemptKey, num_tokens: int) -> None:
        """An attempt was given to a role."""
        self._tokens[key] = num_tokens

    def added(self, keys: Iterable[AttemptKey]) -> None:
        """The engine counts these from now on, whatever became of them there."""
        for key in keys:
            self._tokens.pop(key, None)

    def num_tokens(self, is_live: Callable[[AttemptKey], bool]) -> int:
        """The sum; attempts that are not live any more are forgotten."""
        for key in [key for key in self._tokens if not is_live(key)]:
            del self._tokens[key]
        return sum(self._tokens.values())
