"""One call in the gateway, from its first byte until everything that it took is given back.

async with calls.open(origin) as call:             counted, readiness held, use record open
    generator = call.find(model)                   the model, and the right to use it
    admitted = await call.admit(inputs, names)     checks, deadline, charge, grammar, guardrails
    async for event in call.events(admitted):      of all answers to all prompts, as they come
        ...                                        the front end writes
    await call.finished()                          the use is recorded before the client gets the end

The front ends (`openai`, `other_apis`, `rpc`, `batches`) read what a client sent and write what it gets. What a call
takes and gives back is here, in one order for all of them:

        step                             chat, text      responses, messages   gRPC          line of a batch
    1   counted in the metrics           as http         as http               as grpc       no
    2   a drain waits for it             yes             yes                   yes           no
    3   its use will be recorded         yes             yes                   yes           by `batches`
    4   model, right to use it           after body      after body            first         after body
    5   all prompts are checked          yes             yes                   yes           yes
    6   priority                         at most key's   0                     0             below 0
    7   deadline                         of a header     of a header           of the call   none
    8   all answers are charged          yes             yes                   yes           yes
    9   grammar                          yes             yes                   yes           yes
    10  guardrails on all prompts        yes             yes                   yes           yes
    11  answers, merged                  any number      one                   any number    any number
    12  use is recorded before the end   yes             yes                   yes           by `batches`

1 to 3 are done by `Calls.open`, 4 by `CallScope.find`, 5 to 10 by `CallScope.admit`, 11 by `CallScope.events`, 12 by
`CallScope.finished`. Where columns differ, `Origin` has the difference as data, or an argument of `admit`. A client
that leaves ends its call in 5 to 12: over HTTP by `Exchange.until_disconnect`, over gRPC by cancelling the call's task.

However a call is left, what it took is given back in the opposite order: its answers are cancelled, what was charged
for answers that were not submitted is refunded, its use is recorded, a drain waits for it no longer, and the metrics
get its outcome.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from disagg.gateway.answers.answer import merge
from disagg.gateway.answers.generator import Generator, Vector
from disagg.gateway.auth.auth import Caller
from disagg.gateway.event_loop.shell.turns import run_cooperatively
from disagg.gateway.metrics.registry import GatewayMetrics
from disagg.gateway.metrics.registry import Protocol as ProtocolName
from disagg.gateway.models.models import Models
from disagg.gateway.readiness import Readiness
from disagg.gateway.requests.admitted import AdmittedPrompt
from disagg.gateway.requests.answer_events import Delta, Finish
from disagg.gateway.requests.call_use import CallUse
from disagg.gateway.requests.charge import Charge, least_tokens
from disagg.gateway.requests.part_counts import Cooperative
from disagg.gateway.requests.refusals import Refusals
from disagg.gateway.requests.request import NO_TARGETS, Call, GenerationInput, Targets
from disagg.gateway.requests.validate import CheckedRequest, check_deadline, check_other_prompt, check_request
from disagg.gateway.usage.recorder import UsageRecorder
from disagg.proto.errors import DisaggError, InvalidRequestError, RequestCancelledError
from disagg.proto.ids import RequestId

Events = AsyncGenerator[Delta | Finish, None]

MAX_VECTORS = 64
"""Vectors of one call that are computed at a time: enough to fill steps, and few enough that other calls of the tenant
are computed between them."""


class FieldNames(Protocol):
    """How a protocol calls the fields of one prompt."""

    def rename(self, error: InvalidRequestError) -> InvalidRequestError:
        """The same error, naming the field as the protocol does."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a call comes from: what is known of it before anything that its client wrote is read."""

    request_id: RequestId
    """Id of the call; no other call has had it."""
    caller: Caller
    protocol: ProtocolName | None = None
    """The metrics count the call under it. None for a line of a batch, which is not counted, keeps no gateway from
    stopping, and whose use is recorded by the one who keeps its answer."""
    max_priority: int | None = None
    """The largest priority in the router's queue that the call may have; None for no bound but the router's own."""
    targets: Targets = NO_TARGETS
    """Latency targets of a call whose client cannot name its own."""
    trace_parent: str = ""
    """The W3C `traceparent` of the gateway's own span; empty without one."""
    parent_span: str = ""
    """Id of the client's span; empty without one."""
    id_prefix: str = ""
    """What the API puts before `request_id` in the id of its response."""
    use: CallUse = field(default_factory=CallUse, compare=False)
    """Grows while the call is answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """What a client says in headers of the time that its call may take, and of its session. It is no part of `Origin`:
    what is wrong in it is an error of the call, which is counted."""

    deadline: float | None = None
    """On the generators' clock; None for none."""
    targets: Targets = NO_TARGETS
    in_session: bool = False
    """Whether the call is one of a session, which headers or metadata name."""


