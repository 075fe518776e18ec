"""Guardrails that are asked: a service or a function. Bounded in time and number; a failure has a configured outcome.

ask ──circuit open──> failed
 └──> waits for its place ──> the judge ──verdict──> checked
            │                   ├──refuses the question──> stopped
            │                   └──timeout, error, no valid verdict──> failed ──outage, `allow`──> allowed
            └──too many wait, timeout──> `OverloadedError`               └──> `UnavailableError`

`on_failure: allow` is for a guardrail that is down for all. A text at which the judge fails, one that it refuses, and
those of a tenant that asks much must not pass unseen. Only what the judge does counts for the circuit.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import math
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from typing import Any, Final, Protocol, TypeVar

from typing_extensions import override

from disagg.gateway.guardrails.circuit import FAILURES, PAUSE_S, Circuits
from disagg.gateway.guardrails.config import GuardrailOptions, PythonOptions
from disagg.gateway.guardrails.places import Places, PlacesError, Ticket
from disagg.gateway.requests.verdicts import (
    ALLOW,
    MAX_REASON_CHARS,
    UNJUDGED,
    Allow,
    CannotJudgeError,
    Decision,
    Question,
    Replace,
    Stop,
    Verdict,
)
from disagg.proto.clock.process_clock import process_clock
from disagg.proto.errors import ConfigError, DeadlineError, OverloadedError, UnavailableError

logger = logging.getLogger(__name__)

T = TypeVar("T")

GROUP: Final = "disagg.guardrails"
REFUSED: Final = "it cannot be judged"
"""Reason of a stop where the judge refuses the question."""
_RETRY_S: Final = 1.0
_REFUSALS_LOGGED_S: Final = 60.0
"""Seconds between two lines of the log about refused questions."""
MAX_REPLACEMENT_CHARS: Final = 1 << 20


class JudgeError(Exception):
    """There is no verdict; the message says why.

    Args:
        message: see there.
        is_refusal: whether the judge works, and refused this question.
    """

    def __init__(self, message: str, *, is_refusal: bool = False) -> None:
        super().__init__(message)
        self.is_refusal = is_refusal


class Judge(Protocol):
    """Source of a guardrail's verdicts."""

    async def judge(self, question: Question) -> Verdict:
        """Raises `JudgeError`. Cancelled where it takes too long."""
        ...

    async def close(self) -> None:
        """Release what the judge holds; nothing is asked afterwards."""
        ...


