"""From an admitted prompt to text: what a gateway has for one model.

    wait for a thread, tokenize, hash ──> one `Answer` submitted for each of `n` ──> deltas, merged ──> finish
                 an answer fails, the deadline, the consumer leaves ──> all are cancelled <──┘

Nothing is held before the answers are submitted; after that, every way out but the normal end cancels all of them. The
generator reads more tokens only when its consumer takes more, and the router's handle merges what came meanwhile: a
client that reads slowly, or not at all, costs the memory of its ids and of the messages that its connection has in
flight.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import struct
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Final, Literal, NamedTuple, TypeVar

import msgspec

from disagg.gateway.answers.answer import Answer, merge
from disagg.gateway.answers.grammars.grammars import Grammars
from disagg.gateway.answers.guarded import GuardedAnswer, guarded_rest
from disagg.gateway.auth.auth import CALLER, Caller
from disagg.gateway.event_loop.shell.offload import Offload
from disagg.gateway.guardrails.answers import AnswerGuard
from disagg.gateway.guardrails.shell.guardrails import Guardrails
from disagg.gateway.requests.admitted import AdmittedPrompt
from disagg.gateway.requests.answer_events import Delta, Finish
from disagg.gateway.requests.charge import Charge
from disagg.gateway.requests.headers import sibling_of
from disagg.gateway.requests.request import (
    BYTES_PER_ID,
    Call,
    ChatPrompt,
    GenerationInput,
    IdsPrompt,
    Prompt,
    TextPrompt,
)
from disagg.gateway.requests.sampling import answer_seed
from disagg.gateway.requests.validate import (
    RESUMED,
    CheckedRequest,
    Limits,
    check_deadline,
    check_prompt,
    fit_prompt,
)
from disagg.gateway.requests.values import check_length
from disagg.gateway.text.answer_splitter import AnswerSplitter, answer_splitter
from disagg.gateway.text.detokenizer import TextStream
from disagg.gateway.text.reasoning import Phase, first_phase
from disagg.gateway.text.tokenizer import ServedModel, Tokenizer
from disagg.gateway.text.tool_calls import tool_parser
from disagg.proto.adapters import version_with
from disagg.proto.block_hash import chain_hashes, root_hash
from disagg.proto.errors import AdapterRemovedError, InvalidRequestError
from disagg.proto.ids import BlockHash, RequestId
from disagg.proto.messages import Adapter
from disagg.proto.token_ids import (
    PackedTokenIds,
    num_token_ids,
    pack_token_ids,
    slice_token_ids,
    unpack_token_ids,
)
from disagg.router.api import NO_LIMITS, Quota, RoutedRequest, Router

T = TypeVar("T")
Events = AsyncGenerator[Delta | Finish, None]

MAX_LISTED_IDS: Final = 65_536
"""Largest number of ids of a call that takes or gives ids only, unless the context is longer."""
_MAX_TAG_IDS: Final = 16
"""Largest number of token ids of a tag at the end of a prompt, with white space."""
_IDS_A_TURN: Final = 512
"""Number of ids of a resumed answer that become text in one turn of the event loop: about a millisecond."""


class Vector(NamedTuple):
    """What became of a prompt."""

    numbers: bytes
    """Numbers in fp32, little-endian; one for a score."""
    num_prompt_tokens: int
    num_cached_tokens: int


class _Resumed(NamedTuple):
    """An answer of which the client has the beginning, and which goes on."""

    routed: RoutedRequest
    text: TextStream
    """As it was after the tokens that the client has."""
    guard: AnswerGuard | None


class Generator:
    """Runs calls for one model. Keeps nothing between calls.

    Args:
        model: what is served.
        router: where requests go.
        limits: what requests are checked against.
        prefix_root: block hashes start from it.
        offload: tokenizes large prompts; `None` tokenizes all on the event loop.
        guardrails: on prompts and answers; `None` for none.
        grammars: verdicts on clients' grammars; `None` refuses all of them.
        clock: monotonic seconds, the clock of the deadlines.
        mint_seed: 64 random bits.
        mint_id: a request id that was never used, for all answers of a call but the first.
    """

    def __init__(
        self,
        model: ServedModel,
        router: Router,
        limits: Limits,
        prefix_root: str,
        *,
        clock: Callable[[], float],
        mint_seed: Callable[[], int],
        mint_id: Callable[[], RequestId],
        offload: Offload | None = None,
        guardrails: Guardrails | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self.model = model
        self.limits = limits
        self._router = router
        self._prefix_root = prefix_root
        self.clock = clock
        self.mint_seed = mint_seed
        self._mint_id = mint_id
        self._offload = offload
        self._guardrails = guardrails
        self._grammars = grammars or Grammars(None)
        self.adapter: Adapter | None = None
        """The adapter whose name stands for this generator; None for the model itself."""
        self._adapter_bytes = 0
        self.is_removed = False
        """Set where its adapter is not served any more: what is not submitted yet is refused."""
        self.base_name = model.info.name
        """The name of the model that is served without an adapter."""

    def with_adapter(self, adapter: Adapter, num_bytes: int) -> Generator:
        """A generator of the same model with an adapter, under the adapter's name. All else is shared."""
        found = copy.copy(self)
        found.model = replace(self.model, info=replace(self.model.info, name=adapter.name))
        found.limits = replace(self.limits, model=found.model.info)
        found.adapter, found._adapter_bytes = adapter, num_bytes
        return found

    def is_of(self, base: Generator) -> bool:
        """Whether it is the generator of an adapter of that model's generator."""
        return self._router is base._router and self._grammars is base._grammars

    def remove_adapter(self) -> None:
        """End its requests that wait, and refuse those that are tokenized; its adapter is not served any more."""
        assert self.adapter is not None, "it is of a model"
        self.is_removed = True
        self._router.remove_adapter(self.adapter)

    def run(self, prompt: AdmittedPrompt) -> Events:
        """The events of the answers to a prompt, merged as tokens come. Nothing is done before they are read. Close
        them (`contextlib.aclosing`) when leaving them early. Reading them raises `DisaggError`: for what is wrong with
        the tokens of the prompt or of the answer that is resumed, or whatever happens to one of the answers."""
        return self._resume(prompt) if prompt.checked.resumed else self._answers(prompt)

    async def _resume(self, prompt: AdmittedPrompt) -> Events:
        """The rest of an answer of which the client has the beginning."""
        checked, call = prompt.checked, prompt.call
        routed = await self._route(prompt)
        call.use.continues = True
        text, had_text = await self._resumed_text(checked, routed)
        end = _end_of(checked, routed, text)
        if end is not None:
            _note_ended(call, checked, routed, text)
        guard = await self._answer_guard(checked, call, routed, had_text)
        if end is not None:
            rest = _ended(guard, routed, text, end)
        elif guard is not None and guard.stopped is not None:  # in what the client has
            rest = guarded_rest(guard, routed, text, "stop")
        else:
            rest = self._answers(prompt, _Resumed(routed, text, guard))
        async with aclosing(rest) as events:
            async for event in events:
                yield event

    async def _answers(self, prompt: AdmittedPrompt, resumed: _Resumed | None = None) -> Events:
        """Tokenize and hash, submit an answer for each of `n`, and yield their events, merged as tokens come. An answer
        that is resumed goes on where its client is."""
        checked, call, charge = prompt.checked, prompt.call, prompt.charge
        routed = await self._route(prompt) if resumed is None else resumed.routed
        if charge is not None:
            num_tokens = num_token_ids(routed.prompt_token_ids) + routed.sampling.max_tokens
            charge.tokenized(checked.num_answers * num_tokens)
        answers: list[Answer] = []
        try:
            for i in range(checked.num_answers):
                if i:
                    await asyncio.sleep(0)  # one answer in a turn of the event loop
                one = self._one_of(routed, i)
                text = None if resumed is None else resumed.text
                guard = await self._answer_guard(checked, call, one) if resumed is None else resumed.guard
                answer = self._submit(checked, one, prompt.arrival, i, text, guard)
                if _is_continuable(call, checked):
                    call.use.token_ids.extend(checked.resumed)
                    answer.note_tokens(call.use.token_ids)
                answers.append(answer)  # one by one: the next may be refused
                if charge is not None:
                    charge.submitted(prompt.least_tokens)
            streams = [answer.events() for answer in answers]
            async with aclosing(streams[0] if len(streams) == 1 else merge(streams)) as events:
                async for event in events:
                    yield event
        finally:
            if answers:
                _note_use(call, routed, [answer.used() for answer in answers])
                _note_stream(call, checked, routed, answers[0].model_version)
            for answer in answers:
                answer.cancel()

    async def vector(self, prompt: AdmittedPrompt) -> Vector:
        """The vector of a prompt that wants one. However it ends, nothing of it is left in the cluster. Raises as
        `run`."""
        checked, call, charge = prompt.checked, prompt.call, prompt.charge
        routed = await self._route(prompt)
        if charge is not None:
            charge.tokenized(routed.num_prompt_tokens + routed.sampling.max_tokens)
        handle = self._router.submit(routed, prompt.arrival)
        try:
            if charge is not None:
                charge.submitted(prompt.least_tokens)
            decisions, trace = checked.decisions, self._router.trace(routed.request_id)
            if decisions is not None and decisions.counts and trace is not None:
                trace.guardrails = decisions.counts
            async for _ in handle:
                """It has no tokens."""
        finally:
            if handle.completion is None:
                handle.cancel()
        assert handle.completion is not None, "the iteration ended without an error"
        call.use.add(routed.num_prompt_tokens, handle.completion.cached_tokens, 0)
        return Vector(handle.completion.vector, routed.num_prompt_tokens, handle.completion.cached_tokens)

    async def check_prompt(self, checked: CheckedRequest, call: Call) -> CheckedRequest:
        """Have the guardrails look at the prompt, and return the request with the prompt that they allow: unchanged
        where there are none.

        Raises:
            ContentFilterError: if one refuses it.
            UnavailableError: if one gives no verdict, and without one nothing may pass.
            InvalidRequestError: if what one put in its place is too long.
        """
        if self._guardrails is None:
            return checked
        found = await self._guardrails.check_prompt(
            checked.prompt,
            call,
            self.model,
            lambda num_bytes, work: self.offload(num_bytes, work, call.deadline),
            checked.resumed,
        )
        prompt = checked.prompt
        if found.prompt is not prompt:
            prompt = check_prompt(found.prompt, self.limits, checked.max_prompt_tokens)
        return replace(checked, prompt=prompt, decisions=found.decisions)

    async def check_grammar(self, checked: CheckedRequest, call: Call) -> None:
        """Raises `InvalidRequestError` for a grammar that cannot be compiled, or as `Grammars.check`."""
        grammar = checked.sampling.grammar
        if grammar and (wrong := await self._grammars.check(grammar, call.caller.tenant, call.deadline)):
            raise InvalidRequestError(checked.structured_field, wrong)

    def take_charge(self, inputs: Sequence[GenerationInput], caller: Caller) -> Charge | None:
        """Charge the tenant for all answers of a call; None where it has no limits. Raises `LimitError`."""
        return None if caller.limits is NO_LIMITS else Charge(self._router, caller, inputs)

    @property
    def max_listed_ids(self) -> int:
        """Of one call that takes or gives ids only."""
        return max(self.limits.model.max_model_len, MAX_LISTED_IDS)

    async def tokenize(self, prompt: Prompt, special: bool = True) -> tuple[int, ...]:
        """The ids of a checked prompt; of a text without the special tokens around it where `special` is false. Raises
        `InvalidRequestError` where the chat template refuses it, or it has too many."""
        most, tokenizer = self.max_listed_ids, self.model.tokenizer
        ids = await self.offload(prompt.num_bytes, lambda: _encode(prompt, tokenizer, most, special))
        check_length(len(ids), prompt.field, most, "tokens")
        return ids

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of checked ids, without special tokens."""
        return await self.offload(BYTES_PER_ID * len(token_ids), lambda: self.model.tokenizer.decode(token_ids))

    async def offload(self, num_bytes: int, work: Callable[[], T], deadline: float | None = None) -> T:
        """Do `work`, whose input has `num_bytes`: at once if it is small, else on a thread when it is the caller's
        turn. Raises as `Offload.run`."""
        if self._offload is None:
            return work()
        return await self._offload.run(work, tenant=CALLER.get().tenant, num_bytes=num_bytes, deadline=deadline)

    def has_trace(self, request_id: RequestId) -> bool:
        """Whether the router knows the request, which runs, has ended or was refused there."""
        return self._router.trace(request_id) is not None

    def remaining_quota(self, caller: Caller) -> Quota:
        """What is left now to the tenant."""
        return Quota() if caller.limits is NO_LIMITS else self._router.remaining_quota(caller.tenant, caller.limits)

    async def _route(self, prompt: AdmittedPrompt) -> RoutedRequest:
        """Tokenize, check the context, hash: the first answer's request."""
        checked, call = prompt.checked, prompt.call
        seed = self.mint_seed()
        waits = self._offload is not None and not self._offload.is_inline(checked.prompt.num_bytes)
        came = self.clock() if waits else 0.0
        max_tokens = self.limits.model.longest_prompt
        if isinstance(checked.prompt, TextPrompt) and checked.max_prompt_tokens is None:
            self.model.tokenizer.check_num_bytes(checked.prompt.field, checked.prompt.num_bytes, max_tokens)
        if waits:
            self._router.check_queue_capacity()

        def prepare() -> RoutedRequest:
            queue_s = self.clock() - came if waits else 0.0
            token_ids = _prompt_ids(checked, self.model.tokenizer, max_tokens)
            sampling = fit_prompt(checked, token_ids, self.limits, seed)
            packed = pack_token_ids(token_ids)
            known = PackedTokenIds(packed + pack_token_ids(checked.resumed)) if checked.resumed else packed
            salt = prefix_salt(call.caller.tenant, checked.cache_salt)
            adapter = self.adapter
            root = root_hash(self._prefix_root, salt, adapter.fingerprint if adapter else "")
            if checked.pooling is not None and checked.pooling.is_whole:  # no cached prefix serves it
                root = BlockHash(b"")
            return RoutedRequest(
                request_id=call.request_id,
                sampling=sampling,
                prompt_token_ids=packed,
                block_hashes=tuple(chain_hashes(root, known)) if root else (),
                root_hash=root,
                deadline=call.deadline,
                priority=call.priority,
                ttft_slo_s=call.targets.ttft_s,
                tpot_slo_s=call.targets.tpot_s,
                trace_parent=call.trace_parent,
                parent_span=call.parent_span,
                response_id=call.response_id,
                is_chat=isinstance(checked.prompt, ChatPrompt),
                tenant=call.caller.tenant,
                limits=call.caller.limits,
                prepaid_tokens=prompt.prepaid_tokens,
                tokenize_queue_s=queue_s,
                resumed_token_ids=checked.resumed,
                model_version=version_with(checked.model_version, adapter),
                speculation=checked.speculation,
                in_session=checked.in_session or call.in_session,
                pooling=checked.pooling,
                adapter=adapter,
                adapter_bytes=self._adapter_bytes,
            )

        routed = await self.offload(checked.prompt.num_bytes, prepare, call.deadline)
        check_deadline(None if call.deadline is None else call.deadline - self.clock())
        if self.is_removed:
            raise AdapterRemovedError(self.model.info.name)
        return routed

    def _one_of(self, first: RoutedRequest, answer_index: int) -> RoutedRequest:
        """The request of one answer, which is its own but for the prompt."""
        if answer_index == 0:
            return first
        seed = answer_seed(first.sampling.seed, answer_index)
        sampling = msgspec.structs.replace(first.sampling, seed=seed, prompt_logprobs=-1)  # they share the prompt
        request_id = self._mint_id()
        trace_parent = sibling_of(first.trace_parent, request_id)
        return msgspec.structs.replace(first, request_id=request_id, sampling=sampling, trace_parent=trace_parent)

    def _submit(
        self,
        checked: CheckedRequest,
        routed: RoutedRequest,
        arrival: float,
        answer_index: int,
        resumed: TextStream | None,
        guard: AnswerGuard | None,
    ) -> Answer:
        text = resumed or self._text_stream(checked, routed)
        if guard is not None:
            return GuardedAnswer(self._router, routed, arrival, text, self.clock, answer_index, guard)
        answer = Answer(self._router, routed, arrival, text, self.clock, answer_index)
        if checked.decisions is not None and checked.decisions.counts:
            answer.note_decisions(checked.decisions.counts)
        return answer

    async def _answer_guard(
        self, checked: CheckedRequest, call: Call, routed: RoutedRequest, had_text: str = ""
    ) -> AnswerGuard | None:
        """The guardrails of one answer, after the text that its client has; None without any."""
        if self._guardrails is None or checked.decisions is None:
            return None
        has_form = bool(checked.sampling.grammar) or (isinstance(checked.prompt, ChatPrompt) and checked.prompt.tools)
        guard = self._guardrails.on_answer(
            call, routed.request_id, self.model, not has_form, checked.decisions, self._splitter(checked, routed)
        )
        if guard is not None and checked.resumed:
            await guard.resume(had_text, len(checked.resumed))
        return guard

    def _text_stream(self, checked: CheckedRequest, routed: RoutedRequest) -> TextStream:
        sampling = routed.sampling
        tokenizer = self.model.tokenizer
        is_guarded = self._guardrails is not None and self._guardrails.looks_at_answers
        splitter = None if is_guarded else self._splitter(checked, routed)  # then the guard has it
        return TextStream(tokenizer, checked.stop, sampling.stop_token_ids, sampling.min_tokens, splitter)

    def _splitter(self, checked: CheckedRequest, routed: RoutedRequest) -> AnswerSplitter | None:
        tokenizer, functions = self.model.tokenizer, checked.functions
        parser = tool_parser(tokenizer.tool_format, functions) if functions else None
        return answer_splitter(_first_phase(checked, routed, tokenizer), parser)

    async def _resumed_text(self, checked: CheckedRequest, routed: RoutedRequest) -> tuple[TextStream, str]:
        """The text of an answer that is resumed, as it was after the tokens that the client has, and what the client
        has of it. Raises `InvalidRequestError` if a stop string ends it before the last of them."""
        token_ids = checked.resumed
        had: list[str] = []
        text = self._text_stream(checked, routed)
        for begin in range(0, len(token_ids), _IDS_A_TURN):
            if begin:
                await asyncio.sleep(0)
            had.append(text.push(token_ids[begin : begin + _IDS_A_TURN]).text)
            if text.stopped and text.num_tokens < len(token_ids):
                raise InvalidRequestError(
                    f"{RESUMED}[{text.num_tokens}]", "comes after a stop string, which ends the answer"
                )
        return text, "".join(had)


