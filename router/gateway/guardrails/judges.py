"""Guardrails that are asked: a service or a function. Bounded in time and number; a failure has a configured outcome.

ask ──circuit open, too many wait──> failed
 └──> waits for its turn ──> the judge ──verdict──> checked
            └──timeout, error, no valid verdict──> failed ──on_failure──> allowed, or `UnavailableError`
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from typing import Any, Final, Protocol

from typing_extensions import override

from disagg.proto.errors import ConfigError, DeadlineError, UnavailableError
from disagg.router.gateway.guardrails.circuit import PAUSE_S, Circuit
from disagg.router.gateway.guardrails.config import GuardrailOptions, PythonOptions
from disagg.router.gateway.guardrails.verdicts import (
    ALLOW,
    MAX_REASON_CHARS,
    Allow,
    Decision,
    Question,
    Replace,
    Stop,
    Verdict,
)

logger = logging.getLogger(__name__)

GROUP: Final = "disagg.guardrails"
UNAVAILABLE: Final = "guardrail_unavailable"
"""Code of the error where a guardrail gave no verdict and nothing may pass without one."""
MAX_REPLACEMENT_CHARS: Final = 1 << 20


class JudgeError(Exception):
    """There is no verdict; the message says why."""


class Judge(Protocol):
    """What gives verdicts."""

    async def judge(self, question: Question) -> Verdict:
        """Raises `JudgeError`. Cancelled where it takes too long."""
        ...

    async def close(self) -> None:
        """Nothing is asked any more."""
        ...


class FunctionJudge(Judge):
    """A function on threads. One that does not return keeps its thread, and its place.

    Args:
        function: `Question` to verdict; None allows.
        num_threads: how many run at a time.
    """

    def __init__(self, function: Callable[[Question], Any], num_threads: int) -> None:
        self._function = function
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="guardrail")

    @override
    async def judge(self, question: Question) -> Verdict:
        try:
            verdict = await asyncio.get_running_loop().run_in_executor(self._executor, self._function, question)
        except Exception as error:  # of somebody else's code
            raise JudgeError(f"it raised {type(error).__name__}: {error}") from error
        return ALLOW if verdict is None else verdict  # `checked` looks at it

    @override
    async def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


def load_function(options: PythonOptions, path: str) -> Callable[[Question], Any]:
    """The function that `options` name. Raises `ConfigError` naming the field below `path`."""
    name = options.object
    try:
        if ":" in name:
            module, _, attribute = name.partition(":")
            found: Any = importlib.import_module(module)
            for part in attribute.split("."):
                found = getattr(found, part)
        else:
            points = list(entry_points(group=GROUP, name=name))
            if not points:
                raise ConfigError(f"{path}.object: no installed package has an entry point {name!r} in {GROUP}")
            found = points[0].load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{path}.object: {name} cannot be loaded: {error}") from None
    if isinstance(found, type):
        try:
            found = found(**options.options)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{path}.options: {name} refuses them: {error}") from None
    elif options.options:
        raise ConfigError(f"{path}.options: {name} is a function; only a class takes options")
    if not callable(found):
        raise ConfigError(f"{path}.object: {name} cannot be called")
    return found  # type: ignore[no-any-return]  # it can be called


class Asked:
    """One guardrail that is asked, with its limits. Used on one event loop.

    Args:
        options: its configuration.
        judge: gives the verdicts; closed with this.
        clock: monotonic seconds.
    """

    def __init__(self, options: GuardrailOptions, judge: Judge, clock: Callable[[], float] = time.monotonic) -> None:
        self.options = options
        self._judge = judge
        self._clock = clock
        self._circuit = Circuit()
        self._places = asyncio.Semaphore(options.max_running)
        self._num_asking = 0
        self.seconds = 0.0
        """Sum of the times that questions took."""

    @property
    def is_open(self) -> bool:
        """Whether it fails so often that it is not asked."""
        return self._circuit.is_open

    async def ask(
        self, question: Question, deadline: float | None, note: Callable[[Decision], None], count: Callable[[str], None]
    ) -> Verdict:
        """The verdict; where there is none, what is configured.

        Args:
            question: of one request.
            deadline: of the request, on `clock`.
            note: takes what it decided, where it failed.
            count: takes what came of it: `allow`, `replace`, `stop` or `failed`.

        Raises:
            UnavailableError: if there is no verdict, and without one nothing may pass.
            DeadlineError: if the deadline passed before there was one. That says nothing about the guardrail: else
                clients with short deadlines could have it asked no more.
        """
        began = self._clock()
        try:
            verdict = await self._verdict(question, began, deadline)
        except JudgeError as error:
            count("failed")
            options = self.options
            note(Decision(options.name, "", question.subject, "failed", f"{error}"[:MAX_REASON_CHARS]))
            if options.on_failure == "allow":
                return ALLOW
            raise UnavailableError(f"the guardrail {options.name} gives no verdict", UNAVAILABLE) from None
        finally:
            self.seconds += self._clock() - began
        count("allow" if isinstance(verdict, Allow) else "replace" if isinstance(verdict, Replace) else "stop")
        return verdict

    async def close(self) -> None:
        """End what it holds."""
        await self._judge.close()

    async def _verdict(self, question: Question, now: float, deadline: float | None) -> Verdict:
        options, circuit = self.options, self._circuit
        if self._num_asking >= options.max_running + options.max_waiting:
            raise JudgeError(f"{self._num_asking} questions run or wait")
        if not circuit.asks(now):
            raise JudgeError("it is not asked for a while, after it failed again and again")
        ends_before = deadline is not None and deadline - now < options.timeout_s
        left_s = max(0.0, deadline - now) if deadline is not None and ends_before else options.timeout_s
        self._num_asking += 1
        try:
            async with asyncio.timeout(left_s), self._places:
                verdict = checked(await self._judge.judge(question), question)
        except TimeoutError:
            if ends_before:
                circuit.withdrawn()
                raise DeadlineError(f"the deadline passed while the guardrail {options.name} was asked") from None
            self._failed(f"no verdict in {left_s:g} s")
            raise JudgeError(f"no verdict in {left_s:g} s") from None
        except JudgeError as error:
            self._failed(str(error))
            raise
        except asyncio.CancelledError:
            circuit.withdrawn()
            raise
        except Exception as error:  # of a verdict that somebody else's code made
            why = f"it gave no verdict: {type(error).__name__}: {error}"
            self._failed(why)
            raise JudgeError(why) from error
        finally:
            self._num_asking -= 1
        if circuit.passed() == "closed":
            logger.warning("guardrail %s: gives verdicts again", options.name)
        return verdict

    def _failed(self, why: str) -> None:
        if self._circuit.failed(self._clock()) == "opened":
            then = "pass without it" if self.options.on_failure == "allow" else "fail"
            logger.error(
                "guardrail %s: failed again and again, last: %s. Requests %s; it is tried again every %g s",
                self.options.name,
                why,
                then,
                PAUSE_S,
            )


def checked(verdict: object, question: Question) -> Verdict:
    """The verdict, if it is one that answers `question`. Raises `JudgeError`."""
    if isinstance(verdict, Stop | Replace) and not _is_text(verdict.reason):
        raise JudgeError("its reason is no text")
    if isinstance(verdict, Stop):
        return Stop(verdict.reason[:MAX_REASON_CHARS])
    if isinstance(verdict, Replace):
        texts = tuple(verdict.texts)
        if len(texts) != len(question.texts):
            raise JudgeError(f"it replaced {len(question.texts)} texts by {len(texts)}")
        if not all(_is_text(text) for text in texts) or sum(map(len, texts)) > MAX_REPLACEMENT_CHARS:
            raise JudgeError("its replacement is no text, or too long")
        return Replace(texts, verdict.reason[:MAX_REASON_CHARS])
    if isinstance(verdict, Allow):
        return verdict
    raise JudgeError(f"it gave no verdict but {type(verdict).__name__}")


def _is_text(value: object) -> bool:
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False
