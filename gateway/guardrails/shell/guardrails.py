"""All guardrails of a gateway: asked about prompts before they are queued, and about answers while they come.

    prompt ──> each guardrail in its order ──> allowed, with other texts, or `ContentFilterError`
    answer ──> one `AnswerGuard`, whose checks are the guardrails in their order

Built-in rules on large prompts run on the threads of `Offload`, at the tenant's turn. RE2 gives the interpreter's lock
back while it searches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from disagg.gateway.guardrails.alternatives import Alternatives
from disagg.gateway.guardrails.answers import AnswerGuard
from disagg.gateway.guardrails.channels import GuardedChannels
from disagg.gateway.guardrails.config import GuardrailOptions
from disagg.gateway.guardrails.prompts import NO_REPLACEMENT, GivenText, refusal, ruled, texts_of, with_texts
from disagg.gateway.guardrails.rules import Rules
from disagg.gateway.guardrails.shell.judges import Asked, FunctionJudge, Judge, load_function
from disagg.gateway.guardrails.shell.service import ServiceJudge
from disagg.gateway.guardrails.stream import Chain, Check, PieceCheck
from disagg.gateway.requests.refusals import Refusals
from disagg.gateway.requests.request import BYTES_PER_ID, Call, Prompt
from disagg.gateway.requests.verdicts import Decision, Decisions, Question, Replace, Stop, Subject, Verdict
from disagg.gateway.text.answer_splitter import AnswerSplitter
from disagg.gateway.text.tokenizer import ServedModel, Tokenizer
from disagg.proto.clock.process_clock import process_clock
from disagg.proto.errors import ContentFilterError, OverloadedError, UnavailableError
from disagg.proto.ids import RequestId

T = TypeVar("T")
Offloaded = Callable[[int, Callable[[], T]], Awaitable[T]]


@dataclass(frozen=True, slots=True)
class CheckedPrompt:
    """A prompt that may be queued."""

    prompt: Prompt
    decisions: Decisions


class Guardrails:
    """Used on one event loop; owner of the services' connections and the functions' threads.

    Args:
        options: checked, see `check_guardrails`.
        path: of the options in the configuration.
        clock: monotonic seconds, the clock of the deadlines.
        refusals: get the prompts that are refused.

    Raises:
        ConfigError: if a function cannot be loaded.
    """

    def __init__(
        self,
        options: Sequence[GuardrailOptions],
        *,
        path: str = "gateway.guardrails",
        clock: Callable[[], float] | None = None,
        refusals: Refusals | None = None,
    ) -> None:
        clock = process_clock().now if clock is None else clock
        self._options = options
        self._rules: dict[str, Rules] = {}
        self._asked: dict[str, Asked] = {}
        for i, each in enumerate(options):
            judge = _judge(each, f"{path}[{i}]")
            if judge is None:
                self._rules[each.name] = Rules(each.name, each.rules)
            else:
                self._asked[each.name] = Asked(each, judge, clock)
        self.counts: Counter[tuple[str, Subject, str]] = Counter()
        """By guardrail, subject and action: prompts, answers to which rules did something, and questions of those that
        are asked."""
        self.refusals = Refusals(clock) if refusals is None else refusals
        self.looks_at_answers = any(self._is_for(each, "answer") for each in options)

    # ---------------------------------------------------------------- prompts

    async def check_prompt(
        self,
        prompt: Prompt,
        call: Call,
        model: ServedModel,
        offload: Offloaded[list[GivenText]],
        resumed: Sequence[int] = (),
    ) -> CheckedPrompt:
        """The prompt, or what takes its place; its size is to be checked again then.

        Args:
            prompt: checked.
            call: of the request.
            model: that answers it.
            offload: does work on a text of some bytes, on a thread where it is large.
            resumed: token ids of the beginning of the answer, from the client.

        Raises:
            ContentFilterError: if a guardrail stops it.
            UnavailableError: if one gives no verdict, and without one nothing may pass.
            OverloadedError: if one has no place for the question.
        """
        decisions, num_bytes = Decisions(), prompt.num_bytes + BYTES_PER_ID * len(resumed)
        try:
            texts = await offload(num_bytes, lambda: texts_of(prompt, resumed, model.tokenizer))
            before = texts
            for each in self._options:
                if not self._is_for(each, "prompt"):
                    continue
                if each.name in self._rules:
                    texts = await self._by_rules(each.name, texts, decisions, partial(offload, num_bytes))
                else:
                    texts = await self._by_verdict(each.name, texts, call, model.info.name, decisions)
        except (ContentFilterError, OverloadedError, UnavailableError) as error:
            self.refusals.note(call, model.info.name, error, decisions.counts)
            raise
        return CheckedPrompt(prompt if texts == before else with_texts(prompt, texts), decisions)

    async def _by_rules(
        self,
        name: str,
        texts: list[GivenText],
        decisions: Decisions,
        offload: Callable[[Callable[[], list[GivenText]]], Awaitable[list[GivenText]]],
    ) -> list[GivenText]:
        action = "stop"
        try:
            found = await offload(lambda: ruled(self._rules[name], name, texts, decisions))
            action = "allow" if found == texts else "replace"
        finally:
            self.counts[name, "prompt", action] += 1
        return found

    async def _by_verdict(
        self, name: str, texts: list[GivenText], call: Call, model: str, decisions: Decisions
    ) -> list[GivenText]:
        question = Question(
            subject="prompt",
            guardrail=name,
            texts=tuple(one.text for one in texts),
            roles=tuple(one.role for one in texts),
            request_id=call.request_id,
            model=model,
            tenant=call.caller.tenant,
        )
        verdict = await self._ask(question, call, decisions)
        if isinstance(verdict, Stop):
            decisions.add(Decision(name, "", "prompt", "stop", verdict.reason))
            raise ContentFilterError(texts[0].field, refusal(name, verdict.reason))
        if not isinstance(verdict, Replace):
            return texts
        decisions.add(Decision(name, "", "prompt", "replace", verdict.reason))
        found = [replace(one, text=text) for one, text in zip(texts, verdict.texts, strict=True)]
        for one, before in zip(found, texts, strict=True):
            if one != before and not one.may_replace:
                raise ContentFilterError(one.field, refusal(name, verdict.reason + NO_REPLACEMENT))
        return found

    # ---------------------------------------------------------------- answers

    def on_answer(
        self,
        call: Call,
        request_id: RequestId,
        model: ServedModel,
        may_replace: bool,
        prompt: Decisions,
        splitter: AnswerSplitter | None = None,
    ) -> AnswerGuard | None:
        """The guardrails of one answer; None where no one is for it.

        Args:
            call: of the request.
            request_id: of the answer.
            model: that makes it.
            may_replace: whether the answer may be any text.
            prompt: what was decided on its prompt.
            splitter: divides its text; `None` where all of it is content.
        """
        decisions = Decisions(Counter(prompt.counts))
        if not self.looks_at_answers:
            return None
        note = decisions.add
        limits = [limit for rules in self._rules.values() for limit in rules.limits(note)]

        def chain(is_call: bool) -> Chain:
            checks: list[Check] = []
            can_replace = may_replace and not is_call
            for each in self._options:
                if each.name in self._rules:
                    checks += self._rules[each.name].checks("answer", can_replace, note)
                elif self._is_for(each, "answer"):
                    question = partial(_about, each.name, request_id, model.info.name, call.caller.tenant)
                    pieces = each.piece_chars if isinstance(each.piece_chars, int) else None
                    checks.append(PieceCheck(each.name, question, pieces, each.context_chars, can_replace, note))
            return Chain(checks)

        async def ask(question: Question) -> Verdict:
            return await self._ask(question, call, decisions)

        channels = GuardedChannels(chain, Chain(limits) if limits else None, splitter)
        alternatives = self._alternatives(model.tokenizer)
        return AnswerGuard(channels, ask, decisions, partial(self._answer_ended, decisions), alternatives)

    def _alternatives(self, tokenizer: Tokenizer) -> Alternatives:
        """Alternatives of the tokens of one text. Nobody is asked about them: where there is somebody to ask, none are
        shown."""
        is_asked = any(each.name in self._asked and self._is_for(each, "answer") for each in self._options)
        scanners = [scanner for rules in self._rules.values() for scanner in rules.answer_scanners]
        return Alternatives(None if is_asked else scanners, tokenizer.token_bytes)

    def _answer_ended(self, decisions: Decisions) -> None:
        """Count what rules did to an answer; what was asked about is counted by question."""
        for name, rules in self._rules.items():
            if not rules.is_for("answer"):
                continue
            actions = {action for own, _, subject, action, _ in decisions.counts if own == name and subject == "answer"}
            action = "stop" if "stop" in actions else "replace" if "replace" in actions else "allow"
            self.counts[name, "answer", action] += 1

    # ---------------------------------------------------------------- views

    @property
    def seconds(self) -> dict[str, float]:
        """Total duration of the verdicts, by guardrail that is asked."""
        return {name: asked.seconds for name, asked in self._asked.items()}

    @property
    def open_circuits(self) -> dict[str, bool]:
        """Whether a guardrail fails so often that it is not asked, by guardrail that is asked."""
        return {name: asked.is_open for name, asked in self._asked.items()}

    async def close(self) -> None:
        """End what is held. Idempotent."""
        for asked in self._asked.values():
            await asked.close()

    # ---------------------------------------------------------------- inside

    async def _ask(self, question: Question, call: Call, decisions: Decisions) -> Verdict:
        def count(action: str) -> None:
            self.counts[question.guardrail, question.subject, action] += 1

        asked, is_sole = self._asked[question.guardrail], call.caller.limits.is_sole
        return await asked.ask(question, call.deadline, decisions.add, count, is_sole)

    def _is_for(self, each: GuardrailOptions, subject: Subject) -> bool:
        if each.name in self._rules:
            return self._rules[each.name].is_for(subject)
        return each.applies_to in ("both", f"{subject}s")


def _judge(options: GuardrailOptions, path: str) -> Judge | None:
    """What gives the verdicts; None for rules. Raises `ConfigError`."""
    if options.service is not None:
        return ServiceJudge(options.service.url, options.max_running)
    if options.python is not None:
        return FunctionJudge(load_function(options.python, f"{path}.python"), options.max_running)
    return None


def _about(name: str, request_id: RequestId, model: str, tenant: str, piece: str, before: str, ended: bool) -> Question:
    return Question(
        subject="answer",
        texts=(piece,),
        before=before,
        ended=ended,
        guardrail=name,
        request_id=request_id,
        model=model,
        tenant=tenant,
    )