def prefix_salt(tenant: str, cache_salt: str) -> bytes:
    """What separates cached prefixes: another pair, another salt. Empty where both are."""
    if not tenant and not cache_salt:
        return b""
    name = tenant.encode()
    return struct.pack("<I", len(name)) + name + cache_salt.encode()


def _note_use(call: Call, routed: RoutedRequest, used: Sequence[tuple[int, int]]) -> None:
    """Add to the call what its answers to one prompt used: the prompt once there is a token, and as cached what the one
    answer found that found the least. `used`: cached and output tokens of each."""
    num_output = sum(num_tokens for _, num_tokens in used)
    num_prompt = routed.num_prompt_tokens if num_output else 0
    call.use.add(num_prompt, min(num_cached for num_cached, _ in used), num_output)


def _is_continuable(call: Call, checked: CheckedRequest) -> bool:
    """Whether another call could continue the answer: it is drawn again as it was."""
    is_drawn_alike = checked.seed is not None or not checked.sampling.temperature
    return is_drawn_alike and checked.num_answers == call.use.num_prompts == 1


def _note_stream(call: Call, checked: CheckedRequest, routed: RoutedRequest, model_version: str) -> None:
    """Say which answer it was, for a call that continues it; and how much of it the client says that it has."""
    if _is_continuable(call, checked):
        call.use.stream = stream_id(call.caller.tenant, call.use.model, model_version, checked, routed)
    call.use.num_had = max(call.use.num_had, len(checked.resumed))