class FunctionJudge(Judge):
    """A function on threads. One that does not return keeps its thread, and its place.

    Args:
        function: `Question` to verdict; None allows, and `CannotJudgeError` refuses the question.
        num_threads: how many run at a time.
    """

    def __init__(self, function: Callable[[Question], Any], num_threads: int) -> None:
        self._function = function
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="guardrail")

    @override
    async def judge(self, question: Question) -> Verdict:
        try:
            verdict = await asyncio.get_running_loop().run_in_executor(self._executor, self._function, question)
        except CannotJudgeError as error:
            raise JudgeError(f"it cannot judge it: {error}", is_refusal=True) from error
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

    def __init__(self, options: GuardrailOptions, judge: Judge, clock: Callable[[], float] | None = None) -> None:
        self.options = options
        self._judge = judge
        self._clock = process_clock().now if clock is None else clock
        self._circuit = Circuits()
        self._places = Places(options.max_running, options.max_waiting)
        self._waiting: dict[Ticket, asyncio.Event] = {}
        """Set when its turn has come."""
        self._next_refusal_logged = -math.inf
        self.seconds = 0.0
        """Sum of the times that questions took."""

    @property
    def is_open(self) -> bool:
        """Whether it fails so often that it is not asked, for one tenant at least."""
        return self._circuit.is_open

    async def ask(
        self,
        question: Question,
        deadline: float | None,
        note: Callable[[Decision], None],
        count: Callable[[str], None],
        is_sole: bool = True,
    ) -> Verdict:
        """The verdict; where there is none and the guardrail is down, what is configured.

        Args:
            question: of one request.
            deadline: of the request, on `clock`.
            note: takes what it decided, where it failed.
            count: takes what came of it: `allow`, `replace`, `stop` or `failed`.
            is_sole: whether there is no other tenant.

        Raises:
            UnavailableError: if there is no verdict, and without one nothing may pass.
            OverloadedError: if there is no place for the question.
            DeadlineError: if the deadline passed before there was one. That says nothing about the guardrail: else
                clients with short deadlines could have it asked no more.
        """
        began = self._clock()
        try:
            verdict = await self._verdict(question, began, deadline, is_sole)
        except JudgeError as error:
            if error.is_refusal:
                count("stop")
                self._note_refusal(error)
                return Stop(REFUSED)
            count("failed")
            options = self.options
            note(Decision(options.name, "", question.subject, "failed", f"{error}"[:MAX_REASON_CHARS]))
            if options.on_failure == "allow" and self._circuit.is_outage:
                return ALLOW
            raise UnavailableError(f"the guardrail {options.name} gives no verdict", UNJUDGED) from None
        finally:
            self.seconds += self._clock() - began
        count("allow" if isinstance(verdict, Allow) else "replace" if isinstance(verdict, Replace) else "stop")
        return verdict

    async def close(self) -> None:
        """End what it holds."""
        await self._judge.close()

    async def _verdict(self, question: Question, now: float, deadline: float | None, is_sole: bool) -> Verdict:
        circuit, tenant, ticket = self._circuit, question.tenant, Ticket(question.tenant, is_sole)
        if not circuit.asks(tenant, now):
            since = circuit.open_since(tenant)
            elapsed_s = 0.0 if since is None else now - since
            raise JudgeError(
                f"after {FAILURES} failures in a row it has not been asked for {elapsed_s:.0f} s, but for a trial "
                f"every {PAUSE_S:g} s"
            )
        try:
            await self._enter(ticket, deadline)
        except BaseException:
            circuit.withdrawn(tenant)
            raise
        try:
            verdict = await self._asked(question, deadline)
        except JudgeError as error:
            if error.is_refusal:
                circuit.withdrawn(tenant)
            else:
                self._failed(tenant, str(error), is_sole)
            raise
        except (DeadlineError, asyncio.CancelledError):
            circuit.withdrawn(tenant)
            raise
        finally:
            self._leave(ticket)
        if circuit.passed(tenant):
            logger.info("guardrail %s: gives verdicts again", self.options.name)
        return verdict

    async def _enter(self, ticket: Ticket, deadline: float | None) -> None:
        """Wait for a place. Raises `OverloadedError`, or `DeadlineError`; then it has none."""
        try:
            if self._places.enter(ticket):
                return
        except PlacesError as error:
            raise self._busy(str(error)) from None
        turn = self._waiting[ticket] = asyncio.Event()
        try:
            await self._within(deadline, turn.wait())
        except BaseException as error:
            self._leave(ticket)
            if isinstance(error, TimeoutError):
                raise self._busy(f"no place for a question in {self.options.timeout_s:g} s") from None
            raise
        finally:
            del self._waiting[ticket]

    def _busy(self, why: str) -> OverloadedError:
        return OverloadedError(f"the guardrail {self.options.name} is busy: {why}", _RETRY_S)

    def _note_refusal(self, error: JudgeError) -> None:
        """For operators: a service that refuses all questions stops all requests."""
        now = self._clock()
        if now >= self._next_refusal_logged:
            self._next_refusal_logged = now + _REFUSALS_LOGGED_S
            logger.warning(
                "guardrail %s: a question was refused, so its request is stopped: %s. The next line about that comes "
                "in %g s at the earliest; disagg_guardrail_decisions_total counts all",
                self.options.name,
                error,
                _REFUSALS_LOGGED_S,
            )

    def _leave(self, ticket: Ticket) -> None:
        following = self._places.leave(ticket)
        if following is not None:
            self._waiting[following].set()

    async def _asked(self, question: Question, deadline: float | None) -> Verdict:
        """Raises `JudgeError`, or `DeadlineError`."""
        try:
            return checked(await self._within(deadline, self._judge.judge(question)), question)
        except TimeoutError:
            raise JudgeError(f"no verdict in {self.options.timeout_s:g} s") from None
        except (JudgeError, DeadlineError):
            raise
        except Exception as error:  # of a verdict that somebody else's code made
            raise JudgeError(f"it gave no verdict: {type(error).__name__}: {error}") from error

    async def _within(self, deadline: float | None, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns in the configured time. Raises `TimeoutError` after that, and `DeadlineError` where the
        request's deadline comes first."""
        timeout_s = self.options.timeout_s
        left_s = timeout_s if deadline is None else deadline - self._clock()
        try:
            async with asyncio.timeout(min(timeout_s, max(0.0, left_s))):
                return await work
        except TimeoutError:
            if left_s < timeout_s:
                name = self.options.name
                raise DeadlineError(f"the deadline passed while the guardrail {name} was asked") from None
            raise

    def _failed(self, tenant: str, why: str, is_sole: bool) -> None:
        scope = self._circuit.failed(tenant, self._clock(), is_sole)
        if scope is not None:
            of_tenant = f" of tenant {tenant}" if scope == "tenant" else ""
            passes = scope == "all" and self.options.on_failure == "allow"
            logger.error(
                "guardrail %s: %d questions%s in a row failed, last: %s. Requests%s %s from now on; it is tried again "
                "every %g s",
                self.options.name,
                FAILURES,
                of_tenant,
                why,
                of_tenant,
                "pass without it" if passes else "fail",
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
