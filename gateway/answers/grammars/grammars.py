"""Whether clients' grammars can be used by workers: verdicts that are known, and the turns of those that are not.

    check ── known ──> verdict
      └── unknown ──> waits for its tenant's turn ──> a compiler process (`compiler.py`) ──> verdict, kept

The compiler is native code that recurses, allocates and loops on what a client wrote, and not all of that is counted by
its own limits. So it runs in a process that may die, for a bounded time in bounded memory. What ended it is known from
then on, and refused at once.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import OrderedDict
from typing import Final, Protocol

from disagg.gateway.answers.grammars.compiler import NUM_PLACES
from disagg.gateway.event_loop.shell.offload import Offload
from disagg.proto.errors import UnavailableError

logger = logging.getLogger(__name__)

_MAX_KNOWN: Final = 1024
"""Verdicts that are kept, of 32 bytes and a short message each."""
_MAX_TRIES: Final = 2
"""A grammar whose compiler ended so often without a word about it is not tried again."""
_MAX_WAITING_BYTES: Final = 4 << 20
_MAX_TENANT_WAITING_BYTES: Final = 1 << 20


class NoVerdictError(Exception):
    """A compiler ended without a verdict. `blames`: it had the grammar when it ended."""

    def __init__(self, message: str, blames: bool) -> None:
        super().__init__(message)
        self.blames = blames


class LateVerdictError(Exception):
    """A compiler got too little of the processors, in as long as a client is to wait."""


class Compiler(Protocol):
    """What compiles grammars for one model; any thread may ask."""

    def prepare(self) -> None:
        """Have it load what it needs, so that the first grammar does not wait for that."""

    def verdict(self, grammar: str) -> str:
        """What is wrong with a grammar, empty for a good one. Raises `NoVerdictError` and `LateVerdictError`."""

    def close(self) -> None:
        """End it. Idempotent."""


class Grammars:
    """Verdicts on grammars for one model. Owner of its compiler. Used on one event loop, but for `compiled`.

    Args:
        compiler: None where the model has no end of sequence: no grammar ends then.
        is_inline: compile on the event loop, for tests.
    """

    def __init__(self, compiler: Compiler | None, *, is_inline: bool = False) -> None:
        self._compiler = compiler
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, str] = OrderedDict()
        """By hash: what is wrong with it, empty for a good one."""
        self._offload: Offload | None = None
        if not is_inline:
            self._offload = Offload(
                NUM_PLACES,
                inline_bytes=0,
                max_bytes=_MAX_WAITING_BYTES,
                max_tenant_bytes=_MAX_TENANT_WAITING_BYTES,
                what="grammars",
            )

    def prepare(self) -> None:
        """Have the compiler load."""
        if self._compiler is not None:
            self._compiler.prepare()

    async def check(self, grammar: str, tenant: str, deadline: float | None) -> str:
        """What is wrong with a grammar, empty for a good one.

        Raises:
            OverloadedError, DeadlineError: as `Offload.run`.
            UnavailableError: if no verdict can be had now.
        """
        wrong = self.known(grammar)
        if wrong is not None:
            return wrong
        if self._offload is None:
            return self.compiled(grammar)
        num_bytes = len(grammar)
        return await self._offload.run(
            lambda: self.compiled(grammar), tenant=tenant, num_bytes=num_bytes, deadline=deadline
        )

    def known(self, grammar: str) -> str | None:
        """What is wrong with a grammar, empty for a good one; None where that is not known yet."""
        key = _key(grammar)
        with self._lock:
            wrong = self._known.get(key)
            if wrong is not None:
                self._known.move_to_end(key)
        return wrong

    def compiled(self, grammar: str) -> str:
        """As `known`, compiled where it has to be. Long: not for the event loop. Raises `UnavailableError`."""
        wrong = self.known(grammar)
        return self._compile(grammar) if wrong is None else wrong

    def close(self) -> None:
        """End the compiler; whoever waits for it is told. Idempotent."""
        if self._compiler is not None:
            self._compiler.close()
        if self._offload is not None:
            self._offload.close()

    def _compile(self, grammar: str) -> str:
        if self._compiler is None:
            return "cannot be used: the model has no end-of-sequence token"
        num_blamed = 0
        for _ in range(_MAX_TRIES):
            try:
                return self._keep(grammar, self._compiler.verdict(grammar))
            except NoVerdictError as error:
                num_blamed += error.blames
                logger.warning("grammar %s: %s", _key(grammar).hex()[:16], error)
            except LateVerdictError as error:  # another try would take as long
                logger.warning("grammar %s: %s", _key(grammar).hex()[:16], error)
                break
        if num_blamed == _MAX_TRIES:
            return self._keep(grammar, f"cannot be used: the compiler of grammars ended with it {_MAX_TRIES} times")
        raise UnavailableError("grammars cannot be compiled now; try again", "no_grammar_compiler")

    def _keep(self, grammar: str, wrong: str) -> str:
        with self._lock:
            self._known[_key(grammar)] = wrong
            while len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
        return wrong


def _key(grammar: str) -> bytes:
    return hashlib.sha256(grammar.encode()).digest()