def _note_ended(call: Call, checked: CheckedRequest, routed: RoutedRequest, text: TextStream) -> None:
    """Count an answer of which the client has all tokens."""
    call.use.add(routed.num_prompt_tokens, 0, text.num_tokens)
    call.use.token_ids.extend(checked.resumed)
    _note_stream(call, checked, routed, routed.model_version)


def stream_id(tenant: str, model: str, model_version: str, checked: CheckedRequest, routed: RoutedRequest) -> bytes:
    """What an answer and its continuations by other calls have in common: tenant, prompt, all settings, the seed where
    it is drawn by one, and model and version that made it. 16 bytes."""
    seed = routed.sampling.seed if routed.sampling.temperature else 0
    sampling = msgspec.structs.replace(routed.sampling, seed=seed)
    settings = msgspec.msgpack.encode((tenant, model, model_version, sampling, checked.stop, routed.root_hash))
    digest = hashlib.blake2b(struct.pack("<Q", len(settings)) + settings, digest_size=16)
    digest.update(routed.prompt_token_ids)
    return digest.digest()


def _end_of(checked: CheckedRequest, routed: RoutedRequest, text: TextStream) -> Literal["stop", "length"] | None:
    """How an answer ended of which the client has all tokens; None where more come."""
    sampling = routed.sampling
    if text.stopped or checked.resumed[-1] in sampling.stop_token_ids:
        return "stop"
    return "length" if len(checked.resumed) >= sampling.max_tokens else None