@dataclass(frozen=True, slots=True)
class AdmittedCall:
    """A call whose prompts may be queued."""

    prompts: tuple[AdmittedPrompt, ...]
    """Never empty; all have the same number of answers."""
    names: tuple[FieldNames | None, ...]
    """One for each prompt."""


class CallScope:
    """One call, from its first byte until everything that it took is given back; `Calls.open` makes it. Owner of the
    call's charge and of the events of its answers.

    Args:
        origin: see there.
        models: answer prompts.
        usage: records what the call uses when it is finished; None where somebody else does.
        mint_id: a request id that was never used, for all prompts but the first.
    """

    def __init__(
        self, origin: Origin, models: Models, usage: UsageRecorder | None, mint_id: Callable[[], RequestId]
    ) -> None:
        self._call = Call(
            request_id=origin.request_id,
            caller=origin.caller,
            targets=origin.targets,
            trace_parent=origin.trace_parent,
            parent_span=origin.parent_span,
            response_id=origin.id_prefix and f"{origin.id_prefix}{origin.request_id}",
            use=origin.use,
        )
        self._max_priority = origin.max_priority
        self._models = models
        self._usage = usage
        self._mint_id = mint_id
        self._generator: Generator | None = None
        self._charge: Charge | None = None
        self._events: Events | None = None

    @property
    def call(self) -> Call:
        """The context of the call: complete once it is admitted, and until then without what its client wrote."""
        return self._call

    @property
    def generator(self) -> Generator:
        """What `find` found."""
        assert self._generator is not None, "the model of the call is not known yet"
        return self._generator

    def find(self, model: str | None, needs: str = "") -> Generator:
        """The generator of the model that the call is for. Raises as `Models.find`, and `InvalidRequestError` for a
        model that gives no answers; or, where the call `needs` vectors by that name of an API, for one that gives
        answers."""
        self._generator = self._models.find(self._call.caller, model)
        is_pooled = self._generator.model.info.pooling is not None
        if needs and not is_pooled:
            raise no_support(needs)
        if is_pooled and not needs:
            raise InvalidRequestError(
                "model", "The model does not support answers: it gives vectors or scores of texts"
            )
        return self._generator

    async def admit(
        self,
        inputs: Sequence[GenerationInput],
        names: Sequence[FieldNames] = (),
        times: Times | None = None,
        priority: int = 0,
    ) -> AdmittedCall:
        """Check all prompts, charge for all their answers, and have grammar and guardrails looked at, in this order and
        before any prompt is queued: a prompt that is refused refuses the call, and ends no stream that has begun.

        Args:
            inputs: the prompts of the call, at least one, alike but for their prompts.
            names: the fields of each prompt as the protocol calls them; empty where it uses the names of gRPC.
            times: deadline and targets of the client; None where it may name none.
            priority: the client's, in the router's queue.

        Raises:
            InvalidRequestError: for a wrong field, or a grammar or prompt that is refused.
            DeadlineError: if no time is left.
            LimitError: if a limit of the tenant is in the way.
            DisaggError: whatever guardrails and the compiler of grammars raise.
        """
        generator, times = self.generator, times or Times(targets=self._call.targets)
        all_names = tuple(names) or (None,) * len(inputs)
        checked = await run_cooperatively(_check(generator, inputs, all_names))
        call = self._call = replace(
            self._call,
            deadline=times.deadline,
            targets=times.targets,
            in_session=times.in_session,
            priority=priority if self._max_priority is None else min(priority, self._max_priority),
        )
        call.use.model = generator.model.info.name
        call.use.num_prompts = len(inputs)
        arrival = generator.clock()
        check_deadline(None if times.deadline is None else times.deadline - arrival)
        self._charge = generator.take_charge(inputs, call.caller)
        with _in_words_of(all_names[0]):
            await generator.check_grammar(checked[0], call)  # all prompts have the same
        prompts = []
        for given, one, its_names in zip(inputs, checked, all_names, strict=True):
            with _in_words_of(its_names):
                allowed = await generator.check_prompt(one, call)
            prompts.append((allowed, least_tokens(given)))
        return AdmittedCall(
            tuple(
                AdmittedPrompt(
                    call=call.for_another(self._mint_id()) if i else call,
                    checked=allowed,
                    arrival=arrival,
                    charge=self._charge,
                    least_tokens=tokens,
                )
                for i, (allowed, tokens) in enumerate(prompts)
            ),
            all_names,
        )

    def events(self, admitted: AdmittedCall) -> Events:
        """The events of all answers to all prompts as they come. `answer_index` counts through: the answers to the
        first prompt, those to the second one, and so on. Can be called once; leaving the call closes it.

        Raises:
            DisaggError: whatever happens to one of the answers, while it is read.
        """
        assert self._events is None, "a call is answered once"
        num_answers = admitted.prompts[0].checked.num_answers
        answers = [
            self._answers(prompt, names, i * num_answers)
            for i, (prompt, names) in enumerate(zip(admitted.prompts, admitted.names, strict=True))
        ]
        self._events = answers[0] if len(answers) == 1 else merge(answers)
        return self._events

    async def vectors(self, admitted: AdmittedCall) -> list[Vector]:
        """The vectors of all prompts, in their order; a bounded number of them is computed at a time. Raises
        `DisaggError` for what happens to the first that fails, and then all others are cancelled."""
        waiting = enumerate(zip(admitted.prompts, admitted.names, strict=True))
        found: dict[int, Vector] = {}

        async def next_ones() -> None:
            for number, (prompt, names) in waiting:
                with _in_words_of(names):
                    found[number] = await self.generator.vector(prompt)

        num_tasks = min(MAX_VECTORS, len(admitted.prompts))
        tasks = [asyncio.create_task(next_ones(), name="vectors") for _ in range(num_tasks)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [found[number] for number in range(len(found))]

    async def finished(self) -> None:
        """The answer is complete; returns when its end may be sent, because its use is recorded."""
        if self._usage is not None:
            await self._usage.finished(self._call)

    def note_refusal(self, refusals: Refusals, error: DisaggError) -> None:
        """Keep the trace of the call, which ends with `error`, unless the router has it."""
        generator, call = self._generator, self._call
        if generator is None or not generator.has_trace(call.request_id):
            refusals.note(call, "" if generator is None else generator.model.info.name, error)

    async def aclose(self) -> None:
        """Cancel the answers, and give back what was charged for those that were not submitted. Idempotent."""
        try:
            if self._events is not None:
                await self._events.aclose()
        finally:
            if self._charge is not None:
                self._charge.close()

    def _answers(self, prompt: AdmittedPrompt, names: FieldNames | None, first_index: int) -> Events:
        """The events of the answers to one prompt, the first of which has this index in the call."""
        if names is None and not first_index:
            return self.generator.run(prompt)
        return self._renamed_answers(prompt, names, first_index)

    async def _renamed_answers(self, prompt: AdmittedPrompt, names: FieldNames | None, first_index: int) -> Events:
        with _in_words_of(names):
            async with aclosing(self.generator.run(prompt)) as events:
                async for event in events:
                    yield replace(event, answer_index=first_index + event.answer_index) if first_index else event


class Calls:
    """Opens a scope for each call of one gateway.

    Args:
        models: answer prompts.
        metrics: count the calls.
        readiness: whether new ones are taken; a drain waits for those that are.
        usage: records what they use.
        mint_id: a request id that was never used.
        refusals: get the calls that are refused before a router has them, but for lines of batches.
    """

    def __init__(
        self,
        models: Models,
        metrics: GatewayMetrics,
        readiness: Readiness,
        usage: UsageRecorder,
        mint_id: Callable[[], RequestId],
        refusals: Refusals,
    ) -> None:
        self._refusals = refusals
        self.models = models
        self._metrics = metrics
        self._readiness = readiness
        self._usage = usage
        self._mint_id = mint_id

    @asynccontextmanager
    async def open(self, origin: Origin) -> AsyncGenerator[CallScope, None]:
        """The scope of a call. Raises `UnavailableError` while the gateway stops, but for lines of batches."""
        protocol, usage = origin.protocol, None if origin.protocol is None else self._usage
        scope = CallScope(origin, self.models, usage, self._mint_id)
        if protocol is None:
            async with aclosing(scope):
                yield scope
            return
        try:
            with self._metrics.counted(protocol), self._readiness.answering():
                async with self._usage.counted(scope.call), aclosing(scope):
                    yield scope
        except RequestCancelledError:
            raise
        except DisaggError as error:
            scope.note_refusal(self._refusals, error)
            raise


def no_support(api: str) -> InvalidRequestError:
    """The error for a model that cannot serve an API, in vLLM's words."""
    return InvalidRequestError("model", f"The model does not support {api} API")


def _check(
    generator: Generator, inputs: Sequence[GenerationInput], names: Sequence[FieldNames | None]
) -> Cooperative[list[CheckedRequest]]:
    """Check all prompts, which share everything but themselves. Yields between pieces of work."""
    checked: list[CheckedRequest] = []
    for given, its_names in zip(inputs, names, strict=True):
        if checked:
            yield
        with _in_words_of(its_names):
            if checked:
                checked.append(check_other_prompt(checked[0], given, generator.limits))
            else:
                checked.append(check_request(given, generator.limits))
    return checked


@contextmanager
def _in_words_of(names: FieldNames | None) -> Iterator[None]:
    """Errors inside name fields as the protocol does."""
    try:
        yield
    except InvalidRequestError as error:
        if names is None:
            raise
        raise names.rename(error) from None