async def _ended(
    guard: AnswerGuard | None, routed: RoutedRequest, text: TextStream, reason: Literal["stop", "length"]
) -> Events:
    """What comes after the last token of an answer of which the client has all tokens."""
    if guard is not None:
        async for event in guarded_rest(guard, routed, text, reason):
            yield event
        return
    if not text.stopped:
        tail = text.finish()
        reason = "stop" if tail.stopped else reason
        if tail.text or tail.reasoning or tail.calls:
            yield Delta(
                text.num_tokens,
                (),
                tail.text,
                num_prompt_tokens=routed.num_prompt_tokens,
                reasoning=tail.reasoning,
                calls=tail.calls,
            )
    yield Finish(
        request_id=routed.request_id,
        reason=reason,
        num_prompt_tokens=routed.num_prompt_tokens,
        num_cached_tokens=0,
        num_output_tokens=text.num_tokens,
        num_reasoning_tokens=text.num_reasoning_tokens,
    )


def _first_phase(checked: CheckedRequest, routed: RoutedRequest, tokenizer: Tokenizer) -> Phase | None:
    """Where an answer begins of which the reasoning is separated; `None` for others."""
    prompt = checked.prompt
    is_separated = checked.splits_reasoning and tokenizer.reasoning_format != "none" and not checked.sampling.grammar
    if not is_separated or not isinstance(prompt, ChatPrompt):
        return None
    first = max(0, routed.num_prompt_tokens - _MAX_TAG_IDS)
    last_ids = unpack_token_ids(slice_token_ids(routed.prompt_token_ids, first))
    prompt_end = b"".join(map(tokenizer.token_bytes, last_ids)).decode("utf-8", "replace")
    return first_phase(prompt_end, prompt.turns[-1].content if prompt.options.continues else None)


def _prompt_ids(checked: CheckedRequest, tokenizer: Tokenizer, max_tokens: int) -> tuple[int, ...]:
    """The prompt, without what is cut off at its beginning: of a text not the special tokens that stand there."""
    most = checked.max_prompt_tokens
    ids = _encode(checked.prompt, tokenizer, max_tokens if most is None else None)
    if most is None or len(ids) <= most:
        return ids
    first = tokenizer.first_ids if isinstance(checked.prompt, TextPrompt) else ()
    kept = first if len(first) < most else ()
    return (*kept, *ids[len(ids) - most + len(kept) :])


def _encode(prompt: Prompt, tokenizer: Tokenizer, max_tokens: int | None, special: bool = True) -> tuple[int, ...]:
    match prompt:
        case TextPrompt(text):
            return tuple(tokenizer.encode_text(text, special, max_tokens))
        case IdsPrompt(token_ids):
            return token_ids
        case ChatPrompt(turns, tools, options):
            return tuple(tokenizer.encode_chat(turns, max_tokens, tools, options))
